"""Trains what is not known yet, a cell at a time, and keeps what came out: a killed command goes on where it was."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import fedmutual
from fedmutual import data, runs
from fedmutual.config import Config
from fedmutual.core import Diverged
from fedmutual.errors import DataError
from fedmutual.records.events import Observer
from fedmutual.records.folder import SUMMARY
from fedmutual.records.text import duration
from fedmutual.report.text import count
from fedmutual.reproduce import closeup
from fedmutual.reproduce.cells import Cell
from fedmutual.reproduce.collect import collect, failure
from fedmutual.reproduce.looks import lacks
from fedmutual.reproduce.noise import under_noise
from fedmutual.reproduce.parts import placed
from fedmutual.reproduce.places import as_begun, folder, lengthen, otherwise
from fedmutual.reproduce.plan import Job, Scale, jobs
from fedmutual.reproduce.results import Store

Say = Callable[[str], None]


@dataclass
class Told:
    """What a call of `reproduce` did."""

    known: int = 0  # runs whose results were there
    trained: int = 0
    failed: list[str] = field(default_factory=list)  # runs in which a client diverged, now or before, and why


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
    """Train every run of some cells that the store does not know, into OUT/runs; a stopped one goes on from its last round.

    here: keys that tell in no result, as `jobs` takes them. A run in which a client diverges is kept as such.

    Raises:
        UserError: as `fedmutual.run`; an arm that is not valid before the first is trained.
    """
    planned = [list(jobs(cell, range(seeds), scale, here or {})) for cell in cells]
    planned = [of_cell for of_cell in planned if not _without_data(of_cell, store, say)]
    told, pace = Told(), Pace([j for jobs_ in planned for j in jobs_ if _unknown(store, j)])
    asked = {j.fingerprint for jobs_ in planned for j in jobs_}
    for cell, job in {job.cell.id: (job.cell, job) for job in pace.left if job.cell.about.node}.values():
        closeup.check(job.config, cell.about.node or "", f"{cell.path}, arm {job.arm!r}")
    told.failed += _known_failures(planned, store)
    told.known = len(asked) - len(pace.left)
    say(f"{count(len(pace.left), 'run')} to train, {told.known} known")
    if pace.left:
        store.check()
    for of_cell in planned:
        todo = [j for j in of_cell if _unknown(store, j)]
        needed = {j.needs.fingerprint: j.needs for j in todo if j.needs is not None}
        first = {**needed, **{j.fingerprint: j for j in todo if j.needs is None}}
        for stage in (first.values(), (j for j in todo if j.needs is not None)):
            for batch in _batches([j for j in stage if not _orphan(j, store, told)]):
                _train(batch, out, store, watch, told, pace, say)
    return told


def _known_failures(planned: Sequence[Sequence[Job]], store: Store) -> list[str]:
    """The runs that are known to have no numbers, each once, and why."""
    found = dict[str, str]()
    for job in (j for of_cell in planned for j in of_cell):
        result = store.find(job, fedmutual.__version__)
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
    result = store.find(job, fedmutual.__version__)
    return result is None or lacks(job.cell, result)


def _orphan(job: Job, store: Store, told: Told) -> bool:
    """Whether the run that it starts from has failed."""
    begun = store.find(job.needs) if job.needs is not None else None
    if begun is None or not begun.failed:
        return False
    told.failed.append(f"{job.label}: not run, for {job.about.needs}, which it starts from, diverged")
    return True


def _batches(stage: Sequence[Job]) -> Iterable[list[Job]]:
    """All at once where a stack of them fills the device better, else one after the other."""
    if len(stage) > 1 and all(runs.stacks(job.config) for job in stage):
        return [list(stage)]
    return [[job] for job in stage]


def _train(
    batch: Sequence[Job],
    out: Path,
    store: Store,
    watch: Callable[[str], Observer] | None,
    told: Told,
    pace: "Pace",
    say: Say,
) -> None:
    """Train some jobs, keep their results, say how much is left."""
    folders, configs = [folder(out, job) for job in batch], list[Config]()
    for job, place in zip(batch, folders, strict=True):
        asked = placed(job, out)
        lengthen(job, asked, place, out)
        configs.append(as_begun(asked, place))
        if (changed := otherwise(asked, configs[-1])) and not (place / SUMMARY).exists():
            say(f"{job.label} goes on as it was begun, with {', '.join(changed)}")
    observers: list[list[Observer]] = [[watch(job.label)] if watch else [] for job in batch]
    begun = time.monotonic()
    if len(batch) > 1:
        with suppress(Diverged):  # which one, and why, comes out below: the others are finished by now
            runs.run_together(configs, folders, True, observers)
    for job, config, place, observing in zip(batch, configs, folders, observers, strict=True):
        try:
            runs.run(config, place, True, observing)
        except Diverged as problem:
            result = failure(job, place, len(batch), str(problem))
            told.failed.append(f"{job.label}: {problem}")
        else:
            about = job.cell.about
            noise = under_noise(place, about.noise) if about.noise and _shares(place) else {}
            result = collect(job, place, len(batch), noise, closeup.close_up(place, about.node) if about.node else None)
        if _unknown(store, job):
            store.add(job, result)
    told.trained += len(batch)
    say(pace.after(batch, time.monotonic() - begun))


def _shares(place: Path) -> bool:
    """Whether a run ends with a complete global model."""
    return fedmutual.Run(place).summary["global"]["test_accuracy"] is not None


class Pace:
    """How long the runs that are left will take, by the seconds that a round took in those that are done."""

    def __init__(self, unknown: Iterable[Job]) -> None:
        once = {job.fingerprint: job for job in unknown}
        self.left = list(once.values())
        self._count = len(self.left)
        self._seen: dict[tuple[str, str], list[float]] = {}

    def after(self, done: Sequence[Job], seconds: float) -> str:
        """ "3 of 36 runs done, about 1 h 20 min left"."""
        prints = {job.fingerprint for job in done}
        self.left = [job for job in self.left if job.fingerprint not in prints]
        rounds = sum(job.config.rounds for job in done)
        for job in done:
            self._seen.setdefault((job.cell.id, job.arm), []).append(seconds / rounds)
        words = f"{self._count - len(self.left)} of {self._count} runs done"
        if not self.left:
            return words
        return f"{words}, about {duration(sum(self._rate(job) * job.config.rounds for job in self.left))} left"

    def _rate(self, job: Job) -> float:
        """Seconds a round: of the same arm, else of its cell, else of all so far."""
        same = self._seen.get((job.cell.id, job.arm))
        cell = [v for (id, _), values in self._seen.items() if id == job.cell.id for v in values]
        return fmean(same or cell or [v for values in self._seen.values() for v in values])
