"""What crosses between an engine and the processes that keep its clients: jobs there, answers back, as bytes."""

import io
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmutual.core import Client
from fedmutual.errors import ConfigError

Make = Callable[[str], Client]
"""A client by its id, called where it is to live."""


class Unportable(ConfigError):
    """What clients are made of cannot be handed to another process."""


class WorkerSettings(NamedTuple):
    """What a worker is told before all: either may have changed since it was started, and what follows may name modules."""

    folder: str  # where relative paths begin
    path: Sequence[str]  # where modules are found


class HostRequest(NamedTuple):
    """What a worker is told then: to make these clients and keep them, instead of those it had."""

    number: int
    make: Make
    clients: Sequence[str]
    threads: int
    dtype: torch.dtype


class JobRequest(NamedTuple):
    """What a worker is told after that: what to do with which of its clients."""

    number: int
    do: Callable[..., Any]
    arguments: Mapping[str, tuple[Any, ...]]


class WorkerReply(NamedTuple):
    """What it says, a client at a time."""

    job: int
    client: str
    result: Any
    problem: BaseException | None = None


def answer_request(message: bytes, clients: dict[str, Client]) -> Iterator[WorkerReply]:
    """Do what a message asks for with these clients, or make them: an answer for each, up to the first problem."""
    number, id = 0, ""
    try:
        told: WorkerSettings | HostRequest | JobRequest = unpack_payload(message)
        if isinstance(told, WorkerSettings):
            os.chdir(told.folder)
            sys.path[:] = told.path
            return
        number = told.number
        if isinstance(told, HostRequest):
            clients.clear()
            if not told.clients:
                forget_modules()
            torch.set_num_threads(told.threads)
            torch.set_default_dtype(told.dtype)
            clients |= {id: told.make(id) for id in told.clients}
            yield WorkerReply(number, "", None)
        else:
            for id, given in told.arguments.items():
                yield WorkerReply(number, id, told.do(clients[id], *given))
    except Exception as problem:
        yield WorkerReply(number, id, None, make_portable(problem))


def forget_modules() -> None:
    """Drop modules that are not installed: a user may have changed them since the last run."""
    installed = tuple({sys.prefix, sys.base_prefix})
    for name, module in list(sys.modules.items()):
        place = getattr(module, "__file__", None)
        if (
            place
            and not place.startswith(installed)
            and name.partition(".")[0] not in ("fedmutual", "__main__", "__mp_main__")
        ):
            del sys.modules[name]


def pack_payload(what: WorkerSettings | JobRequest | WorkerReply) -> memoryview:
    """As bytes, with tensors in main memory as their own."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(what)
    return file.getbuffer()


def unpack_payload(message: bytes) -> Any:
    """What was packed, or pickled, elsewhere. Raises Unportable where it cannot be made here."""
    try:
        return pickle.loads(message)
    except Exception as problem:  # a module that is not found here, for instance
        raise describe_unportable(problem) from None


def make_portable(problem: Exception) -> Exception:
    """An exception that can cross, with its trace as a note; one that cannot becomes a RuntimeError with its text."""
    trace = "".join(traceback.format_exception(problem))
    try:
        pickle.loads(pickle.dumps(problem))
    except Exception:
        problem = RuntimeError(f"{type(problem).__name__}: {problem}")
    problem.add_note(trace)
    return problem


def describe_unportable(problem: Exception) -> Unportable:
    """What a failure to pickle, or to unpickle, means to the user."""
    return Unportable(
        "the data, networks or algorithm cannot be handed to worker processes "
        f"({type(problem).__name__}: {problem}); use engine.name = 'inprocess'"
    )


class _Pickler(pickle.Pickler):
    """Tensors as their bytes: plain pickle would write each as a file of torch's."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is Tensor and thing.device.type == "cpu" and not thing.requires_grad:
            return _tensor, (thing.contiguous().reshape(-1).view(torch.uint8).numpy(), thing.dtype, tuple(thing.shape))
        return NotImplemented


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(content).view(dtype).view(shape)
