"""Clients in Ray actors, which hold the clients for the whole run: only messages move. Needs the extra `ray`.

Any process that can connect to a Ray cluster can run code in it. A local cluster listens only on the loopback interface, and
requires a token that only its own processes have, unless RAY_AUTH_MODE=disabled is set.
"""

import logging
import math
import os
import pickle
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedmutual.engines import allocator
from fedmutual.engines.base import Arguments, Do, Make, R, Simulation, WorkerLost
from fedmutual.engines.child_process import count_cores
from fedmutual.engines.inprocess import ClientStore, DiskStorage
from fedmutual.engines.workers import (
    WorkerReply,
    answer_request,
    assign_clients,
    describe_unportable,
    pack_host_request,
    pack_payload,
)
from fedmutual.errors import ConfigError, RunError
from fedmutual.parent_process import end_with_parent

PLACEMENT_LIMIT = 60.0  # seconds to wait for free resources
START = 300.0  # seconds to wait until workers with reserved resources have started
_LEAST = (2, 59)  # the first version of Ray whose local clusters require a token
_INSTALL = f"pip install 'ray>={'.'.join(map(str, _LEAST))}'"


def import_ray() -> Any:
    """Return the module `ray`, set to send no usage statistics and to copy no working folder unless the environment asks.

    Raises:
        ConfigError: Ray is not installed, or its local clusters require no token.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    copies = os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0") != "0"  # under `uv run`, all files of the folder
    try:
        import ray
    except ImportError:
        raise ConfigError(f"engine.name = 'cluster' needs Ray, fedmutual's extra 'ray': {_INSTALL}") from None
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < _LEAST:
        raise ConfigError(
            f"engine.name = 'cluster': local clusters of Ray {ray.__version__} require no token, so anybody who reaches the "
            f"ports can run code; install Ray {'.'.join(map(str, _LEAST))} or later: {_INSTALL}"
        )
    if not copies:
        # If Ray was imported before, it has read the variable.
        ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False
    return ray


def start_local_cluster(ray: Any, cpus: int) -> None:
    """Start a cluster on this machine with this number of logical CPUs. No other machine or user can connect.

    Raises:
        ConfigError: Ray cannot start the cluster.
    """
    # Ray itself would write a token into a file that other users of this machine may read.
    is_given = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    token = {} if is_given else {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Ray then uses 127.0.0.1 as the address of this node. Otherwise its servers listen on all interfaces.
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        with _set_variables(token):
            _initialise(ray, address="local", num_cpus=cpus, include_dashboard=False)
    except Exception as problem:  # of many types
        raise ConfigError(
            f"engine.name = 'cluster': Ray cannot start a cluster on this machine ({_join_lines(problem)}); correct "
            "the cause, or choose engine.name = 'processes'"
        ) from None
    finally:
        constants.ENABLE_RAY_CLUSTER = before


def connect_to_cluster(ray: Any, address: str) -> None:
    """Join a running cluster. Raises ConfigError if no cluster answers at the address."""
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), 10).close()  # Ray itself would try for 15 minutes
        with _set_variables({"RAY_gcs_server_port_wait_time_s": "1"}):  # else an attempt to connect takes 40 s
            _initialise(ray, address=address)
    except Exception as problem:  # of many types
        raise ConfigError(
            f"key 'engine.address': there is no Ray cluster to join at {address!r} ({_join_lines(problem)}); if the "
            "cluster requires a token, set RAY_AUTH_MODE=token and the token of the cluster in the environment"
        ) from None


def _initialise(ray: Any, **options: Any) -> None:
    """Call `ray.init`, and restore the handler of SIGTERM: Ray installs a handler that aborts the process."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _set_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Within, set environment variables that are not set."""
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _join_lines(problem: Exception) -> str:
    """Return what Ray says about a problem, in one line: the cause often stands below the first line."""
    return (" ".join(str(problem).split()) or type(problem).__name__)[:300]


