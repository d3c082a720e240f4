"""Clients in Ray actors, which hold the clients for the whole run: only messages move. Needs the extra `ray`."""

import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, Concatenate, TypeVar

from fedmutual.core import Client
from fedmutual.engines.assignment import assign_clients
from fedmutual.engines.base import Make, Simulation
from fedmutual.engines.client_store import DiskStorage
from fedmutual.engines.ray_actors import Worker
from fedmutual.engines.ray_placement import Reservation, ResourceRequest, keep_reservation, take_reservation
from fedmutual.engines.rpc import JobRequest, WorkerReply, describe_unportable, pack_payload
from fedmutual.errors import RunError

R = TypeVar("R")
MOMENT = 1.0  # seconds to wait for a worker that is no longer needed


class Cluster(Simulation):
    """Ray actors. The results are bit-identical to those of one process with equally many threads.

    make: builds a client in its worker; must be picklable. Each worker receives one copy.
    costs: the work of each client, in any unit; clients are assigned to workers by it.
    workers: the number of workers; None: as many as the CPUs of the cluster allow. No worker is without a client.
    threads: of each worker, which reserves as many CPUs.
    address: of a running cluster, "auto" or "HOST:PORT"; None: start a local cluster, which ends with the engine. If the
        caller has initialised Ray, that cluster is used and left running.
    gpus: the share of a GPU that a worker reserves; None: equal shares of all GPUs.
    disk: where the states of clients that are not in memory are stored, in a folder of all nodes; None: all clients stay in
        memory.

    Raises:
        ConfigError: Ray is not installed, does not answer, or has too few free resources; or a client cannot be built.
        Unportable: the data, networks or algorithm cannot be sent to another process.
        WorkerLost: a worker or its node died. The engine must then be closed.
    """

    def __init__(
        self,
        make: Make,
        costs: Mapping[str, float],
        workers: int | None,
        threads: int,
        address: str | None = None,
        gpus: float | None = 0.0,
        disk: DiskStorage | None = None,
    ) -> None:
        try:
            content = pickle.dumps(make, protocol=5)  # plain pickle keeps the memory layout of tensors, and so the bits
        except Exception as problem:  # a user's dataset or network may raise anything
            raise describe_unportable(problem) from None
        reservation = take_reservation(ResourceRequest(workers, threads, address, gpus), len(costs))
        self._reservation: Reservation | None = reservation
        self._streams: dict[Any, Worker] = {}  # of replies that are still to come
        try:
            content_ref = reservation.ray.put(content)  # sent to each node once
            assigned = zip(reservation.workers, assign_clients(costs, reservation.most_workers), strict=False)
            streams = {worker.host_clients(content_ref, ids, threads, disk): worker for worker, ids in assigned}
            self._streams |= streams
            for _ in self._read_replies(list(streams)):
                pass
        except BaseException:
            reservation.end()
            raise

    @property
    def workers(self) -> int:
        """Return the number of workers that hold clients."""
        return sum(bool(worker.clients) for worker in self._workers)

    def visit(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]], reads: bool = False
    ) -> Iterator[tuple[str, R]]:
        """As `Simulation.visit`, in the order in which clients finish. Work begins with the call, not with the first result.

        A worker receives one job for all its clients, so that arguments that the clients share are sent once.
        """
        streams = {}
        for worker in self._workers:
            arguments_here = {i: values for i, values in arguments.items() if i in worker.clients}
            if arguments_here:
                streams[worker.actor.answer.remote(bytes(pack_payload(JobRequest(0, do, arguments_here, reads))))] = worker
        self._streams |= streams
        return ((reply.client, reply.result) for reply in self._read_replies(list(streams)))

    def reach(self, folder: Path) -> None:
        """Check that all workers see this folder, into which the clients write their state.

        Raises:
            RunError: a worker does not see a file that this process writes there.
            WorkerLost: a worker died.
        """
        file = folder / f".reach-{token_hex(8)}.part"
        file.touch()
        try:
            seen = [worker.wait_for(worker.actor.has_file.remote(str(file))) for worker in self._workers]
        finally:
            file.unlink(missing_ok=True)
        for worker, sees in zip(self._workers, seen, strict=True):
            if not sees:
                raise RunError(
                    f"{folder}: {worker.name} does not see this folder, and clients write their state there; choose with "
                    "--out a folder on a disk that all nodes have under the same path"
                )

    def close(self) -> None:
        """Release the workers.

        In a running cluster that this process joined, idle workers and their resources are kept for the next engine of this
        process, until the process ends or calls `ray.shutdown`.
        """
        reservation = self._reservation
        if reservation is None:
            return
        if reservation.is_joined and not reservation.is_gone and self._are_idle(reservation):
            for worker in reservation.workers:
                worker.host_clients(b"", ())
            keep_reservation(reservation)
        else:
            reservation.end()
        self._reservation, self._streams = None, {}

    @property
    def _workers(self) -> list[Worker]:
        return self._reservation.workers if self._reservation else []

    def _read_replies(self, streams: list[Any]) -> Iterator[WorkerReply]:
        """Yield the replies of the workers as they come. Raise the first problem."""
        while self._reservation is not None and (streams := [s for s in streams if s in self._streams]):
            for stream in self._reservation.ray.wait(streams)[0]:
                content = self._read_next(stream)
                if content is not None:
                    yield _unpack_reply(content)

    def _read_next(self, stream: Any) -> bytes | None:
        """Return the next reply of a stream; None: the stream has ended. Raises WorkerLost."""
        reference = next(stream, None)
        if reference is None:
            del self._streams[stream]
            return None
        content: bytes = self._streams[stream].wait_for(reference)
        return content

    def _are_idle(self, reservation: Reservation) -> bool:
        """Return whether all workers live and have finished their jobs, now or within MOMENT."""
        until = time.monotonic() + MOMENT
        try:
            while self._streams:
                ready = reservation.ray.wait(list(self._streams), timeout=max(0.0, until - time.monotonic()))[0]
                if not ready:
                    return False
                self._read_next(ready[0])
        except Exception:  # of Ray, or WorkerLost
            return False
        return True


def _unpack_reply(content: bytes) -> WorkerReply:
    """Return the reply of a worker. Raise the problem in it."""
    reply: WorkerReply = pickle.loads(content)
    if reply.problem is not None:
        raise reply.problem
    return reply
