"""Start or join a Ray cluster, reserve resources, and start workers with them.

Any process that can connect to a Ray cluster can run code in it. A local cluster listens only on the loopback interface, and
requires a token that only its own processes have, unless RAY_AUTH_MODE=disabled is set.
"""

import logging
import math
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from fedmutual.engines.child_process import count_cores
from fedmutual.errors import ConfigError, format_error

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
            f"engine.name = 'cluster': Ray cannot start a cluster on this machine ({format_error(problem)}); correct "
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
            f"key 'engine.address': there is no Ray cluster to join at {address!r} ({format_error(problem)}); if the "
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
