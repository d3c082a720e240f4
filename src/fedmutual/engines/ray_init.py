"""Ray itself: imported when asked for, started on this machine, or joined where a cluster runs.

Whoever can speak to a Ray cluster can run code in it. A cluster of our own listens on the loopback interface alone, and asks
for a token that nobody but its own processes has, unless RAY_AUTH_MODE=disabled is set.
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
_LEAST = (2, 59)  # from which Ray asks for a token in clusters that it starts
_INSTALL = f"pip install 'ray>={'.'.join(map(str, _LEAST))}'"
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # where a user can give a token
_ATTEMPTS = "RAY_gcs_server_port_wait_time_s"  # one of which takes 40 s


def import_ray() -> Any:
    """Ray, which tells nobody that it is used and does not copy the working folder about, unless the user wants it to."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    copies = os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0") != "0"  # all files of that folder, under `uv run`
    try:
        import ray
    except ImportError:
        raise ConfigError(f"engine.name = 'cluster' needs Ray, fedmutual's extra 'ray': {_INSTALL}") from None
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < _LEAST:
        raise ConfigError(
            f"engine.name = 'cluster': in a cluster of Ray {ray.__version__} anybody who reaches its ports can run code; "
            f"{_INSTALL}, which asks for a token"
        )
    if not copies:
        ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False  # it was read, where Ray had been imported before
    return ray


def start_local_cluster(ray: Any, cpus: int) -> None:
    """A cluster on this machine, with so many logical CPUs, that no other machine and no other user can speak to."""
    with _sigterm_kept(), _on_loopback(ray), _fresh_token():
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **_QUIET)


def connect_to_cluster(ray: Any, address: str) -> None:
    """Become a client of a running cluster. Raises ConfigError where there is none."""
    before = os.environ.get(_ATTEMPTS)
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), 10).close()  # Ray tries for a quarter of an hour
        os.environ.setdefault(_ATTEMPTS, "1")
        with _sigterm_kept():
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


def identify_session(ray: Any) -> tuple[str, str]:
    """What tells one connection to a cluster from another."""
    if not ray.is_initialized():
        return "", ""
    about = ray.get_runtime_context()
    return about.gcs_address, about.get_job_id()


@contextmanager
def _on_loopback(ray: Any) -> Iterator[None]:
    """Have Ray take 127.0.0.1 for this node's address, as it does where it supports no cluster of several nodes.

    Its servers listen on all interfaces otherwise, and it replaces a loopback address that it is given.
    """
    constants = ray._private.ray_constants
    before, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _fresh_token() -> Iterator[None]:
    """Start Ray's processes with a token of their own, unless the user gives one. Ray would write it into a file that other
    users of this machine may read."""
    if any(name in os.environ for name in _TOKENS):
        yield
        return
    os.environ[_TOKENS[0]] = secrets.token_hex(32)
    try:
        yield
    finally:
        del os.environ[_TOKENS[0]]


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Leave SIGTERM to who handled it before: `ray.init` takes it, and lets the process abort."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
