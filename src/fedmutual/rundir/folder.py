"""The folder of a run: create the folder, lock it, and check that a configuration belongs to it."""

import hashlib
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fedmutual.config import Config, dump_config, read_client_settings, read_dumped
from fedmutual.config.schema import list_resumable_keys
from fedmutual.core import Message, Schedule
from fedmutual.errors import Busy, RunError
from fedmutual.files import OTHER_FOLDER, write_bytes
from fedmutual.rundir.file_names import BEGUN, CONFIG, ENVIRONMENT, LOCK, PARTITION, PRETRAINED, SUMMARY, client_folder
from fedmutual.rundir.record_files import check_record, read_record, write_record
from fedmutual.rundir.schema import Environment, PretrainedHeader, RecordedPartition
from fedmutual.tensor_files import read_tensors, write_tensors
from fedmutual.user_code.recorded_code import MODULES, check_unchanged, compute_digests

if TYPE_CHECKING:
    from fedmutual.models import Weights


@contextmanager
def lock_folder(
    folder: Path,
    other: str = "is writing this run",
    fix: str = OTHER_FOLDER,
    patience: float = 0.0,
) -> Iterator[None]:
    """Lock a folder against other processes for the block; create the folder if it is missing.

    The lock of a killed process ends with the process.

    other: what another process does in the folder, for the message. fix: how to fix the problem, for the message.
    patience: seconds to wait for the lock.

    Raises:
        Busy: another process holds the lock.
        RunError: the folder cannot be written.
    """
    lock = FileLock(folder / LOCK, timeout=patience)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise Busy(f"{folder}: another process {other}; wait for it, or {fix}") from None
    except OSError as problem:
        raise RunError(f"{folder}: cannot be written ({problem.strerror}); {fix}") from None
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path) -> bool:
    """Return whether another process holds the lock of a folder. Nothing is written.

    The lock is held for some microseconds: a process that starts in this time needs some patience.
    """
    import fcntl  # not on Windows, where no server and no site runs

    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as problem:
        return isinstance(problem, BlockingIOError)
    return False


