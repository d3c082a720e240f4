"""Clients of one process, and the engine without other processes: all in memory, or the states of some in the run folder."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Size

from fedmutual.core import Client
from fedmutual.engines.base import Arguments, Do, Make, R, Simulation
from fedmutual.errors import RunError
from fedmutual.rundir.checkpoint import collect_client_state, restore_client
from fedmutual.rundir.file_names import client_folder
from fedmutual.tensor_files import read_tensors, write_tensors


class DiskStorage(NamedTuple):
    """Where the states of clients that are not in memory are stored, and how many clients of a process stay in memory."""

    folder: Path  # of the run
    resident: int  # at least 1


class ClientStore:
    """Builds clients, and runs functions with them. With `disk`, at most `disk.resident` clients are in memory.

    The client that was used longest ago leaves the memory first. A changed state is written to a file of this process in
    ``clients/<id>`` of the run folder, and is read when the client is used again. The file is no part of the saved run: only
    the store that wrote the file reads it, and a resumed run begins with the files of the last saved round.
    """

    def __init__(self) -> None:
        self.hold()

    def hold(self, make: Make | None = None, ids: Sequence[str] = (), disk: DiskStorage | None = None) -> None:
        """Hold these clients in place of the earlier ones. They are built now, or with `disk` when they are first used.

        Raises:
            Exception: any exception of `make`, such as ConfigError.
        """
        self._make, self._disk = make, disk
        self.clients: dict[str, Client] = {}  # in memory; the client that was used longest ago comes first
        self._changed = set[str]()  # clients in memory whose state is not in a file
        self._written = dict[str, dict[str, Size]]()  # client -> name and shape of each tensor in its file, in order
        self._forms = dict[tuple[tuple[str, Size], ...], dict[str, Size]]()  # the values of `_written`, each once
        if make is not None and disk is None:
            self.clients = {id: make(id) for id in ids}

    def run(self, id: str, do: Do[R], arguments: tuple[Any, ...] = (), reads: bool = False) -> R:
        """Return ``do(client, *arguments)``. reads: as in `Simulation.visit`; a changed memory is written in any case.

        Raises:
            Exception: any exception of `do`, or of `make` if the client is built now.
            RunError: a state cannot be written or read.
        """
        client = self.clients.pop(id, None) or self._load(id)
        self.clients[id], memory = client, client.memory
        try:
            return do(client, *arguments)
        finally:
            if not reads or client.memory is not memory:
                self._changed.add(id)

    def _load(self, id: str) -> Client:
        """Return a client that is not in memory, with its last state."""
        assert self._make is not None
        assert self._disk is not None
        while len(self.clients) >= self._disk.resident:
            oldest = next(iter(self.clients))
            if oldest in self._changed:
                state = collect_client_state(self.clients[oldest], in_phase=True)
                write_tensors(_find_file(self._disk, oldest), state, {"format": "1"}, sync=False)
                self._changed.discard(oldest)
                shapes = {name: tensor.shape for name, tensor in state.items()}
                # one object for all clients with equal names in equal order
                self._written[oldest] = self._forms.setdefault((*shapes.items(),), shapes)
            del self.clients[oldest]
        client = self._make(id)
        if id in self._written:
            path = _find_file(self._disk, id)
            try:
                tensors, _ = read_tensors(path)
                if {name: tensor.shape for name, tensor in tensors.items()} != self._written[id]:
                    raise RunError(f"{path}: is not the state that this run wrote")
            except RunError as problem:
                raise RunError(
                    f"{problem}; continue from the last saved round with --resume (in Python: resume=True)"
                ) from None
            # in the order in which it was written, because algorithms may sum over a memory in its order
            restore_client(client, {name: tensors[name] for name in self._written[id]})
        return client


def _find_file(disk: DiskStorage, id: str) -> Path:
    return client_folder(disk.folder, id) / f".stored-{os.getpid()}.safetensors"


def remove_stored_states(folder: Path) -> None:
    """Remove the stored states of all processes of a run, also those that a killed process wrote, or wrote in part."""
    for pattern in (".stored-*.safetensors", "..stored-*.part"):
        for file in (folder / "clients").glob(f"*/{pattern}"):
            file.unlink(missing_ok=True)


class InProcess(Simulation):
    """An engine without other processes: it calls each function for one client after the other, in this process.

    disk: where the states of clients that are not in memory are stored; None: all clients stay in memory.
    """

    def __init__(self, make: Make, ids: Sequence[str], disk: DiskStorage | None = None) -> None:
        self._store = ClientStore()
        self._store.hold(make, ids, disk)

    def visit(self, do: Do[R], arguments: Arguments, reads: bool = False) -> Iterator[tuple[str, R]]:
        """As `Simulation.visit`, in the order of `arguments`."""
        for id, values in arguments.items():
            yield id, self._store.run(id, do, values, reads)

    def close(self) -> None:
        """As `Engine.close`."""
        self._store.hold()
