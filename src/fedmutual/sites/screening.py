"""The selection of usable replies in a phase: the server compares each reply with the others and with the contract's limits.

One large update dominates a mean, so the norm of each update is bounded by the median norm of the other sites. A long
update against the common direction of all others is refused, too. An update within both bounds may still be hostile: only
a robust aggregation rule (`server.aggregate`) protects against such an update.

A site that joins later first learns what the others already know: its updates are large and may be opposed, although it is
honest. In its first rounds its update is therefore not refused, but is at most as long as the median of the others'. A
hostile site may send such a short update in any round, so it gains nothing.
"""

import math
import sys
from collections.abc import Collection, Mapping
from itertools import combinations
from statistics import median

import torch
from torch import Tensor

from fedmutual.algorithms.fedavg import N_K
from fedmutual.core import Algorithm, Message
from fedmutual.sites.schema import SitesTable

LEAST = 3  # replies for a comparison: of two different replies, either may be the wrong one
COSINE = 0.15  # from here two updates agree; to its negative they are opposed (measured in docs/security.md)
_COUNTER = 2**31  # more than the batches of any round; repeated larger steps would overflow a 64-bit counter
Update = tuple[Message, Message]
"""A site's reply, and the message that was sent to the site."""


def _compute_change(update: Update, name: str) -> Tensor:
    """Return one tensor of a reply minus the sent tensor, float64 in its shape [...]; a tensor that was not sent, itself.

    One tensor at a time, so that no float64 copy of a model is in memory.
    """
    reply, sent = update
    return reply[name].double() - sent[name].double() if name in sent else reply[name].double()


def _list_names(update: Update) -> list[str]:
    """Return the names of the floating tensors."""
    return [name for name, tensor in update[0].items() if tensor.is_floating_point()]


def compute_norm(update: Update) -> float:
    """Return the L2 norm over all tensors; the largest float where the norm is not finite, which JSON can hold."""
    norm = math.hypot(*(torch.linalg.vector_norm(_compute_change(update, name)).item() for name in _list_names(update)))
    return norm if math.isfinite(norm) else sys.float_info.max


def compute_cosine(update: Update, other: Update) -> float:
    """Return the cosine of the angle between two updates, 0 where the norm of one is 0 or the product is not finite."""
    norms = compute_norm(update) * compute_norm(other)
    if norms == 0 or not math.isfinite(norms):
        return 0.0
    shared = [name for name in _list_names(update) if name in other[0]]
    return sum(torch.sum(_compute_change(update, name) * _compute_change(other, name)).item() for name in shared) / norms


