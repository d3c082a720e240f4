"""The Ray actor that holds clients, and the engine's handle of an actor."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedmutual.engines import allocator
from fedmutual.engines.assignment import WorkerLost
from fedmutual.engines.client_store import ClientStore, DiskStorage
from fedmutual.engines.ray_init import import_ray
from fedmutual.engines.rpc import WorkerReply, answer_request, forget_modules, make_portable, pack_payload, unpack_payload


class ClientActor:
    """A Ray actor that holds clients and runs jobs with them."""

    def __init__(self) -> None:
        allocator.keep_freed_memory()
        self._clients = ClientStore()
        self._path = list(sys.path)

    def get_host_name(self) -> str:
        """Return the name of this worker for messages."""
        return f"worker process {os.getpid()} on node {import_ray().util.get_node_ip_address()}"

    def host_clients(
        self,
        make: bytes,
        ids: Sequence[str],
        threads: int,
        dtype: torch.dtype,
        folder: str,
        path: Sequence[str],
        disk: DiskStorage | None,
    ) -> bytes:
        """Build these clients in place of the earlier clients -> a packed reply, which holds the problem if there was one.

        folder, path: the working folder and sys.path of the process that asks.
        """
        self._clients = ClientStore()
        with suppress(OSError):  # the folder is not on this node; a module in it will be reported as missing
            os.chdir(folder)
        sys.path[:] = [*self._path, *(p for p in path if p not in self._path)]
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        problem = None
        try:
            if ids:
                self._clients.hold(unpack_payload(make), ids, disk)
            else:
                forget_modules()  # of the last run
        except Exception as caught:
            problem = make_portable(caught)
        return bytes(pack_payload(WorkerReply(0, "", None, problem)))

    def run_job(self, job: bytes) -> Iterator[bytes]:
        """Run a job -> packed replies, one for each client."""
        for reply in answer_request(job, self._clients):
            yield bytes(pack_payload(reply))

    def has_file(self, file: str) -> bool:
        """Return whether this file exists on the node of this worker."""
        return Path(file).exists()


@dataclass(eq=False)
class Worker:
    """The engine's handle of an actor: the actor, its name in messages, and the ids of the clients that it holds."""

    ray: Any
    actor: Any
    name: str = "a worker"
    clients: tuple[str, ...] = ()

    def host_clients(self, make: Any, ids: Sequence[str], threads: int = 1, disk: DiskStorage | None = None) -> Any:
        """Ask the actor to build and hold clients -> a reference to its reply."""
        self.clients = tuple(ids)
        return self.actor.host_clients.remote(make, ids, threads, torch.get_default_dtype(), os.getcwd(), sys.path, disk)

    def wait_for(self, reference: Any) -> Any:
        """Return the value of a reference. Raises WorkerLost if the worker or its node died."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError:  # the worker is alive
            raise
        except self.ray.exceptions.ActorUnavailableError:
            raise WorkerLost(self.name, self.clients, "cannot be reached, because its node or the network is down") from None
        except self.ray.exceptions.RayError as problem:
            raise WorkerLost(self.name, self.clients, f"died ({_find_reason(problem)})") from None


def _find_reason(problem: Exception) -> str:
    """Return the reason in Ray's message about a death, without the advice."""
    text = str(problem).strip()
    detail = re.search(r"Worker exit detail: (.+?)(?: Some common causes|$)", text)
    return detail[1] if detail else text.splitlines()[-1][:300]
