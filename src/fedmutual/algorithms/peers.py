"""Who speaks to whom among peers, and what may be believed of what they say."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedmutual.core import At, Batch, Client, Data, Message, Phase, Spec

MEMBER = "rows of "  # begins the names of what all know of each member
FORM = "form of "  # begins the names of what all know of a proxy's tensors: their types and shapes
PEER = "/"  # between a sender's id, which has none, and the name of a tensor
_TOLERANCE = 1e-3  # of the sum of a posterior: float32, and classes by the thousand


class Peering(Phase):
    """A phase of peers: unless it says otherwise nothing leaves or is sent, and the relay forgets what it forwarded."""

    def leaves(self, server: Message) -> Spec:
        """Nothing."""
        return {}

    def send(self, server: Message, to: str, at: At) -> Message:
        """Nothing."""
        return {}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """What all know, and nothing that anybody sent."""
        return {k: v for k, v in server.items() if PEER not in k}


def agreed(owners: Mapping[str, range], classes: int) -> Message:
    """What all know of the public seed set, and the relay with them: how many classes, and rows of each member.

    Members stand in the order in which their rows lie in the set.
    """
    return {"classes": torch.tensor(classes)} | {f"{MEMBER}{i}": torch.tensor(len(own)) for i, own in owners.items()}


def proxied(ids: Iterable[str], classes: int, first: Message) -> Message:
    """What all know of a federation of proxies, and the relay with them: who takes part, and what a proxy is made of."""
    return agreed(dict.fromkeys(ids, range(0)), classes) | {f"{FORM}{k}": v for k, v in first.items()}


def form(server: Message) -> Message:
    """The tensors that a proxy is made of, with values of no meaning."""
    return {k.removeprefix(FORM): v for k, v in server.items() if k.startswith(FORM)}


def members(server: Message) -> dict[str, int]:
    """Who belongs to the federation, and how many rows of the public seed set are its."""
    return {k.removeprefix(MEMBER): int(v) for k, v in server.items() if k.startswith(MEMBER)}


def owned_rows(server: Message) -> dict[str, range]:
    """Which rows of the public seed set are whose: member -> positions."""
    owners, start = {}, 0
    for i, rows in members(server).items():
        owners[i] = range(start, start := start + rows)
    return owners


def partners(ids: Iterable[str], pairs: float, at: At) -> dict[str, tuple[str, ...]]:
    """Whom each of these meets in this round, in all its phases: one other, or nobody.

    ids: of all members, who find the same pairs each for itself. pairs: how many a node, rounded up.
    """
    there, round = sorted(ids), replace(at, phase=0)
    order = sorted(there, key=lambda i: torch.rand((), generator=round.rng("pairs", i)).item())
    count = min(math.ceil(pairs * len(order) - 1e-9), len(order) // 2)
    drawn = [(order[2 * n], order[2 * n + 1]) for n in range(count)]
    return dict.fromkeys(there, ()) | {i: (j,) for pair in drawn for i, j in (pair, pair[::-1])}


def senders(messages: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Who sent these, in one order."""
    return tuple(sorted({k.partition(PEER)[0] for k in messages if PEER in k}))


def forwarded(replies: Mapping[str, Message]) -> Message:
    """What a relay holds until the next phase: all messages, by their senders."""
    return {f"{i}{PEER}{k}": v for i, reply in replies.items() for k, v in reply.items()}


def of_peers(server: Message, peers: Collection[str]) -> Message:
    """Of what a relay holds that of these senders, as it came."""
    return {k: v for k, v in server.items() if k.partition(PEER)[0] in peers}


def flaw(reply: Message, own: range, rows: int) -> str | None:
    """What is wrong with a peer's message, in one clause; None: nothing.

    own: the positions of the sender's own rows in the public seed set, of which alone a peer speaks, and of each once: the
    accuracy that a peer claims weighs all rows of its message, and rows that others gave would be weighed by a stranger.
    rows: of the whole set. An accuracy within 0 and 1 is believed: nobody but the sender can compute it.
    """
    index, accuracy = reply["index"], reply["accuracy"]
    odd = posterior_flaw(reply["posterior"])
    if odd is not None:
        return odd
    if not 0 <= accuracy.item() <= 1:
        return f"its accuracy is {'above 1' if accuracy > 1 else 'below 0' if accuracy < 0 else 'not a number'}"
    if (index < 0).any() or (index >= rows).any():
        return f"it speaks of samples that the public seed set of {rows} has not"
    if (index < own.start).any() or (index >= own.stop).any():
        return "it speaks of samples that another participant gave"
    if len(set(index.tolist())) < len(index):
        return "it speaks of a sample twice"
    return None


def posterior_flaw(p: Tensor) -> str | None:
    """Why the rows of p [B, C] are no posteriors, in one clause; None: they are."""
    if not p.isfinite().all():
        return "its posteriors are not finite"
    if (p < 0).any() or ((p.sum(-1) - 1).abs() > _TOLERANCE).any():
        return "its posteriors do not sum to one"
    return None


def one_batch(data: Data, index: Tensor) -> Batch:
    """The rows of one index tensor."""
    (batch,) = data.rows([index])
    return batch


def opinion(net: nn.Module, x: Tensor) -> Tensor:
    """What a net says of x, in eval mode and without gradient: logits [B, C]. It then goes on as it was."""
    before = net.training
    with torch.no_grad():
        z: Tensor = net.eval()(x)
    net.train(before)
    return z


def swap_states(client: Client) -> None:
    """Change an optimiser's state for the other one in the client's memory; at first, for one that never stepped."""
    if "personal" not in client.optimizers:  # it is frozen
        return
    state = client.optimizers["personal"].state
    for name, p in client.nets["personal"].named_parameters():
        for key, mine in state[p].items() if p in state else ():
            kept = client.memory.get(f"state.{name}.{key}")
            client.memory[f"state.{name}.{key}"] = mine.clone()
            mine.copy_(kept) if kept is not None else mine.zero_()
