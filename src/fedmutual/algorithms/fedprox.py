"""FedProx: federated averaging with a pull towards the global model.

Li et al., Federated Optimization in Heterogeneous Networks, 2020, https://arxiv.org/abs/1812.06127, Algorithm 2, with
every client doing E epochs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.core import At, Batch, Client, Message, Net, Setting, setting, within


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg whose local loss has mu / 2 ||w - w_t||^2 added, over the trainable weights w; w_t as received.

    What stays home of the model, as an adaptor does, was not received and is not pulled.
    """

    mu: Setting = setting(0.01, "the pull towards the model that the server sent, at least 0")
    terms: ClassVar[tuple[str, ...]] = ("meme", "proximal")
    dp_ready: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within("mu", self.mu, 0, float("inf"))

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Fork; w_t and mu."""
        super().begin(client, inbox, at)
        received = ((k, p) for k, p in client.nets["meme"].named_parameters() if p.requires_grad and k in client.shared)
        anchor = {f"w.{k}": p.detach().clone() for k, p in received}
        return anchor | {"mu": at.value(self.mu)}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """FedAvg's, and the proximal term."""
        pairs = [(p, const[f"w.{k}"]) for k, p in nets["meme"].params.items() if f"w.{k}" in const]
        drift = torch.stack([torch.zeros_like(const["mu"]), *((p - w).square().sum() for p, w in pairs)]).sum()
        return super().loss(nets, batch, const) | {"proximal": const["mu"] / 2 * drift}