def check_free(folder: Path) -> None:
    """Check that a new run can begin in this folder. Files of a run that was killed before its start are ignored.

    Raises:
        RunError: the folder holds other files, or cannot be read.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder}: is a file; {OTHER_FOLDER}")
        started = (folder / CONFIG).exists()
        ignored = {LOCK} if started else {LOCK, ENVIRONMENT, PARTITION, BEGUN}
        is_used = folder.exists() and any(not p.name.endswith(".part") and p.name not in ignored for p in folder.iterdir())
    except (OSError, ValueError) as problem:
        raise RunError(f"{folder}: cannot be read ({problem}); {OTHER_FOLDER}") from None
    if is_used:
        content = "a run already; add --resume (in Python: resume=True), or" if started else "other files already;"
        raise RunError(f"{folder}: holds {content} {OTHER_FOLDER}")


def check_resumable(folder: Path, config: Config) -> None:
    """Check that this configuration can resume the run in a folder: an equal configuration, or one with more rounds.

    No file is changed, and no code that the folder names is imported.

    Raises:
        ConfigError: config.toml is missing or damaged.
        RunError: the run has another configuration, or the code that it names has changed since; or environment.json is
            missing or damaged.
    """
    before = read_dumped(folder / CONFIG)
    changed = sorted(_list_changes(before.model_dump(), config.model_dump()))
    changed = [key for key in changed if key not in list_resumable_keys()]
    if changed == ["rounds"] and config.rounds > before.rounds:
        _check_schedules(folder, before, config, f"start a new run: {OTHER_FOLDER}")
    elif changed == ["rounds"]:
        raise RunError(
            f"{folder}: its run has {before.rounds} rounds, and a resume cannot reduce them to {config.rounds}; "
            f"set 'rounds' to {before.rounds} or more, or {OTHER_FOLDER}"
        )
    elif changed:
        raise RunError(
            f"{folder}: the run in it was started with another {changed[0]!r}; only 'rounds' may grow on resume: "
            f"give the configuration it was started with, or {OTHER_FOLDER}"
        )
    check_unchanged(folder, config.model_dump())


def check_schedules(folder: Path, config: Config) -> None:
    """Check that real sites can resume the run in a folder with the rounds of this configuration. No file is changed.

    Raises:
        ConfigError: config.toml is missing or damaged.
        RunError: a schedule depends on the number of rounds, and that number has changed.
    """
    _check_schedules(folder, read_dumped(folder / CONFIG), config, "give the federation another name")


def compute_identity(config: Config, fingerprint: str) -> str:
    """Return a digest (32 hex digits) of a run's settings and data. The number of rounds and resumable keys are left out.

    Default values are left out too, so that a key which a later version adds does not change the digest.

    fingerprint: of the data and their partition.
    """
    settings = config.model_dump(mode="json", exclude={"rounds"}, exclude_defaults=True)
    for key in list_resumable_keys():
        table, _, name = key.partition(".")
        if settings.get(table, {}).pop(name, None) is not None and not settings[table]:
            del settings[table]
    return hashlib.sha256(f"{json.dumps(settings, sort_keys=True)}\n{fingerprint}".encode()).hexdigest()[:32]


def find_source_weights(folder: Path) -> Message | None:
    """Return the weights of another run with which the run in this folder began; None if it began with random weights.

    Raises:
        RunError: the file of the weights is damaged.
    """
    return read_tensors(folder / BEGUN)[0] if (folder / CONFIG).exists() and (folder / BEGUN).exists() else None


def write_begun(folder: Path, state: Message) -> None:
    """Save the weights of another run with which this run begins. Raises RunError if the file cannot be written."""
    write_tensors(folder / BEGUN, state, {"format": "1"})


def read_initial_weights(folder: Path) -> "dict[tuple[str, str], Weights]":
    """Return the pretrained weights in a run's folder by (client, or "" for all clients; network); empty without weights.

    Raises:
        RunError: a file is damaged.
    """
    from fedmutual.models import Weights  # which takes torchvision

    names = (f"{PRETRAINED}/*.safetensors", f"clients/*/{PRETRAINED}.safetensors")
    files = [file for name in names for file in folder.glob(name)] if (folder / CONFIG).exists() else []
    weights = {}
    for file in files:
        state, about = read_tensors(file)
        header = check_record(file, PretrainedHeader, about)
        weights[header.client, header.network] = Weights(header.weights, state or None, str(file))
    return weights


def write_initial_weights(folder: Path, pretrained: "Mapping[tuple[str, str], Weights]") -> None:
    """Write the weights that the folder lacks. Weights that could not be loaded are recorded as a file without tensors.

    Raises:
        RunError: a file cannot be written.
    """
    for (client, network), weights in pretrained.items():
        shared = folder / PRETRAINED / f"{network.replace(':', '.')}.safetensors"
        file = client_folder(folder, client) / f"{PRETRAINED}.safetensors" if client else shared
        if not file.exists():
            about = {"format": "1", "client": client, "network": network, "weights": weights.description}
            write_tensors(file, weights.state or {}, about)


def write_about(folder: Path, config: Config, environment: Environment, partition: Mapping[str, Any]) -> None:
    """Write config.toml, environment.json and partition.json; of a resumed run, check that the data are unchanged.

    They are the first files of a run, written after all checks of the configuration and the data. config.toml is the last
    one, because a folder with config.toml counts as a run folder.

    Raises:
        RunError: the data differ from the data at the start of the run, a file is damaged, or the folder cannot be written.
    """
    partition_file = folder / PARTITION
    is_resumed = (folder / CONFIG).exists()
    if is_resumed and read_record(partition_file, RecordedPartition).fingerprint != partition["fingerprint"]:
        raise RunError(f"{folder}: the data, or their partition, are not those that this run was started with")
    (folder / SUMMARY).unlink(missing_ok=True)  # a summary of fewer rounds
    modules = compute_digests(config.model_dump())
    write_record(folder / ENVIRONMENT, environment.model_copy(update={MODULES: modules} if modules else {}))
    write_record(partition_file, check_record(partition_file, RecordedPartition, dict(partition)))
    write_bytes(folder / CONFIG, dump_config(config).encode())


def describe_environment(threads: int, device: str) -> Environment:
    """Return the machine, the versions and the command of this run."""
    return Environment(
        fedmutual=version("fedmutual"),
        torch=version("torch"),
        torchvision=version("torchvision"),
        python=platform.python_version(),
        platform=platform.platform(),
        cpus=multiprocessing.cpu_count(),
        threads=threads,
        device=device,
        command=" ".join(sys.argv),
    )


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


def _list_changes(before: Any, after: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from _list_changes(before.get(key), after.get(key), f"{path}.{key}" if path else key)
    elif before != after:
        yield path


def _check_schedules(folder: Path, before: Config, config: Config, fix: str) -> None:
    schedule = find_schedule(config)
    if schedule is not None and config.rounds != before.rounds:
        raise RunError(
            f"{folder}: rounds cannot {'grow' if config.rounds > before.rounds else 'shrink'} from {before.rounds} to "
            f"{config.rounds}, because the schedule {schedule!r} depends on their number; {fix}"
        )


def find_schedule(config: Config) -> str | None:
    """Return the first key whose value depends on the number of rounds; None without such a key."""
    return next(_list_schedules(config), None)


def _list_schedules(config: Config) -> Iterator[str]:
    rates = {"": config.optimizer.lr} | {f"clients.{i}.": c.optimizer.lr for i, c in config.clients.items()}
    yield from (f"{where}optimizer.lr" for where, rate in rates.items() if isinstance(rate, Schedule))
    for client in (None, *config.clients):
        where = "algorithm" if client is None else f"clients.{client}.algorithm"
        settings = read_client_settings(config, client)
        yield from (f"{where}.{key}" for key, value in settings.items() if isinstance(value, Schedule))