def screen(
    replies: Mapping[str, Message],
    sent: Mapping[str, Message],
    limits: SitesTable,
    known: Mapping[str, int],
    algorithm: Algorithm,
    newcomers: Collection[str] = (),
) -> tuple[dict[str, str], dict[str, float], dict[str, Message]]:
    """Compare the replies of a phase with the limits of a contract and with each other.

    Return (refused, norms, shortened), each by site. refused: the reason why a reply is not used, a clause with equal text
    in every round. norms: of the usable updates; empty where messages are not updates of the sent model. shortened: the
    shortened replies of newcomers, to use in place of their own.

    Where the algorithm shares a model, a reply is an update of the sent model. Other replies, such as FedMD's logits and
    FedProto's prototypes, are compared without subtraction: an honest site without a class may move these far away. Their
    limit is the square, because the size of logits differs more between architectures than the norm of an update.

    sent: site -> the message to that site. known: site -> the number of examples that the site stated first. newcomers:
    sites with updates of at most the median norm of the others, in any direction; not where updates are compressed (FedKD).
    """
    updates, restore, most = "global" in algorithm.scores, algorithm.restore, limits.update_limit
    refused = {i: why for i, reply in replies.items() if (why := _find_fault(i, reply, sent[i], limits, known))}
    usable = {i: reply if restore is None else restore(sent[i], reply) for i, reply in replies.items() if i not in refused}
    changes: dict[str, Update] = {i: (reply, sent[i] if updates else {}) for i, reply in usable.items()}
    norms = {i: compute_norm(change) for i, change in changes.items()}
    usual, shortened = [norm for i, norm in norms.items() if i not in newcomers], dict[str, Message]()
    if updates and restore is None and usual:
        longer = [i for i, norm in norms.items() if i in newcomers and norm > median(usual)]
        shortened = {i: _shorten(changes[i], median(usual)) for i in longer}
        norms |= dict.fromkeys(shortened, median(usual))
        changes |= {i: (reply, sent[i]) for i, reply in shortened.items()}
    counts = {i: float(reply[N_K]) for i, reply in usable.items() if N_K in reply and limits.examples_limit is None}
    too_many = f"its n_k is more than {most:g} times the median of the others'; sites.examples_limit can allow it"
    refused |= dict.fromkeys(find_outliers(counts, most), too_many)
    limit, noun, of = (most, "update", "") if updates else (most**2, "message", "the square of ")
    too_large = f"its {noun} is more than {limit:g} times the median of the others' ({of}sites.update_limit)"
    refused |= dict.fromkeys(find_outliers(norms, limit), too_large)
    if updates and limits.refuse_opposed:
        judged = {i: change for i, change in changes.items() if i not in refused}
        older = {i: change for i, change in judged.items() if i not in newcomers}  # a newcomer may agree with nobody
        opposed = find_opposed(older if len(older) >= LEAST else judged)
        if opposed is not None and opposed not in newcomers:
            refused[opposed] = (
                "its update points against the updates of all others, which agree, and is longer than their median "
                "(sites.refuse_opposed)"
            )
    norms = {i: norm for i, norm in norms.items() if updates and i not in refused}
    return refused, norms, {i: reply for i, reply in shortened.items() if i not in refused}


def _shorten(update: Update, norm: float) -> Message:
    """Return the reply with an update of this norm in the same direction. Whole numbers do not change."""
    reply, sent = update
    scale = norm / compute_norm(update)
    shorter = {name: scale * _compute_change(update, name) for name in _list_names(update)}
    return {**reply, **{k: (v + sent[k].double() if k in sent else v).to(reply[k].dtype) for k, v in shorter.items()}}


def find_opposed(updates: Mapping[str, Update]) -> str | None:
    """Return the site with an update opposed to all other updates, where the others agree; None: no such site.

    A heterogeneous honest site must not be refused: near the optimum of a mean the updates of honest sites sum to 0, so
    some of them are opposed. Therefore each pair of the others must agree, and the update must be longer than their
    median. Among fewer than `LEAST` updates no update counts as opposed.
    """
    for site in find_outliers({i: compute_norm(update) for i, update in updates.items()}, 1.0):
        others = [update for i, update in updates.items() if i != site]
        is_opposed = all(compute_cosine(updates[site], other) <= -COSINE for other in others)
        if is_opposed and all(compute_cosine(*pair) >= COSINE for pair in combinations(others, 2)):
            return site
    return None


def find_outliers(values: Mapping[str, float], limit: float, least: int = LEAST) -> list[str]:
    """Return the sites with a value above `limit` times the median of the others; none for fewer than `least` values."""
    if len(values) < least:
        return []
    others = {site: median(value for i, value in values.items() if i != site) for site in values}
    return [site for site, value in values.items() if value > limit * others[site]]


def _find_fault(site: str, reply: Message, sent: Message, limits: SitesTable, known: Mapping[str, int]) -> str | None:
    """Return in one clause the fault of a reply without regard to the other replies, or None."""
    if N_K in reply:
        count, most = int(reply[N_K]), limits.examples_limit
        if count < 1 or count > (most or count):
            return f"its n_k is not at least 1{'' if most is None else f' and at most {most} (sites.examples_limit)'}"
        if count != known.get(site, count):
            return "its n_k is not the one that it stated first"
    for name, tensor in reply.items():
        if name == N_K or tensor.is_floating_point():
            continue
        change = tensor.double() - (sent[name].double() if name in sent else 0)
        if change.numel() and change.abs().max() > _COUNTER:
            return f"its whole numbers in {name!r} are further from those that it was sent than a round can take them"
    return None
