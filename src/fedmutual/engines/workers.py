"""What engines with workers share: which worker has which clients, and the messages to and from a worker, as bytes.

A request is (number, function, client -> arguments, reads), or without a function (number, None, arguments of
`_host_clients`, False). For each client the worker replies (number of the request, client, result, None), or (number,
client, None, exception); to a request without a function it replies once, with the client "".
"""

import io
import os
import pickle
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedmutual.engines.inprocess import ClientStore, DiskStorage
from fedmutual.errors import ConfigError

WorkerReply = tuple[int, str, Any, BaseException | None]


class Unportable(ConfigError):
    """The data, networks or algorithm of clients cannot be pickled for another process."""


def assign_clients(costs: Mapping[str, float], workers: int) -> list[list[str]]:
    """Return the clients of each worker. Each client, largest cost first, goes to the worker with the least work.

    This is the LPT rule (Graham, Bounds on multiprocessing timing anomalies, 1969, https://doi.org/10.1137/0117039). No
    worker is without a client, so there may be fewer workers than `workers`.

    costs: the work of each client, in any unit.

    >>> assign_clients({"0": 3.0, "1": 1.0, "2": 2.0, "3": 2.0}, 2)
    [['0', '1'], ['2', '3']]
    """
    assigned: list[list[str]] = [[] for _ in range(min(workers, len(costs)))]
    load = [0.0] * len(assigned)
    for id in sorted(costs, key=lambda i: -costs[i]):
        lightest = load.index(min(load))
        assigned[lightest].append(id)
        load[lightest] += costs[id]
    return assigned


BALANCED = 1.03
"""The load of the busiest worker over the mean load, up to which no client is split."""


def split_clients(costs: Mapping[str, float], workers: int) -> tuple[list[list[str]], dict[str, dict[int, float]]]:
    """Return (the clients of each worker, client -> both workers that share the client -> the worker's share of its work).

    Of a shared client one worker takes the first steps of a phase, and the other one the rest. McNaughton's rule (Scheduling
    with deadlines and loss functions, 1959, https://doi.org/10.1287/mnsc.6.1.1): fill one worker after the other up to the
    mean load, or up to the largest client; the rest of a client goes to the next worker. A worker takes its part of one
    shared client first, and its part of the other one last, so that two workers never need a client at the same time. If
    `assign_clients` balances the workers, no client is split.

    >>> split_clients({"0": 1.0, "1": 1.0, "2": 1.0}, 2)
    ([['0', '1'], ['1', '2']], {'1': {0: 0.5, 1: 0.5}})
    """
    assigned = assign_clients(costs, workers)
    load = max(sum(costs.values()) / len(assigned), *costs.values())
    if max(sum(costs[id] for id in ids) for ids in assigned) <= BALANCED * load:
        return assigned, {}
    filled: list[list[str]] = [[]]
    split, room = {}, load
    for id in sorted(costs, key=lambda i: -costs[i]):
        filled[-1].append(id)
        remaining_cost = costs[id] - room
        if remaining_cost > 1e-9 * load:
            split[id] = {len(filled) - 1: room / costs[id], len(filled): remaining_cost / costs[id]}
            filled.append([id])
            room = load - remaining_cost
        elif remaining_cost > -1e-9 * load and len(filled) < len(assigned):
            filled.append([])
            room = load
        else:
            room = -remaining_cost
    return [ids for ids in filled if ids], split


def pack_host_request(
    number: int, make: bytes, clients: Sequence[str], threads: int = 1, disk: DiskStorage | None = None
) -> memoryview:
    """Return the request to build clients and to hold them in place of the earlier ones; see `_host_clients`."""
    settings = os.getcwd(), list(sys.path), torch.get_default_dtype(), threads, make, clients, disk
    return pack_payload((number, None, settings, False))


def answer_request(
    message: bytes, clients: ClientStore, make: bytes = b"", own_path: Sequence[str] = ()
) -> Iterator[WorkerReply]:
    """Carry out a request on these clients; yield a reply for each client, and stop after the first problem.

    make: the pickled `Make` of a request that does not hold it. own_path: the entries that stay at the front of sys.path,
    before those of the request.
    """
    number, id = 0, ""
    try:
        number, do, arguments, reads = unpack_payload(message)
        del message  # which may be as large as the data of the clients
        if do is None:
            _host_clients(clients, make, own_path, *arguments)
            yield number, "", None, None
            return
        for id, values in arguments.items():
            yield number, id, clients.run(id, do, values, reads), None
    except Exception as problem:
        yield number, id, None, make_portable(problem)


def _host_clients(
    clients: ClientStore,
    make: bytes,
    own_path: Sequence[str],
    folder: str,
    path: Sequence[str],
    dtype: torch.dtype,
    threads: int,
    own_make: bytes,
    ids: Sequence[str],
    disk: DiskStorage | None,
) -> None:
    """Build and hold clients, with the folder, the path and the default type of the process that asks.

    own_make: the pickled `Make`, to be unpickled after sys.path is set; b"": `make` in its place. Without ids, forget the
    modules of the last run.
    """
    try:
        os.chdir(folder)
    except OSError:  # not on this node, or removed: no relative path may lead into the folder of an earlier run
        os.chdir(os.path.abspath(os.sep))
    sys.path[:] = [*own_path, *(entry for entry in path if entry not in own_path)]
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    clients.hold()  # the earlier clients leave the memory first
    if ids:
        clients.hold(unpack_payload(own_make or make), ids, disk)
    else:
        forget_modules()


def forget_modules() -> None:
    """Remove modules that are not installed from sys.modules: a user may have changed them since the last run."""
    installed = tuple({sys.prefix, sys.base_prefix})
    for name, module in list(sys.modules.items()):
        file, package = getattr(module, "__file__", None), name.partition(".")[0]
        if file and not file.startswith(installed) and package not in ("fedmutual", "__main__", "__mp_main__"):
            del sys.modules[name]


def pack_payload(message: Any) -> memoryview:
    """Return a request or a reply as bytes; CPU tensors are written as their raw bytes."""
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
