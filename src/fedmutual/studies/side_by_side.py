"""Whole runs side by side: each in a worker process of its own, so that no core waits for the slowest client of a round.

A run computes the same bits in a worker process as in this one: there `auto` picks the engine `inprocess`, and the engines
that `auto` picks on a CPU have equal bits.
"""

import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fedmutual.config import Config
from fedmutual.engines import allocator
from fedmutual.engines.processes import CONTEXT, hide_main_module
from fedmutual.errors import RunError
from fedmutual.events import Evaluated, Event, Failed, Finished, Noted, Observer, Replied, Started
from fedmutual.recorded_code import is_trusting
from fedmutual.studies.run import run
from fedmutual.studies.trained_run import Run, open_trained_run

START = 8.0  # seconds that the start of worker processes takes: shorter work is done in this process
_SHOWN = (Started, Noted, Replied, Evaluated, Finished)  # events that cross: others hold models, or closures


@dataclass(frozen=True)
class PlannedRun:
    """A run to train: its configuration and its folder."""

    config: Config
    folder: Path


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def can_run_side_by_side(configs: Sequence[Config]) -> bool:
    """Return whether these runs may be trained in worker processes: on a CPU, by the engine `auto` or `inprocess`, and
    without objects that only this process has."""
    return all(
        config.engine.name in ("auto", "inprocess")
        and config.engine.device in ("auto", "cpu")
        and "fedmutual.in_memory:" not in repr(config)
        for config in configs
    )


def choose_jobs(runs: int, seconds: float, threads: int) -> int:
    """Return how many runs to train at once: as many as there are cores for their threads, if that saves more than the start
    of worker processes takes.

    runs: how many are left. seconds: what one takes. threads: of each run.
    """
    jobs = min(runs, max(1, count_cores() // threads))
    saved = seconds * (runs - runs / jobs) if jobs else 0.0
    return jobs if saved > (0.0 if len(_idle) >= jobs else START) else 1


def train_runs(
    planned: Sequence[PlannedRun], resume: bool, observers: Sequence[Sequence[Observer]], jobs: int | None = None
) -> list[Run]:
    """Train each run into its folder, several at once where that is faster -> the runs, in their order.

    observers: of each run. jobs: how many at once; None: chosen after the first run, whose seconds are known then.

    Raises:
        UserError, Diverged: of the first run that failed; the others that are being trained are stopped, and can be resumed.
    """
    left = list(range(len(planned)))
    while left and (jobs is None or jobs == 1):
        one, watching, since = planned[left[0]], observers[left.pop(0)], time.monotonic()
        run(one.config, one.folder, resume, watching)
        chosen = choose_jobs(len(left), time.monotonic() - since, one.config.engine.threads)
        jobs = chosen if jobs is None and chosen > 1 else jobs
    if left:
        _train_in_workers(planned, left, resume, observers, min(jobs or 1, len(left)))
    return [open_trained_run(one.folder, one.config) for one in planned]


def _train_in_workers(
    planned: Sequence[PlannedRun], left: list[int], resume: bool, observers: Sequence[Sequence[Observer]], jobs: int
) -> None:
    """Train the runs of these numbers in worker processes; `left` is emptied."""
    workers = [_idle.pop() if _idle else _Worker() for _ in range(jobs)]
    try:
        busy: dict[Connection, tuple[_Worker, int]] = {}
        for worker in workers:
            number = left.pop(0)
            worker.train(planned[number], resume)
            busy[worker.connection] = (worker, number)
        while busy:
            for connection in wait(list(busy)):
                worker, number = busy[connection]  # type: ignore[index]
                event = worker.receive(planned[number])
                if event is not None:
                    for observer in observers[number]:
                        observer(event)
                if isinstance(event, Failed):
                    raise event.problem
                if event is None:
                    del busy[worker.connection]
                    if left:
                        number = left.pop(0)
                        worker.train(planned[number], resume)
                        busy[worker.connection] = (worker, number)
    except BaseException:
        for worker in workers:
            worker.stop()
        raise
    _idle.extend(workers)  # for the next runs of this command; they end with this process


class _Worker:
    """A process that trains runs, seen from here."""

    def __init__(self) -> None:
        self.connection, other_end = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(other_end,), daemon=True)
        with hide_main_module():
            self._process.start()
        other_end.close()

    def train(self, planned: PlannedRun, resume: bool) -> None:
        """Begin a run."""
        with suppress(OSError):  # a dead worker is found where its answer is missing
            self.connection.send((os.getcwd(), list(sys.path), planned.config, planned.folder, resume, is_trusting()))

    def receive(self, planned: PlannedRun) -> Event | None:
        """Return the next event of the run; None: it is finished.

        Raises:
            RunError: the process died.
        """
        try:
            event: Event | None = self.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self._process.join(5)
            raise RunError(
                f"{planned.folder}: the process that trained this run ended with code {self._process.exitcode}; is there "
                "memory for all? Give the same command with --resume, and with --jobs 1 if it happens again"
            ) from None
        return event

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join()
        self.connection.close()


_idle: list[_Worker] = []  # processes that wait for runs


def _serve(connection: Connection) -> None:
    """The life of a worker process: train run after run until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent process, which ends this one
    allocator.keep_freed_memory()

    def send(event: Event) -> None:
        if isinstance(event, _SHOWN):
            connection.send(event)

    with suppress(EOFError, OSError):
        for working_folder, search_path, config, folder, resume, trusts in _receive(connection):
            os.chdir(working_folder)
            sys.path[:] = search_path
            try:
                run(config, folder, resume, [send], trust_code=trusts)
            except BrokenPipeError:
                return  # the parent process is gone
            except BaseException as problem:
                connection.send(Failed(0, _make_portable(problem)))
            else:
                connection.send(None)


def _receive(connection: Connection) -> Iterator[tuple[Any, ...]]:
    while True:
        yield connection.recv()


def _make_portable(problem: BaseException) -> BaseException:
    """Return an exception that can be sent to another process: itself, or one with its text."""
    try:
        copy = pickle.loads(pickle.dumps(problem))
        return problem if str(copy) == str(problem) else RunError(str(problem))
    except Exception:
        return RunError(f"{type(problem).__name__}: {problem}")
