"""Independent training: every participant alone. What federating has to beat; on pooled data, the ceiling."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedmutual.algorithms.local import LocalEpochs
from fedmutual.core import At, Batch, Message, Net, Spec


@dataclass(frozen=True, kw_only=True)
class Independent(LocalEpochs):
    """E epochs of the personal model on private data a round; nothing is sent, nothing leaves."""

    title: ClassVar[str] = "Local-only"
    terms: ClassVar[tuple[str, ...]] = ("personal",)
    dp_ready: ClassVar[bool] = True

    def leaves(self, server: Message) -> Spec:
        """Nothing."""
        return {}

    def send(self, server: Message, to: str, at: At) -> Message:
        """Nothing."""
        return {}

    def loss(self, nets: Mapping[str, Net], batch: Batch, const: Message) -> Message:
        """Cross-entropy of the personal model."""
        x, y = batch
        return {"personal": self.task.fit(nets["personal"](x), y)}
