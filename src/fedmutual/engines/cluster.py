"""Clients spread over a Ray cluster, an extra (`pip install "fedmutual[ray]"`): messages cross, clients do not."""

import logging
import math
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, Concatenate, NamedTuple, TypeVar

import torch

from fedmutual.core import Client
from fedmutual.engines import allocator
from fedmutual.engines.processes import (
    Answer,
    Job,
    Make,
    Unportable,
    _answered,
    _forget,
    _opened,
    _packed,
    _portable,
    _unportable,
)
from fedmutual.engines.spread import Lost, assign
from fedmutual.errors import ConfigError, RunError

R = TypeVar("R")
PATIENCE = 60.0  # seconds until a cluster without room is given up
MOMENT = 1.0  # seconds that a worker is waited for which is not needed any more
START = 300.0  # seconds until workers that have room, but do not start, are given up


class Wish(NamedTuple):
    """What is asked of a cluster."""

    workers: int | None
    threads: int
    address: str | None
    gpus: float | None


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
            raise Unportable(_unportable(problem)) from None
        place = _place(Wish(workers, threads, address, gpus), len(costs))
        self._place: _Place | None = place
        self._streams: dict[Any, _Worker] = {}  # of answers that are still to come
        try:
            put = place.ray.put(content)  # once a node
            spread = zip(place.workers, assign(costs, place.full), strict=False)
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
                streams[worker.actor.work.remote(bytes(_packed(Job(0, do, mine))))] = worker
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
            _kept.append(place)
        else:
            place.end()
        self._place, self._streams = None, {}

    @property
    def _workers(self) -> "list[_Worker]":
        return self._place.workers if self._place else []

    def _answers(self, streams: list[Any]) -> Iterator[Answer]:
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

    def _rest(self, place: "_Place") -> bool:
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


def _answer(content: bytes) -> Answer:
    """What a worker answered; a problem is raised."""
    answer: Answer = pickle.loads(content)
    if answer.problem is not None:
        raise answer.problem
    return answer


class _Home:
    """An actor: keeps its clients, and does with them what it is asked to."""

    def __init__(self) -> None:
        allocator.keep()
        self._clients: dict[str, Client] = {}
        self._path = list(sys.path)

    def name(self) -> str:
        """What messages call it."""
        return f"worker process {os.getpid()} on node {_ray().util.get_node_ip_address()}"

    def host(
        self, make: bytes, ids: Sequence[str], threads: int, dtype: torch.dtype, folder: str, path: Sequence[str]
    ) -> bytes:
        """Make these clients instead of those it had -> an answer, which holds what went wrong.

        folder, path: the working folder of who asks, and where Python looks for modules there.
        """
        self._clients.clear()
        with suppress(OSError):  # not on this node: whatever is named from it will not be found
            os.chdir(folder)
        sys.path[:] = [*self._path, *(p for p in path if p not in self._path)]
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        problem = None
        try:
            if ids:
                made: Any = _opened(make)
                self._clients |= {id: made(id) for id in ids}
            else:
                _forget()  # modules of the last run's
        except Exception as caught:
            problem = _portable(caught)
        return bytes(_packed(Answer(0, "", None, problem)))

    def work(self, job: bytes) -> Iterator[bytes]:
        """Do a job -> answers, a client at a time."""
        for answer in _answered(job, self._clients):
            yield bytes(_packed(answer))

    def sees(self, file: str) -> bool:
        """Whether there is such a file here."""
        return Path(file).exists()


@dataclass(eq=False)
class _Worker:
    """An actor, seen from here."""

    ray: Any
    actor: Any
    name: str = "a worker"
    clients: tuple[str, ...] = ()

    def host(self, make: Any, ids: Sequence[str], threads: int = 1) -> Any:
        """Give it clients to make and keep -> a reference to its answer."""
        self.clients = tuple(ids)
        return self.actor.host.remote(make, ids, threads, torch.get_default_dtype(), os.getcwd(), sys.path)

    def told(self, reference: Any) -> Any:
        """What it answered. Raises Lost where it, or its node, died."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError:  # it lives
            raise
        except self.ray.exceptions.ActorUnavailableError:
            raise Lost(self.name, self.clients, "is out of reach, as its node or the network is down") from None
        except self.ray.exceptions.RayError as problem:
            raise Lost(self.name, self.clients, f"died ({_reason(problem)})") from None


@dataclass(eq=False)
class _Place:
    """Workers, in room that a cluster reserved for them."""

    ray: Any
    wish: Wish
    session: tuple[str, str]
    ours: bool  # whether Ray was initialised by us
    full: int  # how many workers there would be for any number of clients
    room: Any = None  # a placement group
    workers: list[_Worker] = field(default_factory=list)

    @property
    def joined(self) -> bool:
        """Whether the cluster is neither one that we started for the engine, nor this process's for other things too."""
        return self.ours and self.wish.address is not None

    @property
    def gone(self) -> bool:
        """Whether Ray was shut down by somebody else, and all of this with it."""
        return _session(self.ray) != self.session

    def fits(self, wish: Wish, clients: int) -> bool:
        """Whether it can be used for such a wish, and so many clients."""
        if self.gone or wish != self.wish or len(self.workers) < min(self.full, clients):
            return False
        try:
            self.ray.get([worker.actor.name.remote() for worker in self.workers], timeout=PATIENCE)
        except self.ray.exceptions.RayError:
            return False
        return True

    def fill(self, clients: int) -> None:
        """Reserve room and start workers there, spread over the nodes.

        Raises:
            ConfigError: there is no room, or they do not start.
        """
        count = min(self.full, clients)
        each = {"CPU": self.wish.threads} | _share(self.ray, self.wish.gpus, count)
        self.room = self.ray.util.placement_group([each] * count, strategy="SPREAD")
        if not self.room.wait(PATIENCE):
            raise ConfigError(
                f"engine.name = 'cluster' asks for {count} workers with {_said(each)} each, and after {PATIENCE:g} s the "
                f"Ray cluster had no room for them: it has {_said(self.ray.cluster_resources())}, of which "
                f"{_said(self.ray.available_resources())} free; set engine.workers, engine.threads or engine.gpus lower"
            )
        self.workers = [_Worker(self.ray, self._actor(n, each)) for n in range(count)]
        names = [worker.actor.name.remote() for worker in self.workers]
        if self.ray.wait(names, num_returns=count, timeout=START)[1]:
            raise ConfigError(f"the Ray cluster has room for {count} workers, but not all of them started in {START:.0f} s")
        for worker, name in zip(self.workers, names, strict=True):
            try:
                worker.name = worker.told(name)
            except Lost as lost:
                raise ConfigError(
                    f"a worker cannot start on the Ray cluster: it {lost.how}; install on all nodes what this machine has, "
                    "in the same versions"
                ) from None

    def end(self) -> None:
        """Give the room back, and Ray too where it was initialised by us."""
        if not self.gone:
            with suppress(Exception):  # of a cluster that is ending itself
                self.ray.util.remove_placement_group(self.room)
            if self.ours:
                self.ray.shutdown()

    def _actor(self, number: int, each: Mapping[str, float]) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self.room, placement_group_bundle_index=number)
        options = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0), "scheduling_strategy": where}
        return self.ray.remote(_Home).options(**options).remote()


