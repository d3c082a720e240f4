"""The engine that runs all clients in this process, one after the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, TypeVar

from fedmutual.core import Client
from fedmutual.engines.base import Make
from fedmutual.engines.client_store import ClientStore, DiskStorage

R = TypeVar("R")


class InProcess:
    """An engine without other processes: it calls each function for one client after the other, in this process."""

    def __init__(self, clients: Iterable[Client]) -> None:
        self._clients = {client.id: client for client in clients}

    def run_each(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]]
    ) -> Iterator[tuple[str, R]]:
        """As `Engine.run_each`, in the order of `arguments`."""
        for id, values in arguments.items():
            yield id, do(self._clients[id], *values)

    def take_remarks(self) -> list[str]:
        """As `Engine.take_remarks`."""
        return []

    def close(self) -> None:
        """As `Engine.close`."""
        self._clients = {}


class DiskBackedInProcess(InProcess):
    """An engine without other processes, which stores the states of clients that are not in memory in the run folder."""

    def __init__(self, make: Make, ids: Sequence[str], disk: DiskStorage) -> None:
        super().__init__(())
        self._store = ClientStore()
        self._store.hold(make, ids, disk)

    def run_each(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]]
    ) -> Iterator[tuple[str, R]]:
        """As `Engine.run_each`, in the order of `arguments`."""
        for id, values in arguments.items():
            yield id, self._store.run(id, do, *values)

    def close(self) -> None:
        """As `Engine.close`."""
        self._store = ClientStore()
