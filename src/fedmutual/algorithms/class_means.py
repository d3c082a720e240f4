"""The part that FedProto, FedTGP, FD and FedGH share: clients send a mean for each class, and networks of any kind stay."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmutual.algorithms.independent import Independent
from fedmutual.calling import call_network
from fedmutual.core import Algorithm, At, Client, Data, Message, Spec, find_head, get_target_kind, take_features

PROTOTYPES, EXAMPLES = "prototypes", "examples"  # [C, D] float32; [C] int64: of each class, 0 where it has no mean
_ROWS = 512  # of a forward


@dataclass(frozen=True, kw_only=True)
class ClassMeans(Independent):
    """Each client sends the mean of its features, or of its posteriors, over its rows of each class; the server averages."""

    of_posteriors: ClassVar[bool] = False  # else of features, the inputs of the last layer

    def __post_init__(self) -> None:
        if get_target_kind(self.task) != "classes":
            raise ValueError("prototypes belong to classes, so training.task must be a task with classes")

    @property
    def weighs(self) -> bool:
        """Return whether a client's mean of a class is weighted by its rows of the class, whose number it then sends."""
        return False

    def algorithm(self) -> Algorithm:
        """Return one phase; the first server state has no mean of any class."""
        features = () if self.of_posteriors else ("personal",)
        return replace(super().algorithm(), begins=self.begins, features=features, needs_labels=True)

    def begins(self, shared: nn.Module, classes: int) -> Message:
        """Return the server's first state; D is the number of features of the shared network, or C of posteriors.

        Raises:
            ValueError: the shared network has no linear layer.
        """
        size = classes if self.of_posteriors else self.count_features(shared)
        return {
            PROTOTYPES: torch.zeros(classes, size, dtype=torch.float32),
            EXAMPLES: torch.zeros(classes, dtype=torch.int64),
        }

    def count_features(self, shared: nn.Module) -> int:
        """Return D. Raise ValueError if the shared network has no linear layer."""
        head = find_head(shared)
        if head is None:
            raise ValueError("the shared network has no linear layer, whose input is a prototype; choose another network")
        return head.in_features

    def leaves(self, server: Message) -> Spec:
        """Return the declared reply: the means [C, D], and int64 [C]: each class's rows or 1, and 0 without a mean."""
        return {k: (server[k].dtype, tuple(server[k].shape)) for k in (PROTOTYPES, EXAMPLES)}

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return all means."""
        return {k: server[k] for k in (PROTOTYPES, EXAMPLES)}

    def receive_means(self, client: Client, inbox: Message) -> Message:
        """Return the means [C, D] and which classes have one [C], on the device of a client's network; D is stored."""
        place = next(client.nets["personal"].parameters())
        client.memory = {**client.memory, "size": torch.tensor(inbox[PROTOTYPES].shape[1])}
        return {PROTOTYPES: inbox[PROTOTYPES].to(place), "known": (inbox[EXAMPLES] > 0).to(place)}

    def end(self, client: Client, at: At) -> Message:
        """Return the means [C, D] of the client's examples, from the trained network in eval mode."""
        net, size = client.nets["personal"], int(client.memory["size"])
        sums, counts = sum_by_class(net, client.data["private"], size, self.of_posteriors)
        examples = counts if self.weighs else counts.clamp(max=1)
        return {PROTOTYPES: (sums / counts.clamp(min=1).unsqueeze(1)).float(), EXAMPLES: examples}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return each class's mean over the clients that have one; a class without any has none."""
        if not replies:
            return server
        ordered = [replies[i] for i in sorted(replies)]
        counts = torch.stack([r[EXAMPLES] for r in ordered]).clamp(0, None if self.weighs else 1)  # [K, C]
        total = (torch.stack([r[PROTOTYPES] for r in ordered]).double() * counts.unsqueeze(-1)).sum(0)
        merged = total / counts.sum(0).clamp(min=1).unsqueeze(1)
        return {**server, PROTOTYPES: merged.float(), EXAMPLES: counts.sum(0)}


def list_means(server: Message, replies: Mapping[str, Message]) -> tuple[Tensor, Tensor]:
    """Return the means [N, D] of all clients that have one, by client and class, and their classes int64 [N]."""
    means, classes = [server[PROTOTYPES][:0]], [server[EXAMPLES][:0]]
    for _, reply in sorted(replies.items()):
        known = reply[EXAMPLES] > 0
        means.append(reply[PROTOTYPES][known])
        classes.append(known.nonzero()[:, 0])
    return torch.cat(means), torch.cat(classes)


def fit_features(features: Tensor, size: int) -> Tensor:
    """Return features [B, F] as [B, size]: unchanged if F = size, else means over neighbouring features."""
    return features if features.shape[1] == size else F.adaptive_avg_pool1d(features.unsqueeze(1), size).squeeze(1)


@torch.no_grad()
def sum_by_class(net: nn.Module, data: Data, size: int, of_posteriors: bool = False) -> tuple[Tensor, Tensor]:
    """Return the sum of features over the rows of each class [C, size], and the number of rows of each class int64 [C].

    Both are on the CPU. The network is in eval mode during the computation, and returns to its earlier mode.

    of_posteriors: sum posteriors in the place of features; size is then C.

    Source: FedProto, Tan et al., 2022, https://arxiv.org/abs/2105.00243, Algorithm 1.

    Raises:
        DataError, Refused: as `Data.rows`.
    """
    before, last = net.training, None if of_posteriors else find_head(net)
    classes = size if last is None else last.out_features
    net.eval()
    sums = torch.zeros(classes, size, dtype=next(net.parameters()).dtype if last is None else last.weight.dtype)
    counts = torch.zeros(classes, dtype=torch.int64)  # on the CPU: a GPU would add the rows in a random order
    for x, y, *_ in data.rows(torch.split(torch.arange(len(data)), _ROWS)):
        if last is None:
            values = call_network(net, x).softmax(-1)
        else:
            values = fit_features(take_features(last, partial(call_network, net, x))[0], size)
        sums.index_add_(0, y.cpu(), values.cpu())
        counts += torch.bincount(y.cpu(), minlength=len(counts))
    net.train(before)
    return sums, counts
