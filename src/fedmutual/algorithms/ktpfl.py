"""KT-pFL: each client learns from a mixture of all clients' posteriors on public data, with coefficients of its own.

Zhang et al., Parameterized Knowledge Transfer for Personalized Federated Learning, 2021, https://arxiv.org/abs/2111.02862,
Algorithm 1. K clients, B public examples, C classes; c [K, K] are the knowledge coefficients, z posteriors [K, B, C].
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedmutual.algorithms.agree import PUBLIC_BATCH, Agree, Compare
from fedmutual.algorithms.independent import Independent
from fedmutual.algorithms.peers import PEER, compute_logits, draw_public_batch, get_members, require_posteriors
from fedmutual.core import (
    Algorithm,
    At,
    Batch,
    Client,
    Message,
    Net,
    Public,
    Spec,
    above_zero,
    get_target_kind,
    match_inputs,
    setting,
    within,
)
from fedmutual.losses import kl

COEFFICIENTS, POSTERIORS, TEACHER = "knowledge coefficients", "posteriors", "teacher"


@dataclass(frozen=True, kw_only=True)
class KTpFL(Independent):
    """Networks of any kind learn alone, and from the mixture of all clients' posteriors that the server finds for each.

    A row c_i takes a step down the mean square of z_i - sum_j c_ij z_j plus rho times that of c_ij - 1 / K, of a length that
    makes the mean change about 0.01, and becomes softmax(5 c_i), as in the authors' code.
    """

    public_batch: int = setting(32, PUBLIC_BATCH)  # B
    match_steps: int = setting(1, "gradient steps of each client towards its mixture on the round's public batch")
    kt_temperature: float = setting(10.0, "T, the divisor of the logits on public data, above 0")
    kt_penalty: float = setting(0.7, "rho, the weight of the distance of the coefficients to equal ones, at least 0")

    def __post_init__(self) -> None:
        for name in ("public_batch", "match_steps"):
            within(name, getattr(self, name), 1, float("inf"))
        above_zero("kt_temperature", self.kt_temperature)
        within("kt_penalty", self.kt_penalty, 0, float("inf"))
        if get_target_kind(self.task) != "classes":
            raise ValueError("kt-pfl mixes posteriors over classes, so training.task must be a task with classes")

    def algorithm(self) -> Algorithm:
        """Return the phases of a round: tell posteriors, match the mixture, and train as independent training."""
        settings = dict(vars(self))
        public = Public(labelled=False, batch=self.public_batch, own_labels=False)
        rounds = (Tell(**settings), Match(**settings), self)
        start = (Agree(labelled=False), Compare())
        return Algorithm("ktpfl", rounds, start=start, public=public, trains_on=("private",), dp_ready=True)


class Tell(KTpFL):
    """Send the posteriors on the round's public batch; the server mixes them for each client."""

    terms: ClassVar[tuple[str, ...]] = ()

    def leaves(self, server: Message) -> Spec:
        """Return the declared reply: posteriors [B, C]."""
        return {POSTERIORS: (torch.float32, (self.public_batch, int(server["classes"])))}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return no batches: the phase trains nothing."""
        return ()

    def end(self, client: Client, at: At) -> Message:
        """Return this network's posteriors [B, C] at temperature T."""
        x, *_ = draw_public_batch(client, self.public_batch, at)
        return {POSTERIORS: (compute_logits(client.nets["personal"], x) / self.kt_temperature).softmax(-1).float()}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the new coefficients of the clients that replied, and the mixture [B, C] for each.

        Raises:
            Unusable: a reply should hold posteriors and does not.
        """
        require_posteriors({i: reply[POSTERIORS] for i, reply in replies.items()})
        members = [*get_members(server)]
        ids = [i for i in members if i in replies]
        if not ids:
            return server
        here = torch.tensor([members.index(i) for i in ids])
        z = torch.stack([replies[i][POSTERIORS] for i in ids])
        before = server.get(COEFFICIENTS, torch.full([len(members)] * 2, 1 / len(members))).to(z)
        moved = move_coefficients(before[here[:, None], here], z, self.kt_penalty)
        mixtures = zip(ids, torch.einsum("ij,jbc->ibc", moved, z), strict=True)
        teachers = {f"{i}{PEER}{TEACHER}": mixture for i, mixture in mixtures}
        return server | {COEFFICIENTS: before.index_put((here[:, None], here), moved)} | teachers


class Match(KTpFL):
    """Train each network towards its mixture."""

    terms: ClassVar[tuple[str, ...]] = ("match",)

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return the mixture [B, C] for `to` if the server has one, else {}."""
        name = f"{to}{PEER}{TEACHER}"
        return {TEACHER: server[name]} if name in server else {}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return the public batch `match_steps` times, with the mixture [B, C] in place of the labels."""
        if TEACHER in inbox:
            x, *_ = draw_public_batch(client, self.public_batch, at)
            yield from [(x, match_inputs(inbox[TEACHER], x))] * self.match_steps

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean KL divergence of the network's posteriors at temperature T from the mixture, a scalar."""
        x, teacher = batch
        return {"match": kl(teacher.log(), (nets["personal"](x) / self.kt_temperature).log_softmax(-1)).mean()}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the server state without the mixtures."""
        return {k: v for k, v in server.items() if PEER not in k}


def move_coefficients(c: Tensor, z: Tensor, penalty: float) -> Tensor:
    """Return the coefficients [K, K] after a step, for posteriors z [K, B, C].

    Source: KT-pFL, Zhang et al., 2021, https://arxiv.org/abs/2111.02862, and the length of the step in the authors' code.
    """
    with torch.enable_grad():
        moving = c.clone().requires_grad_()
        off = z - torch.einsum("ij,jbc->ibc", moving, z)
        losses = off.square().mean((1, 2)) + penalty * (moving - 1 / len(c)).square().mean(1)
        (slopes,) = torch.autograd.grad(losses.sum(), moving)
    rates = []
    for slope in slopes:
        size, rate = slope.abs().sum().item() / len(c), 1.0
        for _ in range(5):
            if size > 0.01:
                size, rate = size / 5, rate / 5
            if size < 0.01:
                size, rate = size * 5, rate * 5
        rates.append(rate)
    return (5 * (c - slopes * torch.tensor(rates).to(c)[:, None])).softmax(1)
