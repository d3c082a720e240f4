"""The engine that runs all clients in this process, one after the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, TypeVar

from fedmutual.core import Client
from fedmutual.engines.base import Make, Simulation
from fedmutual.engines.client_store import ClientStore, DiskStorage

R = TypeVar("R")


class InProcess(Simulation):
    """An engine without other processes: it calls each function for one client after the other, in this process."""

    def __init__(self, clients: Iterable[Client]) -> None:
        self._clients = {client.id: client for client in clients}

    def visit(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]], reads: bool = False
    ) -> Iterator[tuple[str, R]]:
        """As `Simulation.visit`, in the order of `arguments`."""
        for id, values in arguments.items():
            yield id, do(self._clients[id], *values)

    def close(self) -> None:
        """As `Engine.close`."""
        self._clients = {}


class DiskBackedInProcess(InProcess):
    """An engine without other processes, which stores the states of clients that are not in memory in the run folder."""

    def __init__(self, make: Make, ids: Sequence[str], disk: DiskStorage) -> None:
        super().__init__(())
        self._store = ClientStore()
        self._store.hold(make, ids, disk)

    def visit(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]], reads: bool = False
    ) -> Iterator[tuple[str, R]]:
        """As `Simulation.visit`, in the order of `arguments`."""
        for id, values in arguments.items():
            yield id, self._store.run(id, do, values, reads)

    def close(self) -> None:
        """As `Engine.close`."""
        self._store = ClientStore()
