"""A run's folder: made, found again, and never mistaken for another's."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from fedmutual.config import Config, dump_config, read_client_settings, read_dumped
from fedmutual.config.keys import list_effects
from fedmutual.core import Message, Schedule
from fedmutual.errors import Busy, RunError
from fedmutual.files import read_json, write_bytes
from fedmutual.recorded_code import MODULES, check_unchanged, digests
from fedmutual.rundir.file_names import BEGUN, CONFIG, ENVIRONMENT, LOCK, PARTITION, SUMMARY
from fedmutual.rundir.record_files import write_record
from fedmutual.rundir.schema import Environment, RecordedPartition
from fedmutual.tensor_files import read_tensors, write_tensors

_RESUMABLE = frozenset(key for key, effect in list_effects(Config).items() if effect.resumable)


@contextmanager
def held(
    folder: Path,
    other: str = "is writing this run",
    mend: str = "choose another folder with --out",
    patience: float = 0.0,
) -> Iterator[None]:
    """Hold a folder, made if missing, against other processes. A killed process lets go of it by dying.

    other: what another process does there. mend: what to do, where it does or nothing can be written. patience: seconds.

    Raises:
        Busy: another process writes there.
        RunError: the folder cannot be written.
    """
    lock = FileLock(folder / LOCK, timeout=patience)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise Busy(f"{folder}: another process {other}; wait for it, or {mend}") from None
    except OSError as problem:
        raise RunError(f"{folder}: cannot be written ({problem.strerror}); {mend}") from None
    try:
        yield
    finally:
        lock.release()


def check_free(folder: Path) -> None:
    """Check that a new run can be made here. What a kill left of an attempt to make one does not count.

    Raises:
        RunError: the folder holds something already, or cannot be looked into.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder}: is a file; choose a folder with --out")
        started = (folder / CONFIG).exists()
        left = {LOCK} if started else {LOCK, ENVIRONMENT, PARTITION, BEGUN}
        used = folder.exists() and any(not p.name.endswith(".part") and p.name not in left for p in folder.iterdir())
    except (OSError, ValueError) as problem:
        raise RunError(f"{folder}: cannot be looked into ({problem}); choose another folder with --out") from None
    if used:
        held = "a run already; add --resume to go on with it, or" if started else "other files already;"
        raise RunError(f"{folder}: holds {held} choose another folder with --out")


def reopen(folder: Path, config: Config) -> None:
    """Check that this configuration may go on with the run in a folder: the same, or with more rounds. Changes nothing.

    No code that the folder names is imported.

    Raises:
        RunError: the run in the folder is of another configuration, or the code that it names has changed since.
    """
    before = read_dumped(folder / CONFIG)
    changed = sorted(_changes(before.model_dump(), config.model_dump()))
    changed = [key for key in changed if key not in _RESUMABLE]
    if changed == ["rounds"] and config.rounds > before.rounds:
        _check_schedules(folder, before, config, "start a new run with --out")
    elif changed == ["rounds"]:
        raise RunError(
            f"{folder}: the run in it is of {before.rounds} rounds, and they cannot shrink to {config.rounds} on resume; "
            f"set 'rounds' to {before.rounds} or more, or start a new run with --out"
        )
    elif changed:
        raise RunError(
            f"{folder}: the run in it was started with another {changed[0]!r}; only 'rounds' may grow on resume: "
            "give the configuration it was started with, or another folder with --out"
        )
    check_unchanged(folder, config.model_dump())


def check_schedules(folder: Path, config: Config) -> None:
    """Check that real sites may go on to so many rounds, where what is saved has the same `identity`. Changes nothing.

    Raises:
        RunError: a setting depends on the number of rounds, and it was another.
    """
    _check_schedules(folder, read_dumped(folder / CONFIG), config, "give the federation another name")


def identity(config: Config, fingerprint: str) -> str:
    """What makes two runs the same: all that was set but the number of rounds and who works, and the data. A hex digest.

    Defaults are left out, so that a key which a later version adds does not make a run another's.
    """
    same = config.model_dump(mode="json", exclude={"rounds"}, exclude_defaults=True)
    for key in _RESUMABLE:
        table, _, name = key.partition(".")
        if same.get(table, {}).pop(name, None) is not None and not same[table]:
            del same[table]
    return hashlib.sha256(f"{json.dumps(same, sort_keys=True)}\n{fingerprint}".encode()).hexdigest()[:32]


def begun(folder: Path) -> Message | None:
    """What the run in a folder began with, where that was another run's model: that run may have gone on since, or gone."""
    return read_tensors(folder / BEGUN)[0] if (folder / CONFIG).exists() and (folder / BEGUN).exists() else None


def write_begun(folder: Path, state: Message) -> None:
    """Keep it. Raises RunError where it cannot be written."""
    write_tensors(folder / BEGUN, state, {"format": "1"})


def write_about(folder: Path, config: Config, environment: Mapping[str, Any], partition: Mapping[str, Any]) -> None:
    """Write config.toml, environment.json and partition.json, or hold those of a resumed run against them.

    The first files of a run, written when all that can be wrong with its configuration and data has been looked at:
    config.toml last, because it is what makes the folder a run's.

    Raises:
        RunError: the data are not those that the run was started with, or the folder cannot be written.
    """
    if (folder / CONFIG).exists() and read_json(folder / PARTITION).get("fingerprint") != partition["fingerprint"]:
        raise RunError(f"{folder}: the data, or their partition, are not those that this run was started with")
    (folder / SUMMARY).unlink(missing_ok=True)  # of fewer rounds
    modules = digests(config.model_dump())
    write_record(folder / ENVIRONMENT, Environment, {**environment, **({MODULES: modules} if modules else {})})
    write_record(folder / PARTITION, RecordedPartition, dict(partition))
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


def check_no_links(folder: Path) -> None:
    """Refuse to resume in a folder that holds symbolic links.

    A resumed run writes and removes files, and a link in a folder of somebody else could lead to files outside that folder.

    Raises:
        RunError: a file or folder in it is a symbolic link.
    """
    for parent, folders, files in os.walk(folder):
        link = next((path for name in (*folders, *files) if (path := Path(parent, name)).is_symlink()), None)
        if link is not None:
            raise RunError(
                f"{link}: is a symbolic link, and a resumed run writes only inside its own folder; replace the link by a "
                "copy of the file or folder that the link leads to"
            )


def _changes(before: Any, after: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from _changes(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif before != after:
        yield path


def _check_schedules(folder: Path, before: Config, config: Config, mend: str) -> None:
    moving = next(_schedules(config), None)
    if moving is not None and config.rounds != before.rounds:
        raise RunError(
            f"{folder}: rounds cannot {'grow' if config.rounds > before.rounds else 'shrink'} from {before.rounds} to "
            f"{config.rounds}, because the schedule {moving!r} depends on their number; {mend}"
        )


def _schedules(config: Config) -> Iterator[str]:
    """The keys whose value depends on the number of rounds."""
    rates = {"": config.optimizer.lr} | {f"clients.{i}.": c.optimizer.lr for i, c in config.clients.items()}
    yield from (f"{where}optimizer.lr" for where, rate in rates.items() if isinstance(rate, Schedule))
    for client in (None, *config.clients):
        where = "algorithm" if client is None else f"clients.{client}.algorithm"
        settings = read_client_settings(config, client)
        yield from (f"{where}.{key}" for key, value in settings.items() if isinstance(value, Schedule))
