"""How replies become one message.

The rule for what is not a weight: floating-point buffers (BatchNorm's running mean and variance) are averaged like
weights; integer and boolean ones (its counter of batches) take the maximum, because a mean of counters is no counter.
"""

from collections.abc import Mapping

import torch

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
    result = {}
    for name in names:
        column = torch.stack([replies[i][name] for i in ids])
        if not column.is_floating_point():
            result[name] = column.amax(0)
        elif weights is None:
            result[name] = column.mean(0)
        else:
            share = torch.tensor([weights[i] for i in ids], dtype=torch.float64)
            share = (share / share.sum()).to(column).reshape(-1, *[1] * (column.dim() - 1))
            result[name] = (column * share).sum(0)
    return result
