"""Choose the folder of a run and how the run begins there; all experiments that share a run share its folder."""

import re
import shutil
import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from operator import attrgetter
from pathlib import Path
from typing import Any

from fedmutual import data, numerics
from fedmutual.config import Config, dump_config, parse_config, read_dumped
from fedmutual.config.keys import Table, list_effects
from fedmutual.config.schema import list_resumable_keys
from fedmutual.core import At
from fedmutual.data import record
from fedmutual.data.division import Division, divide
from fedmutual.data.draws import make_numpy_generator, sample
from fedmutual.data.splits import PRIVATE
from fedmutual.errors import ConfigError, RunError
from fedmutual.federation.build import pick_device
from fedmutual.files import write_json
from fedmutual.rundir.checkpoint import make_file_name, read_checkpoint, read_state
from fedmutual.rundir.file_names import CONFIG, LOCK, SUMMARY, list_client_folders, server_folder
from fedmutual.rundir.folder import check_resumable, lock_folder
from fedmutual.rundir.record_files import read_environment
from fedmutual.rundir.schema import Saved
from fedmutual_papers.plan import Job, has_effect

CLAIMS = "claims"  # in OUT: a folder for each run, with the lock of the process that trains the run
BEST = "-best"  # ends the name of a second folder of a run, with the weights of best rounds that the first folder lacks
_MACHINE_KEYS = [key for key in list_effects(Config) if not has_effect(key) and key not in list_resumable_keys()]


def make_run_path(out: Path, job: Job) -> Path:
    """Return the folder of a run: one for each numerics version, and a second one if the first lacks the best weights.

    Raises:
        ConfigError: config.toml in the folder is damaged.
    """
    plain = out / "runs" / f"{job.fingerprint}-n{numerics.VERSION}"
    best = plain.with_name(plain.name + BEST)
    lacking = job.cell.about.node is not None and (plain / CONFIG).exists() and not _has_best_weights(plain)
    return best if lacking or best.exists() else plain


def lock_run(out: Path, fingerprint: str) -> AbstractContextManager[None]:
    """Return a lock on a run, held from before its folder exists until its result is stored.

    Entering the lock raises Busy if another process holds it, and RunError if the lock file cannot be written.
    """
    return lock_folder(out / CLAIMS / f"{fingerprint}-n{numerics.VERSION}", "trains this run")


def find_missing_device(place: Path, rounds: int) -> str | None:
    """Return the device that the run in this folder needs to continue, if this machine lacks that device; else None.

    Raises:
        ConfigError: config.toml is damaged.
        RunError: environment.json is missing or damaged.
    """
    if not (place / CONFIG).exists() or ((place / SUMMARY).exists() and read_dumped(place / CONFIG).rounds >= rounds):
        return None
    name = read_environment(place).device or "cpu"
    try:
        pick_device(name)
    except ConfigError:
        return name
    return None


def restore_machine_keys(config: Config, place: Path) -> Config:
    """Return the configuration with the machine keys of the run in the folder, if there is one: it resumes only with these.

    So a run that another cell began, or a command repeated with other threads, can resume.

    Raises:
        ConfigError: config.toml in the folder is damaged.
    """
    if not (place / CONFIG).exists():
        return config
    before = read_dumped(place / CONFIG)
    tables: dict[str, Table] = {}
    for key in _MACHINE_KEYS:
        table, _, name = key.rpartition(".")
        tables.setdefault(table, {})[name] = attrgetter(key)(before)
    top_keys = tables.pop("")
    return config.model_copy(
        update=top_keys | {table: getattr(config, table).model_copy(update=values) for table, values in tables.items()}
    )


def list_changed_keys(asked: Config, begun: Config) -> list[str]:
    """Return the keys in which the resumed run differs from the requested configuration: "engine.threads = 1"."""
    return [
        f"{key} = {str(now).lower() if isinstance(now, bool) else now}"
        for key in _MACHINE_KEYS
        if key != "name" and attrgetter(key)(asked) != (now := attrgetter(key)(begun))
    ]


def _has_best_weights(place: Path) -> bool:
    """Return whether a run keeps the weights of its best round."""
    return read_dumped(place / CONFIG).records.keep_best


