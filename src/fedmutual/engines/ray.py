"""Clients in Ray actors, which hold the clients for the whole run: only messages move. Needs the extra `ray`."""

import os
import pickle
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any

from fedmutual.engines import allocator
from fedmutual.engines.base import Arguments, Do, Make, R, Simulation, WorkerLost
from fedmutual.engines.inprocess import ClientStore, DiskStorage
from fedmutual.engines.ray_cluster import PLACEMENT_LIMIT, START, Reservation, import_ray
from fedmutual.engines.workers import (
    WorkerReply,
    answer_request,
    assign_clients,
    describe_unportable,
    pack_host_request,
    pack_payload,
)
from fedmutual.errors import ConfigError, RunError

Request = tuple[int | None, int, str | None, float | None]
"""The workers, threads, address and gpus of a `Reservation`."""


class ClientActor:
    """A Ray actor that holds clients and answers requests."""

    def __init__(self) -> None:
        allocator.keep_freed_memory()
        self._clients = ClientStore()
        self._path = list(sys.path)

    def get_host_name(self) -> str:
        """Return the name of this worker for messages."""
        return f"worker process {os.getpid()} on node {import_ray().util.get_node_ip_address()}"

    def answer(self, request: bytes, make: bytes = b"") -> Iterator[bytes]:
        """Carry out a packed request; yield packed replies, as `answer_request`."""
        for reply in answer_request(request, self._clients, make, self._path):
            yield bytes(pack_payload(reply))

    def has_file(self, file: str) -> bool:
        """Return whether this file exists on the node of this worker."""
        return Path(file).exists()


class Worker:
    """The engine's handle of an actor, with its name in messages and the ids of the clients that it holds."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self.actor = ray, actor
        self.name = "a worker"
        self.clients: tuple[str, ...] = ()

    def host_clients(self, make: Any, ids: Sequence[str], threads: int = 1, disk: DiskStorage | None = None) -> Any:
        """Ask the actor to build and hold clients; return the stream of the reply. make: a reference to pickled `Make`."""
        self.clients = tuple(ids)
        return self.actor.answer.remote(bytes(pack_host_request(0, b"", ids, threads, disk)), make)

    def wait_for(self, reference: Any) -> Any:
        """Return the value of a reference.

        Raises:
            WorkerLost: the worker or its node died, or cannot be reached.
            RayTaskError: the actor raised an exception, and is alive.
        """
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError:  # the worker is alive
            raise
        except errors.ActorUnavailableError:
            raise WorkerLost(self.name, self.clients, "cannot be reached, because its node or the network is down") from None
        except errors.RayError as problem:
            text = str(problem).strip()
            detail = re.search(r"Worker exit detail: (.+?)(?: Some common causes|$)", text)  # without the advice after it
            reason = detail[1] if detail else text.splitlines()[-1][:300]
            raise WorkerLost(self.name, self.clients, f"died ({reason})") from None


class Cluster(Simulation):
    """Ray actors. The results are bit-identical to those of one process with equally many threads.

    make: builds a client in its worker; must be picklable. Each worker receives one copy.
    costs: the work of each client, in any unit; clients are assigned to workers by it.
    workers, threads, address, gpus: as of `Reservation`, one actor for each worker. No worker is without a client.
    disk: where the states of clients that are not in memory are stored, in a folder of all nodes; None: all clients stay in
        memory.

    Raises:
        ConfigError: as `Reservation`; or workers do not start, or a client cannot be built.
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
        self._request = workers, threads, address, gpus
        self._streams: dict[Any, Worker] = {}  # of replies that are still to come
        self._reservation, self._workers = _take_workers(self._request, len(costs))
        try:
            content_ref = self._reservation.ray.put(content)  # sent to each node once
            assigned = assign_clients(costs, self._reservation.most_workers)
            for worker, ids in zip(self._workers, assigned, strict=False):
                self._streams[worker.host_clients(content_ref, ids, threads, disk)] = worker
            for _ in self._read_replies(list(self._streams)):
                pass
        except BaseException:
            self._reservation.end()
            raise

    @property
    def workers(self) -> int:
        """Return the number of workers that hold clients."""
        return sum(bool(worker.clients) for worker in self._workers)

    def visit(self, do: Do[R], arguments: Arguments, reads: bool = False) -> Iterator[tuple[str, R]]:
        """As `Simulation.visit`, in the order in which clients finish. Work begins with the call, not with the first result.

        A worker receives one job for all its clients, so that arguments that the clients share are sent once.
        """
        streams = {}
        for worker in self._workers:
            arguments_here = {i: values for i, values in arguments.items() if i in worker.clients}
            if arguments_here:
                streams[worker.actor.answer.remote(bytes(pack_payload((0, do, arguments_here, reads))))] = worker
        self._streams |= streams
        return self._read_replies(list(streams))

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
        if not all(seen):
            raise RunError(
                f"{folder}: {self._workers[seen.index(False)].name} does not see this folder, and clients write their state "
                "there; choose with --out a folder on a disk that all nodes have under the same path"
            )

    def close(self) -> None:
        """Release the workers.

        In a running cluster that this process joined, idle workers and their resources are kept for the next engine of this
        process, until the process ends or calls `ray.shutdown`.
        """
        reservation, workers = self._reservation, self._workers
        if workers and reservation.is_joined and not reservation.is_gone and not self._streams:
            for worker in workers:
                worker.host_clients(b"", ())
            kept_workers.append((self._request, reservation, workers))
        elif workers:
            reservation.end()
        self._workers, self._streams = [], {}

    def _read_replies(self, streams: list[Any]) -> Iterator[tuple[str, Any]]:
        """Yield (client, result) of the workers as they come. Raise the first problem."""
        while streams := [stream for stream in streams if stream in self._streams]:
            for stream in self._reservation.ray.wait(streams)[0]:
                reference = next(stream, None)
                if reference is None:
                    del self._streams[stream]
                    continue
                reply: WorkerReply = pickle.loads(self._streams[stream].wait_for(reference))
                _, client, result, problem = reply
                if problem is not None:
                    raise problem
                yield client, result


