"""What a run's models take and give, read from its folder: the one place that knows where that is written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmutual.rundir.about import about
from fedmutual.rundir.schema import Participant


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a model."""

    shape: tuple[int, ...]  # of one example: (C, H, W) or (F,)
    classes: tuple[str, ...]  # in the order of the outputs
    task: str
    scaling: dict[str, Any]  # what is done to inputs: divisor, mean, std, size, augment
    columns: tuple[str, ...] | None  # the names of a table's features
    agreed: bool  # whether all that it serves scale their inputs alike


def interface(folder: Path, client: str | None = None) -> Interface:
    """Of the shared model, or of a client's own.

    Raises:
        RunError: a file of the folder is missing or damaged.
    """
    clients = about(folder).clients
    whose = clients[client] if client is not None else next(iter(clients.values()))
    return Interface(
        shape=whose.input,
        classes=whose.classes,
        task=whose.task,
        scaling=whose.scaling.model_dump(mode="json"),
        columns=whose.columns,
        agreed=client is not None or all(_inputs(own) == _inputs(whose) for own in clients.values()),
    )


def _inputs(whose: Participant) -> dict[str, Any]:
    """What is done to every input; augmentation is of training only."""
    return whose.scaling.model_dump(exclude={"augment"})
