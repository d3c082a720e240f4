"""FD: federated distillation: clients share the mean posterior of each class, and learn from the others' mean.

Jeong et al., Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation under Non-IID
Private Data, 2018, https://arxiv.org/abs/1811.11479, Algorithm 1, without augmentation. C classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedmutual.algorithms.class_means import EXAMPLES, PROTOTYPES, ClassMeans
from fedmutual.algorithms.peers import PEER, make_forwarded_message, require_posteriors
from fedmutual.core import At, Batch, Client, Message, Net, Setting, setting, within


@dataclass(frozen=True, kw_only=True)
class FD(ClassMeans):
    """Networks of any kind learn alone, and towards the mean posterior of a row's class over the other clients.

    The loss of independent training has gamma times the cross-entropy to that mean added, which is 0 for a class that no
    other client has. The means are those of the trained network; the paper has those of the outputs during training.
    """

    fd_weight: Setting = setting(1.0, "gamma, the weight of the loss towards the others' mean posteriors, at least 0")
    terms: ClassVar[tuple[str, ...]] = ("personal", "distillation")
    of_posteriors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        within("fd_weight", self.fd_weight, 0, float("inf"))
        super().__post_init__()

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return the mean posteriors of the clients other than `to`; of all, if `to` was not among them."""
        return {k: server.get(f"{to}{PEER}{k}", server[k]) for k in (PROTOTYPES, EXAMPLES)}

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Return the mean posteriors [C, C], which classes have one [C], and gamma []."""
        return self.receive_means(client, inbox) | {"fd_weight": at.value(self.fd_weight)}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean cross-entropy and the weighted mean cross-entropy to the others' posteriors, scalars."""
        x, y = batch
        output = nets["personal"](x)
        taught = -(const[PROTOTYPES][y] * output.log_softmax(-1)).sum(-1) * const["known"][y]
        return {"personal": self.task.fit(output, y), "distillation": const["fd_weight"] * taught.mean()}

    def receive(self, server: Message, replies: Mapping[str, Message], at: At) -> Message:
        """Return each class's mean posterior over all clients that have one, and over all but each client.

        Raises:
            Unusable: a reply should hold posteriors and does not.
        """
        require_posteriors({i: reply[PROTOTYPES][reply[EXAMPLES] > 0] for i, reply in replies.items()})
        if not replies:
            return server
        none, average = {k: torch.zeros_like(server[k]) for k in (PROTOTYPES, EXAMPLES)}, super().receive
        others = {i: average(none, {j: reply for j, reply in replies.items() if j != i}, at) for i in replies}
        return average(none, replies, at) | make_forwarded_message(others)
