"""Train the runs without a stored result and store their results; a killed command resumes.

Several processes with the same command share the work: each trains runs that no other process trains. All experiments that
share a run share its folder, and a run begins there with a copy of a shorter one, if there is one.
"""

import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from operator import attrgetter
from pathlib import Path
from typing import Any

from fedmutual import data, numerics
from fedmutual.config import Config, dump_config, parse_config, read_dumped
from fedmutual.config.keys import list_effects
from fedmutual.config.reading import merge_overrides
from fedmutual.config.schema import list_resumable_keys
from fedmutual.core import At, Diverged
from fedmutual.data import record
from fedmutual.data.division import Division, divide
from fedmutual.data.draws import make_numpy_generator, sample
from fedmutual.data.splits import PRIVATE
from fedmutual.errors import Busy, ConfigError, DataError, RunError, format_count
from fedmutual.events import Observer
from fedmutual.federation.build import pick_device
from fedmutual.files import write_json
from fedmutual.rundir.checkpoint import make_file_name, read_checkpoint, read_state
from fedmutual.rundir.file_names import CONFIG, LOCK, SUMMARY, list_client_folders, server_folder
from fedmutual.rundir.folder import check_resumable, lock_folder
from fedmutual.rundir.logs import format_duration
from fedmutual.rundir.record_files import read_environment
from fedmutual.studies.run import RunRequest, can_stack
from fedmutual.studies.side_by_side import limit_jobs, train_queue
from fedmutual_papers.collect import check_node, make_result
from fedmutual_papers.experiment_files import Cell
from fedmutual_papers.measured_cell import is_incomplete
from fedmutual_papers.plan import Job, Scale, has_effect, list_jobs
from fedmutual_papers.store import Result, ResultStore

Say = Callable[[str], None]
Watch = Callable[[str], Observer]
CLAIMS = "claims"  # in OUT: a folder for each run, with the lock of the process that trains the run
BEST = "-best"  # ends the name of a second folder of a run, with the weights of best rounds that the first folder lacks
_MACHINE_KEYS = [key for key in list_effects(Config) if not has_effect(key) and key not in list_resumable_keys()]


def train_cells(
    cells: Sequence[Cell],
    seeds: int,
    scale: Scale,
    out: Path,
    store: ResultStore,
    here: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    say: Say = lambda line: None,
    jobs: int | None = None,
) -> "CellQueue":
    """Train every run without a stored result that no other process trains, in OUT/runs, and return the emptied queue.

    A stopped run resumes from its last saved round. A run in which a client diverges is stored as failed. here: keys of this
    machine that do not change a result, as in `list_jobs`. jobs: how many runs are trained side by side; None: chosen by the
    seconds of the first run.

    Raises:
        UserError: as `fedmutual.run`; a configuration that is not valid is reported before the first run is trained.
    """
    planned = [list(list_jobs(cell, cell.list_seeds(seeds), scale, here or {})) for cell in cells]
    queue = CellQueue(out, store, watch, say, [of_cell for of_cell in planned if not _lacks_data(of_cell, store, say)])
    left = list(queue.left.values())
    for job in {job.cell.id: job for job in left if job.cell.about.node}.values():
        check_node(job.config, job.cell.about.node or "", f"{job.cell.path}, arm {job.arm!r}")
    say(f"{format_count(len(left), 'run')} to train, {queue.known} known")
    if left:
        store.check()
        at_once = limit_jobs([job.config for job in left], jobs)
        # each pass trains what can begin: runs that start from others, and those that another process gave up, come later
        while queue.train(at_once):
            pass
    return queue


def _lacks_data(of_cell: Sequence[Job], store: ResultStore, say: Say) -> bool:
    """Return whether an optional cell is left out, because its data are missing."""
    if of_cell[0].cell.about.optional and any(_is_missing(store, job) for job in of_cell):
        try:
            data.prepare(of_cell[0].config)
        except DataError as problem:
            say(f"{of_cell[0].cell.name} is left out: {problem}")
            return True
    return False


def _find(store: ResultStore, job: Job) -> Result | None:
    return job.find_result(store, numerics.VERSION)


def _is_missing(store: ResultStore, job: Job) -> bool:
    """Return whether a run must be trained, or its folder read again for something that the cell now asks for."""
    result = _find(store, job)
    return result is None or is_incomplete(job.cell, result)


def count_work(job: Job) -> int:
    """Return the number of local steps, or of epochs, over all rounds, because arms differ in the steps of a round."""
    return job.config.rounds * (job.config.training.local_steps or job.config.training.local_epochs)


