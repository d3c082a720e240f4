"""Whole runs side by side: each in its own worker process, so that no core waits for the slowest client of a round.

Runs in common stacks share a worker process. Several such processes, one for each method, use a GPU more fully than one.

A run has equal bits in a worker process and in this process: in a worker process `auto` picks the engine `inprocess`, and
the engines that `auto` picks on a CPU have equal bits.
"""

import math
import os
import pickle
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Protocol

from fedmutual.config import Config
from fedmutual.engines.child_process import START, ChildProcess, count_cores, prepare_child_process
from fedmutual.engines.workers import make_portable
from fedmutual.errors import ConfigError, RunError
from fedmutual.events import Evaluated, Event, Finished, Noted, Replied, Started
from fedmutual.federation.build import pick_device
from fedmutual.in_memory import PREFIX
from fedmutual.rundir.record_files import read_environment
from fedmutual.studies.run import RunRequest, attempt_together, train_run
from fedmutual.user_code.recorded_code import is_trusting, set_trust

EFFICIENCY = 0.9  # of each further worker over which one run's clients are spread: docs/performance.md
_SHOWN = (Started, Noted, Replied, Evaluated, Finished)  # events that are sent: others hold models, or closures


def limit_jobs(configs: Sequence[Config], jobs: int | None) -> int | None:
    """Return `jobs` as `train_queue` takes it: 1 where worker processes cannot train these runs.

    The runs need a CPU and the engine `auto` or `inprocess`, and no objects that only this process has. Runs in common
    stacks, and runs on a GPU, have several jobs only if `jobs` says so.

    Raises:
        ConfigError: several jobs are wanted where these runs cannot be trained side by side.
    """
    if all(
        config.engine.name in ("auto", "inprocess")
        and (config.engine.device == "cpu" or (config.engine.device == "auto" and pick_device("auto").type == "cpu"))
        and PREFIX not in repr(config)
        for config in configs
    ):
        return jobs
    if jobs is None or jobs == 1:
        return 1
    if any(c.engine.name in ("processes", "cluster") or PREFIX in repr(c) for c in configs):
        fix = "leave it out, or change the engine"
        raise ConfigError(f"--jobs (in Python: jobs) needs the engine 'auto', 'inprocess' or 'stacked'; {fix}")
    return jobs


