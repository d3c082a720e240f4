"""Check, before round 1 of every algorithm with a public seed set, that all participants hold the same set."""

from collections import Counter
from dataclasses import dataclass

import torch

from fedmutual.algorithms.peers import PEER, Peering, list_senders, select_peer_messages
from fedmutual.core import At, Client, Disagreed, Message, Seeds, Spec

PUBLIC_BATCH = "examples of public data in one exchange"
PUBLIC_LABELS = "all clients know the labels of public data; false: at most the owner of an example knows its label"


@dataclass(frozen=True)
class Agree(Peering):
    """Each participant sends a digest and the row counts of its public seed set, never a row."""

    labelled: bool = True  # whether labels belong to it

    def leaves(self, server: Message) -> Spec:
        """Return the declared reply: a digest uint8 [32], rows int64 [], and with labels each class's rows int64 [C]."""
        declared: Spec = {"digest": (torch.uint8, (32,)), "rows": (torch.int64, ())}
        return {**declared, "counts": (torch.int64, (int(server["classes"]),))} if self.labelled else declared

    def end(self, client: Client, at: At) -> Message:
        """Return the digest and the counts of this participant's public seed set."""
        return dict(read_agreed_facts(client).about)


@dataclass(frozen=True)
class Compare(Peering):
    """Each participant compares the other participants' digests and counts with its own."""

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return the digests and counts of the other participants."""
        return select_peer_messages(server, [i for i in list_senders(server) if i != to])

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Return no constants.

        Raises:
            Disagreed: a participant's set differs from the most common set; if no set is the most common, from the first.
        """
        by_sender = {i: {k: inbox[f"{i}{PEER}{k}"] for k in read_agreed_facts(client).about} for i in list_senders(inbox)}
        facts = dict(sorted({**by_sender, client.id: dict(read_agreed_facts(client).about)}.items()))
        fingerprints = {i: str([v.tolist() for v in about.values()]) for i, about in facts.items()}
        common = Counter(fingerprints.values()).most_common(1)[0][0]
        majority = next(facts[i] for i, print in fingerprints.items() if print == common)
        others = {i: why for i, about in facts.items() if (why := describe_difference(about, majority)) is not None}
        if others:
            first = next(iter(others))
            raise Disagreed(first, others[first], tuple(others))
        return {}


def read_agreed_facts(client: Client) -> Seeds:
    """Return the agreed facts about the public seed set of a client that has one."""
    assert client.seeds is not None  # an algorithm with `Algorithm.public` is given it
    return client.seeds


def describe_difference(one: Message, others: Message) -> str | None:
    """Return how one set differs from the others, as one clause; None if the sets are equal."""
    if one["rows"] != others["rows"]:
        return f"{one['rows'].item()} rows, and theirs has {others['rows'].item()}"
    counts, other_counts = (m["counts"].tolist() if "counts" in m else [] for m in (one, others))
    differing = [(k, a, b) for k, (a, b) in enumerate(zip(counts, other_counts, strict=True)) if a != b]
    if differing:
        k, a, b = differing[0]
        more = f", and others of {len(differing) - 1} more classes" if len(differing) > 1 else ""
        return f"{a} examples of class number {k}, and theirs has {b}{more}"
    if not torch.equal(one["digest"], others["digest"]):
        a, b = (bytes(m["digest"].tolist()).hex()[:12] for m in (one, others))
        return f"as many examples of each class, but not the same ones in the same order (digest {a}, theirs {b})"
    return None
