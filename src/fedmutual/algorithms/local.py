"""What every algorithm of local epochs shares: its two settings and its batches."""

from collections.abc import Iterable
from dataclasses import dataclass

from fedmutual.batches import epochs
from fedmutual.core import At, Batch, Client, Message, Phase, Task
from fedmutual.losses import Classification


@dataclass(frozen=True, kw_only=True)
class LocalEpochs(Phase):
    """E passes over a client's private data. Every algorithm that does so takes the very same batches."""

    local_epochs: int = 5  # E
    batch_size: int = 128  # B
    task: Task = Classification()

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """E epochs of private data."""
        data = client.data["private"]
        plan = epochs(len(data), self.local_epochs, self.batch_size, at.rng(client.id, "batches"))
        return data.rows(plan, at.rng(client.id, "augment"))
