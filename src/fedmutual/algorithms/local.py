"""The settings and the batches of local training, shared by all algorithms with local epochs."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from fedmutual.batches import draws, epochs
from fedmutual.core import At, Batch, Client, Message, Phase, Task, from_training
from fedmutual.losses import Classification


@dataclass(frozen=True, kw_only=True)
class LocalEpochs(Phase):
    """E passes over a client's private data, or a number of steps. All algorithms with this class take identical batches."""

    local_epochs: int = from_training(5)  # E
    local_steps: int | None = from_training(None)  # in the place of epochs
    batch_size: int = from_training(128)  # B
    task: Task = from_training(Classification())

    def batches(self, client: Client, inbox: Message, at: At) -> Iterable[Batch]:
        """Return E epochs, or the steps, of private data: inputs [B, ...] and targets [B]."""
        return self.over("private", client, at)

    def count_steps(self, client: Client) -> int | None:
        """As `Phase.count_steps`; a last batch of one row is no step of its own. None for a subclass with other batches."""
        if type(self).batches is not LocalEpochs.batches:
            return None
        if self.local_steps is not None:
            return self.local_steps
        return self.local_epochs * -(-len(client.data["private"]) // self.batch_size)

    def over(
        self, rows: str, client: Client, at: At, passes: int | None = None, among: Tensor | None = None
    ) -> Iterable[Batch]:
        """Return E epochs, or the steps, of the rows named `rows` in `Client.data`; with `passes`, that number of epochs.

        among: the positions int64 [N] of the rows to take; None: all.
        """
        data, rng = client.data[rows], at.rng(client.id, "batches")
        count = len(data) if among is None else len(among)
        plan = (
            draws(count, self.local_steps, self.batch_size, rng)
            if self.local_steps is not None and passes is None
            else epochs(count, passes or self.local_epochs, self.batch_size, rng)
        )
        return data.rows(plan if among is None else (among[index] for index in plan), at.rng(client.id, "augment"))
