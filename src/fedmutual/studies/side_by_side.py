"""Whole runs side by side: each run in its own worker process, so that no core waits for the slowest client of a round.

A run has equal bits in a worker process and in this process: in a worker process `auto` picks the engine `inprocess`, and
the engines that `auto` picks on a CPU have equal bits.
"""

import os
import pickle
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

from fedmutual.config import Config
from fedmutual.engines.child_process import START, ChildProcess, count_cores, prepare_child_process
from fedmutual.engines.rpc import make_portable
from fedmutual.errors import RunError
from fedmutual.events import Evaluated, Event, Failed, Finished, Noted, Observer, Replied, Started
from fedmutual.in_memory import PREFIX
from fedmutual.recorded_code import is_trusting
from fedmutual.studies.run import run
from fedmutual.studies.trained_run import Run, open_trained_run

_SHOWN = (Started, Noted, Replied, Evaluated, Finished)  # events that are sent: others hold models, or closures


def can_run_side_by_side(configs: Sequence[Config]) -> bool:
    """Return whether these runs may be trained in worker processes: on a CPU, by the engine `auto` or `inprocess`, and
    without objects that only this process has."""
    return all(
        config.engine.name in ("auto", "inprocess")
        and config.engine.device in ("auto", "cpu")
        and PREFIX not in repr(config)
        for config in configs
    )


def choose_jobs(runs: int, seconds: float, threads: int) -> int:
    """Return how many runs to train at once: as many as the cores have room for, if that saves more seconds than the start
    of worker processes takes.

    runs: still to train. seconds: of one run. threads: of each run.
    """
    jobs = min(runs, max(1, count_cores() // threads))
    saved = seconds * (runs - runs / jobs) if jobs else 0.0
    return jobs if saved > (0.0 if len(_idle) >= jobs else START) else 1


def train_runs(
    configs: Sequence[Config],
    folders: Sequence[Path],
    resume: bool,
    observers: Sequence[Sequence[Observer]],
    jobs: int | None = None,
) -> list[Run]:
    """Train several experiments, side by side if that is faster; return the runs in the order of the configurations.

    jobs: the number of runs at once; None: chosen after the first run, when the seconds of a run are known.

    Raises:
        UserError, Diverged: the error of the first run that failed. The other runs are stopped, and can be resumed.
    """
    remaining = list(range(len(configs)))
    while remaining and (jobs is None or jobs == 1):
        number, start = remaining.pop(0), time.monotonic()
        run(configs[number], folders[number], resume, observers[number])
        chosen = choose_jobs(len(remaining), time.monotonic() - start, configs[number].engine.threads)
        jobs = chosen if jobs is None and chosen > 1 else jobs
    if remaining:
        _train_in_workers(configs, folders, resume, observers, remaining, min(jobs or 1, len(remaining)))
    return [open_trained_run(folder, config) for folder, config in zip(folders, configs, strict=True)]


def _train_in_workers(
    configs: Sequence[Config],
    folders: Sequence[Path],
    resume: bool,
    observers: Sequence[Sequence[Observer]],
    remaining: list[int],
    jobs: int,
) -> None:
    """Train the experiments with these numbers in worker processes; `remaining` is emptied."""
    workers = [_idle.pop() if _idle else _RunWorker() for _ in range(jobs)]
    busy: dict[Connection, tuple[_RunWorker, int]] = {}

    def train_next(worker: _RunWorker) -> None:
        number = remaining.pop(0)
        worker.train(configs[number], folders[number], resume)
        busy[worker.connection] = (worker, number)

    try:
        for worker in workers:
            train_next(worker)
        while busy:
            for connection in wait(list(busy)):
                worker, number = busy[connection]  # type: ignore[index]
                event = worker.receive(folders[number])
                if event is not None:
                    for observer in observers[number]:
                        observer(event)
                if isinstance(event, Failed):
                    raise event.problem
                if event is None:
                    del busy[worker.connection]
                    if remaining:
                        train_next(worker)
    except BaseException:
        for worker in workers:
            worker.stop()
        raise
    _idle.extend(workers)  # for the next runs of this command; the processes end with this process


class _RunWorker(ChildProcess):
    """A worker process that trains one run after the other."""

    def __init__(self) -> None:
        super().__init__(_serve)

    def train(self, config: Config, folder: Path, resume: bool) -> None:
        """Begin a run."""
        with suppress(OSError):  # `receive` reports a process that died
            self.connection.send((os.getcwd(), list(sys.path), config, folder, resume, is_trusting()))

    def receive(self, folder: Path) -> Event | None:
        """Return the next event of the run in this folder; None: the run is finished.

        Raises:
            RunError: the process died.
        """
        try:
            event: Event | None = self.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            raise RunError(
                f"{folder}: the process that trained this run {self.describe_end()}; is there enough memory? Give the "
                "command again with --resume, and with --jobs 1 if it happens again"
            ) from None
        return event


_idle: list[_RunWorker] = []  # processes without a run


def _serve(connection: Connection) -> None:
    """Train run after run until the parent process closes the pipe."""
    prepare_child_process()

    def send(event: Event) -> None:
        if isinstance(event, _SHOWN):
            connection.send(event)

    with suppress(EOFError, OSError):
        while True:
            working_folder, search_path, config, folder, resume, trusts = connection.recv()
            os.chdir(working_folder)
            sys.path[:] = search_path
            try:
                run(config, folder, resume, [send], trust_code=trusts)
            except BrokenPipeError:
                return  # the parent process has ended
            except Exception as problem:
                connection.send(Failed(0, make_portable(problem)))
            else:
                connection.send(None)