class CellQueue:
    """The queue of the runs of a call of `reproduce`. A run is locked from its start until its result is stored.

    known: the number of runs whose results were stored before, or meanwhile by other processes. trained: the number of runs
    that this process trained. elsewhere: fingerprint -> a run that is left to other processes, and why.
    """

    def __init__(
        self, out: Path, store: ResultStore, watch: Watch | None, say: Say, planned: Sequence[Sequence[Job]]
    ) -> None:
        """planned: the runs of each cell."""
        self.out, self.store, self.watch, self.say, self.planned = out, store, watch, say, planned
        self.jobs = [job for of_cell in planned for job in of_cell]
        self.left = {job.fingerprint: job for job in self.jobs if _is_missing(store, job)}
        self.known = len({job.fingerprint for job in self.jobs}) - len(self.left)
        self.planned_runs, self.trained, self.seconds, self.work = len(self.left), 0, 0.0, 0
        self.elsewhere: dict[str, str] = {}
        self.ended: list[Job] = []
        self.waiting: list[list[Job]] = []  # the runs in a list train in common stacks
        self.in_training: dict[Path, tuple[list[Job], ExitStack]] = {}  # by the folder of the first run

    @property
    def failed(self) -> list[str]:
        """Return a line for each run without numbers, because a client diverged in it or in the run it starts from."""
        lines: dict[str, str] = {}
        for job in self.jobs:
            result, start = _find(self.store, job), _find(self.store, job.needs) if job.needs else None
            if result is not None and result.failed:
                lines.setdefault(job.fingerprint, f"{job.label}: {result.failed}")
            elif result is None and start is not None and start.failed:
                lines[job.fingerprint] = f"{job.label}: not run, because {job.about.needs}, from which it starts, diverged"
        return list(lines.values())

    def train(self, jobs: int | None) -> bool:
        """Train the runs that no other process trains; return whether a further pass may train more.

        jobs: how many runs side by side; None: chosen by what the first run takes.

        Raises:
            UserError: as `train_cells`.
        """
        before, self.elsewhere = self.trained, {}
        self.waiting = list(self._list_batches())
        try:
            train_queue(self, jobs)
        finally:
            for _, locks in self.in_training.values():  # of runs whose training was stopped
                locks.close()
        return self.trained > before

    def _list_batches(self) -> Iterator[list[Job]]:
        """Yield the runs of each cell that can begin, each once, and runs that missing runs start from."""
        begun = set[str]()
        for of_cell in self.planned:
            todo = dict[str, Job]()
            for job in (job for job in of_cell if _is_missing(self.store, job)):
                first = job if job.needs is None or self._has_models(job.needs) else job.needs
                if first is job or self._is_needed(first):
                    todo.setdefault(first.fingerprint, first)
            batch = [job for job in todo.values() if job.fingerprint not in begun and job not in self.ended]
            begun |= todo.keys()
            for arm in dict.fromkeys(job.arm for job in batch):  # only runs of one method share their steps
                of_arm = [job for job in batch if job.arm == arm]
                yield from [of_arm] if can_stack([job.config for job in of_arm]) else [[job] for job in of_arm]

    def _has_models(self, job: Job) -> bool:
        return (_make_run_path(self.out, job) / SUMMARY).exists()

    def _is_needed(self, job: Job) -> bool:
        """Return whether a run must be trained: its result is missing, or its models, from which a missing run starts."""
        result = _find(self.store, job)
        if result is None or is_incomplete(job.cell, result):
            return True
        return not result.failed and not self._has_models(job) and any(self._list_dependents(job))

    def _list_dependents(self, job: Job) -> Iterator[Job]:
        """Yield the missing runs that start from a run."""
        return (j for j in self.jobs if j.needs and j.needs.fingerprint == job.fingerprint and _is_missing(self.store, j))

    def _claim_run(self, job: Job, locks: ExitStack) -> bool:
        """Lock a run; return whether this process must train it: no other process trains it or has trained it.

        locks: receives the lock, if no other process holds it.
        """
        reason = ""
        try:
            locks.enter_context(lock_run(self.out, job.fingerprint))
        except Busy:
            reason = "is in training there"
        for cell in dict.fromkeys(j.cell.id for j in self.jobs if j.fingerprint == job.fingerprint):
            self.store.read_again(cell)  # other processes may have stored its result meanwhile, in any cell
        if not self._is_needed(job):
            self.known += self.left.pop(job.fingerprint, None) is not None
            return False
        if not reason and (device := _find_missing_device(_make_run_path(self.out, job), job.config.rounds)) is not None:
            reason = f"was begun on {device!r}, which this machine lacks"
        if reason:
            self.elsewhere.setdefault(job.fingerprint, f"{job.label} ({reason})")
            for other in self._list_dependents(job):
                self.elsewhere.setdefault(other.fingerprint, f"{other.label} (starts from {other.about.needs})")
        return not reason

    def __len__(self) -> int:
        """Return how many runs have not begun."""
        return sum(map(len, self.waiting))

    def take(self) -> Sequence[RunRequest]:
        """Lock, remove and return the next runs, as `RunQueue.take`; runs that other processes have are removed as well.

        Raises:
            UserError: a file of a run's folder is damaged or cannot be written; or as `data.prepare` and `parse_config`.
        """
        while self.waiting:
            batch = self.waiting.pop(0)
            with ExitStack() as locks:
                own_jobs = [job for job in batch if self._claim_run(job, locks)]
                requests = [self._make_request(job) for job in own_jobs]
                if requests:
                    self.in_training[requests[0].folder] = own_jobs, locks.pop_all()
                    return requests
        return ()

    def _make_request(self, job: Job) -> RunRequest:
        place = _make_run_path(self.out, job)
        return RunRequest(_begin_run(job, place, self.out), place, True, [self.watch(job.label)] if self.watch else [])

    def finish(self, requests: Sequence[RunRequest], problems: Sequence[Exception | None], seconds: float) -> None:
        """Store the results of runs, unlock the runs and report the remaining time, as `RunQueue.finish`.

        Raises:
            Exception: the first problem of a run in which no client diverged.
            UserError: the run's folder or its data cannot be read, or the result cannot be written.
        """
        at_once = len(self.in_training)
        jobs, locks = self.in_training.pop(requests[0].folder)
        with locks:
            for job, request, problem in zip(jobs, requests, problems, strict=True):
                if problem is not None and not isinstance(problem, Diverged):
                    raise problem
                result = make_result(job, request, problem, len(requests))
                if _is_missing(self.store, job):
                    self.store.add(job.cell.id, result)
                self.left.pop(job.fingerprint, None)
                self.trained, self.work = self.trained + 1, self.work + count_work(job)
        self.ended += jobs
        self.seconds += seconds / at_once
        time = format_duration(self.seconds / self.work * sum(map(count_work, self.left.values())))
        done = f"{self.planned_runs - len(self.left)} of {self.planned_runs} runs done"
        self.say(f"{done}, about {time} left" if self.left else done)


