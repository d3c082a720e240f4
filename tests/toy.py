"""Small federations for all tests that need clients: known data, known nets, any algorithm, any engine."""

import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from fedmutual.algorithms import FML, Independent
from fedmutual.algorithms.peers import make_proxy_state
from fedmutual.core import Algorithm, At, Batch, Client, Message
from fedmutual.engines.inprocess import DiskStorage, InProcess
from fedmutual.engines.loop import federate
from fedmutual.engines.processes import Processes
from fedmutual.engines.ray import Cluster
from fedmutual.engines.stacked import Stacked, Stacker
from fedmutual.errors import ConfigError
from fedmutual.events import Event
from fedmutual.federation.experiment import RoundPlan
from fedmutual.optimizers import COMMON


class Ready:
    """Clients that were built before the engine: picklable, so that worker processes can have copies."""

    def __init__(self, clients: Iterable[Client]) -> None:
        self._clients = {client.id: client for client in clients}

    def __call__(self, id: str) -> Client:
        return self._clients[id]


class DiskBacked(InProcess):
    """An engine with one client in memory: the states of the others are stored in a folder of the engine."""

    def __init__(self, clients: list[Client]) -> None:
        self._folder = TemporaryDirectory()
        make, ids = Ready(clients), [c.id for c in clients]
        super().__init__(lambda id: deepcopy(make(id)), ids, DiskStorage(Path(self._folder.name), 1))

    def close(self) -> None:
        super().close()
        self._folder.cleanup()


def in_process(clients: list[Client]) -> InProcess:
    """Return the engine without other processes."""
    return InProcess(Ready(clients), [c.id for c in clients])


def stacked(clients: list[Client]) -> Stacked:
    """Return the engine that steps clients together."""
    optimizers = {type(optimizer) for c in clients for optimizer in c.optimizers.values()}
    is_obstructed = any(c.recipe.patience for c in clients) or not optimizers <= {*COMMON}
    return Stacked(Ready(clients), [c.id for c in clients], Stacker(obstacle="as in a run" if is_obstructed else ""))


def processes(clients: list[Client]) -> Processes:
    """Return an engine with three worker processes: of four equal clients two are split."""
    return Processes(Ready(clients), dict.fromkeys((c.id for c in clients), 1.0), workers=3, threads=torch.get_num_threads())


def cluster(clients: list[Client]) -> Cluster:
    """Return an engine with three workers on three nodes."""
    from nodes import start_three_nodes  # not where a worker imports this file

    costs, threads = dict.fromkeys((c.id for c in clients), 1.0), torch.get_num_threads()
    return Cluster(Ready(clients), costs, workers=3, threads=threads, address=start_three_nodes().address)


ENGINES: dict[str, Callable[[list[Client]], Any]] = {
    "inprocess": in_process,
    "disk-backed": DiskBacked,
    "processes": processes,
    "cluster": cluster,
    "stacked": stacked,
}
EXACT = ("inprocess", "disk-backed", "processes", "cluster")
"""Engines whose results are the same bits."""
CLASSES, FEATURES = 3, 6


class Rows:
    """Resident rows."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, plan: Iterable[Tensor], rng: torch.Generator | None = None) -> Iterable[Batch]:
        return ((self.x[i], self.y[i]) for i in plan)


def mlp(seed: int, hidden: int = 8, norm: bool = False) -> nn.Module:
    """Return a small net with weights from a seed, with BatchNorm if asked."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        middle = [nn.BatchNorm1d(hidden)] if norm else []
        return nn.Sequential(nn.Linear(FEATURES, hidden), *middle, nn.ReLU(), nn.Linear(hidden, CLASSES))


