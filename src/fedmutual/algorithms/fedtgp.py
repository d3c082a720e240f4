"""FedTGP: prototypes that the server trains to keep classes apart, in the place of means.

Zhang et al., FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and Model
Heterogeneity in Federated Learning, 2024, https://arxiv.org/abs/2401.03230, Algorithm 1. C classes, D numbers in a
prototype; the server's network is an embedding [C, D], a hidden layer of D units, and an output of D.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmutual.algorithms.class_means import EXAMPLES, PROTOTYPES, list_means
from fedmutual.algorithms.fedproto import FedProto
from fedmutual.batches import epochs
from fedmutual.core import At, Message, above_zero, setting, within
from fedmutual.optimizers import descend

TGP = "tgp."  # begins the names of the server's network in its state


@dataclass(frozen=True, kw_only=True)
class FedTGP(FedProto):
    """FedProto whose server trains the prototypes, so that those of different classes lie apart.

    For a client's prototype q of class y: cross-entropy of the softmax over classes c of `-(|q - p_c| + m [c = y])`, with
    the margin m = min(the largest of the classes' distances to their nearest class, the threshold).
    """

    margin: float = setting(100.0, "the threshold of the margin between prototypes, at least 0")
    server_epochs: int = setting(
        100, "passes over the clients' prototypes in which the server trains its prototypes, in each round"
    )
    server_lr: float = setting(0.01, "the learning rate of the server's prototypes (SGD), above 0")

    def __post_init__(self) -> None:
        super().__post_init__()
        within("margin", self.margin, 0, float("inf"))
        within("server_epochs", self.server_epochs, 1, float("inf"))
        above_zero("server_lr", self.server_lr)

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the server's prototypes [C, D] after their training; from then on every class has one."""
        merged, (q, y) = super().receive(server, replies, at), list_means(server, replies)
        if not len(y):
            return server
        margin = min(compute_largest_gap(merged[PROTOTYPES][merged[EXAMPLES] > 0]), self.margin)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(at.rng("tgp").initial_seed())
            net = TrainableGlobalPrototypes(*server[PROTOTYPES].shape).float()
        net.load_state_dict({**net.state_dict(), **{k.removeprefix(TGP): v for k, v in server.items() if k.startswith(TGP)}})

        def compute_loss(rows: Tensor) -> Tensor:
            distance = compute_distances(q[rows], net()) + margin * F.one_hot(y[rows], len(server[EXAMPLES]))
            return F.cross_entropy(-distance, y[rows])

        plan = epochs(len(q), self.server_epochs, self.batch_size, at.rng("tgp", "batches"))
        descend(torch.optim.SGD(net.parameters(), lr=self.server_lr), map(compute_loss, plan))
        state = {f"{TGP}{k}": v.detach().clone() for k, v in net.state_dict().items()}
        return {**server, **state, PROTOTYPES: net().detach(), EXAMPLES: torch.ones_like(server[EXAMPLES])}


class TrainableGlobalPrototypes(nn.Module):
    """The server's network: no input -> prototypes [C, D].

    Source: FedTGP, Zhang et al., 2024, https://arxiv.org/abs/2401.03230.
    """

    def __init__(self, classes: int, size: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(classes, size))
        self.hidden, self.output = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self) -> Tensor:
        """Return all prototypes [C, D]."""
        prototypes: Tensor = self.output(self.hidden(self.embedding).relu())
        return prototypes


def compute_distances(q: Tensor, p: Tensor) -> Tensor:
    """Return the distances [B, C] between the rows of q [B, D] and the rows of p [C, D]."""
    return (q.unsqueeze(1) - p).square().sum(-1).clamp(min=torch.finfo(q.dtype).tiny).sqrt()


def compute_largest_gap(prototypes: Tensor) -> float:
    """Return the largest distance of a class's mean prototype [c, D] to its nearest other class; infinite for one class.

    Source: the margin of FedTGP, Zhang et al., 2024, https://arxiv.org/abs/2401.03230.
    """
    distances = torch.cdist(prototypes.double(), prototypes.double())
    return float(distances.fill_diagonal_(torch.inf).min(1).values.max())