def choose_jobs(runs: int, seconds: float, threads: int, workers: int = 1) -> int:
    """Return how many runs to train at once: as many as the cores have room for, if the runs then end sooner.

    runs: still to train. seconds: of one run in this process. threads: of each run. workers: over which the engine of that
    run spread its clients; in a worker process all clients of a run share one core.
    """
    jobs = min(runs, max(1, count_cores() // threads))
    if jobs < 2:
        return 1
    on_one_core = seconds * (1 + EFFICIENCY * (workers - 1))
    together = math.ceil(runs / jobs) * on_one_core + (0.0 if len(_idle) >= jobs else START)
    return jobs if together < seconds * runs else 1


class RunQueue(Protocol):
    """The runs of a command that have not begun; a run may wait for the result of another one."""

    def __len__(self) -> int:
        """Return how many runs have not begun."""
        ...

    def take(self) -> Sequence[RunRequest]:
        """Remove and return the next run, or the next runs that train in common stacks.

        Empty if no run can begin before another one has finished.
        """
        ...

    def finish(self, requests: Sequence[RunRequest], problems: Sequence[Exception | None], seconds: float) -> None:
        """Receive the runs of one `take` that have ended, and the error of each; None for a finished run.

        An error that this function raises stops all other runs.
        """
        ...


def train_queue(queue: RunQueue, jobs: int | None = None) -> None:
    """Train the runs of a queue: those that `take` returns together in common stacks, others side by side if that is faster.

    jobs: the number of runs at once; None: chosen after each run in this process, when the seconds of a run are known.

    Raises:
        RunError: a worker process died. All other runs are stopped, and can be resumed.
        Exception: an error that `queue.take` or `queue.finish` raises. All other runs are stopped as well.
    """
    busy: dict[RunWorker, tuple[Sequence[RunRequest], float]] = {}  # a worker's runs, and when they began
    try:
        while True:
            requests = queue.take() if len(busy) < (jobs or 1) else ()
            start = time.monotonic()
            if requests and jobs is not None and jobs > 1:
                worker = _idle.pop() if _idle else RunWorker()
                busy[worker] = requests, start
                worker.train(requests)
            elif requests:
                problems = _attempt_runs(requests)
                seconds = time.monotonic() - start
                queue.finish(requests, problems, seconds)
                if jobs is None:
                    engine = None if problems[0] is not None else read_environment(requests[0].folder).engine
                    workers = engine.workers or 1 if engine else 1  # over which the engine spread the clients
                    chosen = choose_jobs(len(queue), seconds, requests[0].config.engine.threads, workers)
                    jobs = chosen if chosen > 1 else None
            elif busy:
                _wait_for_end(queue, busy)
            else:
                return
    finally:
        for worker in busy:
            worker.stop()


def _attempt_runs(requests: Sequence[RunRequest]) -> list[Exception | None]:
    """Train runs in this process, several in common stacks; return the exception of each, None for a finished run."""
    if len(requests) > 1:
        return attempt_together(requests)
    try:
        train_run(*requests[0])
    except Exception as problem:
        return [problem]
    return [None]


def _wait_for_end(queue: RunQueue, busy: "dict[RunWorker, tuple[Sequence[RunRequest], float]]") -> None:
    """Pass the events of workers to observers until the runs of a worker have ended; tell the queue."""
    while True:
        ready = wait([worker.connection for worker in busy])
        for worker in [worker for worker in busy if worker.connection in ready]:
            requests, start = busy[worker]
            received = worker.receive(requests[0].folder)
            if isinstance(received, tuple):
                number, event = received
                for observer in requests[number].observers:
                    observer(event)
            else:
                del busy[worker]
                _idle.append(worker)  # for the next runs of this command; the process ends with this process
                return queue.finish(requests, received, time.monotonic() - start)


class RunWorker(ChildProcess):
    """A worker process that trains one run after the other, or several runs in common stacks."""

    def __init__(self) -> None:
        super().__init__(_serve)

    def train(self, requests: Sequence[RunRequest]) -> None:
        """Begin runs."""
        silent = [request._replace(observers=()) for request in requests]
        with suppress(OSError):  # `receive` reports a process that died
            self.connection.send((os.getcwd(), list(sys.path), silent, is_trusting()))

    def receive(self, folder: Path) -> tuple[int, Event] | list[Exception | None]:
        """Return the next (number of a run, its event), or at the end the problem of each run. folder: of the first run.

        Raises:
            RunError: the process died.
        """
        try:
            received: tuple[int, Event] | list[Exception | None] = self.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            raise RunError(
                f"{folder}: the process that trained this run {self.describe_end()}; is there enough memory? Give the "
                "command again with --resume, and with --jobs 1 if it happens again (in Python: resume=True, jobs=1)"
            ) from None
        return received


_idle: list[RunWorker] = []  # processes without a run


def _serve(connection: Connection) -> None:
    """Train runs until the parent process closes the pipe."""
    prepare_child_process()

    def send(number: int, event: Event) -> None:
        if isinstance(event, _SHOWN):
            connection.send((number, event))

    with suppress(EOFError, OSError):
        while True:
            working_folder, search_path, requests, trusts = connection.recv()
            os.chdir(working_folder)
            sys.path[:] = search_path
            with set_trust(trusts):
                try:
                    problems = _attempt_runs([r._replace(observers=[partial(send, n)]) for n, r in enumerate(requests)])
                except Exception as problem:  # raised before the first training
                    problems = [problem] * len(requests)
            if any(isinstance(problem, BrokenPipeError) for problem in problems):
                return  # the parent process has ended
            connection.send([None if problem is None else make_portable(problem) for problem in problems])
