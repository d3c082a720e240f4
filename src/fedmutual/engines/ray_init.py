"""Import Ray, start a local cluster, or join a running cluster.

Any process that can connect to a Ray cluster can run code in it. A local cluster listens only on the loopback interface, and
requires a token that only its own processes have, unless RAY_AUTH_MODE=disabled is set.
"""

import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedmutual.errors import ConfigError

_QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
_LEAST = (2, 59)  # the first version of Ray whose local clusters require a token
_INSTALL = f"pip install 'ray>={'.'.join(map(str, _LEAST))}'"
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # with which a user gives a token
_ATTEMPTS = "RAY_gcs_server_port_wait_time_s"  # an attempt to connect takes 40 s


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
    try:
        with _restore_sigterm(), _bind_to_loopback(ray), _set_fresh_token():
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, **_QUIET)
    except Exception as problem:  # of many types
        raise ConfigError(
            f"engine.name = 'cluster': Ray cannot start a cluster on this machine ({_describe_problem(problem)}); correct "
            "the cause, or choose engine.name = 'processes'"
        ) from None


def connect_to_cluster(ray: Any, address: str) -> None:
    """Join a running cluster. Raises ConfigError if no cluster answers at the address."""
    before = os.environ.get(_ATTEMPTS)
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), 10).close()  # Ray itself would try for 15 minutes
        os.environ.setdefault(_ATTEMPTS, "1")
        with _restore_sigterm():
            ray.init(address=address, **_QUIET)
    except Exception as problem:  # of many types
        raise ConfigError(
            f"key 'engine.address': there is no Ray cluster to join at {address!r} ({_describe_problem(problem)}); if the "
            "cluster requires a token, set RAY_AUTH_MODE=token and the token of the cluster in the environment"
        ) from None
    finally:
        if before is None:
            os.environ.pop(_ATTEMPTS, None)


def _describe_problem(problem: Exception) -> str:
    """Return what Ray says about a problem, in one line."""
    return (" ".join(str(problem).split()) or type(problem).__name__)[:300]


def identify_session(ray: Any) -> tuple[str, str]:
    """Return (address, job id) of this process's connection to a cluster; ("", "") without a connection."""
    if not ray.is_initialized():
        return "", ""
    about = ray.get_runtime_context()
    return about.gcs_address, about.get_job_id()


@contextmanager
def _bind_to_loopback(ray: Any) -> Iterator[None]:
    """Make Ray use 127.0.0.1 as the address of this node, as Ray does on systems without clusters of several nodes.

    Otherwise the servers of Ray listen on all interfaces, and Ray replaces a loopback address in its settings.
    """
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _set_fresh_token() -> Iterator[None]:
    """Start Ray's processes with a new token, unless the user gives one.

    Ray itself would write the token into a file that other users of this machine may read.
    """
    if any(name in os.environ for name in _TOKENS):
        yield
        return
    os.environ[_TOKENS[0]] = secrets.token_hex(32)
    try:
        yield
    finally:
        del os.environ[_TOKENS[0]]


@contextmanager
def _restore_sigterm() -> Iterator[None]:
    """Restore the handler of SIGTERM: `ray.init` installs a handler that aborts the process."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
