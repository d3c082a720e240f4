"""Choose the folder of a run and how the run begins there; all experiments that share a run share its folder."""

import re
import shutil
import tomllib
from contextlib import AbstractContextManager, ExitStack
from operator import attrgetter
from pathlib import Path
from typing import Any

from fedmutual import data, numerics
from fedmutual.config import Config, dump_config, parse_config, read_dumped
from fedmutual.config.keys import list_effects
from fedmutual.config.reading import merge_overrides
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
    return best if best.exists() or ((plain / CONFIG).exists() and _lacks_best_weights(job, plain)) else plain


def _lacks_best_weights(job: Job, place: Path) -> bool:
    return job.cell.about.node is not None and not read_dumped(place / CONFIG).records.keep_best


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
    machine_settings = {key: attrgetter(key)(before) for key in _MACHINE_KEYS}
    return Config.model_validate(merge_overrides(config.model_dump(exclude_unset=True), machine_settings))


def list_changed_keys(asked: Config, begun: Config) -> list[str]:
    """Return the keys in which the resumed run differs from the requested configuration: "engine.threads = 1"."""
    now = {key: attrgetter(key)(begun) for key in _MACHINE_KEYS if key != "name"}
    changed = {key: value for key, value in now.items() if value != attrgetter(key)(asked)}
    return [f"{key} = {str(value).lower() if isinstance(value, bool) else value}" for key, value in changed.items()]


def extend_run(job: Job, config: Config, place: Path, out: Path) -> None:
    """Copy the longest shorter run with the same configuration into the folder, if there is one that can resume.

    Raises:
        RunError: the run cannot be copied.
    """
    digest, _, full = job.fingerprint.partition("-")
    pattern = re.compile(rf"{digest}-(\d+)-n{numerics.VERSION}(?:{BEST})?")
    names = [(pattern.fullmatch(path.name), path) for path in sorted((out / "runs").glob(f"{digest}-*"))]
    shorter = [(int(match[1]), path) for match, path in names if match and int(match[1]) < int(full)]
    for rounds, begun in sorted(shorter, key=lambda item: -item[0]) if not place.exists() else []:
        with ExitStack() as locks:
            try:
                locks.enter_context(lock_run(out, f"{digest}-{rounds}"))
                locks.enter_context(lock_folder(begun))
                check_resumable(begun, restore_machine_keys(config, begun))
                saved = read_checkpoint(begun)
                if saved is None or _lacks_best_weights(job, begun) or find_missing_device(begun, config.rounds):
                    continue
                for folder in (server_folder(begun), *list_client_folders(begun)):
                    read_state(folder / make_file_name(saved.round), saved.run, saved.round)  # raises RunError if damaged
            except (RunError, ConfigError):  # another process trains it, rounds change a schedule, or it is damaged
                continue
            _copy_run(begun, place, make_file_name(saved.round))
            return


def _copy_run(begun: Path, place: Path, saved: str) -> None:
    """Copy a run, of its weights those of the saved round. The caller holds the lock of the run.

    saved: the name of a file with weights of that round.
    """

    def list_others(_: str, names: list[str]) -> list[str]:
        """Return locks, part files, and weights of other rounds, which are not copied."""
        return [n for n in names if n == LOCK or n.endswith(".part") or (n.startswith("round-") and n != saved)]

    part = place.with_name(f".{place.name}.{begun.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(begun, part, ignore=list_others)
        part.rename(place)
    except OSError as problem:  # shutil's own has no words
        shutil.rmtree(part, ignore_errors=True)
        why = problem.strerror or "not every file of it can be read"
        raise RunError(
            f"{place}: cannot be begun with a copy of {begun} ({why}); fix that, or choose another folder with --out"
        ) from None


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
    path, source = out / "partitions" / f"{job.fingerprint}.json", f"{job.cell.path}, arm {job.arm!r}"
    read = data.prepare(job.config)[""]
    division = divide(job.config, read.table)
    clients = job.about.clients or tuple(division.clients)
    if unknown := [i for i in clients if i not in division.clients]:
        known = ", ".join(division.clients)
        raise ConfigError(f"{source}: there is no client {unknown[0]!r} in its partition; there are {known}")
    shares = {i: dict(division.clients[i]) for i in clients}
    wanted, capped = job.about.examples, job.config.partition.examples is not None
    for i in clients:
        rows = shares[i][PRIVATE]
        if wanted is None or (wanted >= len(rows) and capped):
            continue
        if wanted > len(rows):
            raise ConfigError(f"{source}: client {i!r} has {len(rows)} training examples, not {wanted}; lower 'examples'")
        rng = make_numpy_generator(At(job.seed, -1, job.config.rounds).rng("newcomer", i))
        shares[i][PRIVATE] = sample(rows, read.table.labels[rows], wanted, rng, keep=True)
    write_json(path, record.make_record(job.config, read.table, Division(division.test, shares), read.digest))
    return path
