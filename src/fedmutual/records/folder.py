"""A run's folder: made, found again, and never mistaken for another's."""

import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fedmutual.config import Config, dump_config, load_config
from fedmutual.core import Schedule
from fedmutual.errors import RunError
from fedmutual.records.files import read_json, write_bytes, write_json

CONFIG, ENVIRONMENT, PARTITION, SUMMARY, LOG = (
    "config.toml",
    "environment.json",
    "partition.json",
    "summary.json",
    "log.txt",
)


def check_free(folder: Path) -> None:
    """Check that a new run can be made here. What a kill left of an attempt to make one does not count.

    Raises:
        RunError: the folder is in use.
    """
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder}: is a file; choose a folder with --out")
    made = {ENVIRONMENT, PARTITION} if not (folder / CONFIG).exists() else set()
    if folder.exists() and any(not p.name.endswith(".part") and p.name not in made for p in folder.iterdir()):
        mend = "add --resume to go on with the run in it, or choose" if (folder / CONFIG).exists() else "choose"
        raise RunError(f"{folder}: is in use; {mend} another folder with --out")


def reopen(folder: Path, config: Config) -> None:
    """Check that this configuration may go on with the run in a folder; more rounds are taken over.

    Raises:
        RunError: the run in the folder is of another configuration.
    """
    before = load_config(folder / CONFIG)
    changed = sorted(_changes(before.model_dump(), config.model_dump()))
    if changed == ["rounds"] and config.rounds > before.rounds:
        moving = [key for key, value in _leaves(config.model_dump()) if isinstance(value, Schedule)]
        if moving:
            raise RunError(
                f"{folder}: rounds cannot grow from {before.rounds} to {config.rounds}, because the schedule "
                f"{moving[0]!r} depends on their number; start a new run with --out"
            )
        (folder / SUMMARY).unlink(missing_ok=True)
        write_bytes(folder / CONFIG, dump_config(config).encode())
    elif changed:
        raise RunError(
            f"{folder}: the run in it was started with another {changed[0]!r}; only 'rounds' may grow on resume: "
            "give the configuration it was started with, or another folder with --out"
        )


def identity(config: Config, fingerprint: str) -> str:
    """What makes two runs the same: all of the configuration but the number of rounds, and the data. A hex digest."""
    same = config.model_copy(update={"rounds": 1})
    return hashlib.sha256(f"{dump_config(same)}\n{fingerprint}".encode()).hexdigest()[:32]


def write_about(folder: Path, config: Config, environment: Mapping[str, Any], partition: Mapping[str, Any]) -> None:
    """Write config.toml, environment.json and partition.json, or hold those of a resumed run against them.

    The first files of a run, written when all that can be wrong with its configuration and data has been looked at:
    config.toml last, because it is what makes the folder a run's.

    Raises:
        RunError: the data are not those that the run was started with, or the folder cannot be written.
    """
    if (folder / CONFIG).exists() and read_json(folder / PARTITION)["fingerprint"] != partition["fingerprint"]:
        raise RunError(f"{folder}: the data, or their partition, are not those that this run was started with")
    write_json(folder / ENVIRONMENT, environment)
    write_json(folder / PARTITION, partition)
    write_bytes(folder / CONFIG, dump_config(config).encode())


def environment(threads: int, device: torch.device) -> dict[str, Any]:
    """The machine and the versions."""
    return {
        "format": 1,
        **{name: version(name) for name in ("fedmutual", "torch", "torchvision")},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": torch.multiprocessing.cpu_count(),
        "threads": threads,
        "device": str(device),
        "command": " ".join(sys.argv),
    }


def _changes(before: Any, after: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from _changes(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif before != after:
        yield path


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and not {"start", "end"} <= value.keys():
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, Schedule(**value) if isinstance(value, dict) else value