_kept: list[_Place] = []  # one at most


def _place(wish: Wish, clients: int) -> _Place:
    """The place that was kept, if it fits, or a new one."""
    while _kept:
        place = _kept.pop()
        if place.fits(wish, clients):
            return place
        place.end()
    ray = _ray()
    ours = not ray.is_initialized()
    if ours:
        with _sigterm_kept():
            _start(ray, wish, clients) if wish.address is None else _join(ray, wish.address)
    place = _Place(ray, wish, _session(ray), ours, wish.workers or _capacity(ray, wish))
    try:
        place.fill(clients)
    except BaseException:
        place.end()
        raise
    return place


def _ray() -> Any:
    """Ray, which tells nobody that it is used and does not copy the working folder about, unless the user wants it to."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    copies = os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0") != "0"  # all files of that folder, under `uv run`
    try:
        import ray
    except ImportError:
        raise ConfigError("engine.name = 'cluster' needs Ray: pip install 'fedmutual[ray]'") from None
    if not copies:
        ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False  # it was read, where Ray had been imported before
    return ray


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Leave SIGTERM to who handled it before: `ray.init` takes it, and lets the process abort."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


_QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}


def _start(ray: Any, wish: Wish, clients: int) -> None:
    """A cluster on this machine, with logical CPUs for the workers: one a core, unless the user says how many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpus = min(wish.workers or cores, clients) * wish.threads
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, **_QUIET)


def _join(ray: Any, address: str) -> None:
    """Become a client of a running cluster. Raises ConfigError where there is none."""
    before = os.environ.get(_ATTEMPTS)
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), 10).close()  # Ray tries for a quarter of an hour
        os.environ.setdefault(_ATTEMPTS, "1")
        ray.init(address=address, **_QUIET)
    except Exception as problem:  # of many types
        why = " ".join(str(problem).split()) or type(problem).__name__
        raise ConfigError(
            f"key 'engine.address': there is no Ray cluster to join at {address!r} ({why[:300]}); one that asks for a token "
            "is joined with RAY_AUTH_MODE=token in the environment"
        ) from None
    finally:
        if before is None:
            os.environ.pop(_ATTEMPTS, None)


_ATTEMPTS = "RAY_gcs_server_port_wait_time_s"  # one of which takes 40 s


def _session(ray: Any) -> tuple[str, str]:
    """What tells one connection to a cluster from another."""
    if not ray.is_initialized():
        return "", ""
    about = ray.get_runtime_context()
    return about.gcs_address, about.get_job_id()


def _capacity(ray: Any, wish: Wish) -> int:
    """How many workers the nodes hold, at least one."""

    def held(node: Mapping[str, float]) -> int:
        cpus, gpus = int(node.get("CPU", 0) // wish.threads), node.get("GPU", 0)
        if wish.gpus is None:
            return cpus if gpus else 0
        return min(cpus, int(gpus / wish.gpus + 1e-6)) if wish.gpus else cpus

    return max(1, sum(held(node["Resources"]) for node in ray.nodes() if node["Alive"]))


def _share(ray: Any, gpus: float | None, workers: int) -> dict[str, float]:
    """What a worker reserves of a GPU."""
    if gpus is not None:
        return {"GPU": gpus} if gpus else {}
    found = int(ray.cluster_resources().get("GPU", 0))
    if not found:
        raise ConfigError("engine.device = 'cuda', but the Ray cluster has no GPU; set engine.device to 'cpu'")
    return {"GPU": math.floor(1e4 / math.ceil(workers / found)) / 1e4}  # Ray counts in ten-thousandths


def _said(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU"))


def _reason(problem: Exception) -> str:
    """What Ray says of a death, without its advice."""
    text = str(problem).strip()
    detail = re.search(r"Worker exit detail: (.+?)(?: Some common causes|$)", text)
    return detail[1] if detail else text.splitlines()[-1][:300]
