"""An update as words that can be masked and summed, and the server's next model out of the sum.

The words are those of `fixed_sum`: one for each floating number, in the order of the tensors' names, and where replies weigh
one more, n_k.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch

from fedmutual.aggregation import Aggregation
from fedmutual.algorithms.fedavg import N_K, FedAvg
from fedmutual.algorithms.fml import FML
from fedmutual.algorithms.fork import Fork
from fedmutual.core import Algorithm, Message, Phase, Unusable
from fedmutual.fixed_sum import EncodedSum, apply_mean, encode_update
from fedmutual.sites.secure_sum.letters import WORDS
from fedmutual.sites.secure_sum.masks import Words


def is_summable(phase: Phase) -> bool:
    """Whether a phase sends the shared model, and n_k at most, and takes the mean: all that a secure sum can do."""
    kind = type(phase)
    sends = kind.send is Phase.send and kind.leaves in (Phase.leaves, FedAvg.leaves)
    return isinstance(phase, Fork) and sends and kind.receive in (FML.receive, FedAvg.receive)


def is_weighted(phase: Phase) -> bool:
    """Whether replies of a phase weigh by n_k."""
    return N_K in phase.leaves({})


def count_words(phase: Phase, base: Message) -> int:
    """How many words an update of the shared model has."""
    return sum(t.numel() for t in base.values() if t.is_floating_point()) + is_weighted(phase)


def pack_update(reply: Message, base: Message) -> Words:
    """A site's reply as words. base: what it was sent.

    Raises:
        ValueError: its n_k is out of the range of a fixed-point sum, or a number is not finite.
    """
    model = {name: tensor for name, tensor in reply.items() if name != N_K}
    update = encode_update(model, base, int(reply[N_K]) if N_K in reply else None)
    parts = [update.tensors[name].flatten() for name in sorted(update.tensors)]
    count = [torch.tensor([update.weight])] if update.weighted else []
    words: Words = torch.cat([*parts, *count]).numpy().view(np.uint64)
    return words


def divide_total(total: Words, sites: tuple[str, ...]) -> dict[str, Message]:
    """The sum of the sites' words as one message for each of them: the first holds the sum, the others zeros.

    What a single site sent nobody knows; a phase that adds these messages has the sum.
    """
    words = torch.from_numpy(total.view(np.int64))
    nothing = torch.zeros(1, dtype=torch.int64).expand(len(words))
    return {site: {WORDS: nothing if number else words} for number, site in enumerate(sites)}


@dataclass(frozen=True)
class OpenedSum(Aggregation):
    """What the server of a secure sum has in the place of an `Aggregation`: of replies it knows the sum alone."""

    weighted: bool = False  # whether the last word is the sum of n_k

    @property
    def weighs(self) -> bool:
        """No: weights are in the sum already."""
        return False

    def __call__(
        self, replies: Mapping[str, Message], weights: Mapping[str, float] | None = None, base: Message | None = None
    ) -> Message:
        """The server's next message. replies: as of `divide_total`. base: what sites were sent.

        Raises:
            Unusable: the weights do not sum to 1 or more.
        """
        assert base is not None
        total = reduce(torch.add, [reply[WORDS] for reply in replies.values()])
        weight = int(total[-1]) if self.weighted else len(replies)
        if weight < 1:  # a site's own words may say anything
            raise Unusable(dict.fromkeys(replies, "the sum of all n_k is below 1"))
        names = sorted(name for name, tensor in base.items() if tensor.is_floating_point())
        sizes = [base[name].numel() for name in names]
        parts = torch.split(total[: sum(sizes)], sizes)
        tensors = {name: part.reshape(base[name].shape) for name, part in zip(names, parts, strict=True)}
        declared = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in base.items()}
        return apply_mean(EncodedSum(tensors, weight, self.weighted), base, declared)


def open_sums(algorithm: Algorithm) -> Algorithm:
    """The algorithm as the server of a secure sum runs it."""
    (phase,) = algorithm.phases
    assert isinstance(phase, Fork)
    return replace(algorithm, phases=(replace(phase, aggregate=OpenedSum(weighted=is_weighted(phase))),))


def list_masked_leaves(algorithm: Algorithm, base: Message) -> dict[str, dict[str, tuple[str, list[int]]]]:
    """All that leaves a site of a model in a secure sum: phase -> name -> dtype, shape; as `experiment.list_leaves`."""
    (phase,) = algorithm.phases
    return {type(phase).__name__.lower(): {WORDS: ("int64", [count_words(phase, base)])}}
