"""The Ray actor that holds clients, and the engine's handle of an actor."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmutual.engines import allocator
from fedmutual.engines.assignment import WorkerLost
from fedmutual.engines.client_store import ClientStore, DiskStorage
from fedmutual.engines.ray_init import import_ray
from fedmutual.engines.rpc import answer_request, make_host_request, pack_payload


class ClientActor:
    """A Ray actor that holds clients and answers requests."""

    def __init__(self) -> None:
        allocator.keep_freed_memory()
        self._clients = ClientStore()
        self._path = list(sys.path)

    def get_host_name(self) -> str:
        """Return the name of this worker for messages."""
        return f"worker process {os.getpid()} on node {import_ray().util.get_node_ip_address()}"

    def answer(self, request: bytes, make: bytes = b"") -> Iterator[bytes]:
        """Carry out a packed request; yield packed replies, as `answer_request`."""
        for reply in answer_request(request, self._clients, make, self._path):
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
        """Ask the actor to build and hold clients; return the stream of the reply.

        make: a reference to the pickled `Make`.
        """
        self.clients = tuple(ids)
        return self.actor.answer.remote(bytes(pack_payload(make_host_request(0, b"", ids, threads, disk))), make)

    def wait_for(self, reference: Any) -> Any:
        """Return the value of a reference.

        Raises:
            WorkerLost: the worker or its node died, or cannot be reached.
            RayTaskError: the actor raised an exception, and is alive.
        """
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
