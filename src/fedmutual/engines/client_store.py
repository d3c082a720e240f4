"""The clients of one process: all in memory, or some in memory and the states of the others in the run folder."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, TypeVar

from torch import Size

from fedmutual.core import Client, Message
from fedmutual.engines.base import Make
from fedmutual.errors import RunError
from fedmutual.rundir.checkpoint import collect_client_state, restore_client
from fedmutual.rundir.file_names import client_folder
from fedmutual.tensor_files import read_tensors, write_tensors

R = TypeVar("R")


class DiskStorage(NamedTuple):
    """Where the states of clients that are not in memory are stored, and how many clients of a process stay in memory."""

    folder: Path  # of the run
    resident: int  # at least 1
    name: str  # a random name, so that no file that was in the run folder before is read

    def remove_files(self) -> None:
        """Remove the stored states of all processes; the engine must be closed."""
        _remove(self.folder, self.name)


class ClientStore:
    """Builds clients, and runs functions with them. With `disk`, at most `disk.resident` clients are in memory.

    The client that was used longest ago leaves the memory first. A changed state is written to a file of this process in
    ``clients/<id>`` of the run folder, and is read when the client is used again. The file is no part of the saved run: no
    other process reads the file, and a resumed run begins with the files of the last saved round.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Release all clients, and their memory."""
        self._make: Make | None = None
        self._disk: DiskStorage | None = None
        self._clients: dict[str, Client] = {}  # the client that was used longest ago comes first
        self._changed: set[str] = set()  # clients in memory whose state is not in a file
        self._written: dict[str, dict[str, Size]] = {}  # client -> name and shape of each tensor in its file, in order

    def hold(self, make: Make, ids: Sequence[str], disk: DiskStorage | None = None) -> None:
        """Hold these clients in place of the earlier ones. They are built now, or with `disk` when they are first used.

        Raises:
            Exception: any exception of `make`, such as ConfigError.
        """
        self.clear()
        self._make, self._disk = make, disk
        if disk is None:
            self._clients = {id: make(id) for id in ids}

    def run(
        self, id: str, do: Callable[Concatenate[Client, ...], R], arguments: tuple[Any, ...] = (), reads: bool = False
    ) -> R:
        """Return ``do(client, *arguments)``. reads: as in `Simulation.visit`; a changed memory is written in any case.

        Raises:
            Exception: any exception of `do`, or of `make` if the client is built now.
            RunError: a state cannot be written or read.
        """
        client = self._clients.pop(id, None) or self._load(id)
        self._clients[id], memory = client, client.memory
        try:
            return do(client, *arguments)
        finally:
            if not reads or client.memory is not memory:
                self._changed.add(id)

    def _load(self, id: str) -> Client:
        """Return a client that is not in memory, with its last state."""
        assert self._make is not None
        assert self._disk is not None
        while len(self._clients) >= self._disk.resident:
            oldest = next(iter(self._clients))
            if oldest in self._changed:
                state = collect_client_state(self._clients[oldest], in_phase=True)
                write_tensors(self._find_file(oldest), state, {"format": "1"}, sync=False)
                self._changed.discard(oldest)
                self._written[oldest] = {name: tensor.shape for name, tensor in state.items()}
            del self._clients[oldest]
        client = self._make(id)
        if id in self._written:
            restore_client(client, self._read_state(id))
        return client

    def _read_state(self, id: str) -> Message:
        """Return the state in the order in which it was written, because algorithms may sum over a memory in its order."""
        path = self._find_file(id)
        try:
            tensors, _ = read_tensors(path)
            if {name: tensor.shape for name, tensor in tensors.items()} != self._written[id]:
                raise RunError(f"{path}: is not the state that this run wrote")
        except RunError as problem:
            raise RunError(f"{problem}; continue from the last saved round with --resume") from None
        return {name: tensors[name] for name in self._written[id]}

    def _find_file(self, id: str) -> Path:
        assert self._disk is not None
        return client_folder(self._disk.folder, id) / f".stored-{self._disk.name}-{os.getpid()}.safetensors"


def remove_abandoned_files(folder: Path) -> None:
    """Remove the stored states that a killed process left in a run folder."""
    _remove(folder, "*")


def _remove(folder: Path, name: str) -> None:
    """Remove the stored states of a run by its random name, also those that a killed worker wrote in part."""
    for pattern in (f".stored-{name}-*.safetensors", f"..stored-{name}-*.part"):
        for file in (folder / "clients").glob(f"*/{pattern}"):
            file.unlink(missing_ok=True)
