"""FedMD: a server averages what participants say of public data, and each learns to say the same.

Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, 2019, https://arxiv.org/abs/1910.03581,
Algorithm 1. B public samples a round, C classes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmutual.aggregation import Aggregation
from fedmutual.algorithms.agree import PUBLIC_BATCH, PUBLIC_LABELS, Agree, Compare
from fedmutual.algorithms.independent import Independent
from fedmutual.algorithms.peers import compute_logits, draw_public_batch, require_posteriors
from fedmutual.core import (
    Algorithm,
    At,
    Batch,
    Client,
    Message,
    Net,
    Public,
    Spec,
    get_target_kind,
    match_inputs,
    setting,
    within,
)


@dataclass(frozen=True, kw_only=True)
class FedMD(Independent):
    """Participants train on public data, then on their own; in each round they fit the mean scores of a public batch.

    Without public labels they begin with their own data.
    """

    public_batch: int = setting(32, PUBLIC_BATCH)  # B
    transfer_epochs: int = setting(
        5, "passes over the public data, then over the client's private data, before the first round"
    )
    labels: bool = setting(True, PUBLIC_LABELS)
    digest_steps: int = setting(1, "gradient steps towards the mean of all clients' scores on the round's public batch")
    consensus: Literal["logits", "posteriors"] = setting(
        "logits", "the kind of scores on public data that clients send and fit, and that the server averages"
    )
    aggregate: Aggregation = Aggregation()  # of the clients' scores

    def __post_init__(self) -> None:
        for name in ("public_batch", "transfer_epochs", "digest_steps"):
            within(name, getattr(self, name), 1, float("inf"))
        if self.consensus == "posteriors" and get_target_kind(self.task) != "classes":
            raise ValueError("consensus cannot be 'posteriors' with a training.task without classes")

    def algorithm(self) -> Algorithm:
        """Return the phases: transfer (of labels) and revisit before round 1; announce, digest and revisit in each round."""
        settings = dict(vars(self))
        transfer = (Transfer(**settings),) if self.labels else ()
        start = (Agree(self.labels), Compare(), *transfer, Revisit(**settings))
        rounds = (Announce(**settings), Digest(**settings), Revisit(**settings))
        public = Public(self.labels, self.public_batch, own_labels=self.labels)
        return Algorithm("fedmd", rounds, start=start, public=public, trains_on=("private",), dp_ready=True)

    def convert_outputs(self, z: Tensor) -> Tensor:
        """Return the scores that are sent and fitted: logits or posteriors, both [B, C]."""
        return z.softmax(-1) if self.consensus == "posteriors" else z


class Transfer(FedMD):
    """Train on the public data with their labels, before round 1."""

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return `transfer_epochs` epochs of public data, inputs [B, ...] and targets [B]."""
        return self.over("public", client, at, self.transfer_epochs)


class Revisit(FedMD):
    """Train on the private data: `transfer_epochs` epochs before round 1, the local epochs or steps in each round."""

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return epochs, or steps, of private data, inputs [B, ...] and targets [B]."""
        return self.over("private", client, at, self.transfer_epochs if at.round < 0 else None)


class Announce(FedMD):
    """Send the scores of each network on the round's public batch."""

    terms: ClassVar[tuple[str, ...]] = ()

    def leaves(self, server: Message) -> Spec:
        """Return the declared reply: logits or posteriors [B, C]."""
        return {self.consensus: (torch.float32, (self.public_batch, int(server["classes"])))}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return no batches: the phase trains nothing."""
        return ()

    def end(self, client: Client, at: At) -> Message:
        """Return this network's scores [B, C] on the round's public batch."""
        x, *_ = draw_public_batch(client, self.public_batch, at)
        return {self.consensus: self.convert_outputs(compute_logits(client.nets["personal"], x)).float()}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the consensus [B, C]: the mean of the scores, or the result of the rule of `[server]`.

        Raises:
            Unusable: a reply should hold posteriors and does not, or cannot be summed in fixed point.
        """
        if self.consensus == "posteriors":
            require_posteriors({i: reply[self.consensus] for i, reply in replies.items()})
        return server | ({"consensus": self.aggregate(replies)[self.consensus]} if replies else {})


class Digest(FedMD):
    """Train each network to fit the consensus."""

    terms: ClassVar[tuple[str, ...]] = ("digest",)

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return {"consensus": [B, C]} if the server has one, else {}."""
        return {k: v for k, v in server.items() if k == "consensus"}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return the public batch `digest_steps` times, with the consensus [B, C] in place of the labels."""
        if "consensus" in inbox:
            x, *_ = draw_public_batch(client, self.public_batch, at)
            yield from [(x, match_inputs(inbox["consensus"], x))] * self.digest_steps

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean absolute difference of logits, or of posteriors, a scalar."""
        x, consensus = batch
        return {"digest": (self.convert_outputs(nets["personal"](x)) - consensus).abs().mean()}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the server state without the consensus."""
        return {k: v for k, v in server.items() if k != "consensus"}
