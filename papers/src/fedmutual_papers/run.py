"""Train the runs without a stored result, cell by cell, and store their results; a killed command resumes.

Several processes with the same command share the work: each trains runs that no other process trains.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fedmutual import data, numerics
from fedmutual.core import Diverged
from fedmutual.errors import Busy, DataError, format_count
from fedmutual.events import Observer
from fedmutual.rundir.file_names import SUMMARY
from fedmutual.rundir.text import format_duration
from fedmutual.studies.run import RunRequest, can_stack
from fedmutual.studies.side_by_side import limit_jobs, train_queue
from fedmutual_papers.collect import make_result
from fedmutual_papers.experiment_files import Cell
from fedmutual_papers.measured_cell import is_incomplete
from fedmutual_papers.plan import Job, Scale, list_jobs
from fedmutual_papers.run_dirs import (
    extend_run,
    find_missing_device,
    list_changed_keys,
    lock_run,
    make_run_path,
    place_config,
    restore_machine_keys,
)
from fedmutual_papers.store import ResultStore
from fedmutual_papers.weights import check_node


class TimeEstimate:
    """Estimate the time of the remaining runs from the seconds per step or epoch of the finished runs."""

    def __init__(self, unknown: Iterable[Job]) -> None:
        """unknown: the runs to train; runs with one fingerprint count once."""
        once = {job.fingerprint: job for job in unknown}
        self.left = list(once.values())
        self._count = len(self.left)
        self._seen: dict[tuple[str, str], list[float]] = {}

    def remove_finished(self, done: Iterable[Job]) -> int:
        """Remove finished runs from the remaining runs and return how many were removed."""
        prints, before = {job.fingerprint for job in done}, len(self.left)
        self.left = [job for job in self.left if job.fingerprint not in prints]
        return before - len(self.left)

    def report_finished(self, finished_jobs: Sequence[Job], seconds: float, at_once: int = 1) -> str:
        """Record the seconds of finished runs and return a progress line: "3 of 36 runs done, about 1 h 20 min left".

        at_once: how many runs are trained side by side.
        """
        self.remove_finished(finished_jobs)
        work = sum(map(_count_work, finished_jobs))
        for job in finished_jobs:
            self._seen.setdefault((job.cell.id, job.arm), []).append(seconds / work)
        words = f"{self._count - len(self.left)} of {self._count} runs done"
        if not self.left:
            return words
        seconds_left = sum(self._find_rate(job) * _count_work(job) for job in self.left)
        return f"{words}, about {format_duration(seconds_left / at_once)} left"

    def _find_rate(self, job: Job) -> float:
        """Return the seconds per step or epoch of the same arm, else of the same cell, else of all finished runs."""
        same = self._seen.get((job.cell.id, job.arm))
        cell = [v for (id, _), values in self._seen.items() if id == job.cell.id for v in values]
        return fmean(same or cell or [v for values in self._seen.values() for v in values])


def _count_work(job: Job) -> int:
    """Return the number of local steps, or of epochs, over all rounds, because arms differ in the steps of a round."""
    training = job.config.training
    return job.config.rounds * (training.local_steps or training.local_epochs)


Say = Callable[[str], None]


@dataclass
class ReproduceOutcome:
    """How many results were known or trained, which runs failed, and which were left to other processes."""

    known: int = 0  # runs whose results were there, or came meanwhile from other processes
    trained: int = 0
    failed: list[str] = field(default_factory=list)  # runs in which a client diverged, now or before, and why
    elsewhere: dict[str, str] = field(default_factory=dict)  # fingerprint -> a run that is left to other processes, and why


def train_cells(
    cells: Sequence[Cell],
    seeds: int,
    scale: Scale,
    out: Path,
    store: ResultStore,
    here: Mapping[str, Any] | None = None,
    watch: Callable[[str], Observer] | None = None,
    say: Say = lambda line: None,
    jobs: int | None = None,
) -> ReproduceOutcome:
    """Train every run without a stored result that no other process trains, in OUT/runs, and return the outcome.

    A stopped run resumes from its last saved round. A run in which a client diverges is stored as failed. here: keys of this
    machine that do not change a result, as in `list_jobs`. jobs: how many runs are trained side by side; None: chosen by the
    seconds of the first run.

    Raises:
        UserError: as `fedmutual.run`; a configuration that is not valid is reported before the first run is trained.
    """
    planned = [list(list_jobs(cell, range(seeds), scale, here or {})) for cell in cells]
    planned = [of_cell for of_cell in planned if not _lacks_data(of_cell, store, say)]
    outcome, eta = ReproduceOutcome(), TimeEstimate([j for jobs_ in planned for j in jobs_ if _is_missing(store, j)])
    fingerprints = {j.fingerprint for jobs_ in planned for j in jobs_}
    for cell, job in {job.cell.id: (job.cell, job) for job in eta.left if job.cell.about.node}.values():
        check_node(job.config, cell.about.node or "", f"{cell.path}, arm {job.arm!r}")
    outcome.known = len(fingerprints) - len(eta.left)
    say(f"{format_count(len(eta.left), 'run')} to train, {outcome.known} known")
    if eta.left:
        store.check()
        at_once = limit_jobs([j.config for j in eta.left], jobs)
        queue = CellQueue(out, store, watch, outcome, eta, say, planned, at_once)
        while queue.train_planned():  # try again: other processes may have released their runs
            outcome.elsewhere.clear()
            outcome.failed.clear()
    outcome.failed = [*_known_failures(planned, store), *outcome.failed]
    return outcome


def _known_failures(planned: Sequence[Sequence[Job]], store: ResultStore) -> list[str]:
    """Return one line for each stored run without numbers, with the reason."""
    failures = dict[str, str]()
    for job in (j for of_cell in planned for j in of_cell):
        result = store.find(job, numerics.VERSION)
        if result is not None and result.failed:
            failures.setdefault(job.fingerprint, f"{job.label}: {result.failed}")
    return list(failures.values())


def _lacks_data(of_cell: Sequence[Job], store: ResultStore, say: Say) -> bool:
    """Return whether an optional cell is left out, because its data are missing."""
    if not of_cell[0].cell.about.optional or not any(_is_missing(store, job) for job in of_cell):
        return False
    try:
        data.prepare(of_cell[0].config)
    except DataError as problem:
        say(f"{of_cell[0].cell.name} is left out: {problem}")
        return True
    return False


def _is_missing(store: ResultStore, job: Job) -> bool:
    """Return whether a run must be trained, or its folder read again for something that the cell now asks for."""
    result = store.find(job, numerics.VERSION)
    return result is None or is_incomplete(job.cell, result)


@dataclass
class CellQueue:
    """The queue of the runs of a call of `reproduce`. A run is locked from its start until its result is stored."""

    out: Path
    store: ResultStore
    watch: Callable[[str], Observer] | None
    outcome: ReproduceOutcome
    eta: TimeEstimate
    say: Say
    planned: Sequence[Sequence[Job]]  # of each cell
    jobs: int | None  # how many runs side by side; None: chosen by what the first run takes
    needed: set[str] = field(default_factory=set)  # fingerprints of the runs that other runs to train start from
    waiting: list[list[Job]] = field(default_factory=list)  # the runs in a list train in common stacks
    in_training: dict[Path, tuple[list[Job], ExitStack]] = field(default_factory=dict)  # by the folder of the first run

    def train_planned(self) -> bool:
        """Train the runs that no other process trains; return whether a further pass may find results of other processes.

        Raises:
            UserError: as `reproduce`.
        """
        trained_before = self.outcome.trained
        self.waiting = list(self._list_batches())
        try:
            train_queue(self, self.jobs)
        finally:
            for _, locks in self.in_training.values():  # of runs whose training was stopped
                locks.close()
        return bool(self.outcome.elsewhere) and self.outcome.trained > trained_before

    def _list_batches(self) -> Iterator[list[Job]]:
        """Yield the runs to train of each cell: first those that start from no other run, then those that start from one."""
        for of_cell in self.planned:
            todo = [j for j in of_cell if _is_missing(self.store, j)]
            needed = {j.needs.fingerprint: j.needs for j in todo if j.needs is not None}
            self.needed |= needed.keys()
            first = list({**needed, **{j.fingerprint: j for j in todo if j.needs is None}}.values())
            for stage in (first, [j for j in todo if j.needs is not None]):
                yield from [stage] if can_stack([j.config for j in stage]) else [[j] for j in stage]

    def _can_begin(self, job: Job) -> bool:
        """Return whether a run can begin: it starts from no other run, or from a finished run.

        Raises:
            ConfigError: as `make_run_path`.
        """
        if job.needs is None:
            return True
        begun = self.store.find(job.needs, numerics.VERSION)
        if begun is not None and begun.failed:
            self.outcome.failed.append(f"{job.label}: not run, for {job.about.needs}, which it starts from, diverged")
            return False
        if not (make_run_path(self.out, job.needs) / SUMMARY).exists():
            self._leave(job, f"starts from {job.about.needs}")
            return False
        return True

    def _claim_run(self, job: Job, locks: ExitStack) -> bool:
        """Lock a run; return whether this process must train it: no other process trains it or has trained it.

        locks: receives the lock, if no other process holds it.

        Raises:
            RunError: the lock cannot be written, or a file of results or of the run's folder is damaged.
            ConfigError: config.toml in the run's folder is damaged.
        """
        try:
            locks.enter_context(lock_run(self.out, job.fingerprint))
            is_free = True
        except Busy:
            is_free = False
        self._read_results_of_others(job)
        if not _is_missing(self.store, job) and not (job.fingerprint in self.needed and self._to_begin_with(job)):
            self.outcome.known += self.eta.remove_finished([job])
        elif not is_free:
            self._leave(job, "is in training there")
        elif (device := find_missing_device(make_run_path(self.out, job), job.config.rounds)) is not None:
            self._leave(job, f"was begun on {device!r}, which this machine lacks")
        else:
            return True
        return False

    def _read_results_of_others(self, job: Job) -> None:
        """Read the results that other processes stored for a run meanwhile, in any cell."""
        for cell in dict.fromkeys(
            j.cell.id for of_cell in self.planned for j in of_cell if j.fingerprint == job.fingerprint
        ):
            self.store.read_again(cell)

    def _to_begin_with(self, job: Job) -> bool:
        """Return whether to train a run with a stored result, because its models, from which others start, are missing."""
        result = self.store.find(job, numerics.VERSION)
        return not (result and result.failed) and not (make_run_path(self.out, job) / SUMMARY).exists()

    def _leave(self, job: Job, why: str) -> None:
        """Record that a run is left to other processes."""
        self.outcome.elsewhere.setdefault(job.fingerprint, f"{job.label} ({why})")

    def _prepare(self, job: Job) -> RunRequest:
        """Return the request to train a run: its folder, and its configuration with the paths of this machine.

        A shorter run with an equal configuration is copied into the folder first.

        Raises:
            UserError: the partition of the run cannot be made, or its folder is damaged or cannot be written.
        """
        place, wanted_config = make_run_path(self.out, job), place_config(job, self.out)
        extend_run(job, wanted_config, place, self.out)
        config = restore_machine_keys(wanted_config, place)
        if (changed := list_changed_keys(wanted_config, config)) and not (place / SUMMARY).exists():
            self.say(f"{job.label} resumes as it began, with {', '.join(changed)}")
        return RunRequest(config, place, True, [self.watch(job.label)] if self.watch else [])

    def _store_result(self, job: Job, request: RunRequest, problem: Exception | None, together: int) -> None:
        """Store the result of a run that has ended. together: the runs in its stack.

        Raises:
            Exception: the problem, unless a client diverged.
            UserError: the run's folder or its data cannot be read, or the result cannot be written.
        """
        if problem is not None and not isinstance(problem, Diverged):
            raise problem
        result = make_result(job, request, problem, together)
        if _is_missing(self.store, job):
            self.store.add(job, result)
        self.outcome.trained += 1

    def __len__(self) -> int:
        """Return how many runs have not begun."""
        return sum(map(len, self.waiting))

    def take(self) -> Sequence[RunRequest]:
        """Lock, remove and return the next runs, as `RunQueue.take`; runs that other processes have are removed as well.

        Raises:
            UserError: as `make_run_path`, `lock_run`, `extend_run` and `place_config`.
        """
        while (batch := next((batch for batch in self.waiting if not self._has_to_wait(batch)), None)) is not None:
            self.waiting.remove(batch)
            with ExitStack() as locks:
                own_jobs = [job for job in batch if self._can_begin(job) and self._claim_run(job, locks)]
                requests = [self._prepare(job) for job in own_jobs]
                if requests:
                    self.in_training[requests[0].folder] = own_jobs, locks.pop_all()
                    return requests
        return ()

    def _has_to_wait(self, batch: Sequence[Job]) -> bool:
        """Return whether a run of these, or a run that one of these starts from, is in training or will be before these."""
        in_training = {job.fingerprint for jobs, _ in self.in_training.values() for job in jobs}
        waiting = {job.fingerprint for jobs in self.waiting for job in jobs}
        first = {job.needs.fingerprint for job in batch if job.needs is not None}
        return not in_training.isdisjoint(job.fingerprint for job in batch) or not first.isdisjoint(in_training | waiting)

    def finish(self, requests: Sequence[RunRequest], problems: Sequence[Exception | None], seconds: float) -> None:
        """Store the results of runs, unlock the runs and report the remaining time, as `RunQueue.finish`.

        Raises:
            Exception: the first problem of a run in which no client diverged.
        """
        at_once = len(self.in_training)
        jobs, locks = self.in_training.pop(requests[0].folder)
        with locks:
            for job, request, problem in zip(jobs, requests, problems, strict=True):
                self._store_result(job, request, problem, len(requests))
        self.say(self.eta.report_finished(jobs, seconds, at_once))
