"""Clients spread over a Ray cluster, the extra `ray`: messages cross, clients do not."""

import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, Concatenate, TypeVar

from fedmutual.core import Client
from fedmutual.engines.assignment import assign_clients
from fedmutual.engines.ray_actors import Worker
from fedmutual.engines.ray_placement import Reservation, ResourceRequest, keep_reservation, take_reservation
from fedmutual.engines.rpc import JobRequest, Make, WorkerReply, describe_unportable, pack_payload
from fedmutual.errors import RunError

R = TypeVar("R")
MOMENT = 1.0  # seconds that a worker is waited for which is not needed any more


class Cluster:
    """Ray actors with one thread each, or more. Results are bit for bit those of one process with as many threads.

    make: a client by its id; called where it is to live. It must be picklable; each worker is sent a copy, once.
    costs: the work of each client, in any unit, by which they are spread.
    workers: how many; None: as many as the cluster's CPUs hold. None is without a client.
    threads: of a worker, which reserves as many CPUs.
    address: of an existing cluster, "auto" or "HOST:PORT"; None: a local one, which ends with the engine. Where the caller
        has initialised Ray, that is used instead and left running.
    gpus: of a GPU, the share that a worker reserves; None: equal shares of all that there are.

    Raises:
        ConfigError: Ray is not installed, does not answer, or has no room.
        Unportable: what clients are made of cannot be handed to another process.
        Lost: a worker died, or its node. The engine is then to be closed.
    """

    def __init__(
        self,
        make: Make,
        costs: Mapping[str, float],
        workers: int | None,
        threads: int,
        address: str | None = None,
        gpus: float | None = 0.0,
    ) -> None:
        try:
            content = pickle.dumps(make, protocol=5)  # plain: it keeps the layout of tensors in memory, and so the bits
        except Exception as problem:  # whatever a user's dataset or network says to it
            raise describe_unportable(problem) from None
        place = take_reservation(ResourceRequest(workers, threads, address, gpus), len(costs))
        self._place: Reservation | None = place
        self._streams: dict[Any, Worker] = {}  # of answers that are still to come
        try:
            put = place.ray.put(content)  # once a node
            spread = zip(place.workers, assign_clients(costs, place.full), strict=False)
            for worker, answer in [(worker, worker.host(put, ids, threads)) for worker, ids in spread]:
                _answer(worker.told(answer))
        except BaseException:
            place.end()
            raise

    @property
    def workers(self) -> int:
        """How many hold clients."""
        return sum(bool(worker.clients) for worker in self._workers)

    def each(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]]
    ) -> Iterator[tuple[str, R]]:
        """As `Engine.each`, in the order in which clients end. Work begins with the call, not with the first result.

        A worker is sent one job for all its clients, so that what they are all told crosses once.
        """
        streams = {}
        for worker in self._workers:
            mine = {i: given for i, given in arguments.items() if i in worker.clients}
            if mine:
                streams[worker.actor.work.remote(bytes(pack_payload(JobRequest(0, do, mine))))] = worker
        self._streams |= streams
        return ((answer.client, answer.result) for answer in self._answers(list(streams)))

    def remarks(self) -> list[str]:
        """As `Engine.remarks`."""
        return []

    def reach(self, folder: Path) -> None:
        """Check that all workers see a file that is written into this folder here: clients write their state there.

        Raises:
            RunError: one does not.
            Lost: one died.
        """
        file = folder / f".reach-{token_hex(8)}.part"
        file.touch()
        try:
            seen = [worker.told(worker.actor.sees.remote(str(file))) for worker in self._workers]
        finally:
            file.unlink(missing_ok=True)
        for worker, sees in zip(self._workers, seen, strict=True):
            if not sees:
                raise RunError(
                    f"{folder}: {worker.name} does not see this folder, and clients write their state there; choose with "
                    "--out a folder on a disk that all nodes have under the same path"
                )

    def close(self) -> None:
        """Let the workers go. In a cluster that we joined, those that wait for work are kept for this process's next engine,
        with their room, until the process ends or calls `ray.shutdown`."""
        place = self._place
        if place is None:
            return
        if place.joined and not place.gone and self._rest(place):
            for worker in place.workers:
                worker.host(b"", ())
            keep_reservation(place)
        else:
            place.end()
        self._place, self._streams = None, {}

    @property
    def _workers(self) -> list[Worker]:
        return self._place.workers if self._place else []

    def _answers(self, streams: list[Any]) -> Iterator[WorkerReply]:
        """What workers stream back as it comes; the first problem is raised."""
        while self._place is not None and (streams := [s for s in streams if s in self._streams]):
            for stream in self._place.ray.wait(streams)[0]:
                content = self._next(stream)
                if content is not None:
                    yield _answer(content)

    def _next(self, stream: Any) -> bytes | None:
        """The next answer of a stream that has one, or has ended. Raises Lost."""
        reference = next(stream, None)
        if reference is None:
            del self._streams[stream]
            return None
        content: bytes = self._streams[stream].told(reference)
        return content

    def _rest(self, place: Reservation) -> bool:
        """Whether all workers live and have done what they were told, at once or in a moment."""
        until = time.monotonic() + MOMENT
        try:
            while self._streams:
                ready = place.ray.wait(list(self._streams), timeout=max(0.0, until - time.monotonic()))[0]
                if not ready:
                    return False
                self._next(ready[0])
        except Exception:  # of Ray's, or Lost
            return False
        return True


def _answer(content: bytes) -> WorkerReply:
    """What a worker answered; a problem is raised."""
    answer: WorkerReply = pickle.loads(content)
    if answer.problem is not None:
        raise answer.problem
    return answer
