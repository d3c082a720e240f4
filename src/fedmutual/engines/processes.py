"""Clients spread over worker processes, which keep them for the whole run: messages cross, clients do not."""

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import Any, Concatenate, TypeVar

import torch
import torch.multiprocessing

from fedmutual.core import Client
from fedmutual.engines import allocator
from fedmutual.engines.assignment import WorkerLost, assign_clients
from fedmutual.engines.rpc import (
    HostRequest,
    JobRequest,
    Make,
    WorkerReply,
    WorkerSettings,
    answer_request,
    describe_unportable,
    pack_payload,
)

R = TypeVar("R")

CONTEXT = multiprocessing.get_context("spawn")
"""Worker processes start anew, on any system: they inherit nothing, and all that they need is handed to them."""


class Processes:
    """Worker processes with one thread each, or more. Results are bit for bit those of one process with as many threads.

    make: a client by its id; called where it is to live. It must be picklable, and tensors in it cross as shared memory.
    costs: the work of each client, in any unit, by which they are spread.

    Raises:
        Unportable: what clients are made of cannot be handed to another process.
        Lost: a worker died. The engine is then to be closed.
    """

    def __init__(self, make: Make, costs: Mapping[str, float], workers: int, threads: int) -> None:
        self._workers: list[_Worker] = []
        number = next(_numbers)
        try:
            held = assign_clients(costs, workers)
            self._workers = [_worker() for _ in held]  # all start at once
            for worker, ids in zip(self._workers, held, strict=True):
                worker.host(HostRequest(number, make, ids, threads, torch.get_default_dtype()))
            for _ in self._answers(number, len(self._workers)):
                pass
        except BaseException:
            self.close()
            raise

    def each(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]]
    ) -> Iterator[tuple[str, R]]:
        """As `Engine.each`, in the order in which clients end. Work begins with the call, not with the first result."""
        number = next(_numbers)
        for worker in self._workers:
            worker.drain()
            mine = {i: given for i, given in arguments.items() if i in worker.clients}
            if mine:
                worker.tell(pack_payload(JobRequest(number, do, mine)), len(mine))
        return ((answer.client, answer.result) for answer in self._answers(number, len(arguments)))

    def remarks(self) -> list[str]:
        """As `Engine.remarks`."""
        return []

    def close(self) -> None:
        """Let the workers go: one that waits for work is kept for the next engine of this process, for it took seconds."""
        for worker in self._workers:
            try:
                if worker.due:
                    raise WorkerLost("worker", (), "is busy")
                worker.host(HostRequest(next(_numbers), _no_client, (), 1, torch.float32))
                _idle.append(worker)
            except (WorkerLost, OSError):
                worker.stop()
        self._workers = []

    def _answers(self, number: int, due: int) -> Iterator[WorkerReply]:
        """That many answers to what was told under this number; the first problem is raised."""
        while due:
            for ready in wait([w.connection for w in self._workers]):
                worker = next(w for w in self._workers if w.connection is ready)
                answer = worker.answer()
                if answer.problem is not None:
                    raise answer.problem
                if answer.job == number:  # else to the last thing that an earlier engine told
                    due -= 1
                    yield answer


class _Worker:
    """A process, seen from here."""

    def __init__(self) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self.clients: tuple[str, ...] = ()
        self.process = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self.due = 0  # answers that it owes
        with hide_main_module():
            self.process.start()
        theirs.close()

    def host(self, told: HostRequest) -> None:
        """Give it clients to make and keep."""
        self.clients = tuple(told.clients)
        self.tell(pack_payload(WorkerSettings(os.getcwd(), list(sys.path))), 0)
        self.tell(_shared(told), 1)

    def tell(self, message: bytes | memoryview, answers: int) -> None:
        """Send it something that it owes so many answers to."""
        self.due += answers
        try:
            self.connection.send_bytes(message)
        except OSError:
            raise self._lost() from None

    def answer(self) -> WorkerReply:
        """Its next answer. Raises Lost where it died."""
        try:
            answer: WorkerReply = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._lost() from None
        self.due -= answer.problem is None  # with a problem it stays in debt, and is not used again
        return answer

    def drain(self) -> None:
        """Take the answers that nobody waited for; else both ends might wait until the other reads."""
        while self.due:
            if (problem := self.answer().problem) is not None:
                raise problem

    def stop(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _lost(self) -> WorkerLost:
        self.process.join(5)
        code = self.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        return WorkerLost(f"worker process {self.process.pid}", self.clients, how)


_idle: list[_Worker] = []
_numbers = count(1)


def _worker() -> _Worker:
    """One that waits for work, or a new one."""
    while _idle:
        worker = _idle.pop()
        if worker.process.is_alive():
            return worker
        worker.stop()
    return _Worker()


def _serve(connection: Connection) -> None:
    """A worker's life: make clients, do what is asked with them, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a stop by hand is the parent's to handle
    allocator.keep_freed_memory()
    clients: dict[str, Client] = {}
    with suppress(EOFError, OSError):
        while True:
            for answer in answer_request(connection.recv_bytes(), clients):
                connection.send_bytes(pack_payload(answer))


def _no_client(id: str) -> Client:
    raise AssertionError(id)


def _shared(host: HostRequest) -> bytes:
    """For a worker, with tensors as shared memory."""
    try:
        return bytes(ForkingPickler.dumps(host))
    except Exception as problem:  # whatever a user's dataset or network says to being pickled; and a full /dev/shm
        raise describe_unportable(problem) from None


@contextmanager
def hide_main_module() -> Iterator[None]:
    """Hide the main module: a new process would import it, and a script without `if __name__ == "__main__"` run itself."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
