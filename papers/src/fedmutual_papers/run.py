"""Train the runs without a stored result, cell by cell, and store their results; a killed command resumes.

Several processes with the same command share the work: each trains runs that no other process trains.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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
from fedmutual_papers.collect import check_node, make_result
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
from fedmutual_papers.store import Result, ResultStore

Say = Callable[[str], None]
Watch = Callable[[str], Observer]


class TimeEstimate:
    """Estimate the time of the remaining runs from the seconds per step or epoch of the finished runs."""

    def __init__(self, unknown: Iterable[Job]) -> None:
        """unknown: the runs to train; runs with one fingerprint count once."""
        self.left = {job.fingerprint: job for job in unknown}
        self._count = len(self.left)
        self._seen: dict[tuple[str, str], list[float]] = {}

    def report_finished(self, finished_jobs: Sequence[Job], seconds: float, at_once: int = 1) -> str:
        """Record the seconds of finished runs and return a progress line: "3 of 36 runs done, about 1 h 20 min left".

        at_once: how many runs are trained side by side.
        """
        rate = seconds / sum(map(_count_work, finished_jobs))
        for job in finished_jobs:
            self.left.pop(job.fingerprint, None)
            self._seen.setdefault((job.cell.id, job.arm), []).append(rate)
        words = f"{self._count - len(self.left)} of {self._count} runs done"
        if not self.left:
            return words
        every = fmean(rate for rates in self._seen.values() for rate in rates)
        left = [
            (fmean(self._seen[place]) if (place := (job.cell.id, job.arm)) in self._seen else every) * _count_work(job)
            for job in self.left.values()
        ]
        return f"{words}, about {format_duration(sum(left) / at_once)} left"


def _count_work(job: Job) -> int:
    """Return the number of local steps, or of epochs, over all rounds, because arms differ in the steps of a round."""
    training = job.config.training
    return job.config.rounds * (training.local_steps or training.local_epochs)


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
    planned = [list(list_jobs(cell, range(seeds), scale, here or {})) for cell in cells]
    queue = CellQueue(out, store, watch, say, [of_cell for of_cell in planned if not _lacks_data(of_cell, store, say)])
    left = list(queue.eta.left.values())
    for job in {job.cell.id: job for job in left if job.cell.about.node}.values():
        check_node(job.config, job.cell.about.node or "", f"{job.cell.path}, arm {job.arm!r}")
    say(f"{format_count(len(left), 'run')} to train, {queue.known} known")
    if left:
        store.check()
        at_once = limit_jobs([job.config for job in left], jobs)
        while queue.train(at_once):  # try again: other processes may have released their runs
            pass
    return queue


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


def _find(store: ResultStore, job: Job) -> Result | None:
    return job.find_result(store, numerics.VERSION)


def _is_missing(store: ResultStore, job: Job) -> bool:
    """Return whether a run must be trained, or its folder read again for something that the cell now asks for."""
    result = _find(store, job)
    return result is None or is_incomplete(job.cell, result)


class CellQueue:
    """The queue of the runs of a call of `reproduce`. A run is locked from its start until its result is stored.

    known: the number of runs whose results were stored before, or meanwhile by other processes. trained: the number of runs
    that this process trained.
    """

    def __init__(
        self, out: Path, store: ResultStore, watch: Watch | None, say: Say, planned: Sequence[Sequence[Job]]
    ) -> None:
        """planned: the runs of each cell."""
        self.out, self.store, self.watch, self.say, self.planned = out, store, watch, say, planned
        self.jobs = [job for of_cell in planned for job in of_cell]
        self.eta = TimeEstimate(job for job in self.jobs if _is_missing(store, job))
        self.known = len({job.fingerprint for job in self.jobs}) - len(self.eta.left)
        self.trained = 0
        self.elsewhere: dict[str, str] = {}  # fingerprint -> a run that is left to other processes, and why
        self.not_run: list[str] = []  # runs whose start diverged
        self.needed: set[str] = set()  # fingerprints of the runs that other runs to train start from
        self.waiting: list[list[Job]] = []  # the runs in a list train in common stacks
        self.in_training: dict[Path, tuple[list[Job], ExitStack]] = {}  # by the folder of the first run

    @property
    def failed(self) -> list[str]:
        """Return a line for each run without numbers, because a client diverged in it or in the run it starts from."""
        lines: dict[str, str] = {}
        for job in self.jobs:
            if (result := _find(self.store, job)) is not None and result.failed:
                lines.setdefault(job.fingerprint, f"{job.label}: {result.failed}")
        return [*lines.values(), *self.not_run]

    def train(self, jobs: int | None) -> bool:
        """Train the runs that no other process trains; return whether a further pass may find results of other processes.

        jobs: how many runs side by side; None: chosen by what the first run takes.

        Raises:
            UserError: as `train_cells`.
        """
        before, self.elsewhere, self.not_run = self.trained, {}, []
        self.waiting = list(self._list_batches())
        try:
            train_queue(self, jobs)
        finally:
            for _, locks in self.in_training.values():  # of runs whose training was stopped
                locks.close()
        return bool(self.elsewhere) and self.trained > before

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
        """Return whether a run can begin: it starts from no other run, or from a finished run."""
        if job.needs is None:
            return True
        begun = _find(self.store, job.needs)
        if begun is not None and begun.failed:
            self.not_run.append(f"{job.label}: not run, for {job.about.needs}, which it starts from, diverged")
        elif not (make_run_path(self.out, job.needs) / SUMMARY).exists():
            self._leave(job, f"starts from {job.about.needs}")
        else:
            return True
        return False

    def _claim_run(self, job: Job, locks: ExitStack) -> bool:
        """Lock a run; return whether this process must train it: no other process trains it or has trained it.

        locks: receives the lock, if no other process holds it.
        """
        try:
            locks.enter_context(lock_run(self.out, job.fingerprint))
            is_free = True
        except Busy:
            is_free = False
        for cell in dict.fromkeys(j.cell.id for j in self.jobs if j.fingerprint == job.fingerprint):
            self.store.read_again(cell)  # other processes may have stored its result meanwhile, in any cell
        if not _is_missing(self.store, job) and not self._lacks_start(job):
            self.known += self.eta.left.pop(job.fingerprint, None) is not None
        elif not is_free:
            self._leave(job, "is in training there")
        elif (device := find_missing_device(make_run_path(self.out, job), job.config.rounds)) is not None:
            self._leave(job, f"was begun on {device!r}, which this machine lacks")
        else:
            return True
        return False

    def _lacks_start(self, job: Job) -> bool:
        """Return whether a run with a result is trained again, because its models, from which others start, are missing."""
        result = _find(self.store, job)
        is_start = job.fingerprint in self.needed and result is not None and not result.failed
        return is_start and not (make_run_path(self.out, job) / SUMMARY).exists()

    def _leave(self, job: Job, why: str) -> None:
        self.elsewhere.setdefault(job.fingerprint, f"{job.label} ({why})")

    def _prepare(self, job: Job) -> RunRequest:
        """Return the request to train a run. A shorter run with an equal configuration is copied into its folder first."""
        place, wanted_config = make_run_path(self.out, job), place_config(job, self.out)
        extend_run(job, wanted_config, place, self.out)
        config = restore_machine_keys(wanted_config, place)
        if (changed := list_changed_keys(wanted_config, config)) and not (place / SUMMARY).exists():
            self.say(f"{job.label} resumes as it began, with {', '.join(changed)}")
        return RunRequest(config, place, True, [self.watch(job.label)] if self.watch else [])

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
                self.trained += 1
        self.say(self.eta.report_finished(jobs, seconds, at_once))
