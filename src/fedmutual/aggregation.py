"""How replies become one message.

The rule for what is not a weight: floating-point buffers (BatchNorm's running mean and variance) are averaged like
weights; integer and boolean ones (its counter of batches) take the maximum, because a mean of counters is no counter.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from fedmutual.core import Message


def mean(replies: Mapping[str, Message], weights: Mapping[str, float] | None = None) -> Message:
    """The mean over participants, weighted if `weights` (any scale, > 0) are given, plain (1/K) otherwise.

    Replies are taken in the sorted order of their senders, so that the result does not depend on who answered first.

    Raises:
        ValueError: there are no replies, or two of them hold different names.
    """
    if not replies:
        raise ValueError("a mean needs at least one reply")
    ids = sorted(replies)
    names = list(replies[ids[0]])
    for other in ids[1:]:
        if replies[other].keys() != replies[ids[0]].keys():
            raise ValueError(f"{other!r} and {ids[0]!r} answered with different names")
    return {
        name: _mean([replies[i][name] for i in ids], None if weights is None else [weights[i] for i in ids])
        for name in names
    }


def _mean(tensors: Sequence[Tensor], weights: Sequence[float] | None) -> Tensor:
    """One after the other, in double precision: no second copy of all replies, and no rounding to speak of."""
    first = tensors[0]
    if not first.is_floating_point():
        return reduce(torch.maximum, tensors[1:], first.clone())
    total = torch.zeros_like(first, dtype=torch.float64)
    for number, tensor in enumerate(tensors):
        total.add_(tensor, alpha=1.0 if weights is None else weights[number])
    return (total / (len(tensors) if weights is None else sum(weights))).to(first.dtype)
