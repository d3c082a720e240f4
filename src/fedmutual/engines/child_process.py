"""A worker process with a pipe to this process: start it, describe its end, and stop it."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from fedmutual.engines import allocator
from fedmutual.errors import RunError, format_error
from fedmutual.parent_process import end_with_parent

IS_FORKED = sys.platform == "linux"
"""Whether a worker process is a fork of a server process. The server has imported torch, and holds nothing of a run."""

CONTEXT: Any = multiprocessing.get_context("forkserver" if IS_FORKED else "spawn")
"""Starts worker processes without the memory of this process: this process sends all that a worker needs."""

START = 1.0 if IS_FORKED else 8.0
"""Seconds until worker processes are ready."""

_ATTEMPTS = 3  # to start a worker process
_PAUSE = 0.5  # seconds between two attempts: a fork server that fails still accepts connections until it has ended
_PRELOADED = [
    "fedmutual.engines.fork_server",
    "fedmutual.federation.experiment",  # a worker's imports, which take seconds
]


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start_fork_server_early() -> None:
    """Where there are several cores, start the imports of later worker processes without waiting for them. Only on Linux."""
    if count_cores() > 1:
        _start_fork_server()


def _start_fork_server() -> None:
    """Start the process of which worker processes are forks, unless it runs. Only on Linux."""
    if IS_FORKED:
        CONTEXT.set_forkserver_preload(_PRELOADED)
        former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the server would print a traceback at Ctrl-C
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)


def expect_workers(engines: Iterable[str], jobs: int | None = None) -> None:
    """Start the fork server if a command that trains with these engines is likely to need worker processes.

    jobs: the number of runs at once, as `--jobs`. If workers are needed after all, the first one starts the server.
    """
    if (jobs or 1) > 1 or not {"auto", "processes"}.isdisjoint(engines):
        start_fork_server_early()


class ChildProcess:
    """A worker process that reads requests from a pipe until the pipe closes.

    serve: the function that the process runs with its end of the pipe; a function of a module, so that it can be pickled.

    Raises:
        RunError: the process does not start in three attempts.
    """

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        self.connection, worker_end = CONTEXT.Pipe()
        for attempts_left in reversed(range(_ATTEMPTS)):
            self.process = CONTEXT.Process(target=serve, args=(worker_end,), daemon=True)
            _start_fork_server()
            try:
                with _hide_main_module():
                    self.process.start()
                break
            except (EOFError, OSError) as problem:  # the fork server has died, or there are too many processes
                if not attempts_left:
                    self.connection.close()
                    worker_end.close()
                    raise RunError(
                        f"a worker process cannot be started ({format_error(problem)}); end other processes, or train "
                        "without worker processes (engine.name = 'inprocess' and --jobs 1)"
                    ) from None
                time.sleep(_PAUSE)
        worker_end.close()

    def describe_end(self) -> str:
        """Return how the process ended, after its pipe closed: "was killed by SIGKILL", or "ended with code 1"."""
        self.process.join(5)
        code = self.process.exitcode
        return f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"

    def stop(self) -> None:
        """Kill the process, also in the middle of a request."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def prepare_child_process() -> None:
    """Prepare this process for the requests of its parent process."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C, and stops this process
    allocator.keep_freed_memory()


@contextmanager
def _hide_main_module() -> Iterator[None]:
    """Hide the main module: a new process would import the user's script, and run it if it has no `__name__` guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
