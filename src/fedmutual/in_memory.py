"""The caller's objects, under names for a configuration: "fedmutual.in_memory:model.north" is a network.

The objects exist while `hold_objects` is in force, in this process; a configuration with such names cannot run elsewhere.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from fedmutual.errors import ConfigError

PREFIX = f"{__name__}:"

_objects: ContextVar[Mapping[str, Any]] = ContextVar("objects", default=MappingProxyType({}))


@contextmanager
def hold_objects(objects: Mapping[str, Any]) -> Iterator[None]:
    """Within, make objects available to configurations in this thread. objects: name -> object."""
    token = _objects.set(objects)
    try:
        yield
    finally:
        _objects.reset(token)


def __getattr__(name: str) -> Any:
    """Return the object of that name.

    Raises:
        ConfigError: no object of that name is held here.
    """
    objects = _objects.get()
    if name in objects:
        return objects[name]
    if name.startswith("_"):  # what Python itself asks of a module
        raise AttributeError(name)
    key = name.removeprefix("model.")
    fix = f", or give the function that makes the network: fedmutual.Run(FOLDER, models={{{key!r}: make}})"
    if name not in ("shared", f"model.{key}"):
        fix = ""
    raise ConfigError(
        f"{PREFIX}{name} was an object in the memory of another process, or of another call; use the run that "
        f"fedmutual.federate or fedmutual.compare returned{fix}"
    )
