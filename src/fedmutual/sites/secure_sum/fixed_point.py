"""A site's update as fixed-point words: the integers of `aggregation.encode_update`, modulo 2^64."""

import numpy as np
import torch

from fedmutual.aggregation import encode_update
from fedmutual.algorithms.fedavg import N_K
from fedmutual.core import Algorithm, Message, Phase
from fedmutual.sites.secure_sum.masks import Words
from fedmutual.sites.secure_sum.messages import WORDS
from fedmutual.sites.statistics import SUMS, SumStatistics


def is_weighted(phase: Phase) -> bool:
    """Return whether the replies of a phase are weighted by n_k."""
    return N_K in phase.leaves({})


def count_words(phase: Phase, base: Message) -> int:
    """Return the number of words of an update. base: the shared model."""
    if isinstance(phase, SumStatistics):
        return phase.layout.count
    return sum(t.numel() for t in base.values() if t.is_floating_point()) + is_weighted(phase)


def pack_update(reply: Message, base: Message) -> Words:
    """Return the words [N] of a site's reply, N as in `count_words`. base: the shared model that the site was sent.

    A number that is not finite has the update zero: a site returns such a number as the server sent it (`private_values`).
    Raises ValueError where n_k is out of the range of a fixed-point sum.
    """
    if SUMS in reply:  # of a site's rows, in fixed point already
        sums: Words = reply[SUMS].numpy().view(np.uint64)
        return sums
    model, base = ({k: torch.nan_to_num(v) for k, v in m.items() if k != N_K} for m in (reply, base))
    words: Words = encode_update(model, base, int(reply[N_K]) if N_K in reply else None).numpy().view(np.uint64)
    return words


def list_masked_leaves(algorithm: Algorithm, base: Message) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """Return the tensors that leave a site in a secure sum: phase -> name -> dtype, shape; as `experiment.list_leaves`."""
    phases = (*algorithm.start, *algorithm.phases)
    return {type(phase).__name__.lower(): {WORDS: ("int64", [count_words(phase, base)])} for phase in phases}
