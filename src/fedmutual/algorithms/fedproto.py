"""FedProto: participants with networks of their own share the mean features of each class.

Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, 2022, https://arxiv.org/abs/2105.00243,
Algorithm 1. A prototype is the mean of what a network's last layer takes, over a client's examples of a class. C classes,
D numbers in a prototype.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from fedmutual.algorithms.class_means import PROTOTYPES, ClassMeans, fit_features
from fedmutual.core import At, Batch, Client, Message, Net, Setting, find_head, setting, within


@dataclass(frozen=True, kw_only=True)
class FedProto(ClassMeans):
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
        super().__post_init__()

    @property
    def weighs(self) -> bool:
        """Return whether clients send their rows of each class, which weight their prototypes."""
        return self.proto_weighting == "samples"

    def count_features(self, shared: nn.Module) -> int:
        """Return D: `proto_size`, or the features of the shared network. Raise ValueError if there is neither."""
        size: int | None = self.proto_size or getattr(find_head(shared), "in_features", None)
        if size is None:
            raise ValueError("the shared network has no linear layer, whose input is a prototype; set algorithm.proto_size")
        return size

    def begin(self, client: Client, inbox: Message, at: At) -> Message:
        """Return the prototypes [C, D], which classes have one [C], and lambda []; D is stored for the reply."""
        return self.receive_means(client, inbox) | {"proto_lam": at.value(self.proto_lam)}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean cross-entropy and the weighted distance to the prototypes (eq. 7), scalars."""
        x, y = batch
        features, output = nets["personal"].features(x)
        off = (fit_features(features, const[PROTOTYPES].shape[1]) - const[PROTOTYPES][y]) * const["known"][y].unsqueeze(-1)
        return {"personal": self.task.fit(output, y), "prototype": const["proto_lam"] * off.square().mean()}
