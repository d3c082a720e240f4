"""What a run's models take and give, read from its folder: the one place that knows where that is written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmutual.records.files import read_json
from fedmutual.records.folder import ENVIRONMENT, PARTITION


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a model."""

    shape: tuple[int, ...]  # of one example: (C, H, W) or (F,)
    classes: tuple[str, ...]  # in the order of the outputs
    scaling: dict[str, Any]  # what is done to inputs: divisor, mean, std, size
    columns: tuple[str, ...] | None  # the names of a table's features


def interface(folder: Path, client: str | None = None) -> Interface:
    """Of the shared model, or of a client's own where it has data of its own kind.

    Raises:
        RunError: a file of the folder is missing or damaged.
    """
    about = read_json(folder / ENVIRONMENT)
    own = about.get("clients", {}).get(client, {})
    classes = own.get("classes") or read_json(folder / PARTITION)["classes"]
    columns = own.get("columns", about.get("columns"))
    return Interface(
        shape=tuple(own.get("input", about["models"]["input"])),
        classes=tuple(classes),
        scaling=own.get("scaling", about["scaling"]),
        columns=columns and tuple(columns),
    )
