"""Train the runs without a stored result, cell by cell, and store their results; a killed command resumes.

Several processes with the same command share the work: each trains runs that no other process trains.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmutual import data, numerics
from fedmutual.config import Config
from fedmutual.core import Diverged
from fedmutual.errors import Busy, DataError
from fedmutual.events import Observer
from fedmutual.report.text import count
from fedmutual.reproduce import node_analysis
from fedmutual.reproduce.cell_results import lacks
from fedmutual.reproduce.cells import Cell
from fedmutual.reproduce.collect import collect, failure
from fedmutual.reproduce.eta import Pace
from fedmutual.reproduce.noise import under_noise
from fedmutual.reproduce.plan import Job, Scale, jobs
from fedmutual.reproduce.result import Result
from fedmutual.reproduce.results import ResultStore
from fedmutual.reproduce.run_dirs import as_begun, claim, folder, foreign, lengthen, otherwise
from fedmutual.reproduce.subset import placed
from fedmutual.rundir.file_names import SUMMARY
from fedmutual.studies import run
from fedmutual.studies.trained_run import Run

Say = Callable[[str], None]


@dataclass
class ReproduceOutcome:
    """The outcome of a call of `reproduce`."""

    known: int = 0  # runs whose results were there, or came meanwhile from other processes
    trained: int = 0
    failed: list[str] = field(default_factory=list)  # runs in which a client diverged, now or before, and why
    elsewhere: dict[str, str] = field(default_factory=dict)  # fingerprint -> a run that is left to other processes, and why


def reproduce(
    cells: Sequence[Cell],
    seeds: int,
    scale: Scale,
    out: Path,
    store: ResultStore,
    here: Mapping[str, Any] | None = None,
    watch: Callable[[str], Observer] | None = None,
    say: Say = lambda line: None,
) -> ReproduceOutcome:
    """Train every run without a stored result that no other process trains, in OUT/runs, and return the outcome.

    A stopped run resumes from its last saved round. A run in which a client diverges is stored as failed. here: keys of this
    machine that do not change a result, as in `jobs`.

    Raises:
        UserError: as `fedmutual.run`; a configuration that is not valid is reported before the first run is trained.
    """
    planned = [list(jobs(cell, range(seeds), scale, here or {})) for cell in cells]
    planned = [of_cell for of_cell in planned if not _lacks_data(of_cell, store, say)]
    outcome, pace = ReproduceOutcome(), Pace([j for jobs_ in planned for j in jobs_ if _is_missing(store, j)])
    fingerprints = {j.fingerprint for jobs_ in planned for j in jobs_}
    for cell, job in {job.cell.id: (job.cell, job) for job in pace.left if job.cell.about.node}.values():
        node_analysis.check(job.config, cell.about.node or "", f"{cell.path}, arm {job.arm!r}")
    outcome.known = len(fingerprints) - len(pace.left)
    say(f"{count(len(pace.left), 'run')} to train, {outcome.known} known")
    if pace.left:
        store.check()
        work = CellWork(out, store, watch, outcome, pace, say, planned)
        while work.through():  # once more: what others had may be let go of by now
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
    return result is None or lacks(job.cell, result)


def _group_stage(stage: Sequence[Job]) -> Iterable[list[Job]]:
    """Return the runs of a stage in groups: one group if stacked training suits the device, else one group for each run."""
    if len(stage) > 1 and all(run.can_stack(job.config) for job in stage):
        return [list(stage)]
    return [[job] for job in stage]


def _has_global_model(run: Run) -> bool:
    """Return whether a run ends with a complete global model."""
    return run.summary["global"]["test_accuracy"] is not None


@dataclass
class CellWork:
    """The runs of a call of `reproduce`, and the folders and the store that they use."""

    out: Path
    store: ResultStore
    watch: Callable[[str], Observer] | None
    outcome: ReproduceOutcome
    pace: Pace
    say: Say
    planned: Sequence[Sequence[Job]]  # of each cell

    def through(self) -> bool:
        """Train the runs that no other process trains; return whether to try again, because other processes had some."""
        trained_before = self.outcome.trained
        for of_cell in self.planned:
            todo = [j for j in of_cell if _is_missing(self.store, j)]
            needed = {j.needs.fingerprint: j.needs for j in todo if j.needs is not None}
            first = {**needed, **{j.fingerprint: j for j in todo if j.needs is None}}
            for stage in (first.values(), [j for j in todo if j.needs is not None]):
                for batch in _group_stage([j for j in stage if self._can_begin(j)]):
                    self._train_ours(batch, needed)
        return bool(self.outcome.elsewhere) and self.outcome.trained > trained_before

    def _can_begin(self, job: Job) -> bool:
        """Return whether the run that this run starts from is finished; True if this run starts from none."""
        if job.needs is None:
            return True
        begun = self.store.find(job.needs, numerics.VERSION)
        if begun is not None and begun.failed:
            self.outcome.failed.append(f"{job.label}: not run, for {job.about.needs}, which it starts from, diverged")
            return False
        if not (folder(self.out, job.needs) / SUMMARY).exists():
            self._leave(job, f"starts from {job.about.needs}")
            return False
        return True

    def _train_ours(self, batch: Sequence[Job], needed: Collection[str]) -> None:
        """Lock and train the runs that no other process trains or has trained. needed: runs that other runs start from."""
        own_jobs = []
        with ExitStack() as locks:
            for job in batch:
                try:
                    locks.enter_context(claim(self.out, job.fingerprint))
                    is_free = True
                except Busy:
                    is_free = False
                self._look(job)
                if not _is_missing(self.store, job) and not (job.fingerprint in needed and self._to_begin_with(job)):
                    self.outcome.known += self.pace.drop([job])
                elif not is_free:
                    self._leave(job, "is in training there")
                elif (device := foreign(folder(self.out, job), job.config.rounds)) is not None:
                    self._leave(job, f"was begun on {device!r}, which this machine lacks")
                else:
                    own_jobs.append(job)
            if own_jobs:
                self._train(own_jobs)

    def _look(self, job: Job) -> None:
        """Read the results that other processes stored for a run meanwhile, in any cell."""
        for cell in dict.fromkeys(
            j.cell.id for of_cell in self.planned for j in of_cell if j.fingerprint == job.fingerprint
        ):
            self.store.read_again(cell)

    def _to_begin_with(self, job: Job) -> bool:
        """Return whether to train a run with a stored result, because its models, from which others start, are missing."""
        result = self.store.find(job, numerics.VERSION)
        return not (result and result.failed) and not (folder(self.out, job) / SUMMARY).exists()

    def _leave(self, job: Job, why: str) -> None:
        """Record that a run is left to other processes."""
        self.outcome.elsewhere.setdefault(job.fingerprint, f"{job.label} ({why})")

    def _train(self, batch: Sequence[Job]) -> None:
        """Train some runs, store their results and report the remaining time."""
        folders, configs = [folder(self.out, job) for job in batch], list[Config]()
        for job, place in zip(batch, folders, strict=True):
            wanted_config = placed(job, self.out)
            lengthen(job, wanted_config, place, self.out)
            configs.append(as_begun(wanted_config, place))
            if (changed := otherwise(wanted_config, configs[-1])) and not (place / SUMMARY).exists():
                self.say(f"{job.label} resumes as it began, with {', '.join(changed)}")
        observers: list[list[Observer]] = [[self.watch(job.label)] if self.watch else [] for job in batch]
        begun = time.monotonic()
        if len(batch) > 1:
            with suppress(Diverged):  # which one, and why, comes out below: the others are finished by now
                run.run_together(configs, folders, True, observers)
        for job, config, place, observing in zip(batch, configs, folders, observers, strict=True):
            result = self._result(job, config, place, observing, len(batch))
            if _is_missing(self.store, job):
                self.store.add(job, result)
        self.outcome.trained += len(batch)
        self.say(self.pace.after(batch, time.monotonic() - begun))

    def _result(self, job: Job, config: Config, place: Path, observing: Sequence[Observer], together: int) -> Result:
        """Train one run to its end and return its result."""
        try:
            finished = run.run(config, place, True, observing)
        except Diverged as problem:
            return failure(job, place, together, str(problem))
        about = job.cell.about
        noise = under_noise(finished, about.noise) if about.noise and _has_global_model(finished) else {}
        if unbounded := [deviation for deviation, loss in noise.items() if not math.isfinite(loss)]:
            return failure(job, place, together, f"the loss under weight noise {unbounded[0]} is not finite")
        return collect(job, place, together, noise, node_analysis.close_up(finished, about.node) if about.node else None)
