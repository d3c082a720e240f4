"""FedProto: participants with networks of their own share the mean features of each class.

Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, 2022, https://arxiv.org/abs/2105.00243,
Algorithm 1. A prototype is the mean of what a network's last layer takes, over a client's examples of a class. C classes,
D numbers in a prototype.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmutual.algorithms.independent import Independent
from fedmutual.calling import call_network
from fedmutual.core import (
    Algorithm,
    At,
    Batch,
    Client,
    Data,
    Message,
    Net,
    Setting,
    Spec,
    find_head,
    get_target_kind,
    setting,
    take_features,
    within,
)

PROTOTYPES, EXAMPLES = "prototypes", "examples"  # [C, D] float32; [C] int64: of each class, 0 where it has no prototype
_ROWS = 512  # of a forward


@dataclass(frozen=True, kw_only=True)
class FedProto(Independent):
    """Networks of any kind learn alone, and pull their features towards the mean features of each class over all clients.

    The loss of independent training has `lam |f(x) - p_y|^2` added, for features f and the prototype p of the label. The
    distance is the mean of squares over D, and 0 for a class without a prototype. lam = 0 is independent training.
    """

    proto_lam: Setting = setting(
        1.0, "lambda, the weight of the distance of features to their class's prototype, at least 0"
    )
    proto_size: int | None = setting(
        None,
        "the length of a prototype; other features are averaged to this length; unset, the number of features of "
        "model.shared",
    )
    proto_weighting: Literal["samples", "uniform"] = setting(
        "uniform", "prototypes are weighted by their number of examples (then reported by each client), or all equally"
    )
    terms: ClassVar[tuple[str, ...]] = ("personal", "prototype")

    def __post_init__(self) -> None:
        within("proto_lam", self.proto_lam, 0, float("inf"))
        if self.proto_size is not None:
            within("proto_size", self.proto_size, 1, float("inf"))
        if get_target_kind(self.task) != "classes":
            raise ValueError("prototypes belong to classes, so training.task must be a task with classes")

    def algorithm(self) -> Algorithm:
        """Return one phase; the first server state has no prototype of any class."""
        return replace(super().algorithm(), begins=self.begins, features=("personal",), needs_labels=True)

    def begins(self, shared: nn.Module, classes: int) -> Message:
        """Return the server's first state; D is the number of features of the shared network, unless `proto_size` is set.

        Raises:
            ValueError: `proto_size` is not set, and the shared network has no linear layer.
        """
        size = self.proto_size or getattr(find_head(shared), "in_features", None)
        if size is None:
            raise ValueError("the shared network has no linear layer, whose input is a prototype; set algorithm.proto_size")
        return {
            PROTOTYPES: torch.zeros(classes, size, dtype=torch.float32),
            EXAMPLES: torch.zeros(classes, dtype=torch.int64),
        }

    def leaves(self, server: Message) -> Spec:
        """Return the declared reply: prototypes [C, D], and int64 [C]: each class's rows or 1, and 0 without a prototype."""
        return {k: (server[k].dtype, tuple(server[k].shape)) for k in (PROTOTYPES, EXAMPLES)}

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return all prototypes."""
        return {k: server[k] for k in (PROTOTYPES, EXAMPLES)}

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Return the prototypes [C, D], which classes have one [C], and lambda []; D is stored for the reply."""
        place = next(client.nets["personal"].parameters())
        client.memory = {**client.memory, "size": torch.tensor(inbox[PROTOTYPES].shape[1])}
        known = (inbox[EXAMPLES] > 0).to(place)
        return {PROTOTYPES: inbox[PROTOTYPES].to(place), "known": known, "proto_lam": at.value(self.proto_lam)}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean cross-entropy and the weighted distance to the prototypes (eq. 7), scalars."""
        x, y = batch
        features, output = nets["personal"].features(x)
        off = (fit_features(features, const[PROTOTYPES].shape[1]) - const[PROTOTYPES][y]) * const["known"][y].unsqueeze(-1)
        return {"personal": self.task.fit(output, y), "prototype": const["proto_lam"] * off.square().mean()}

    def end(self, client: Client, at: At) -> Message:
        """Return the prototypes [C, D] of the client's examples, from the trained network in eval mode."""
        sums, counts = sum_by_class(client.nets["personal"], client.data["private"], int(client.memory["size"]))
        examples = counts if self.proto_weighting == "samples" else counts.clamp(max=1)
        return {PROTOTYPES: (sums / counts.clamp(min=1).unsqueeze(1)).float(), EXAMPLES: examples}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return each class's mean prototype over the clients that have one (eq. 6); a class without any has none."""
        if not replies:
            return server
        ordered = [replies[i] for i in sorted(replies)]
        counts = torch.stack([r[EXAMPLES] for r in ordered])  # [K, C]
        total = (torch.stack([r[PROTOTYPES] for r in ordered]).double() * counts.unsqueeze(-1)).sum(0)
        merged = total / counts.sum(0).clamp(min=1).unsqueeze(1)
        return {**server, PROTOTYPES: merged.float(), EXAMPLES: counts.sum(0)}


def fit_features(features: Tensor, size: int) -> Tensor:
    """Return features [B, F] as [B, size]: unchanged if F = size, else means over neighbouring features."""
    return features if features.shape[1] == size else F.adaptive_avg_pool1d(features.unsqueeze(1), size).squeeze(1)


@torch.no_grad()
def sum_by_class(net: nn.Module, data: Data, size: int) -> tuple[Tensor, Tensor]:
    """Return the sum of features over the rows of each class [C, size], and the number of rows of each class int64 [C].

    Both are on the CPU. The network is in eval mode during the computation, and returns to its earlier mode.

    Source: FedProto, Tan et al., 2022, https://arxiv.org/abs/2105.00243, Algorithm 1.

    Raises:
        DataError, Refused: as `Data.rows`.
    """
    before, last = net.training, find_head(net)
    assert last is not None  # as `Algorithm.features` has it
    net.eval()
    sums = torch.zeros(last.out_features, size, dtype=last.weight.dtype)  # a GPU would add the rows in a random order
    counts = torch.zeros(last.out_features, dtype=torch.int64)
    for x, y, *_ in data.rows(torch.split(torch.arange(len(data)), _ROWS)):
        features, _ = take_features(last, partial(call_network, net, x))
        sums.index_add_(0, y.cpu(), fit_features(features, size).cpu())
        counts += torch.bincount(y.cpu(), minlength=len(counts))
    net.train(before)
    return sums, counts