def extend_run(job: Job, config: Config, place: Path, out: Path) -> None:
    """Copy a shorter run with the same configuration into the folder, if there is one that can resume.

    Raises:
        RunError: the run cannot be copied.
    """
    for rounds, begun in _find_shorter(out, job) if not place.exists() else []:
        with ExitStack() as locks:
            try:
                locks.enter_context(lock_run(out, f"{job.fingerprint.partition('-')[0]}-{rounds}"))
                locks.enter_context(lock_folder(begun))
                check_resumable(begun, restore_machine_keys(config, begun))
                saved = read_checkpoint(begun)
                lacking = job.cell.about.node is not None and not _has_best_weights(begun)
                if saved is None or lacking or find_missing_device(begun, config.rounds) is not None:
                    continue
                _check_weights(begun, saved)
            except (RunError, ConfigError):  # another process trains it, rounds change a schedule, or it is damaged
                continue
            _copy_run(begun, place, saved.round)
            return


def _check_weights(begun: Path, saved: Saved) -> None:
    """Raise RunError if a weight file of the saved round is missing, is damaged or belongs to another run."""
    for folder in (server_folder(begun), *list_client_folders(begun)):
        read_state(folder / make_file_name(saved.round), saved.run, saved.round)


def _find_shorter(out: Path, job: Job) -> list[tuple[int, Path]]:
    """Return (rounds, folder) of the runs with the same configuration and fewer rounds, the longest first."""
    digest, _, rounds = job.fingerprint.partition("-")
    pattern = re.compile(rf"{digest}-(\d+)-n{numerics.VERSION}(?:{BEST})?")
    names = {p: pattern.fullmatch(p.name) for p in (out / "runs").glob(f"{digest}-*")}
    rounds_by_folder = {p: int(match[1]) for p, match in names.items() if match and (p / CONFIG).exists()}
    return sorted(
        ((n, p) for p, n in rounds_by_folder.items() if n < int(rounds)), key=lambda item: (-item[0], item[1].name)
    )


def _copy_run(begun: Path, place: Path, round: int) -> None:
    """Copy a run at its saved round. The caller holds the lock, so no other process writes the part folder."""
    part = place.with_name(f".{place.name}.{begun.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(begun, part, ignore=_ignore_other_rounds(round))
        part.rename(place)
    except OSError as problem:  # shutil's own has no words
        shutil.rmtree(part, ignore_errors=True)
        why = problem.strerror or "not every file of it can be read"
        raise RunError(
            f"{place}: cannot be begun with a copy of {begun} ({why}); fix that, or choose another folder with --out"
        ) from None


def _ignore_other_rounds(round: int) -> Callable[[str, list[str]], list[str]]:
    """Return an ignore function for copytree: locks, part files, and weights of rounds other than the saved round."""

    def others(_: str, names: list[str]) -> list[str]:
        weights_file = make_file_name(round)
        return [n for n in names if n == LOCK or n.endswith(".part") or (n.startswith("round-") and n != weights_file)]

    return others


def place_config(job: Job, out: Path) -> Config:
    """Return the configuration of a run with the paths of this machine: the run it starts from, and its partition file.

    Raises:
        UserError: the partition has no such client, or a client has too few examples; or the data cannot be read, or the
            partition file cannot be written.
    """
    tables: dict[str, Any] = tomllib.loads(dump_config(job.config))
    changed = {"model.weights": str(make_run_path(out, job.needs))} if job.needs is not None else {}
    if job.about.clients is not None or job.about.examples is not None:
        tables["partition"] = {"kind": "file", "file": str(_write_partition(job, out))}
    elif not changed:
        return job.config
    return parse_config(tables, f"{job.cell.path}, arm {job.arm!r}", changed)


def _write_partition(job: Job, out: Path) -> Path:
    """Write the partition file of a run's clients and return its path."""
    path = out / "partitions" / f"{job.fingerprint}.json"
    read = data.prepare(job.config)[""]
    full_partition = divide(job.config, read.table)
    clients = job.about.clients or tuple(full_partition.clients)
    unknown = [i for i in clients if i not in full_partition.clients]
    if unknown:
        raise ConfigError(
            f"{job.cell.path}, arm {job.arm!r}: there is no client {unknown[0]!r} in its partition; there are "
            f"{', '.join(full_partition.clients)}"
        )
    shares = {i: dict(full_partition.clients[i]) for i in clients}
    wanted, capped = job.about.examples, job.config.partition.examples is not None
    for i in clients:
        rows = shares[i][PRIVATE]
        if wanted is None or (wanted >= len(rows) and capped):
            continue
        if wanted > len(rows):
            raise ConfigError(
                f"{job.cell.path}, arm {job.arm!r}: client {i!r} has {len(rows)} training examples, not {wanted}; lower "
                "'examples'"
            )
        rng = make_numpy_generator(At(job.seed, -1, job.config.rounds).rng("newcomer", i))
        shares[i][PRIVATE] = sample(rows, read.table.labels[rows], wanted, rng, keep=True)
    write_json(path, record.make_record(job.config, read.table, Division(full_partition.test, shares), read.digest))
    return path
