"""Ray actors that keep clients, and how one is seen from the engine."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedmutual.core import Client
from fedmutual.engines import allocator
from fedmutual.engines.assignment import WorkerLost
from fedmutual.engines.ray_init import import_ray
from fedmutual.engines.rpc import WorkerReply, answer_request, forget_modules, make_portable, pack_payload, unpack_payload


class ClientActor:
    """An actor: keeps its clients, and does with them what it is asked to."""

    def __init__(self) -> None:
        allocator.keep_freed_memory()
        self._clients: dict[str, Client] = {}
        self._path = list(sys.path)

    def name(self) -> str:
        """What messages call it."""
        return f"worker process {os.getpid()} on node {import_ray().util.get_node_ip_address()}"

    def host(
        self, make: bytes, ids: Sequence[str], threads: int, dtype: torch.dtype, folder: str, path: Sequence[str]
    ) -> bytes:
        """Make these clients instead of those it had -> an answer, which holds what went wrong.

        folder, path: the working folder of who asks, and where Python looks for modules there.
        """
        self._clients.clear()
        with suppress(OSError):  # not on this node: whatever is named from it will not be found
            os.chdir(folder)
        sys.path[:] = [*self._path, *(p for p in path if p not in self._path)]
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        problem = None
        try:
            if ids:
                made = unpack_payload(make)
                self._clients |= {id: made(id) for id in ids}
            else:
                forget_modules()  # modules of the last run's
        except Exception as caught:
            problem = make_portable(caught)
        return bytes(pack_payload(WorkerReply(0, "", None, problem)))

    def work(self, job: bytes) -> Iterator[bytes]:
        """Do a job -> answers, a client at a time."""
        for answer in answer_request(job, self._clients):
            yield bytes(pack_payload(answer))

    def sees(self, file: str) -> bool:
        """Whether there is such a file here."""
        return Path(file).exists()


@dataclass(eq=False)
class Worker:
    """An actor, seen from here."""

    ray: Any
    actor: Any
    name: str = "a worker"
    clients: tuple[str, ...] = ()

    def host(self, make: Any, ids: Sequence[str], threads: int = 1) -> Any:
        """Give it clients to make and keep -> a reference to its answer."""
        self.clients = tuple(ids)
        return self.actor.host.remote(make, ids, threads, torch.get_default_dtype(), os.getcwd(), sys.path)

    def told(self, reference: Any) -> Any:
        """What it answered. Raises Lost where it, or its node, died."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError:  # it lives
            raise
        except self.ray.exceptions.ActorUnavailableError:
            raise WorkerLost(self.name, self.clients, "is out of reach, as its node or the network is down") from None
        except self.ray.exceptions.RayError as problem:
            raise WorkerLost(self.name, self.clients, f"died ({_reason(problem)})") from None


def _reason(problem: Exception) -> str:
    """What Ray says of a death, without its advice."""
    text = str(problem).strip()
    detail = re.search(r"Worker exit detail: (.+?)(?: Some common causes|$)", text)
    return detail[1] if detail else text.splitlines()[-1][:300]
