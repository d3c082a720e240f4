"""Reserve resources of a Ray cluster, start workers with them, and keep both for the next engine."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedmutual.engines.assignment import WorkerLost
from fedmutual.engines.child_process import count_cores
from fedmutual.engines.ray_actors import ClientActor, Worker
from fedmutual.engines.ray_init import connect_to_cluster, identify_session, import_ray, start_local_cluster
from fedmutual.errors import ConfigError

PLACEMENT_LIMIT = 60.0  # seconds to wait for free resources
START = 300.0  # seconds to wait until workers with reserved resources have started


class ResourceRequest(NamedTuple):
    """The resources that an engine asks a cluster for.

    `workers` is the number of workers (None: as many as the nodes have resources for), `threads` is the number of CPUs of
    each worker, `address` is that of a running cluster (None: start one on this machine), and `gpus` is the share of a GPU
    of each worker (None: equal shares of the cluster's GPUs; 0: no GPU).
    """

    workers: int | None
    threads: int
    address: str | None
    gpus: float | None


@dataclass(eq=False)
class Reservation:
    """Workers, and the resources that a cluster reserved for them until `end`.

    `ray` is Ray's module, `request` is what was asked for, and `session` identifies the session of Ray in which the
    reservation was made.
    """

    ray: Any
    request: ResourceRequest
    session: tuple[str, str]
    has_initialised_ray: bool  # whether this process's engine initialised Ray
    most_workers: int  # for any number of clients
    group: Any = None  # a placement group of Ray
    workers: list[Worker] = field(default_factory=list)

    @property
    def is_joined(self) -> bool:
        """Return whether the engine joined a running cluster, which nothing else in this process uses."""
        return self.has_initialised_ray and self.request.address is not None

    @property
    def is_gone(self) -> bool:
        """Return whether other code has shut Ray down, and the reservation with it."""
        return identify_session(self.ray) != self.session

    def can_host(self, request: ResourceRequest, clients: int) -> bool:
        """Return whether the reservation meets the request for this number of clients."""
        if self.is_gone or request != self.request or len(self.workers) < min(self.most_workers, clients):
            return False
        try:
            self.ray.get([worker.actor.get_host_name.remote() for worker in self.workers], timeout=PLACEMENT_LIMIT)
        except self.ray.exceptions.RayError:
            return False
        return True

    def fill(self, clients: int) -> None:
        """Reserve resources, and start workers spread over the nodes.

        Raises:
            ConfigError: the cluster has too few free resources or no GPU, or workers do not start.
        """
        count = min(self.most_workers, clients)
        share = {"CPU": self.request.threads} | choose_gpu_share(self.ray, self.request.gpus, count)
        self.group = self.ray.util.placement_group([share] * count, strategy="SPREAD")
        if not self.group.wait(PLACEMENT_LIMIT):
            raise ConfigError(
                f"engine.name = 'cluster' asks for {count} workers with {_format_resources(share)} each, and after "
                f"{PLACEMENT_LIMIT:g} s the Ray cluster had too few free resources: it has "
                f"{_format_resources(self.ray.cluster_resources())}, of which "
                f"{_format_resources(self.ray.available_resources())} free; set engine.workers, engine.threads or "
                "engine.gpus lower"
            )
        self.workers = [Worker(self.ray, self._start_actor(n, share)) for n in range(count)]
        names = [worker.actor.get_host_name.remote() for worker in self.workers]
        if self.ray.wait(names, num_returns=count, timeout=START)[1]:
            raise ConfigError(f"the Ray cluster has room for {count} workers, but not all of them started in {START:.0f} s")
        for worker, name in zip(self.workers, names, strict=True):
            try:
                worker.name = worker.wait_for(name)
            except WorkerLost as lost:
                raise ConfigError(
                    f"a worker cannot start on the Ray cluster: it {lost.how}; install on all nodes what this machine has, "
                    "in the same versions"
                ) from None

    def end(self) -> None:
        """Release the resources, and shut Ray down if the engine initialised it."""
        if not self.is_gone:
            with suppress(Exception):  # the cluster may be shutting down
                self.ray.util.remove_placement_group(self.group)
            if self.has_initialised_ray:
                self.ray.shutdown()

    def _start_actor(self, number: int, share: Mapping[str, float]) -> Any:
        strategies = self.ray.util.scheduling_strategies
        where = strategies.PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=number)
        options = {"num_cpus": share["CPU"], "num_gpus": share.get("GPU", 0), "scheduling_strategy": where}
        return self.ray.remote(ClientActor).options(**options).remote()


kept_reservations: list[Reservation] = []  # one at most


def take_reservation(request: ResourceRequest, clients: int) -> Reservation:
    """Return the kept reservation if it meets the request, or make one.

    Raises:
        ConfigError: Ray is not installed, does not answer, or has too few free resources; or workers do not start.
    """
    while kept_reservations:
        reservation = kept_reservations.pop()
        if reservation.can_host(request, clients):
            return reservation
        reservation.end()
    ray = import_ray()
    must_initialise = not ray.is_initialized()
    if must_initialise:
        if request.address is None:
            start_local_cluster(ray, _count_cpus(request, clients))
        else:
            connect_to_cluster(ray, request.address)
    reservation = Reservation(
        ray, request, identify_session(ray), must_initialise, request.workers or count_workers(ray, request)
    )
    try:
        reservation.fill(clients)
    except BaseException:
        reservation.end()
        raise
    return reservation


def keep_reservation(reservation: Reservation) -> None:
    """Keep a reservation with its workers for the next engine of this process."""
    kept_reservations.append(reservation)


def _count_cpus(request: ResourceRequest, clients: int) -> int:
    """Return the logical CPUs of a local cluster: one worker per core, unless the request has a number of workers."""
    cores = count_cores()
    return min(request.workers or cores, clients) * request.threads


def count_workers(ray: Any, request: ResourceRequest) -> int:
    """Return how many workers the nodes have resources for, at least 1."""

    def count_on(node: Mapping[str, float]) -> int:
        cpus, gpus = int(node.get("CPU", 0) // request.threads), node.get("GPU", 0)
        if request.gpus is None:
            return cpus if gpus else 0
        return min(cpus, int(gpus / request.gpus + 1e-6)) if request.gpus else cpus

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