class Reservation:
    """Resources that a cluster reserved for one actor on each of several places, until `end`.

    workers: the number of actors; None: as many as the nodes have resources for. No more than `clients` are started.
    threads: the CPUs of each actor.
    address: of a running cluster; None: start one on this machine. If the caller has initialised Ray, that cluster is used.
    gpus: the share of a GPU of each actor; None: equal shares of the cluster's GPUs; 0: no GPU.

    Raises:
        ConfigError: Ray is not installed or does not answer; or the cluster has too few free resources or no GPU.
    """

    def __init__(self, workers: int | None, threads: int, address: str | None, gpus: float | None, clients: int) -> None:
        self.ray = import_ray()
        self._has_initialised_ray = not self.ray.is_initialized()
        if self._has_initialised_ray and address is None:
            start_local_cluster(self.ray, min(workers or count_cores(), clients) * threads)
        elif self._has_initialised_ray:
            connect_to_cluster(self.ray, str(address))
        self.is_joined = self._has_initialised_ray and address is not None  # nothing else in this process uses the cluster
        self._session = _identify_session(self.ray)
        self._group: Any = None  # a placement group of Ray
        try:
            self.most_workers = workers or count_workers(self.ray, threads, gpus)  # for any number of clients
            self.count = min(self.most_workers, clients)
            self._share = {"CPU": threads} | choose_gpu_share(self.ray, gpus, self.count)
            self._group = self.ray.util.placement_group([self._share] * self.count, strategy="SPREAD")
            if not self._group.wait(PLACEMENT_LIMIT):
                raise ConfigError(
                    f"engine.name = 'cluster' asks for {self.count} workers with {_format_resources(self._share)} each, and "
                    f"after {PLACEMENT_LIMIT:g} s the Ray cluster had too few free resources: it has "
                    f"{_format_resources(self.ray.cluster_resources())}, of which "
                    f"{_format_resources(self.ray.available_resources())} free; set engine.workers, engine.threads or "
                    "engine.gpus lower"
                )
        except BaseException:
            self.end()
            raise

    def start_actors(self, kind: type) -> list[Any]:
        """Start an actor of a class on each place, and return them."""
        strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        options = {"num_cpus": self._share["CPU"], "num_gpus": self._share.get("GPU", 0)}
        places = [strategy(self._group, placement_group_bundle_index=n) for n in range(self.count)]
        return [self.ray.remote(kind).options(**options, scheduling_strategy=place).remote() for place in places]

    @property
    def is_gone(self) -> bool:
        """Return whether other code has shut Ray down, and the reservation with it."""
        return _identify_session(self.ray) != self._session

    def end(self) -> None:
        """Release the resources, and shut Ray down if the engine initialised it."""
        if not self.is_gone:
            with suppress(Exception):  # the cluster may be shutting down
                self.ray.util.remove_placement_group(self._group)
            if self._has_initialised_ray:
                self.ray.shutdown()


def _identify_session(ray: Any) -> tuple[str, str]:
    """Return (address, job id) of this process's connection to a cluster; ("", "") without a connection."""
    if not ray.is_initialized():
        return "", ""
    about = ray.get_runtime_context()
    return about.gcs_address, about.get_job_id()


def count_workers(ray: Any, threads: int, gpus: float | None) -> int:
    """Return how many workers with these resources the nodes have room for, at least 1."""

    def count_on(node: Mapping[str, float]) -> int:
        cpus, node_gpus = int(node.get("CPU", 0) // threads), node.get("GPU", 0)
        if gpus is None:
            return cpus if node_gpus else 0
        return min(cpus, int(node_gpus / gpus + 1e-6)) if gpus else cpus

    return max(1, sum(count_on(node["Resources"]) for node in ray.nodes() if node["Alive"]))


def choose_gpu_share(ray: Any, gpus: float | None, workers: int) -> dict[str, float]:
    """Return the share of a GPU that each worker reserves, as Ray's resources: {"GPU": share}; {} for none.

    Raises:
        ConfigError: the share is not given, and the cluster has no GPU.
    """
    if gpus is not None:
        return {"GPU": gpus} if gpus else {}
    available = int(ray.cluster_resources().get("GPU", 0))
    if not available:
        raise ConfigError("engine.device = 'cuda', but the Ray cluster has no GPU; set engine.device to 'cpu'")
    return {"GPU": math.floor(1e4 / math.ceil(workers / available)) / 1e4}  # Ray counts in ten-thousandths


def _format_resources(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))


Request = tuple[int | None, int, str | None, float | None]
"""The workers, threads, address and gpus of a `Reservation`."""


class ClientActor:
    """A Ray actor that holds clients and answers requests."""

    def __init__(self) -> None:
        end_with_parent(os.getppid())  # Ray itself has left an actor at work for 10 s and more after its node had ended
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
        file = folder / f".reach-{secrets.token_hex(8)}.part"
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
