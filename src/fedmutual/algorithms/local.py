"""What every algorithm of local work shares: its settings and its batches."""

from collections.abc import Iterable
from dataclasses import dataclass

from fedmutual.batches import draws, epochs
from fedmutual.core import At, Batch, Client, Message, Phase, Task
from fedmutual.losses import Classification


@dataclass(frozen=True, kw_only=True)
class LocalEpochs(Phase):
    """E passes over a client's private data, or so many steps. Every algorithm that does so takes the very same batches."""

    local_epochs: int = 5  # E
    local_steps: int | None = None  # in the place of epochs
    batch_size: int = 128  # B
    task: Task = Classification()

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """E epochs, or the steps, of private data."""
        return self.over("private", client, at)

    def over(self, rows: str, client: Client, at: At, passes: int | None = None) -> Iterable[Batch]:
        """The same of the rows that `Client.data` has by this name; or so many passes over them."""
        data, rng = client.data[rows], at.rng(client.id, "batches")
        plan = (
            draws(len(data), self.local_steps, self.batch_size, rng)
            if self.local_steps is not None and passes is None
            else epochs(len(data), passes or self.local_epochs, self.batch_size, rng)
        )
        return data.rows(plan, at.rng(client.id, "augment"))
