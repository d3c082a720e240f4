"""Ray itself: imported when asked for, started on this machine, or joined where a cluster runs."""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedmutual.errors import ConfigError

_QUIET = {"log_to_driver": False, "logging_level": logging.ERROR}
_ATTEMPTS = "RAY_gcs_server_port_wait_time_s"  # one of which takes 40 s


def load() -> Any:
    """Ray, which tells nobody that it is used and does not copy the working folder about, unless the user wants it to."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    copies = os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0") != "0"  # all files of that folder, under `uv run`
    try:
        import ray
    except ImportError:
        raise ConfigError("engine.name = 'cluster' needs Ray, fedmutual's extra 'ray': pip install 'ray>=2.40'") from None
    if not copies:
        ray._private.ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV = False  # it was read, where Ray had been imported before
    return ray


def start(ray: Any, cpus: int) -> None:
    """A cluster on this machine, with so many logical CPUs."""
    with _sigterm_kept():
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **_QUIET)


def join(ray: Any, address: str) -> None:
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


def session(ray: Any) -> tuple[str, str]:
    """What tells one connection to a cluster from another."""
    if not ray.is_initialized():
        return "", ""
    about = ray.get_runtime_context()
    return about.gcs_address, about.get_job_id()


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Leave SIGTERM to who handled it before: `ray.init` takes it, and lets the process abort."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
