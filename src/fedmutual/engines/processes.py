"""Clients in worker processes, which hold the clients for the whole run: only messages move between processes.

Where a worker would wait for another, two workers share the phases of a client: one takes the first steps of a phase, and
sends the client to the other, which takes the rest with the same bits.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing

from fedmutual.core import At, Client, Message, Phase, Spec
from fedmutual.cpu import compute_on_cpu
from fedmutual.engines.base import (
    Arguments,
    Do,
    Make,
    R,
    Replies,
    Reply,
    Simulation,
    WorkerLost,
    participate,
    raise_user_errors,
    release_reply,
)
from fedmutual.engines.child_process import ChildProcess, prepare_child_process
from fedmutual.engines.inprocess import ClientStore, DiskStorage
from fedmutual.engines.workers import (
    WorkerReply,
    answer_request,
    describe_unportable,
    pack_host_request,
    pack_payload,
    split_clients,
    unpack_payload,
)
from fedmutual.rundir.checkpoint import collect_client_state, restore_client
from fedmutual.stepping import Progress, steps, with_client_settings, work


class Processes(Simulation):
    """Worker processes. The results are bit-identical to those of one process with equally many threads.

    make: builds a client in its worker process; must be picklable, and its tensors are sent as shared memory.
    costs: the work of each client, in any unit; clients are assigned to workers by it.
    threads: of each worker process.
    disk: where the states of clients that are not in memory are stored; None: all clients stay in memory.

    Raises:
        ConfigError: a client cannot be built.
        Unportable: the data, networks or algorithm cannot be sent to another process.
        WorkerLost: a worker process died. The engine must then be closed.
    """

    def __init__(
        self, make: Make, costs: Mapping[str, float], workers: int, threads: int, disk: DiskStorage | None = None
    ) -> None:
        self._workers: list[_Worker] = []
        number = next(_request_numbers)
        try:
            assigned, self._split = split_clients(costs, workers)
            self._homes = {id: worker for worker, ids in enumerate(assigned) for id in ids}  # where a client's state is
            self._workers = [_take_worker() for _ in assigned]  # all processes start at once
            for worker, ids in zip(self._workers, assigned, strict=True):
                worker.host_clients(number, _pickle_shared(make), ids, threads, disk)
            while any(worker.pending for worker in self._workers):
                self._read_replies(number)
        except BaseException:
            self.close()
            raise

    def visit(self, do: Do[R], arguments: Arguments, reads: bool = False) -> Iterator[tuple[str, R]]:
        """As `Simulation.visit`, in the order in which clients finish. Work begins with the call, not the first result."""
        return self._read_results(self._send_jobs(do, arguments, reads), arguments)

    def train(self, phase: Phase, at: At, inboxes: Mapping[str, Message], declared: Spec) -> Replies:
        """As `Engine.train`, in the order in which clients finish. Work begins with the call, not with the first reply.

        A worker first takes its part of the phases that it begins for another worker, then runs its other clients, and then
        ends the phases that other workers began.
        """
        arguments = {i: (phase, inbox, declared, at) for i, inbox in inboxes.items()}
        shares = {i: self._split[i][self._homes[i]] for i in inboxes if i in self._split}
        in_order = (*shares, *(i for i in sorted(inboxes) if i not in shares))  # as a mean adds the replies
        number = self._send_jobs(begin_phase, {i: (*arguments[i], shares.get(i, 1.0)) for i in in_order})
        return self._read_results(number, arguments)

    def _send_jobs(self, do: Callable[..., Any], arguments: Arguments, reads: bool = False) -> int:
        """Send each worker one job for its clients; return the number of the request."""
        number = next(_request_numbers)
        for home, worker in enumerate(self._workers):
            worker.drain()
            worker.send_job(number, do, {i: values for i, values in arguments.items() if self._homes[i] == home}, reads)
        return number

    def _read_results(self, number: int, arguments: Arguments) -> Iterator[tuple[str, Any]]:
        """Yield (client, result) as clients finish; pass begun phases on to idle workers."""
        begun: dict[str, BegunPhase] = {}
        left = set(arguments)
        while left:
            for i in list(begun):
                (other,) = self._split[i].keys() - {self._homes[i]}
                if not self._workers[other].pending:  # a worker at work does not read, and would block this process
                    self._workers[other].send_job(number, end_phase, {i: (*arguments[i], begun.pop(i))})
                    self._homes[i] = other
            for i, result in self._read_replies(number):
                if isinstance(result, BegunPhase):
                    begun[i] = result
                else:
                    left.remove(i)
                    yield i, result

    def close(self) -> None:
        """Release the workers. An idle worker is kept for the next engine of this process, because a start takes seconds."""
        for worker in self._workers:
            with suppress(WorkerLost, OSError):
                if not worker.pending:
                    worker.host_clients(next(_request_numbers), b"", ())
                    idle_workers.append(worker)
                    continue
            worker.stop()
        self._workers = []

    def _read_replies(self, number: int) -> list[tuple[str, Any]]:
        """Wait for messages; return (client, result) of the replies to the request with this number.

        Other replies answer the last request of an earlier engine. Raise the first problem.
        """
        ready = wait([worker.connection for worker in self._workers])
        replies = [worker.receive() for worker in self._workers if worker.connection in ready]
        return [(client, result) for job, client, result, _ in replies if job == number]


class BegunPhase(bytes):
    """A packed `Progress`. The parent process passes it on unread: it has a tensor for each loss term of each step."""


@compute_on_cpu()
def begin_phase(client: Client, phase: Phase, inbox: Message, declared: Spec, at: At, share: float) -> BegunPhase | Reply:
    """Take the first steps of a phase, about this share of them, and return what another worker needs for the rest.

    Return the reply if the share is 1, or if the phase cannot be handed over: if it does not count its steps, if noise is
    drawn for privacy, or if dropout is not drawn on the CPU. share: in (0, 1].

    Raises:
        Diverged, Refused, AlgorithmError: as `participate`.
    """
    count = with_client_settings(phase, client).count_steps(client)
    is_on_cpu = all(p.device.type == "cpu" for net in client.nets.values() for p in net.parameters())
    if share == 1.0 or count is None or client.privacy is not None or not is_on_cpu:
        return participate(client, phase, inbox, declared, at)
    with raise_user_errors(phase, client.id):
        stepping = steps(phase, client, inbox, at)
        for _ in range(max(1, round(share * count / client.recipe.accumulate))):
            try:
                progress = next(stepping)
            except StopIteration as end:
                return release_reply(client, phase, inbox, declared, end.value)
        stepping.close()
        progress.state, progress.stream = collect_client_state(client, in_phase=True), torch.get_rng_state()
        return BegunPhase(pack_payload(progress))


@compute_on_cpu()
def end_phase(client: Client, phase: Phase, inbox: Message, declared: Spec, at: At, begun: BegunPhase) -> Reply:
    """Take the other steps of a phase that another worker began; return the reply.

    Raises:
        Diverged, Refused, AlgorithmError: as `participate`.
    """
    with raise_user_errors(phase, client.id):
        progress: Progress = unpack_payload(begun)
        restore_client(client, progress.state)
        return release_reply(client, phase, inbox, declared, work(phase, client, inbox, at, progress))


class _Worker(ChildProcess):
    """A worker process that holds clients."""

    def __init__(self) -> None:
        super().__init__(_serve)
        self.clients: tuple[str, ...] = ()
        self.pending = 0  # replies that the process still has to send

    def host_clients(
        self, number: int, make: bytes, ids: Sequence[str], threads: int = 1, disk: DiskStorage | None = None
    ) -> None:
        """Ask the process to build clients, and to hold them."""
        self.clients = tuple(ids)
        self._send(pack_host_request(number, make, ids, threads, disk), 1)

    def send_job(self, number: int, do: Callable[..., Any], arguments: Arguments, reads: bool = False) -> None:
        """Ask the process to run `do` with these clients. reads: as in `Simulation.visit`."""
        if arguments:
            self._send(pack_payload((number, do, arguments, reads)), len(arguments))

    def _send(self, message: memoryview, replies: int) -> None:
        """Send a message. replies: the number of answers that the process will send."""
        self.pending += replies
        try:
            self.connection.send_bytes(message)
        except OSError:
            raise self._make_lost() from None

    def receive(self) -> WorkerReply:
        """Return the next reply. Raise the problem in it.

        Raises:
            WorkerLost: the process died.
        """
        try:
            reply: WorkerReply = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._make_lost() from None
        if reply[-1] is not None:
            raise reply[-1]  # its replies stay pending, so that the process is not used again
        self.pending -= 1
        return reply

    def drain(self) -> None:
        """Read replies that nobody waited for: with full pipes both processes would wait for each other."""
        while self.pending:
            self.receive()

    def _make_lost(self) -> WorkerLost:
        return WorkerLost(f"worker process {self.process.pid}", self.clients, self.describe_end())


idle_workers: list[_Worker] = []  # processes without clients
_request_numbers = count(1)


def _take_worker() -> _Worker:
    """Return an idle worker, or start one."""
    while idle_workers:
        worker = idle_workers.pop()
        with suppress(Exception):  # the process died, or the reply to the last request holds a problem
            worker.drain()
            if not worker.connection.poll():  # the pipe of a dead process is readable: it has an end
                return worker
        worker.stop()
    return _Worker()


def _serve(connection: Connection) -> None:
    """Answer the requests of the parent process until the parent process closes the pipe."""
    prepare_child_process()
    clients = ClientStore()
    with suppress(EOFError, OSError):
        while True:
            for reply in answer_request(connection.recv_bytes(), clients):
                connection.send_bytes(pack_payload(reply))


def _pickle_shared(make: Make) -> bytes:
    """Return the pickled `make` for one worker; its tensors become shared memory."""
    try:
        return bytes(ForkingPickler.dumps(make))
    except Exception as problem:  # a user's dataset or network may raise anything, and /dev/shm may be full
        raise describe_unportable(problem) from None