class Dropping(nn.Module):
    """A network with a random part and with running statistics."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.3), mlp(0, norm=True))

    def forward(self, x):
        return self.net(x)


def make_dropping(seed: int) -> nn.Module:
    return Dropping()


@dataclass(frozen=True, kw_only=True)
class Counted(FML):
    """A phase with memory, and whose loss terms hold the number of the step."""

    terms = ("personal", "meme", "steps")

    def edit(self, grads, memory):
        return grads, {"steps": memory.get("steps", torch.zeros(())) + 1}


def rows(seed: int, n: int) -> Rows:
    """Return n rows of noise, labelled by which of three features is greatest, so that the labels can be learned."""
    x = torch.randn(n, FEATURES, generator=torch.Generator().manual_seed(seed))
    return Rows(x, x[:, :CLASSES].argmax(1))


def client(
    id: str,
    algorithm: Algorithm,
    n: int = 20,
    personal: Callable[[int], nn.Module] = mlp,
    shared: Callable[[int], nn.Module] = mlp,
    home: Sequence[str] = (),
    **changes: Any,
) -> Client:
    """Return a client with the nets of its algorithm, SGD with momentum and weight decay. home: shared names that stay."""
    number = int(id)
    nets = {}
    if "personal" in algorithm.scores:
        nets["personal"] = personal(100 + number)
    if {"global", "proxy"} & set(algorithm.scores):
        nets["meme"] = shared(0)
    optimizers = {
        k: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.0, momentum=0.9, weight_decay=5e-4)
        for k, m in nets.items()
    }
    crosses = tuple(k for k in nets["meme"].state_dict() if k not in home) if "meme" in nets else ()
    made = Client(
        id, nets, optimizers, {"private": rows(number, n), "validation": rows(50 + number, 12)}, rate=0.1, shared=crosses
    )
    made.proxy = "proxy" in algorithm.scores
    return replace(made, **changes)


def server(shared: Callable[[int], nn.Module] = mlp, home: Sequence[str] = ()) -> Message:
    """Return the first shared state."""
    return {k: v.clone() for k, v in shared(0).state_dict().items() if k not in home}


def first_state(
    algorithm: Algorithm, ids: Iterable[str], shared: Callable[[int], nn.Module] = mlp, home: Sequence[str] = ()
) -> Message:
    """Return the server's first state, as an experiment has it."""
    if "proxy" in algorithm.scores:
        return make_proxy_state(ids, CLASSES, server(shared, home))
    begun = algorithm.begins(shared(0), CLASSES) if algorithm.begins is not None else {}
    return begun | (server(shared, home) if "global" in algorithm.scores else {})


def federation(
    algorithm: Algorithm,
    clients: list[Client],
    rounds: int = 3,
    start: Message | None = None,
    engine: str = "inprocess",
    participation: float = 1.0,
    seed: int = 7,
    events: list[Event] | None = None,
) -> Message:
    """Run the federation and return the server's last state. The clients are changed in place."""
    plan = RoundPlan(
        algorithm=algorithm,
        seed=seed,
        rounds=rounds,
        clients=tuple(c.id for c in clients),
        notes=(),
        participation=participation,
        evaluate_every=rounds,
        evaluations={},
        seeds={},
        homes={},
    )
    state = start if start is not None else first_state(algorithm, [c.id for c in clients])
    with closing(ENGINES[engine](clients)) as hosted:
        last = federate(plan, hosted, state, None, [events.append] if events is not None else [], None)
        lived = dict(hosted.visit(itself, {c.id: () for c in clients}))
    for client in clients:
        vars(client).update(vars(lived[client.id]))
    return last


def itself(client: Client) -> Client:
    """Return the client where it lives, for a test to look at."""
    return client


def weights(net: nn.Module) -> Message:
    """Return a copy of a net's tensors."""
    return {k: v.detach().clone() for k, v in net.state_dict().items()}


def difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the greatest absolute difference of two messages with equal names."""
    assert a.keys() == b.keys()
    return max((a[k].double() - b[k].double()).abs().max().item() for k in a)


def at(round: int = 0, rounds: int = 3, seed: int = 7) -> At:
    """Return a position in a run."""
    return At(seed, round, rounds)


class Spare(nn.Module):
    """A net with a frozen layer, and a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(0)
        self.unused = mlp(1)[0]
        self.net[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@dataclass(frozen=True, kw_only=True)
class Count(Independent):
    """A phase that counts its steps in memory."""

    def edit(self, grads: Message, memory: Message) -> tuple[Message, Message]:
        return grads, {"steps": memory.get("steps", torch.zeros(())) + 1}


@dataclass(frozen=True, kw_only=True)
class Absent(FML):
    """A phase that one client skips."""

    def end(self, client: Client, at: At) -> Message:
        return {} if client.id == "1" else super().end(client, at)


def parent_pid(client):
    return os.getppid()


def pid(client: Client) -> int:
    """Return the process id of a client's process."""
    return os.getpid()


def echo(client: Client, thing: Tensor) -> Tensor:
    """Return the argument."""
    return thing


def killed(client: Client) -> None:
    """Kill the process."""
    os.kill(os.getpid(), signal.SIGKILL)


def refused(client: Client) -> None:
    """Raise an error with one sentence for the user."""
    raise ConfigError(f"not {client.id}")


def raise_unpicklable(client: Client) -> None:
    """Raise an exception that cannot be pickled."""

    class Local(Exception):
        pass

    raise Local("cannot cross")
