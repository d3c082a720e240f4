"""MOON: model-contrastive federated learning: features near those of the shared model, away from the client's last ones.

Li et al., Model-Contrastive Federated Learning, 2021, https://arxiv.org/abs/2103.16257, Algorithm 1. The features are the
inputs of the last layer; the paper has a projection head before it, which a network of one's own may have.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.core import Algorithm, At, Batch, Client, Message, Net, Setting, above_zero, setting, within

SHARED, LAST = "shared.", "last."  # begin the names of the constants: the received model, and what the client sent last


@dataclass(frozen=True, kw_only=True)
class MOON(FedAvg):
    """FedAvg with a contrastive loss between the features of three models.

    z are a client's features, z_glob those of the received model, z_prev those of the model that the client sent last:
    contrast mu times the mean of -log(e^(cos(z, z_glob) / T) / (e^(cos(z, z_glob) / T) + e^(cos(z, z_prev) / T))).
    """

    contrast: Setting = setting(1.0, "mu, the weight of the contrastive loss, at least 0")
    contrast_temperature: float = setting(0.5, "T, the temperature of the contrastive loss, above 0")
    terms: ClassVar[tuple[str, ...]] = ("meme", "contrast")
    keeps_reply: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within("contrast", self.contrast, 0, float("inf"))
        above_zero("contrast_temperature", self.contrast_temperature)

    def algorithm(self) -> Algorithm:
        """Return FedAvg's phase; the shared network must end in a linear layer, whose inputs are the features."""
        return replace(super().algorithm(), features=("meme",))

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the shared model; return mu [], and the tensors of the two models that do not move."""
        super().begin(client, inbox, at)
        state = client.nets["meme"].state_dict()
        received = {k: v.clone() for k, v in state.items()}
        last = {k: client.previous.get(k, v).to(v, copy=True) for k, v in state.items()}
        models = {SHARED + k: v for k, v in received.items()} | {LAST + k: v for k, v in last.items()}
        return models | {"contrast": at.value(self.contrast)}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean cross-entropy and the weighted contrastive loss (eq. 4), scalars."""
        x, y = batch
        features, output = nets["meme"].features(x)
        similarities = []
        for model in (SHARED, LAST):
            fixed, _ = nets["meme"].features(x, {k.removeprefix(model): v for k, v in const.items() if k.startswith(model)})
            similarities.append(F.cosine_similarity(features, fixed.detach()) / self.contrast_temperature)
        contrast = -torch.stack(similarities, 1).log_softmax(1)[:, 0].mean()
        return {"meme": self.task.fit(output, y), "contrast": const["contrast"] * contrast}
