"""FedRep: a shared representation, and a head of every client's own, trained one after the other.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, 2021,
https://arxiv.org/abs/2102.07078, Algorithm 1. E_h epochs of the head, then E of the representation.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.batches import epochs
from fedmutual.core import At, Batch, Client, Message, Net, setting, within


@dataclass(frozen=True, kw_only=True)
class FedRep(FedAvg):
    """FedAvg of the features; each client keeps its classifier, and trains first that, then the features.

    While one part is trained, the other is fixed. `model.part` says which part is shared; if all of it is, this is FedAvg.
    """

    head_epochs: int = setting(10, "passes that train the private layers, before the passes that train the shared layers")

    def __post_init__(self) -> None:
        within("head_epochs", self.head_epochs, 1, float("inf"))

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the shared model; return the names of the shared weights as keys, with empty values."""
        super().begin(client, inbox, at)
        return {f"shared.{k}": torch.zeros(()) for k in client.shared}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Yield the batches for the head, marked by a third tensor, then FedAvg's batches."""
        if any(p.requires_grad and k not in client.shared for k, p in client.nets["meme"].named_parameters()):
            data, rng = client.data["private"], at.rng(client.id, "head")
            plan = epochs(len(data), self.head_epochs, self.batch_size, rng)
            for batch in data.rows(plan, at.rng(client.id, "head", "augment")):
                yield *batch, batch[1].new_ones(())
        yield from super().batches(client, inbox, at)

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean loss of the copy, a scalar; the weights of the other part are constants and get no gradient."""
        x, y, *head = batch
        fixed = {k: p.detach() for k, p in nets["meme"].params.items() if (f"shared.{k}" in const) == bool(head)}
        return {"meme": self.task.fit(nets["meme"](x, fixed), y)}
