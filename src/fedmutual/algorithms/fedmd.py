"""FedMD: a server averages what participants say of public data, and each learns to say the same.

Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation, 2019, https://arxiv.org/abs/1910.03581,
Algorithm 1. B public samples a round, C classes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmutual.aggregation import Aggregation
from fedmutual.algorithms.agree import PUBLIC_BATCH, Agree, Compare
from fedmutual.algorithms.independent import Independent
from fedmutual.algorithms.peers import one_batch, opinion, posterior_flaw
from fedmutual.batches import draws
from fedmutual.core import Algorithm, At, Batch, Client, Message, Net, Public, Spec, Unusable, setting, within


@dataclass(frozen=True, kw_only=True)
class FedMD(Independent):
    """Participants learn public data, then their own; then, every round, what all say in the mean of a public batch."""

    public_batch: int = setting(32, PUBLIC_BATCH)  # B
    transfer_epochs: int = setting(
        5, "passes over the public data, then over the client's private data, before the first round"
    )
    digest_steps: int = setting(
        1,
        "gradient steps towards the mean of all clients' scores on the round's public batch",
        tune=(1, 5),
    )
    consensus: Literal["logits", "posteriors"] = setting(
        "logits", "the scores on public data that are sent, averaged and fitted"
    )
    aggregate: Aggregation = Aggregation()  # of what is said

    def __post_init__(self) -> None:
        for name in ("public_batch", "transfer_epochs", "digest_steps"):
            within(name, getattr(self, name), 1, float("inf"))
        if self.consensus == "posteriors" and self.task.outputs is not None:
            raise ValueError("consensus cannot be 'posteriors' with a training.task of numbers, which has no classes")

    def algorithm(self) -> Algorithm:
        """Transfer; then announce, digest and revisit in every round."""
        given = dict(vars(self))
        start = (Agree(), Compare(), Transfer(**given), Revisit(**given))
        rounds = (Announce(**given), Digest(**given), Revisit(**given))
        public = Public(batch=self.public_batch)
        return Algorithm("fedmd", rounds, start=start, public=public, trains_on=("private",), dp_ready=True)

    def said(self, z: Tensor) -> Tensor:
        """Of logits [B, C] what is announced and fitted."""
        return z.softmax(-1) if self.consensus == "posteriors" else z


class Transfer(FedMD):
    """Public data, with their labels, to begin with."""

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Epochs of public data."""
        return self.over("public", client, at, self.transfer_epochs)


class Revisit(FedMD):
    """One's own data: after the transfer as often as the public ones, in a round as the settings say."""

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Epochs, or steps, of private data."""
        return self.over("private", client, at, self.transfer_epochs if at.round < 0 else None)


class Announce(FedMD):
    """What each says of the round's public batch."""

    terms: ClassVar[tuple[str, ...]] = ()

    def leaves(self, server: Message) -> Spec:
        """Logits or posteriors [B, C]."""
        return {self.consensus: (torch.float32, (self.public_batch, int(server["classes"])))}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """None."""
        return ()

    def end(self, client: Client, at: At) -> Message:
        """What this network says."""
        x, *_ = self.asked(client, at)
        return {self.consensus: self.said(opinion(client.nets["personal"], x)).float()}

    def asked(self, client: Client, at: At) -> Batch:
        """The public batch of the round, which all draw alike."""
        public = client.data["public"]
        return one_batch(public, next(draws(len(public), 1, self.public_batch, replace(at, phase=0).rng("public"))))

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """The consensus: the mean, or the rule of `[server]`. Raises Unusable where what should be posteriors are none."""
        said = {i: reply[self.consensus] for i, reply in replies.items()} if self.consensus == "posteriors" else {}
        flaws = {i: why for i, p in said.items() if (why := posterior_flaw(p)) is not None}
        if flaws:
            raise Unusable(flaws)
        return server | ({"consensus": self.aggregate(replies)[self.consensus]} if replies else {})


class Digest(Announce):
    """Everybody fits the consensus."""

    terms: ClassVar[tuple[str, ...]] = ("digest",)

    def leaves(self, server: Message) -> Spec:
        """Nothing."""
        return {}

    def send(self, server: Message, to: str, at: At) -> Message:
        """The consensus."""
        return {k: v for k, v in server.items() if k == "consensus"}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """The public batch with the consensus in the place of labels, so many times."""
        if "consensus" in inbox:
            x, *_ = self.asked(client, at)
            yield from [(x, inbox["consensus"].to(x))] * self.digest_steps

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """The mean absolute difference of logits, or posteriors."""
        x, consensus = batch
        return {"digest": (self.said(nets["personal"](x)) - consensus).abs().mean()}

    def end(self, client: Client, at: At) -> Message:
        """Nothing."""
        return {}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """The consensus has served."""
        return {k: v for k, v in server.items() if k != "consensus"}
