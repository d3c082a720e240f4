"""FML: federated mutual learning, Algorithm 1.

Shen et al., Federated Mutual Learning, 2020, https://arxiv.org/abs/2006.16765; the journal version: Federated mutual
learning: a collaborative machine learning method for heterogeneous data, models, and objectives, FITEE 24(10), 2023,
https://doi.org/10.1631/FITEE.2300098. K clients, T rounds, E local epochs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fedmutual.algorithms.fork import Fork
from fedmutual.core import Algorithm, At, Batch, Client, Message, Net, Setting, setting, within


@dataclass(frozen=True, kw_only=True)
class FML(Fork):
    """A meme, forked from the shared model, and a personal model teach each other on private data.

    L_personal = alpha CE(personal) + (1 - alpha) KL(p_meme || p_personal)      (eq. 5)
    L_meme     = beta  CE(meme)     + (1 - beta)  KL(p_personal || p_meme)

    Memes are averaged with equal weights; personal models stay, with their momentum. beta = 1 makes the shared model
    FedAvg's with equal weights, alpha = 1 each personal model that of independent training.
    """

    alpha: Setting = setting(
        0.5, "the weight of the labels in a personal model's loss, 0 to 1; the rest weighs the loss towards the meme"
    )
    beta: Setting = setting(
        0.5, "the weight of the labels in a meme's loss, 0 to 1; the rest weighs the loss towards the personal model"
    )
    temperature: float = setting(1.0, "the divisor of both networks' logits where they teach each other, 0.001 to 1000")
    scores: ClassVar[tuple[str, ...]] = ("global", "personal")
    terms: ClassVar[tuple[str, ...]] = ("personal", "meme")
    dp_ready: ClassVar[bool] = True
    adapt_rival: ClassVar[str | None] = "fedavg"

    def __post_init__(self) -> None:
        within("alpha", self.alpha, 0, 1)
        within("beta", self.beta, 0, 1)
        within("temperature", self.temperature, 1e-3, 1e3)

    def algorithm(self) -> Algorithm:
        """Return one phase, with a remark if a distillation term has weight 0."""
        off = {"alpha": ("personal models learn", "memes"), "beta": ("memes learn", "personal models")}
        remarks = tuple(
            f"{name} = 1 turns distillation off: {student} nothing from {teacher}"
            for name, (student, teacher) in off.items()
            if getattr(self, name) == 1
        )
        return replace(super().algorithm(), remarks=remarks)

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the shared model into the meme; return alpha [] and beta [] of this round."""
        super().begin(client, inbox, at)
        return {"alpha": at.value(self.alpha), "beta": at.value(self.beta)}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return L_personal and L_meme, scalars; one forward pass of each network, and each loss trains only its network."""
        x, y = batch
        personal, meme = self.task.mutual(
            nets["personal"](x), nets["meme"](x), y, const["alpha"], const["beta"], self.temperature
        )
        return {"personal": personal, "meme": meme}
