"""What a run's models take and give, read from its folder: the one place that knows where that is written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmutual.records.files import read_json
from fedmutual.records.folder import ENVIRONMENT


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
    clients = read_json(folder / ENVIRONMENT)["clients"]
    about = clients[client] if client is not None else next(iter(clients.values()))
    return Interface(
        shape=tuple(about["input"]),
        classes=tuple(about["classes"]),
        task=about["task"],
        scaling=about["scaling"],
        columns=tuple(about["columns"]) if "columns" in about else None,
        agreed=client is not None or all(_inputs(own) == _inputs(about) for own in clients.values()),
    )


def _inputs(about: dict[str, Any]) -> dict[str, Any]:
    """What is done to every input; augmentation is of training only."""
    return {k: v for k, v in about["scaling"].items() if k != "augment"}
