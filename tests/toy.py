"""Small federations made by hand, for every test that needs clients: known data, known nets, any algorithm, any engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedmutual.core import Algorithm, At, Batch, Client, Message
from fedmutual.engines.inprocess import InProcess
from fedmutual.engines.loop import Plan, federate
from fedmutual.records.events import Event

ENGINES: dict[str, Callable[[list[Client]], Any]] = {"inprocess": InProcess}
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
    """A small net with weights from a seed; with BatchNorm if asked."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        middle = [nn.BatchNorm1d(hidden)] if norm else []
        return nn.Sequential(nn.Linear(FEATURES, hidden), *middle, nn.ReLU(), nn.Linear(hidden, CLASSES))


def rows(seed: int, n: int) -> Rows:
    """n rows of noise, labelled by which of three features is greatest: learnable."""
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
    """A client with the nets its algorithm needs; SGD with momentum and weight decay; `home`: shared names that stay."""
    number = int(id)
    nets = {}
    if "personal" in algorithm.scores:
        nets["personal"] = personal(100 + number)
    if "global" in algorithm.scores:
        nets["meme"] = shared(0)
    optimizers = {
        k: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.0, momentum=0.9, weight_decay=5e-4)
        for k, m in nets.items()
    }
    crosses = tuple(k for k in nets["meme"].state_dict() if k not in home) if "meme" in nets else ()
    made = Client(
        id, nets, optimizers, {"private": rows(number, n), "validation": rows(50 + number, 12)}, rate=0.1, shared=crosses
    )
    return replace(made, **changes)


def server(shared: Callable[[int], nn.Module] = mlp, home: Sequence[str] = ()) -> Message:
    """The first shared state."""
    return {k: v.clone() for k, v in shared(0).state_dict().items() if k not in home}


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
    """Run it -> the server's last state. The clients are changed in place."""
    plan = Plan(
        algorithm=algorithm,
        seed=seed,
        rounds=rounds,
        clients=tuple(c.id for c in clients),
        notes=(),
        participation=participation,
        evaluate_every=rounds,
        exams={},
        homes={},
    )
    state = start if start is not None else (server() if "global" in algorithm.scores else {})
    return federate(plan, ENGINES[engine](clients), state, None, [events.append] if events is not None else [], None)


def weights(net: nn.Module) -> Message:
    """A copy of a net's tensors."""
    return {k: v.detach().clone() for k, v in net.state_dict().items()}


def difference(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """The greatest absolute difference of two messages of the same names."""
    assert a.keys() == b.keys()
    return max((a[k].double() - b[k].double()).abs().max().item() for k in a)


def at(round: int = 0, rounds: int = 3, seed: int = 7) -> At:
    """A place in a run."""
    return At(seed, round, rounds)
