"""FedProx: federated averaging with a pull towards the global model.

Li et al., Federated Optimization in Heterogeneous Networks, 2020, https://arxiv.org/abs/1812.06127, Algorithm 2, with
every client doing E epochs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.core import At, Batch, Client, Message, Net, Setting, setting, within


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg whose local loss has mu / 2 ||w - w_t||^2 added, over the trainable weights w; w_t as received.

    Weights that stay at the client, such as an adaptor's, are not received and have no proximal term.
    """

    mu: Setting = setting(0.01, "the weight of the distance to the server's model, at least 0")
    terms: ClassVar[tuple[str, ...]] = ("meme", "proximal")
    dp_ready: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within("mu", self.mu, 0, float("inf"))

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the shared model; return the received weights w_t, "w.name" -> tensor, and mu []."""
        super().begin(client, inbox, at)
        return copy_received(client) | {"mu": at.value(self.mu)}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return FedAvg's loss and the proximal term, scalars."""
        return super().loss(nets, batch, const) | {"proximal": compute_proximal(nets["meme"], const, "mu")}


def copy_received(client: Client) -> Message:
    """Return a copy of the trainable shared weights w_t after the shared model was loaded: "w.name" -> tensor."""
    weights = ((k, p) for k, p in client.nets["meme"].named_parameters() if p.requires_grad and k in client.shared)
    return {f"w.{k}": p.detach().clone() for k, p in weights}


def compute_proximal(net: Net, const: Message, strength: str) -> Tensor:
    """Return strength / 2 ||w - w_t||^2, [], over the received weights of a net.

    const: w_t as `copy_received` returns it, and under the name `strength` the tensor [] of that setting.

    Source: FedProx, Li et al., 2020, https://arxiv.org/abs/1812.06127, Algorithm 2.
    """
    pairs = [(p, const[f"w.{k}"]) for k, p in net.params.items() if f"w.{k}" in const]
    zero = torch.zeros_like(const[strength], device=pairs[0][0].device if pairs else None)
    drift = torch.stack([zero, *((p - w).square().sum() for p, w in pairs)]).sum()
    return const[strength] / 2 * drift
