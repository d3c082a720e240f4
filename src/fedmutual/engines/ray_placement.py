"""Room for workers on a Ray cluster: reserved, filled with actors, kept for the next engine."""

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

PATIENCE = 60.0  # seconds until a cluster without room is given up
START = 300.0  # seconds until workers that have room, but do not start, are given up


class ResourceRequest(NamedTuple):
    """What is asked of a cluster."""

    workers: int | None
    threads: int
    address: str | None
    gpus: float | None


@dataclass(eq=False)
class Reservation:
    """Workers, in room that a cluster reserved for them."""

    ray: Any
    wish: ResourceRequest
    session: tuple[str, str]
    ours: bool  # whether Ray was initialised by us
    full: int  # how many workers there would be for any number of clients
    room: Any = None  # a placement group
    workers: list[Worker] = field(default_factory=list)

    @property
    def joined(self) -> bool:
        """Whether the cluster is neither one that we started for the engine, nor this process's for other things too."""
        return self.ours and self.wish.address is not None

    @property
    def gone(self) -> bool:
        """Whether Ray was shut down by somebody else, and all of this with it."""
        return identify_session(self.ray) != self.session

    def fits(self, wish: ResourceRequest, clients: int) -> bool:
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
        self.workers = [Worker(self.ray, self._actor(n, each)) for n in range(count)]
        names = [worker.actor.name.remote() for worker in self.workers]
        if self.ray.wait(names, num_returns=count, timeout=START)[1]:
            raise ConfigError(f"the Ray cluster has room for {count} workers, but not all of them started in {START:.0f} s")
        for worker, name in zip(self.workers, names, strict=True):
            try:
                worker.name = worker.told(name)
            except WorkerLost as lost:
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
        strategies = self.ray.util.scheduling_strategies
        where = strategies.PlacementGroupSchedulingStrategy(self.room, placement_group_bundle_index=number)
        options = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0), "scheduling_strategy": where}
        return self.ray.remote(ClientActor).options(**options).remote()


_kept: list[Reservation] = []  # one at most


def take_reservation(wish: ResourceRequest, clients: int) -> Reservation:
    """The place that was kept, if it fits, or a new one.

    Raises:
        ConfigError: Ray is not installed, does not answer, or has no room.
    """
    while _kept:
        place = _kept.pop()
        if place.fits(wish, clients):
            return place
        place.end()
    ray = import_ray()
    ours = not ray.is_initialized()
    if ours:
        start_local_cluster(ray, _cpus(wish, clients)) if wish.address is None else connect_to_cluster(ray, wish.address)
    place = Reservation(ray, wish, identify_session(ray), ours, wish.workers or _capacity(ray, wish))
    try:
        place.fill(clients)
    except BaseException:
        place.end()
        raise
    return place


def keep_reservation(place: Reservation) -> None:
    """Keep a place, with its workers, for this process's next engine."""
    _kept.append(place)


def _cpus(wish: ResourceRequest, clients: int) -> int:
    """Logical CPUs for the workers of a cluster of our own: one a core, unless the user says how many workers."""
    cores = count_cores()
    return min(wish.workers or cores, clients) * wish.threads


def _capacity(ray: Any, wish: ResourceRequest) -> int:
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
