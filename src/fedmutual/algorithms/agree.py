"""Before round 1 of every algorithm with a public seed set: all make sure that they hold the same one."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fedmutual.algorithms.peers import PEER, Peering, forwarded, of_peers, senders
from fedmutual.core import At, Batch, Client, Disagreed, Message, Net, Seeds, Spec

PUBLIC_BATCH = "examples of public data in one exchange"


@dataclass(frozen=True)
class Silent(Peering):
    """A phase without a step."""

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """None."""
        return ()

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """None."""
        return {}


@dataclass(frozen=True)
class Agree(Silent):
    """Everybody tells what its public seed set is, never what is in it."""

    labelled: bool = True  # whether labels belong to it

    def leaves(self, server: Message) -> Spec:
        """A digest of 32 bytes; how many rows there are, and of each class where labels belong to the set."""
        told: Spec = {"digest": (torch.uint8, (32,)), "rows": (torch.int64, ())}
        return {**told, "counts": (torch.int64, (int(server["classes"]),))} if self.labelled else told

    def end(self, client: Client, at: At) -> Message:
        """What this participant holds."""
        return dict(known(client).about)

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """What is to be forwarded."""
        return server | forwarded(replies)


class Compare(Silent):
    """Everybody holds what the others have against what it has itself."""

    def send(self, server: Message, to: str, at: At) -> Message:
        """What the others told."""
        return of_peers(server, [i for i in senders(server) if i != to])

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Nothing, if all is well.

        Raises:
            Disagreed: somebody's set is not that of most, or of the first where no set is that of most.
        """
        told = {i: {k: inbox[f"{i}{PEER}{k}"] for k in known(client).about} for i in senders(inbox)}
        held = dict(sorted({**told, client.id: dict(known(client).about)}.items()))
        prints = {i: str([v.tolist() for v in about.values()]) for i, about in held.items()}
        common = Counter(prints.values()).most_common(1)[0][0]
        model = next(held[i] for i, print in prints.items() if print == common)
        others = {i: what for i, about in held.items() if (what := difference(about, model)) is not None}
        if others:
            first = next(iter(others))
            raise Disagreed(first, others[first], tuple(others))
        return {}


def known(client: Client) -> Seeds:
    """What is agreed of the public seed set, of a client that has one."""
    assert client.seeds is not None  # an algorithm with `Algorithm.public` is given it
    return client.seeds


def difference(one: Message, others: Message) -> str | None:
    """In what one's set differs from the others', in one clause; None if in nothing."""
    if one["rows"] != others["rows"]:
        return f"{one['rows'].item()} rows, and theirs has {others['rows'].item()}"
    mine, theirs = (m["counts"].tolist() if "counts" in m else [] for m in (one, others))
    odd = [(k, a, b) for k, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
    if odd:
        k, a, b = odd[0]
        more = f", and others of {len(odd) - 1} more classes" if len(odd) > 1 else ""
        return f"{a} examples of class number {k}, and theirs has {b}{more}"
    if not torch.equal(one["digest"], others["digest"]):
        a, b = (bytes(m["digest"].tolist()).hex()[:12] for m in (one, others))
        return f"as many examples of each class, but not the same ones in the same order (digest {a}, theirs {b})"
    return None
