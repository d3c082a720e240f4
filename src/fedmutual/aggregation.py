"""Combine replies into one message: by their mean, or by a rule that a hostile minority cannot control.

The rules work coordinate by coordinate: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical
Rates, 2018, https://arxiv.org/abs/1803.01498.

Floating-point buffers (BatchNorm's running mean and variance) are combined like weights. Integer and boolean tensors
(BatchNorm's counter of batches) are not averaged, because a mean of counters is not a counter: with a mean they take the
maximum, with the other rules the lower one of the two middle values. The real and imaginary parts of complex tensors are
combined apart.

A mean can also be added in fixed point: in integers modulo 2^64, so that the order of the summands changes no bit. An
update is a reply minus the message that the server had sent, each number clipped to +-LIMIT. A number u becomes the integer
round(u * 2^40), in a weighted sum round(u * n_k * 2^20) with the sum of n_k beside it: MOST_SUMMED updates at most stay
below 2^63, so no sum overflows. Real sites mask these integers (`sites.secure_sum`): a masked sum has the same bits.
Integer and boolean tensors are no updates: they stay as the server sent them.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmutual.core import Message, Total, Unusable
from fedmutual.errors import RunError
from fedmutual.settings import MOST_SUMMED, TRIM, Rule, Sum

FRACTION_BITS = 40  # of a number in a plain sum
WEIGHT_BITS = 20  # a weight n_k counts as the fraction n_k / 2^20
LIMIT = 2.0**10  # a larger change of one number in one round is clipped
HEAVIEST = 2**WEIGHT_BITS  # the largest n_k
LARGEST = int(LIMIT) << FRACTION_BITS  # the largest integer of one update, weighted or not
_PIECE = 2**20  # elements of a tensor that are sorted at once, over all replies
_ROUNDING = 1e-9  # 0.29 * 100 is below 29


@dataclass(frozen=True)
class FixedTotal(Total):
    """A sum in fixed point."""

    words: Tensor  # int64 [N], as `encode_update`
    weighted: bool = False  # whether each update was multiplied by the client's n_k


@dataclass(frozen=True)
class FloatTotal(Total):
    """The mean of replies in floating point, which stands for their sum."""

    mean: Message


@dataclass(frozen=True)
class Aggregation:
    """The rule by which a server combines replies; `[server]` sets each field of this type that an algorithm has."""

    rule: Rule = "mean"
    trim: float = TRIM  # of the trimmed mean
    sum: Sum = "float"  # how a mean adds; "fixed": in integers

    @property
    def weighs(self) -> bool:
        """Return whether replies may have different weights; only the mean uses weights."""
        return self.rule == "mean"

    def __call__(
        self, replies: Mapping[str, Message], weights: Mapping[str, float] | None = None, base: Message | None = None
    ) -> Message:
        """Return one message from the replies: name -> tensor, in the shape and dtype of the replies.

        replies: by sender, or their total. weights: sender -> weight, for a mean only. base: the message that the replies
        update, for a sum in fixed point; without a base, replies are summed as they are.

        Raises:
            ValueError: as `mean`, `fixed_mean` and `trimmed_mean`.
            Unusable: a reply cannot be summed in fixed point.
            RunError: as `average_total`.
        """
        if isinstance(replies, FloatTotal):
            return replies.mean
        if isinstance(replies, FixedTotal):
            return average_total(replies, base or {})
        if self.sum == "fixed":
            return fixed_mean(replies, weights, base or {})
        if self.rule == "mean":
            return mean(replies, weights)
        return median(replies) if self.rule == "median" else trimmed_mean(replies, self.trim)


def mean(replies: Mapping[str, Message], weights: Mapping[str, float] | None = None) -> Message:
    """Return the mean over participants, weighted if `weights` (any scale, > 0) are given, else unweighted (1/K).

    Replies are taken in the sorted order of their senders, so that the result does not depend on the order of arrival.

    Raises:
        ValueError: there are no replies, or two of them hold different names.
    """
    running = RunningMean(_alike(replies, "mean"))
    for sender, reply in replies.items():
        running.add(sender, reply, 1.0 if weights is None else weights[sender])
    return running.finish().mean


class RunningMean:
    """The mean of replies that are added as they come; only the first reply is kept, for its names, shapes and dtypes.

    The order of arrival changes no bit: a reply waits until those of all senders before it, in sorted order, are added.
    """

    def __init__(self, senders: Iterable[str]) -> None:
        self._due, self._waiting = deque(sorted(senders)), dict[str, tuple[Message, float]]()
        self._added, self._first, self._sums, self._weight = list[str](), Message(), Message(), 0.0

    def add(self, sender: str, reply: Message, weight: float = 1.0) -> None:
        """Add the reply of one of the senders; an empty reply has no part in the mean."""
        self._waiting[sender] = reply, weight
        while self._due and self._due[0] in self._waiting:
            self._add_next()

    def finish(self) -> FloatTotal:
        """Return the mean of the replies that came."""
        while self._due:
            self._add_next()
        means = {}
        for name, first in self._first.items():
            real, total = _view_as_real(first), self._sums[name]
            value = (total / self._weight).to(real.dtype) if real.is_floating_point() else total
            means[name] = torch.view_as_complex(value) if first.is_complex() else value
        return FloatTotal(tuple(self._added), means)

    def _add_next(self) -> None:
        """Add the reply of the next sender, if it came, in double precision: little rounding."""
        sender = self._due.popleft()
        reply, weight = self._waiting.pop(sender, ({}, 0.0))
        if not reply:
            return
        self._first = self._first or reply
        self._added.append(sender)
        self._weight += weight
        for name, tensor in reply.items():
            real = _view_as_real(tensor)
            if not real.is_floating_point():
                self._sums[name] = torch.maximum(self._sums.get(name, real), real)
                continue
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(real, dtype=torch.float64)
            self._sums[name].add_(real, alpha=weight)


def _view_as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def fixed_mean(replies: Mapping[str, Message], weights: Mapping[str, float] | None, base: Message) -> Message:
    """Return the mean as `mean` does, added in fixed point: base plus the mean of the replies' updates.

    Integer tensors are those of `base`; an integer tensor that `base` lacks takes the maximum, as in `mean`.

    Raises:
        ValueError: as `mean`; or there are more than MOST_SUMMED replies.
        Unusable: the senders with an update or weight that cannot be encoded, with the reason.
    """
    first = replies[_alike(replies, "mean")[0]]
    if len(replies) > MOST_SUMMED:
        raise ValueError(f"a fixed-point sum takes at most {MOST_SUMMED} clients in a round")
    counters = [name for name, tensor in first.items() if not tensor.is_floating_point() and name not in base]
    base = mean({i: {name: reply[name] for name in counters} for i, reply in replies.items()}) | base
    total, flaws = torch.zeros((), dtype=torch.int64), dict[str, str]()
    for sender, reply in replies.items():
        try:
            total = total + encode_update(reply, base, None if weights is None else weights[sender])
        except ValueError as problem:
            flaws[sender] = str(problem)
    if flaws:
        raise Unusable(flaws)
    return _add_mean(FixedTotal(tuple(replies), total, weights is not None), base, first)


def encode_update(reply: Message, base: Message, weight: float | None = None) -> Tensor:
    """Return one client's update (reply - base) in fixed point as words int64 [N].

    They are the numbers of the floating tensors, in the order of the tensors' names, and in a weighted sum then n_k.

    base: what the server had sent, by name; a tensor that is not in it counts from zero. weight: n_k of a weighted sum, a
    whole number from 1 to HEAVIEST.

    Raises:
        ValueError: the weight is out of its range, a number is not finite, or a tensor is complex.
    """
    if weight is not None and not (1 <= weight <= HEAVIEST and float(weight).is_integer()):
        raise ValueError(
            f"its weight n_k is not a whole number from 1 to {HEAVIEST:,}, which a fixed-point sum needs; "
            'algorithm.weighting = "uniform" needs no n_k'
        )
    scale = 2.0**FRACTION_BITS if weight is None else weight * 2.0 ** (FRACTION_BITS - WEIGHT_BITS)
    words = []
    for name, tensor in sorted(reply.items()):
        if tensor.is_complex():
            raise ValueError(f"its tensor {name!r} is complex, which a fixed-point sum cannot add")
        if tensor.is_floating_point():
            update = tensor.double() - base[name].double() if name in base else tensor.double()
            if not torch.isfinite(update).all():
                raise ValueError(f"its update of {name!r} holds numbers that are not finite")
            words.append(update.clamp(-LIMIT, LIMIT).mul(scale).round().to(torch.int64).flatten())
    return torch.cat([*words, torch.tensor([] if weight is None else [int(weight)], dtype=torch.int64)])


def average_total(total: FixedTotal, base: Message) -> Message:
    """Return the server's next message from the sum of all updates. base: the message that the clients were sent.

    Raises:
        RunError: no updates of this number of clients have this sum, so a client sent wrong words.
    """
    updates, weight = _split_words(total)
    most = len(total) * LARGEST  # compared on both sides, because abs() of the smallest integer is negative
    if bool(((updates > most) | (updates < -most)).any()) or not len(total) <= weight <= len(total) * HEAVIEST:
        raise RunError(
            "the sum of the updates is impossible, so a site sent wrong words, and it is not known which of "
            f"{', '.join(total)} it was; begin a federation of another name with other sites, or without masks"
        )
    return _add_mean(total, base, base)


def _split_words(total: FixedTotal) -> tuple[Tensor, int]:
    """Return the sum of the updates [N], and the number of clients, or where updates are weighted the sum of their n_k."""
    return (total.words[:-1], int(total.words[-1])) if total.weighted else (total.words, len(total))


def _add_mean(total: FixedTotal, base: Message, like: Message) -> Message:
    """Return base plus the mean of the updates, in the shapes and dtypes of `like`."""
    updates, weight = _split_words(total)
    unit = 2.0 ** ((WEIGHT_BITS if total.weighted else 0) - FRACTION_BITS)
    names = sorted(name for name, tensor in like.items() if tensor.is_floating_point())
    parts = dict(zip(names, torch.split(updates, [like[name].numel() for name in names]), strict=True))
    moved: Message = {}
    for name, tensor in like.items():
        if name in parts:
            mean = parts[name].reshape(tensor.shape).double().mul(unit).div(weight)
            moved[name] = (base[name].double() + mean if name in base else mean).to(tensor.dtype)
        else:
            moved[name] = base[name]
    return moved


def median(replies: Mapping[str, Message]) -> Message:
    """Return the median of each coordinate; for an even number of replies the mean of the two middle values.

    Source: Yin et al., 2018, https://arxiv.org/abs/1803.01498.

    Raises:
        ValueError: as `mean`.
    """
    return _trimmed(replies, (len(replies) - 1) // 2, "median")


def trimmed_mean(replies: Mapping[str, Message], trim: float = TRIM) -> Message:
    """Return the mean of each coordinate without its smallest and largest values, as `scipy.stats.trim_mean`.

    trim: the fraction of the replies, at least 0 and below 0.5, that is left out at either end; rounded down.

    Source: Yin et al., 2018, https://arxiv.org/abs/1803.01498.

    Raises:
        ValueError: as `mean`; or `trim` is out of its range.
    """
    if not 0 <= trim < 0.5:
        raise ValueError(f"trim must be at least 0 and below 0.5, not {trim:g}")
    return _trimmed(replies, math.floor(trim * len(replies) + _ROUNDING), "trimmed mean")


def _trimmed(replies: Mapping[str, Message], cut: int, what: str) -> Message:
    """Return the mean of each coordinate without its `cut` smallest and `cut` largest values."""
    ids = _alike(replies, what)
    return {name: _trimmed_tensor([replies[i][name] for i in ids], cut) for name in replies[ids[0]]}


def _alike(replies: Mapping[str, Message], what: str) -> list[str]:
    """Return the senders, sorted. Raise ValueError if there is none, or if two replies hold different names."""
    if not replies:
        raise ValueError(f"a {what} needs at least one reply")
    ids = sorted(replies)
    for other in ids[1:]:
        if replies[other].keys() != replies[ids[0]].keys():
            raise ValueError(f"{other!r} and {ids[0]!r} answered with different names")
    return ids


def _trimmed_tensor(tensors: Sequence[Tensor], cut: int) -> Tensor:
    """Return the trimmed mean of one tensor, sorted in pieces: a sorted copy of all replies may not fit in memory."""
    if tensors[0].is_complex():
        return torch.view_as_complex(_trimmed_tensor(list(map(torch.view_as_real, tensors)), cut))
    pieces = zip(*(torch.split(tensor.flatten(), _PIECE) for tensor in tensors), strict=True)
    return torch.cat([_trimmed_piece(torch.stack(piece), cut) for piece in pieces]).reshape(tensors[0].shape)


def _trimmed_piece(values: Tensor, cut: int) -> Tensor:
    """Return the trimmed mean [N] of values [K, N]."""
    ordered = values.sort(0).values
    if not values.is_floating_point():
        return ordered[(len(values) - 1) // 2]
    return ordered[cut : len(values) - cut].double().mean(0).to(values.dtype)


def is_weight(name: str, tensor: Tensor) -> bool:
    """Return whether a server may move a shared tensor along an update: all but counters and BatchNorm's statistics."""
    return tensor.is_floating_point() and not name.endswith(("running_mean", "running_var"))
