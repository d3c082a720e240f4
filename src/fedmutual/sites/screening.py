"""Which replies of a phase the server does not use: each is held against the others' and against the contract's limits.

A mean follows its largest member, so the norm of each update is bounded by the median of the other sites'. An update within
the bound may still be hostile: only a rule that a minority cannot move (`server.aggregate`) holds against that.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch

from fedmutual.algorithms.fedavg import N_K
from fedmutual.core import Message

LEAST = 3  # replies that are compared: of two, nothing tells which one is wrong
_COUNTER = 2**31  # more than any round has batches; repeated, a larger step would take a counter beyond 64 bits


@dataclass(frozen=True)
class Limits:
    """What a contract allows a reply."""

    update: float  # how many times as large as the median of the others' the norm of an update may be
    examples: int | None  # the most examples that a site may say it has; None: `update` times the median of the others'


class Screened(NamedTuple):
    """What screening found of the replies of a phase."""

    refused: dict[str, str]  # site -> why its reply is not used, in one clause that is the same in every round
    norms: dict[str, float]  # of the updates that are used; empty where messages are no updates of what was sent


def update_norm(reply: Message, sent: Message) -> float:
    """The L2 norm of a reply minus what its site was sent, over floating tensors; a tensor that was not sent counts whole.

    It is finite, so that it can be written down.
    """
    norms = []
    for name, tensor in reply.items():
        if tensor.is_floating_point():
            change = tensor.double() - sent[name].double() if name in sent else tensor.double()
            norms.append(torch.linalg.vector_norm(change).item())
    return min(math.hypot(*norms), sys.float_info.max)


def median_of_others(values: Mapping[str, float], site: str) -> float:
    """The median of the other sites' values; of an even number the mean of the two middle ones."""
    return median(value for i, value in values.items() if i != site)


def screen(
    replies: Mapping[str, Message], sent: Mapping[str, Message], limits: Limits, known: Mapping[str, int]
) -> Screened:
    """Hold the replies of a phase against the limits and each other.

    sent: what each site was sent. known: the number of examples that each site stated first.
    """
    refused = {i: why for i, reply in replies.items() if (why := _find_fault(i, reply, sent[i], limits, known))}
    left = {i: reply for i, reply in replies.items() if i not in refused}
    norms = {i: update_norm(reply, sent[i]) for i, reply in left.items()}
    counts = {i: float(reply[N_K]) for i, reply in left.items() if N_K in reply and limits.examples is None}
    too_many = f"its n_k is more than {limits.update:g} times the median of the others'; sites.examples_limit can allow it"
    refused |= dict.fromkeys(find_outliers(counts, limits.update), too_many)
    updates = any(reply.keys() & sent[i].keys() for i, reply in left.items())
    refused |= _find_too_large(norms, limits, updates)
    return Screened(refused, {i: norm for i, norm in norms.items() if updates and i not in refused})


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
