"""FedGH: the server trains one last layer for all on the mean features of each client's classes.

Yi et al., FedGH: Heterogeneous Federated Learning with Generalized Global Header, 2023, https://arxiv.org/abs/2303.13137,
Algorithm 1. C classes, D features.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from fedmutual.algorithms.class_means import ClassMeans, list_means
from fedmutual.algorithms.fork import reset_optimizer_state
from fedmutual.batches import epochs
from fedmutual.core import Algorithm, At, Client, Message, above_zero, find_head, setting, within
from fedmutual.optimizers import descend

HEAD = "head "  # begins the names of the last layer's tensors in messages


@dataclass(frozen=True, kw_only=True)
class FedGH(ClassMeans):
    """Networks with features of their own and one last layer, which the server trains on the clients' mean features.

    Each client replaces its last layer by the server's, trains its whole network, and sends the mean features of each class.
    The server takes steps of SGD on the cross-entropy of its layer over all means of all clients.
    """

    head_lr: float = setting(0.01, "the learning rate of the server's last layer (SGD), above 0")
    head_passes: int = setting(1, "passes over the clients' means in which the server trains the last layer, in each round")

    def __post_init__(self) -> None:
        above_zero("head_lr", self.head_lr)
        within("head_passes", self.head_passes, 1, float("inf"))
        super().__post_init__()

    def algorithm(self) -> Algorithm:
        """Return one phase; the last layers of all networks must have one shape."""
        return replace(super().algorithm(), same_heads=True)

    def begins(self, shared: nn.Module, classes: int) -> Message:
        """Return the server's first state: no means, whose shapes a reply has, and the last layer of the shared network.

        Raises:
            ValueError: the shared network has no linear layer.
        """
        first, head = super().begins(shared, classes), find_head(shared)
        assert head is not None  # or the line above raises
        return first | {HEAD + k: v.detach().clone() for k, v in head.state_dict().items()}

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return the last layer."""
        return {k: v for k, v in server.items() if k.startswith(HEAD)}

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Load the server's last layer, with a fresh optimiser state; return no constants."""
        head = find_head(client.nets["personal"])
        assert head is not None  # as `Algorithm.features` has it
        head.load_state_dict({k.removeprefix(HEAD): v for k, v in inbox.items()})
        reset_optimizer_state(client, "personal")
        client.memory = {**client.memory, "size": torch.tensor(head.in_features)}
        return {}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return the state with the trained last layer."""
        q, y = list_means(server, replies)
        head = {k: v.clone().requires_grad_() for k, v in server.items() if k.startswith(HEAD)}
        weight, bias = head[f"{HEAD}weight"], head.get(f"{HEAD}bias")
        plan = epochs(len(q), self.head_passes, self.batch_size, at.rng("head")) if len(q) else ()
        losses = (F.cross_entropy(F.linear(q[rows].to(weight), weight, bias), y[rows]) for rows in plan)
        descend(torch.optim.SGD(head.values(), lr=self.head_lr), losses)
        return {**server, **{k: v.detach() for k, v in head.items()}}
