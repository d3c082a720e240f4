"""Combine replies into one message: by their mean, or by a rule that a hostile minority cannot control.

The rules work coordinate by coordinate: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical
Rates, 2018, https://arxiv.org/abs/1803.01498.

Floating-point buffers (BatchNorm's running mean and variance) are combined like weights. Integer and boolean tensors
(BatchNorm's counter of batches) are not averaged, because a mean of counters is not a counter: with a mean they take the
maximum, with the other rules the lower one of the two middle values. The real and imaginary parts of complex tensors are
combined apart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from fedmutual.core import Message, Total
from fedmutual.fixed_sum import average_total, average_updates
from fedmutual.settings import TRIM, Rule, Sum

_PIECE = 2**20  # elements of a tensor that are sorted at once, over all replies
_ROUNDING = 1e-9  # 0.29 * 100 is below 29


@dataclass(frozen=True)
class Aggregation:
    """The rule by which a server combines replies; `[server]` sets each field of this type that an algorithm has."""

    rule: Rule = "mean"
    trim: float = TRIM  # of the trimmed mean
    sum: Sum = "float"  # how a mean adds; "fixed": in integers (`fixed_sum`)

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
            RunError: as `fixed_sum.average_total`.
        """
        if isinstance(replies, Total):
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
    ids = _alike(replies, "mean")
    return {
        name: _mean([replies[i][name] for i in ids], None if weights is None else [weights[i] for i in ids])
        for name in replies[ids[0]]
    }


def fixed_mean(replies: Mapping[str, Message], weights: Mapping[str, float] | None, base: Message) -> Message:
    """Return the mean as `mean` does, added in fixed point: base plus the mean of the replies' updates (`fixed_sum`).

    Integer tensors are those of `base`; an integer tensor that `base` lacks takes the maximum, as in `mean`.

    Raises:
        ValueError: as `mean`; or there are more than MOST_SUMMED replies.
        Unusable: a reply cannot be summed in fixed point.
    """
    first = replies[_alike(replies, "mean")[0]]
    counters = [name for name, tensor in first.items() if not tensor.is_floating_point() and name not in base]
    largest = mean({i: {name: reply[name] for name in counters} for i, reply in replies.items()})
    return average_updates(replies, weights, {**largest, **base})


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


def _mean(tensors: Sequence[Tensor], weights: Sequence[float] | None) -> Tensor:
    """Return the mean, summed reply by reply in double precision: no second copy of all replies, and little rounding."""
    first = tensors[0]
    if first.is_complex():
        return torch.view_as_complex(_mean(list(map(torch.view_as_real, tensors)), weights))
    if not first.is_floating_point():
        return reduce(torch.maximum, tensors[1:], first.clone())
    total = torch.zeros_like(first, dtype=torch.float64)
    for number, tensor in enumerate(tensors):
        total.add_(tensor, alpha=1.0 if weights is None else weights[number])
    return (total / (len(tensors) if weights is None else sum(weights))).to(first.dtype)


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
