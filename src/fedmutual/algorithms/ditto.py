"""Ditto: federated averaging, and beside it a personal model that is pulled towards the global one.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, 2021, https://arxiv.org/abs/2012.04221,
Algorithm 1 with FedAvg as the global solver. K clients; v_k is the personal model, w the global one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.algorithms.fedprox import compute_proximal, copy_received
from fedmutual.core import Algorithm, At, Batch, Client, Message, Net, Setting, setting, within


@dataclass(frozen=True, kw_only=True)
class Ditto(FedAvg):
    """FedAvg, and beside it each client's own model, which is pulled towards the shared one.

    v_k minimises F_k(v_k) + lam / 2 ||v_k - w_t||^2, with w_t as received; the copies of w are FedAvg's. A copy and a
    personal model take the same batches: neither sees the other, so their order does not matter. lam = 0 is independent
    training beside FedAvg.
    """

    lam: Setting = setting(1.0, "lambda, the weight of the distance of a personal model to the server's model, at least 0")
    scores: ClassVar[tuple[str, ...]] = ("global", "personal")
    terms: ClassVar[tuple[str, ...]] = ("meme", "personal", "proximal")

    def __post_init__(self) -> None:
        within("lam", self.lam, 0, float("inf"))

    def algorithm(self) -> Algorithm:
        """Return the phases of a round; personal models have the shared architecture: the loss takes their distance."""
        return replace(super().algorithm(), alike=True)

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the shared model; return the received weights w_t, "w.name" -> tensor, and lambda []."""
        super().begin(client, inbox, at)
        return copy_received(client) | {"lam": at.value(self.lam)}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean losses of the copy and of the personal model, and lam / 2 ||v_k - w_t||^2; scalars."""
        x, y = batch
        personal = {"personal": self.task.fit(nets["personal"](x), y)}
        return super().loss(nets, batch, const) | personal | {"proximal": compute_proximal(nets["personal"], const, "lam")}
