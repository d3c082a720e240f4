"""How replies become one message: by their mean, or by a rule that a hostile minority cannot carry away.

The rules, coordinate by coordinate: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
2018, https://arxiv.org/abs/1803.01498.

Floating-point buffers (BatchNorm's running mean and variance) are combined like weights. Integer and boolean tensors
(BatchNorm's counter of batches) are not averaged, because a mean of counters is no counter: beside a mean they take the
maximum, beside the other rules the lower one of the two middle values.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from fedmutual.core import Message
from fedmutual.fixed_sum import average_updates
from fedmutual.settings import TRIM, Rule, Sum

_PIECE = 2**20  # elements of a tensor that are sorted at once, over all replies
_ROUNDING = 1e-9  # 0.29 * 100 is below 29


@dataclass(frozen=True)
class Aggregation:
    """How a server makes one message of the replies; `[server]` sets each field of this type that an algorithm has."""

    rule: Rule = "mean"
    trim: float = TRIM  # of the trimmed mean
    sum: Sum = "float"  # how a mean adds; "fixed": in integers (`fixed_sum`)

    @property
    def weighs(self) -> bool:
        """Whether replies may weigh differently: in a mean; the other rules take every sender alike."""
        return self.rule == "mean"

    def __call__(
        self, replies: Mapping[str, Message], weights: Mapping[str, float] | None = None, base: Message | None = None
    ) -> Message:
        """One message of the replies.

        weights: of a mean; the other rules have none. base: what the replies are updates of, for a sum in fixed point;
        without it replies are summed as they are.

        Raises:
            ValueError: as `mean`.
            Unusable: a reply cannot be summed in fixed point.
        """
        if self.sum == "fixed":
            return fixed_mean(replies, weights, base or {})
        if self.rule == "mean":
            return mean(replies, weights)
        return median(replies) if self.rule == "median" else trimmed_mean(replies, self.trim)


def mean(replies: Mapping[str, Message], weights: Mapping[str, float] | None = None) -> Message:
    """The mean over participants, weighted if `weights` (any scale, > 0) are given, plain (1/K) otherwise.

    Replies are taken in the sorted order of their senders, so that the result does not depend on who answered first.

    Raises:
        ValueError: there are no replies, or two of them hold different names.
    """
    ids = _alike(replies, "mean")
    return {
        name: _mean([replies[i][name] for i in ids], None if weights is None else [weights[i] for i in ids])
        for name in replies[ids[0]]
    }


def fixed_mean(replies: Mapping[str, Message], weights: Mapping[str, float] | None, base: Message) -> Message:
    """The mean as of `mean`, added in fixed point: base plus the mean of the replies' updates (`fixed_sum`).

    Tensors of whole numbers are those of `base`; one that `base` has not takes the maximum, as in `mean`.

    Raises:
        ValueError: as `mean`.
        Unusable: a reply cannot be summed in fixed point.
    """
    first = replies[_alike(replies, "mean")[0]]
    counters = [name for name, tensor in first.items() if not tensor.is_floating_point() and name not in base]
    largest = mean({i: {name: reply[name] for name in counters} for i, reply in replies.items()})
    return average_updates(replies, weights, {**largest, **base})


def median(replies: Mapping[str, Message]) -> Message:
    """The median of each coordinate; of an even number of replies the mean of the two middle values.

    Raises:
        ValueError: as `mean`.
    """
    return _trimmed(replies, (len(replies) - 1) // 2, "median")


def trimmed_mean(replies: Mapping[str, Message], trim: float = TRIM) -> Message:
    """The mean of each coordinate without its smallest and its largest values, as `scipy.stats.trim_mean`.

    trim: the fraction of the replies, at least 0 and below 0.5, that is left out at either end; rounded down.

    Raises:
        ValueError: as `mean`; or `trim` is out of its range.
    """
    if not 0 <= trim < 0.5:
        raise ValueError(f"trim must be at least 0 and below 0.5, not {trim:g}")
    return _trimmed(replies, math.floor(trim * len(replies) + _ROUNDING), "trimmed mean")


def _trimmed(replies: Mapping[str, Message], cut: int, what: str) -> Message:
    """Without the `cut` smallest and the `cut` largest values of each coordinate."""
    ids = _alike(replies, what)
    return {name: _trimmed_tensor([replies[i][name] for i in ids], cut) for name in replies[ids[0]]}


def _alike(replies: Mapping[str, Message], what: str) -> list[str]:
    """The senders, sorted. Raises ValueError unless there is one, and all replies hold the same names."""
    if not replies:
        raise ValueError(f"a {what} needs at least one reply")
    ids = sorted(replies)
    for other in ids[1:]:
        if replies[other].keys() != replies[ids[0]].keys():
            raise ValueError(f"{other!r} and {ids[0]!r} answered with different names")
    return ids


def _mean(tensors: Sequence[Tensor], weights: Sequence[float] | None) -> Tensor:
    """One after the other, in double precision: no second copy of all replies, and no rounding to speak of."""
    first = tensors[0]
    if not first.is_floating_point():
        return reduce(torch.maximum, tensors[1:], first.clone())
    total = torch.zeros_like(first, dtype=torch.float64)
    for number, tensor in enumerate(tensors):
        total.add_(tensor, alpha=1.0 if weights is None else weights[number])
    return (total / (len(tensors) if weights is None else sum(weights))).to(first.dtype)


def _trimmed_tensor(tensors: Sequence[Tensor], cut: int) -> Tensor:
    """Sorted piece by piece: a sorted copy of a large tensor of all replies would not fit beside them."""
    pieces = zip(*(torch.split(tensor.flatten(), _PIECE) for tensor in tensors), strict=True)
    return torch.cat([_trimmed_piece(torch.stack(piece), cut) for piece in pieces]).reshape(tensors[0].shape)


def _trimmed_piece(values: Tensor, cut: int) -> Tensor:
    """values: [K, N] -> [N]."""
    ordered = values.sort(0).values
    if not values.is_floating_point():
        return ordered[(len(values) - 1) // 2]
    return ordered[cut : len(values) - cut].double().mean(0).to(values.dtype)
