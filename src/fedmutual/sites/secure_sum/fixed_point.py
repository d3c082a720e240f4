"""A site's update as fixed-point words, and the next shared model from the sum of the words.

The words are the integers of `fixed_sum`: one word for each floating-point number, in the order of the tensors' names. A
weighted update has one more word at its end, n_k.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch

from fedmutual.aggregation import Aggregation
from fedmutual.algorithms.fedavg import N_K
from fedmutual.algorithms.fork import Fork
from fedmutual.core import Algorithm, Message, Phase
from fedmutual.errors import RunError
from fedmutual.fixed_sum import HEAVIEST, LARGEST, EncodedSum, apply_mean, encode_update
from fedmutual.sites.secure_sum.masks import Words
from fedmutual.sites.secure_sum.messages import WORDS
from fedmutual.sites.statistics import SUMS, SumStatistics


def is_summable(phase: Phase) -> bool:
    """Return whether a secure sum can replace the mean of a phase's replies."""
    return isinstance(phase, Fork) and phase.sum_ready


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

    Raises:
        ValueError: n_k is out of the range of a fixed-point sum.
    """
    if SUMS in reply:  # of a site's rows, in fixed point already
        sums: Words = reply[SUMS].numpy().view(np.uint64)
        return sums
    model, base = ({k: torch.nan_to_num(v) for k, v in m.items() if k != N_K} for m in (reply, base))
    update = encode_update(model, base, int(reply[N_K]) if N_K in reply else None)
    parts = [update.tensors[name].flatten() for name in sorted(update.tensors)]
    weights = [torch.tensor([update.weight])] if update.weighted else []
    words: Words = torch.cat([*parts, *weights]).numpy().view(np.uint64)
    return words


def divide_total(total: Words, sites: tuple[str, ...]) -> dict[str, Message]:
    """Return one message for each site: the message of the first site holds the sum of all words, the others hold zeros.

    total: the sum, words [N]. Each message holds one tensor, int64 [N]. The round loop needs a reply of each site, and the
    server knows only the sum of the replies.
    """
    words = torch.from_numpy(total.view(np.int64))
    zeros = torch.zeros(1, dtype=torch.int64).expand(len(words))
    return {site: {WORDS: zeros if number else words} for number, site in enumerate(sites)}


@dataclass(frozen=True)
class OpenedSum(Aggregation):
    """The aggregation of a secure sum: the mean comes from the sum of the replies, not from single replies."""

    weighted: bool = False  # whether the last word is the sum of n_k

    @property
    def weighs(self) -> bool:
        """False: the words are weighted at the sites."""
        return False

    def __call__(
        self, replies: Mapping[str, Message], weights: Mapping[str, float] | None = None, base: Message | None = None
    ) -> Message:
        """Return the next shared model. replies: the messages of `divide_total`. base: the model that the sites were sent.

        Raises:
            RunError: no updates of this number of sites have this sum, so a site sent wrong words.
        """
        assert base is not None
        total = reduce(torch.add, [reply[WORDS] for reply in replies.values()])
        weight = int(total[-1]) if self.weighted else len(replies)
        updates = total[:-1] if self.weighted else total
        most = len(replies) * LARGEST  # compared on both sides, because abs() of the smallest integer is negative
        if bool(((updates > most) | (updates < -most)).any()) or not len(replies) <= weight <= len(replies) * HEAVIEST:
            raise RunError(
                "the sum of the updates is impossible, so a site sent wrong words, and it is not known which of "
                f"{', '.join(replies)} it was; begin a federation of another name with other sites, or without masks"
            )
        names = sorted(name for name, tensor in base.items() if tensor.is_floating_point())
        sizes = [base[name].numel() for name in names]
        parts = torch.split(total[: sum(sizes)], sizes)
        tensors = {name: part.reshape(base[name].shape) for name, part in zip(names, parts, strict=True)}
        declared = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in base.items()}
        return apply_mean(EncodedSum(tensors, weight, self.weighted), base, declared)


def use_masked_sum(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with the aggregation of a secure sum, for the server."""
    (phase,) = algorithm.phases
    assert isinstance(phase, Fork)
    return replace(algorithm, phases=(replace(phase, aggregate=OpenedSum(weighted=is_weighted(phase))),))


def list_masked_leaves(algorithm: Algorithm, base: Message) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """Return the tensors that leave a site in a secure sum: phase -> name -> dtype, shape; as `experiment.list_leaves`."""
    phases = (*algorithm.start, *algorithm.phases)
    return {type(phase).__name__.lower(): {WORDS: ("int64", [count_words(phase, base)])} for phase in phases}
