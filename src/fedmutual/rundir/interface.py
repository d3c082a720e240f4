"""Read the inputs and outputs of a run's models from its folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmutual.rundir.about import read_networks
from fedmutual.rundir.schema import Participant


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a model."""

    shape: tuple[int, ...]  # of one example: (C, H, W) or (F,)
    classes: tuple[str, ...]  # or labels, in the order of the outputs
    task: str
    scaling: dict[str, Any]  # of inputs: divisor, mean, std, size, augment
    columns: tuple[str, ...] | None  # the names of a table's features
    agreed: bool  # whether all clients of the model scale their inputs equally


def read_interface(folder: Path, client: str | None = None) -> Interface:
    """Return the inputs and outputs of a client's model; without a client, of the shared model.

    Raises:
        RunError: a file of the folder is missing or damaged.
    """
    clients = read_networks(folder).clients
    participant = clients[client] if client is not None else next(iter(clients.values()))
    return Interface(
        shape=participant.input,
        classes=participant.classes,
        task=participant.task,
        scaling=participant.scaling.model_dump(mode="json"),
        columns=participant.columns,
        agreed=client is not None or all(_list_steps(other) == _list_steps(participant) for other in clients.values()),
    )


def _list_steps(participant: Participant) -> dict[str, Any]:
    """Return the scaling of every input, without augmentation, which only training uses."""
    return participant.scaling.model_dump(exclude={"augment"})
