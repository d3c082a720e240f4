"""Trains what is not known yet, a cell at a time, and keeps what came out: a killed command goes on where it was.

Processes that are given the same command share the work: each trains what no other does.
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
from fedmutual.reproduce.results import Store
from fedmutual.reproduce.run_dirs import as_begun, claim, folder, foreign, lengthen, otherwise
from fedmutual.reproduce.subset import placed
from fedmutual.rundir.file_names import SUMMARY
from fedmutual.studies import run
from fedmutual.studies.trained_run import Run

Say = Callable[[str], None]


@dataclass
class Told:
    """What a call of `reproduce` did."""

    known: int = 0  # runs whose results were there, or came meanwhile from other processes
    trained: int = 0
    failed: list[str] = field(default_factory=list)  # runs in which a client diverged, now or before, and why
    elsewhere: dict[str, str] = field(default_factory=dict)  # fingerprint -> a run that is left to other processes, and why


def reproduce(
    cells: Sequence[Cell],
    seeds: int,
    scale: Scale,
    out: Path,
    store: Store,
    here: Mapping[str, Any] | None = None,
    watch: Callable[[str], Observer] | None = None,
    say: Say = lambda line: None,
) -> Told:
    """Train every run of some cells that the store does not know and no other process trains, into OUT/runs.

    A stopped one goes on from its last round.

    here: keys that tell in no result, as `jobs` takes them. A run in which a client diverges is kept as such.

    Raises:
        UserError: as `fedmutual.run`; an arm that is not valid before the first is trained.
    """
    planned = [list(jobs(cell, range(seeds), scale, here or {})) for cell in cells]
    planned = [of_cell for of_cell in planned if not _without_data(of_cell, store, say)]
    told, pace = Told(), Pace([j for jobs_ in planned for j in jobs_ if _unknown(store, j)])
    asked = {j.fingerprint for jobs_ in planned for j in jobs_}
    for cell, job in {job.cell.id: (job.cell, job) for job in pace.left if job.cell.about.node}.values():
        node_analysis.check(job.config, cell.about.node or "", f"{cell.path}, arm {job.arm!r}")
    told.known = len(asked) - len(pace.left)
    say(f"{count(len(pace.left), 'run')} to train, {told.known} known")
    if pace.left:
        store.check()
        work = Work(out, store, watch, told, pace, say, planned)
        while work.through():  # once more: what others had may be let go of by now
            told.elsewhere.clear()
            told.failed.clear()
    told.failed = [*_known_failures(planned, store), *told.failed]
    return told


def _known_failures(planned: Sequence[Sequence[Job]], store: Store) -> list[str]:
    """The runs that have no numbers, each once, and why."""
    found = dict[str, str]()
    for job in (j for of_cell in planned for j in of_cell):
        result = store.find(job, numerics.VERSION)
        if result is not None and result.failed:
            found.setdefault(job.fingerprint, f"{job.label}: {result.failed}")
    return list(found.values())


def _without_data(of_cell: Sequence[Job], store: Store, say: Say) -> bool:
    """Whether a cell that may be left out is, because its data are not there."""
    if not of_cell[0].cell.about.optional or not any(_unknown(store, job) for job in of_cell):
        return False
    try:
        data.prepare(of_cell[0].config)
    except DataError as problem:
        say(f"{of_cell[0].cell.name} is left out: {problem}")
        return True
    return False


def _unknown(store: Store, job: Job) -> bool:
    """Whether a run must be trained, or its folder looked into again: for what the cell did not ask for before."""
    result = store.find(job, numerics.VERSION)
    return result is None or lacks(job.cell, result)


def _batches(stage: Sequence[Job]) -> Iterable[list[Job]]:
    """All at once where a stack of them fills the device better, else one after the other."""
    if len(stage) > 1 and all(run.can_stack(job.config) for job in stage):
        return [list(stage)]
    return [[job] for job in stage]


def _shares(run: Run) -> bool:
    """Whether a run ends with a complete global model."""
    return run.summary["global"]["test_accuracy"] is not None


@dataclass
class Work:
    """What a call of `reproduce` trains, and where."""

    out: Path
    store: Store
    watch: Callable[[str], Observer] | None
    told: Told
    pace: Pace
    say: Say
    planned: Sequence[Sequence[Job]]  # of each cell

    def through(self) -> bool:
        """Train what nobody else does -> whether there is something to do again: others had some, and time went by."""
        before = self.told.trained
        for of_cell in self.planned:
            todo = [j for j in of_cell if _unknown(self.store, j)]
            needed = {j.needs.fingerprint: j.needs for j in todo if j.needs is not None}
            first = {**needed, **{j.fingerprint: j for j in todo if j.needs is None}}
            for stage in (first.values(), [j for j in todo if j.needs is not None]):
                for batch in _batches([j for j in stage if self._can_begin(j)]):
                    self._train_ours(batch, needed)
        return bool(self.told.elsewhere) and self.told.trained > before

    def _can_begin(self, job: Job) -> bool:
        """Whether the run that it starts from, if it does, is there."""
        if job.needs is None:
            return True
        begun = self.store.find(job.needs, numerics.VERSION)
        if begun is not None and begun.failed:
            self.told.failed.append(f"{job.label}: not run, for {job.about.needs}, which it starts from, diverged")
            return False
        if not (folder(self.out, job.needs) / SUMMARY).exists():
            self._leave(job, f"starts from {job.about.needs}")
            return False
        return True

    def _train_ours(self, batch: Sequence[Job], needed: Collection[str]) -> None:
        """Train those that no other process trains or has trained, and hold them meanwhile. needed: others start there."""
        ours = []
        with ExitStack() as holding:
            for job in batch:
                try:
                    holding.enter_context(claim(self.out, job.fingerprint))
                    free = True
                except Busy:
                    free = False
                self._look(job)
                if not _unknown(self.store, job) and not (job.fingerprint in needed and self._to_begin_with(job)):
                    self.told.known += self.pace.drop([job])
                elif not free:
                    self._leave(job, "is in training there")
                elif (device := foreign(folder(self.out, job), job.config.rounds)) is not None:
                    self._leave(job, f"was begun on {device!r}, which this machine has not")
                else:
                    ours.append(job)
            if ours:
                self._train(ours)

    def _look(self, job: Job) -> None:
        """Take in what other processes kept of a run meanwhile, for whichever cell."""
        for cell in dict.fromkeys(
            j.cell.id for of_cell in self.planned for j in of_cell if j.fingerprint == job.fingerprint
        ):
            self.store.look(cell)

    def _to_begin_with(self, job: Job) -> bool:
        """Whether a run from which others start has to be trained although its result is known: its models are not here."""
        result = self.store.find(job, numerics.VERSION)
        return not (result and result.failed) and not (folder(self.out, job) / SUMMARY).exists()

    def _leave(self, job: Job, why: str) -> None:
        """To other processes."""
        self.told.elsewhere.setdefault(job.fingerprint, f"{job.label} ({why})")

    def _train(self, batch: Sequence[Job]) -> None:
        """Train some jobs, keep their results, say how much is left."""
        folders, configs = [folder(self.out, job) for job in batch], list[Config]()
        for job, place in zip(batch, folders, strict=True):
            asked = placed(job, self.out)
            lengthen(job, asked, place, self.out)
            configs.append(as_begun(asked, place))
            if (changed := otherwise(asked, configs[-1])) and not (place / SUMMARY).exists():
                self.say(f"{job.label} goes on as it was begun, with {', '.join(changed)}")
        observers: list[list[Observer]] = [[self.watch(job.label)] if self.watch else [] for job in batch]
        begun = time.monotonic()
        if len(batch) > 1:
            with suppress(Diverged):  # which one, and why, comes out below: the others are finished by now
                run.run_together(configs, folders, True, observers)
        for job, config, place, observing in zip(batch, configs, folders, observers, strict=True):
            result = self._result(job, config, place, observing, len(batch))
            if _unknown(self.store, job):
                self.store.add(job, result)
        self.told.trained += len(batch)
        self.say(self.pace.after(batch, time.monotonic() - begun))

    def _result(self, job: Job, config: Config, place: Path, observing: Sequence[Observer], together: int) -> Result:
        """Train one to its end -> what is kept of it."""
        try:
            finished = run.run(config, place, True, observing)
        except Diverged as problem:
            return failure(job, place, together, str(problem))
        about = job.cell.about
        noise = under_noise(finished, about.noise) if about.noise and _shares(finished) else {}
        if unbounded := [deviation for deviation, loss in noise.items() if not math.isfinite(loss)]:
            return failure(job, place, together, f"the loss under weight noise {unbounded[0]} is not finite")
        return collect(job, place, together, noise, node_analysis.close_up(finished, about.node) if about.node else None)
