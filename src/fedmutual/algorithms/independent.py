"""Independent training: each participant trains alone. The baseline of federated methods; on pooled data, their upper
bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedmutual.algorithms.local import LocalEpochs
from fedmutual.core import At, Batch, Message, Net, Spec


@dataclass(frozen=True, kw_only=True)
class Independent(LocalEpochs):
    """E epochs of the personal model on private data a round; nothing is sent, nothing leaves."""

    terms: ClassVar[tuple[str, ...]] = ("personal",)
    dp_ready: ClassVar[bool] = True

    def leaves(self, server: Message) -> Spec:
        """Return {}: nothing leaves the client."""
        return {}

    def send(self, server: Message, to: str, at: At) -> Message:
        """Return {}: nothing is sent."""
        return {}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Return the mean loss of the personal model, a scalar: with classes the cross-entropy."""
        x, y = batch
        return {"personal": self.task.fit(nets["personal"](x), y)}
