"""Which replies of a phase the server does not use: each is held against the others' and against the contract's limits.

A mean follows its largest member, so the norm of each update is bounded by the median of the other sites'. A long update
against the direction in which all others agree is refused, too. An update within both bounds may still be hostile: only a
rule that a minority cannot move (`server.aggregate`) holds against that.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from fedmutual.algorithms.fedavg import N_K
from fedmutual.core import Algorithm, Message

LEAST = 3  # replies that are compared: of two, nothing tells which one is wrong
COSINE = 0.15  # from here on two updates agree; down to its negative they are opposed. docs/security.md has the measurement
_COUNTER = 2**31  # more than any round has batches; repeated, a larger step would take a counter beyond 64 bits


@dataclass(frozen=True)
class Limits:
    """What a contract allows a reply."""

    update: float  # how many times as large as the median of the others' the norm of an update may be
    examples: int | None  # the most examples that a site may say it has; None: `update` times the median of the others'
    opposed: bool = True  # whether a long update against all others is refused, where these agree


class Screened(NamedTuple):
    """What screening found of the replies of a phase."""

    refused: dict[str, str]  # site -> why its reply is not used, in one clause that is the same in every round
    norms: dict[str, float]  # of the updates that are used; empty where messages are no updates of what was sent


class Update(NamedTuple):
    """What a site changed in a round: computed tensor by tensor, so that no copy of a whole model is held in float64."""

    reply: Message
    sent: Message

    def names(self) -> list[str]:
        """Return the names of the floating tensors."""
        return [name for name, tensor in self.reply.items() if tensor.is_floating_point()]

    def change(self, name: str) -> Tensor:
        """Return one tensor of the reply minus what was sent, in float64; a tensor that was not sent as it is."""
        tensor = self.reply[name].double()
        return tensor - self.sent[name].double() if name in self.sent else tensor

    def norm(self) -> float:
        """Return the L2 norm over all tensors; the largest float where it is not finite, so that it can be written down."""
        norm = math.hypot(*(torch.linalg.vector_norm(self.change(name)).item() for name in self.names()))
        return norm if math.isfinite(norm) else sys.float_info.max


def compute_cosine(update: Update, other: Update) -> float:
    """Return the cosine of the angle between two updates, 0 where the norm of one is 0 or the product is not finite."""
    norms = update.norm() * other.norm()
    if norms == 0 or not math.isfinite(norms):
        return 0.0
    shared = [name for name in update.names() if name in other.reply]
    return sum(torch.sum(update.change(name) * other.change(name)).item() for name in shared) / norms


def median_of_others(values: Mapping[str, float], site: str) -> float:
    """The median of the other sites' values; of an even number the mean of the two middle ones."""
    return median(value for i, value in values.items() if i != site)


def screen(
    replies: Mapping[str, Message],
    sent: Mapping[str, Message],
    limits: Limits,
    known: Mapping[str, int],
    algorithm: Algorithm,
) -> Screened:
    """Hold the replies of a phase against the limits and each other.

    Where the algorithm shares a model, a reply is an update of the model that was sent. Other replies are compared as they
    are, such as FedMD's logits and FedProto's prototypes: a site without a class may rightly take those far away.

    sent: what each site was sent. known: the number of examples that each site stated first.
    """
    updates, restore = "global" in algorithm.scores, algorithm.restore
    refused = {i: why for i, reply in replies.items() if (why := _find_fault(i, reply, sent[i], limits, known))}
    usable = {i: reply if restore is None else restore(sent[i], reply) for i, reply in replies.items() if i not in refused}
    changes = {i: Update(reply, sent[i] if updates else {}) for i, reply in usable.items()}
    norms = {i: change.norm() for i, change in changes.items()}
    counts = {i: float(reply[N_K]) for i, reply in usable.items() if N_K in reply and limits.examples is None}
    too_many = f"its n_k is more than {limits.update:g} times the median of the others'; sites.examples_limit can allow it"
    refused |= dict.fromkeys(find_outliers(counts, limits.update), too_many)
    refused |= _find_too_large(norms, limits, updates)
    opposed = find_opposed({i: c for i, c in changes.items() if i not in refused}) if updates and limits.opposed else None
    if opposed is not None:
        refused[opposed] = (
            "its update points against the updates of all others, which agree, and is longer than their median "
            "(sites.refuse_opposed)"
        )
    return Screened(refused, {i: norm for i, norm in norms.items() if updates and i not in refused})


def find_opposed(updates: Mapping[str, Update]) -> str | None:
    """Return the one site whose update is opposed to the updates of all others, while these agree; None: there is none.

    A heterogeneous site is not to be refused: near the optimum of a mean the updates of honest sites sum to 0, so that
    some are opposed. Therefore all of the others must agree pair by pair, and the update must be longer than their
    median. Of fewer than `LEAST` updates none is opposed.
    """
    norms = {i: update.norm() for i, update in updates.items()}
    for site in find_outliers(norms, 1.0):
        others = [update for i, update in updates.items() if i != site]
        against = all(compute_cosine(updates[site], other) <= -COSINE for other in others)
        if against and all(compute_cosine(*pair) >= COSINE for pair in combinations(others, 2)):
            return site
    return None


def _find_too_large(norms: Mapping[str, float], limits: Limits, updates: bool) -> dict[str, str]:
    """Site -> why its message is not used. updates: whether messages are updates of what was sent.

    Messages that are none, such as logits, are held to the square of the limit: networks of different kinds differ more in
    how large their logits are than in how far a round moves the one model that they share.
    """
    limit, what, whose = (limits.update, "update", "") if updates else (limits.update**2, "message", "the square of ")
    why = f"its {what} is more than {limit:g} times the median of the others' ({whose}sites.update_limit)"
    return dict.fromkeys(find_outliers(norms, limit), why)


def find_outliers(values: Mapping[str, float], limit: float, least: int = LEAST) -> list[str]:
    """The sites whose value is above `limit` times the median of the others'; of fewer than `least` values none is."""
    if len(values) < least:
        return []
    return [i for i, value in values.items() if value > limit * median_of_others(values, i)]


def _find_fault(site: str, reply: Message, sent: Message, limits: Limits, known: Mapping[str, int]) -> str | None:
    """What is wrong with a reply whatever the others say; None: nothing."""
    if N_K in reply:
        count = int(reply[N_K])
        if count < 1 or count > (limits.examples or count):
            most = "" if limits.examples is None else f" and at most {limits.examples} (sites.examples_limit)"
            return f"its n_k is not at least 1{most}"
        if count != known.get(site, count):
            return "its n_k is not the one that it stated first"
    for name, tensor in reply.items():
        if name == N_K or tensor.is_floating_point():
            continue
        change = tensor.double() - (sent[name].double() if name in sent else 0)
        if change.numel() and change.abs().max() > _COUNTER:
            return f"its whole numbers in {name!r} are further from those that it was sent than a round can take them"
    return None