def _make_run_path(out: Path, job: Job) -> Path:
    """Return the folder of a run: one for each numerics version, and a second one if the first lacks the best weights."""
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


def _find_missing_device(place: Path, rounds: int) -> str | None:
    """Return the device that the run in this folder needs to continue, if this machine lacks that device; else None."""
    if not (place / CONFIG).exists() or ((place / SUMMARY).exists() and read_dumped(place / CONFIG).rounds >= rounds):
        return None
    name = read_environment(place).device or "cpu"
    try:
        pick_device(name)
    except ConfigError:
        return name
    return None


def _restore_machine_keys(config: Config, place: Path) -> Config:
    """Return the configuration with the machine keys of the run in the folder, if there is one: it resumes only with these.

    So a run that another cell began, or a command repeated with other threads, can resume.
    """
    if not (place / CONFIG).exists():
        return config
    before = read_dumped(place / CONFIG)
    machine_settings = {key: attrgetter(key)(before) for key in _MACHINE_KEYS}
    return Config.model_validate(merge_overrides(config.model_dump(exclude_unset=True), machine_settings))


def _begin_run(job: Job, place: Path, out: Path) -> Config:
    """Return the configuration with which a run begins or resumes in its folder.

    The longest shorter run with the same configuration is copied into an empty folder, if there is one that can resume.
    """
    config, (digest, _, full) = _place_config(job, out), job.fingerprint.partition("-")
    pattern = re.compile(rf"{digest}-(\d+)-n{numerics.VERSION}(?:{BEST})?")
    names = [(pattern.fullmatch(path.name), path) for path in sorted((out / "runs").glob(f"{digest}-*"))]
    shorter = [(int(match[1]), path) for match, path in names if match and int(match[1]) < int(full)]
    for rounds, begun in sorted(shorter, key=lambda item: -item[0]) if not place.exists() else []:
        with ExitStack() as locks:
            try:
                locks.enter_context(lock_run(out, f"{digest}-{rounds}"))
                locks.enter_context(lock_folder(begun))
                check_resumable(begun, _restore_machine_keys(config, begun))
                saved = read_checkpoint(begun)
                if saved is None or _lacks_best_weights(job, begun) or _find_missing_device(begun, config.rounds):
                    continue
                for folder in (server_folder(begun), *list_client_folders(begun)):
                    read_state(folder / make_file_name(saved.round), saved.run, saved.round)  # raises RunError if damaged
            except (RunError, ConfigError):  # another process trains it, rounds change a schedule, or it is damaged
                continue
            _copy_run(begun, place, make_file_name(saved.round))
            break
    return _restore_machine_keys(config, place)


def _copy_run(begun: Path, place: Path, saved: str) -> None:
    """Copy a run without locks, part files and weights of other rounds than the saved one. The caller holds its lock."""

    def list_others(_: str, names: list[str]) -> list[str]:
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


def _place_config(job: Job, out: Path) -> Config:
    """Return the configuration of a run with the paths of this machine: the run it starts from, and its partition file."""
    tables: dict[str, Any] = tomllib.loads(dump_config(job.config))
    changed = {"model.weights": str(_make_run_path(out, job.needs))} if job.needs is not None else {}
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
