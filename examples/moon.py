"""MOON in one file: features near those of the shared model, and away from the client's last ones.

Li et al. 2021, https://arxiv.org/abs/2103.16257. Run: python examples/moon.py
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fedmutual
from fedmutual import Site
from fedmutual.algorithms import FedAvg
from fedmutual.core import Algorithm, At, Batch, Client, Message, Net, Setting, setting

SHARED, PREVIOUS = "shared.", "previous."  # of the constants: the received model, and what the client sent last


@dataclass(frozen=True, kw_only=True)
class MOON(FedAvg):
    """FedAvg with a contrastive loss between the features of three models."""

    mu: Setting = setting(1.0, "the weight of the contrastive loss", tune=(0.1, 1.0, 5.0))
    temperature: float = setting(0.5, "the temperature of the contrastive loss")
    terms: ClassVar[tuple[str, ...]] = ("meme", "contrast")
    keeps_reply: ClassVar[bool] = True

    def algorithm(self) -> Algorithm:
        """Every network must end in a linear layer, whose inputs are the features."""
        return replace(super().algorithm(), features=("meme",))

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the received model into the meme; return the two other models, which do not move."""
        super().begin(client, inbox, at)
        received = {name: tensor.clone() for name, tensor in client.nets["meme"].state_dict().items()}
        previous = received | {name: tensor.clone() for name, tensor in client.previous.items() if name in received}
        models = ((SHARED, received), (PREVIOUS, previous))
        return {"mu": at.value(self.mu)} | {begins + name: t for begins, model in models for name, t in model.items()}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Cross-entropy, and mu times -log of the share of the shared model in exp(similarity / temperature)."""
        x, y = batch
        features, output = nets["meme"].features(x)
        similarities = []
        for begins in (SHARED, PREVIOUS):
            weights = {name.removeprefix(begins): t for name, t in const.items() if name.startswith(begins)}
            other, _ = nets["meme"].features(x, weights)
            similarities.append(F.cosine_similarity(features, other.detach()) / self.temperature)
        contrast = -torch.stack(similarities, 1).log_softmax(1)[:, 0].mean()
        return {"meme": self.task.fit(output, y), "contrast": const["mu"] * contrast}


if __name__ == "__main__":
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32").reshape(-1, 1, 8, 8)
    sites = {f"site {k}": Site(train=(x[k:900:3], y[k:900:3])) for k in range(3)}
    comparison = fedmutual.compare(
        sites, {"MOON": MOON(mu=1.0), "FedAvg": "fedavg"}, shared="cnn1", rounds=4, batch_size=16, lr=0.05, seeds=1
    )
    print(comparison)
