"""FedAvg with fine-tuning: the averaged model, and at every client a copy of it that is trained further.

Yu et al., Salvaging Federated Learning by Local Adaptation, 2020, https://arxiv.org/abs/2002.04758, section on
fine-tuning. E_t epochs of fine-tuning.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from fedmutual.algorithms.fedavg import FedAvg
from fedmutual.algorithms.fork import copy_shared, copy_unshared
from fedmutual.algorithms.independent import Independent
from fedmutual.core import Algorithm, At, Batch, Client, Message, setting, within


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(FedAvg):
    """FedAvg; then each client's personal model is the averaged one after E_t epochs of its own data.

    Clients send nothing after fine-tuning, so the averaged model is FedAvg's. In rounds that fine-tune, the server sends the
    averaged model once more.
    """

    tune_epochs: int = setting(
        1, "passes over a client's private data in fine-tuning; 0: no fine-tuning, the client's model is the average"
    )
    tune_every: int = setting(1, "rounds from one fine-tuning to the next; the last round always fine-tunes")
    scores: ClassVar[tuple[str, ...]] = ("global", "personal")

    def __post_init__(self) -> None:
        within("tune_epochs", self.tune_epochs, 0, float("inf"))
        within("tune_every", self.tune_every, 1, float("inf"))

    def algorithm(self) -> Algorithm:
        """Return two phases: average, then fine-tune; personal models have the architecture of the shared model."""
        tune = Tune(**{f.name: getattr(self, f.name) for f in fields(Tune)})
        return replace(super().algorithm(), phases=(self, tune), alike=True)


@dataclass(frozen=True, kw_only=True)
class Tune(Independent):
    """Train each client's personal model, starting from the averaged model; nothing leaves the client."""

    tune_epochs: int = 1
    tune_every: int = 1

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return the averaged model in rounds that fine-tune, else {}."""
        due = (at.round + 1) % self.tune_every == 0 or at.round + 1 == at.rounds
        return server if due else {}

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Copy the averaged model, with the layers that stay at the client, into the personal model; return no constants."""
        if inbox:
            copy_shared(client, "personal", inbox)
            copy_unshared(client)
        return {}

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return E_t epochs of private data, inputs [B, ...] and targets [B]; none in a round without fine-tuning."""
        return self.over("private", client, at, self.tune_epochs) if inbox and self.tune_epochs else ()