kept_workers: list[tuple[Request, Reservation, list[Worker]]] = []  # of one reservation at most


def _take_workers(request: Request, clients: int) -> tuple[Reservation, list[Worker]]:
    """Return workers for this number of clients: the kept ones if they meet the request and live, or new ones.

    Raises:
        ConfigError: as `Reservation`; or workers do not start.
    """
    while kept_workers:
        kept_request, reservation, workers = kept_workers.pop()
        if kept_request == request and len(workers) >= min(reservation.most_workers, clients) and not reservation.is_gone:
            ray = reservation.ray
            try:
                ray.get([worker.actor.get_host_name.remote() for worker in workers], timeout=PLACEMENT_LIMIT)
                return reservation, workers
            except ray.exceptions.RayError:
                pass  # a worker died
        reservation.end()
    reservation = Reservation(*request, clients)
    try:
        return reservation, _start_workers(reservation)
    except BaseException:
        reservation.end()
        raise


def _start_workers(reservation: Reservation) -> list[Worker]:
    """Start an actor on each reserved place, spread over the nodes. Raises ConfigError if one of them does not start."""
    ray, count = reservation.ray, reservation.count
    workers = [Worker(ray, actor) for actor in reservation.start_actors(ClientActor)]
    names = [worker.actor.get_host_name.remote() for worker in workers]
    if ray.wait(names, num_returns=count, timeout=START)[1]:
        raise ConfigError(f"the Ray cluster has room for {count} workers, but not all of them started in {START:.0f} s")
    for worker, name in zip(workers, names, strict=True):
        try:
            worker.name = worker.wait_for(name)
        except WorkerLost as lost:
            raise ConfigError(
                f"a worker cannot start on the Ray cluster: it {lost.how}; install on all nodes what this machine has, "
                "in the same versions"
            ) from None
    return workers
