"""The messages between an engine and its workers, processes or Ray actors, as bytes: requests to workers, and replies."""

import io
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmutual.engines.client_store import ClientStore, DiskStorage
from fedmutual.errors import ConfigError


class Unportable(ConfigError):
    """The data, networks or algorithm of clients cannot be pickled for another process."""


class HostRequest(NamedTuple):
    """Ask a worker to build these clients and to hold them in place of its earlier clients."""

    number: int
    clients: Sequence[str]
    folder: str  # the working folder of the process that asks
    path: Sequence[str]  # sys.path of that process
    threads: int
    dtype: torch.dtype
    disk: DiskStorage | None
    make: bytes  # the pickled `Make`, to be unpickled after sys.path is set; b"": the worker receives it in another way


class JobRequest(NamedTuple):
    """Ask a worker to run `do` with each of the named clients and their arguments."""

    number: int
    do: Callable[..., Any]
    arguments: Mapping[str, tuple[Any, ...]]
    reads: bool  # as in `Simulation.visit`


class WorkerReply(NamedTuple):
    """The reply of a worker for one client to a `JobRequest`; to a `HostRequest` one reply, whose `client` is "".

    `job` is the number of the request. `result` is what the function returned; if `problem` is set, the function raised that
    exception and the result is None.
    """

    job: int
    client: str
    result: Any
    problem: BaseException | None = None


def make_host_request(
    number: int, make: bytes, clients: Sequence[str], threads: int = 1, disk: DiskStorage | None = None
) -> HostRequest:
    """Return the request to hold these clients, with the folder, the path and the default type of this process."""
    return HostRequest(number, clients, os.getcwd(), list(sys.path), threads, torch.get_default_dtype(), disk, make)


def answer_request(
    message: bytes, clients: ClientStore, make: bytes = b"", own_path: Sequence[str] = ()
) -> Iterator[WorkerReply]:
    """Carry out a request on these clients; yield a reply for each client, and stop after the first problem.

    make: the pickled `Make` of a `HostRequest` that does not hold it. own_path: the entries that stay at the front of
    sys.path, before those of the request.
    """
    number, id = 0, ""
    try:
        request: HostRequest | JobRequest = unpack_payload(message)
        del message  # which may be as large as the data of the clients
        number = request.number
        if isinstance(request, HostRequest):
            _host_clients(request, clients, request.make or make, own_path)
            yield WorkerReply(number, "", None)
        else:
            for id, arguments in request.arguments.items():
                yield WorkerReply(number, id, clients.run(id, request.do, arguments, request.reads))
    except Exception as problem:
        yield WorkerReply(number, id, None, make_portable(problem))


def _host_clients(request: HostRequest, clients: ClientStore, make: bytes, own_path: Sequence[str]) -> None:
    """Build and hold the clients of a request; without clients, forget the modules of the last run."""
    try:
        os.chdir(request.folder)
    except OSError:  # not on this node, or removed: no relative path may lead into the folder of an earlier run
        os.chdir(os.path.abspath(os.sep))
    sys.path[:] = [*own_path, *(entry for entry in request.path if entry not in own_path)]
    torch.set_num_threads(request.threads)
    torch.set_default_dtype(request.dtype)
    clients.clear()
    if request.clients:
        clients.hold(unpack_payload(make), request.clients, request.disk)
    else:
        forget_modules()


def forget_modules() -> None:
    """Remove modules that are not installed from sys.modules: a user may have changed them since the last run."""
    installed = tuple({sys.prefix, sys.base_prefix})
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if (
            file
            and not file.startswith(installed)
            and name.partition(".")[0] not in ("fedmutual", "__main__", "__mp_main__")
        ):
            del sys.modules[name]


def pack_payload(message: HostRequest | JobRequest | WorkerReply) -> memoryview:
    """Return a message as bytes; CPU tensors are written as their raw bytes."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(message)
    return file.getbuffer()


def unpack_payload(message: bytes) -> Any:
    """Return the Python object in bytes from `pack_payload` or `pickle` of another process.

    Raises:
        Unportable: the message cannot be unpickled in this process.
    """
    try:
        return pickle.loads(message)
    except Exception as problem:  # a module that is not found here, for instance
        raise describe_unportable(problem) from None


def make_portable(problem: Exception) -> Exception:
    """Return the exception with its traceback as a note.

    An exception that changes when it is pickled, or cannot be pickled, becomes a RuntimeError with its text.
    """
    trace = "".join(traceback.format_exception(problem))
    try:
        is_portable = str(pickle.loads(pickle.dumps(problem))) == str(problem)
    except Exception:
        is_portable = False
    if not is_portable:
        problem = RuntimeError(f"{type(problem).__name__}: {problem}")
    problem.add_note(trace)
    return problem


def describe_unportable(problem: Exception) -> Unportable:
    """Return the error for the user after a failure to pickle or to unpickle."""
    return Unportable(
        "the data, networks or algorithm cannot be handed to worker processes "
        f"({type(problem).__name__}: {problem}); use engine.name = 'inprocess'"
    )


class _Pickler(pickle.Pickler):
    """Writes tensors as their raw bytes: torch's own pickling writes each tensor in the format of a file."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.device.type == "cpu" and not value.requires_grad:
            return _read_tensor, (value.contiguous().reshape(-1).view(torch.uint8).numpy(), value.dtype, tuple(value.shape))
        return NotImplemented


def _read_tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(content).view(dtype).view(shape)
