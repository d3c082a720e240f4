"""Section engines: the engines compared with the hand-written loop, FML with five clients, equal cores."""

from functools import partial
from typing import Any

import torch
from bare import BATCH, NETS, Federation
from common import Options, Spread, ratios, spread, verdict
from ours import hosted, noisy, train
from turns import Contestant, take_turns

from fedmutual.batches import epochs
from fedmutual.core import At, Client, Message

CLIENTS = 5
BATCHES = {"mlp": 94, "lenet5": 20, "cnn1": 20, "cnn2": 3}  # of a client a round, so that a round takes seconds; 94: MNIST
CLOSE = 1e-5  # weights after a round of the same work

CONTESTANTS = {
    "bare, 2 threads": ("bare.py", "--threads", 2),
    "bare, 1 thread": ("bare.py", "--threads", 1),
    "inprocess, 1 thread": ("ours.py", "--engine", "inprocess", "--threads", 1),
    "inprocess, 2 threads": ("ours.py", "--engine", "inprocess", "--threads", 2),
    "processes, 2 workers of 1 thread": ("ours.py", "--engine", "processes", "--workers", 2, "--threads", 1),
}
# engine, what it is held against, and how many times as fast it is to be by network
GOALS = (
    (
        "processes, 2 workers of 1 thread",
        "bare, 2 threads",
        {"mlp": 1.4, "lenet5": 1.25, "cnn1": 1.4, "cnn2": 1.5},
    ),
    ("processes, 2 workers of 1 thread", "inprocess, 1 thread", dict.fromkeys(NETS, 1.85)),
    ("inprocess, 1 thread", "bare, 1 thread", dict.fromkeys(NETS, 1.0)),
    ("inprocess, 2 threads", "bare, 2 threads", dict.fromkeys(NETS, 1.0)),
)


def measure(options: Options) -> list[dict[str, Any]]:
    print(f"times as fast as the bare loop: median (quartiles) of {options.pairs} interleaved turns")
    return [_network(model, options) for model in NETS]


def _network(model: str, options: Options) -> dict[str, Any]:
    apart = difference(model, batches=1 if options.tiny else 3)
    print(f"{model:7} weights after a round of the same batches differ by {apart:.1e} at most: {verdict(apart < CLOSE)}")
    batches = 1 if options.tiny else BATCHES[model]
    rest = ("--model", model, "--rows", batches * BATCH)
    starts = {name: partial(Contestant, *words, *rest) for name, words in CONTESTANTS.items()}
    seconds = take_turns(starts, options.pairs)
    faster = []
    for engine, bare, goals in GOALS:
        ratio = ratios(seconds[bare], seconds[engine])
        faster.append(_line(model, engine, bare, ratio, goals[model]))
    steps = CLIENTS * batches
    return {
        "model": model,
        "clients": CLIENTS,
        "batches_per_client": batches,
        "turns": options.pairs,
        "largest_difference_of_weights": apart,
        "faster": faster,
        "milliseconds_per_step": {n: spread([1e3 * s / steps for s in v]) for n, v in seconds.items()},
    }


def _line(model: str, engine: str, bare: str, ratio: Spread, goal: float) -> dict[str, Any]:
    met = ratio.median >= goal
    print(f"{model:7} {engine:32} over {bare:15} {ratio:.2f}, goal {goal:.2f}: {verdict(met)}", flush=True)
    return {"engine": engine, "over": bare, "times": ratio, "goal": goal, "met": met}


def difference(model: str, batches: int) -> float:
    """Return the largest weight difference between bare and inprocess after a round with equal weights and batches."""
    rows = batches * BATCH
    with noisy(model, CLIENTS, rows) as config, hosted(config) as ours:
        clients = ours.experiment.clients
        shares = ours.experiment.data.clients
        data = [next(iter(shares[i].private.rows([torch.arange(rows)]))) for i in clients]
        bare = Federation(NETS[model], [(x.contiguous(), y) for x, y in data])
        before = _personal(ours)
        _load(bare.shared, ours.experiment.make_server_state())
        for net, i in zip(bare.personal, clients, strict=True):
            _load(net, before[i])
        server = train(ours, 1, ())
        at = At(config.seed, 0, 1)
        bare.round(lambda k: epochs(rows, 1, BATCH, at.rng(clients[k], "batches")))
        after = _personal(ours)
        pairs = [(bare.shared, server), *zip(bare.personal, (after[i] for i in clients), strict=True)]
        return max(_apart(net, state) for net, state in pairs)


def _personal(ours: Any) -> dict[str, Message]:
    return dict(ours.engine.visit(_state, dict.fromkeys(ours.experiment.clients, ())))


def _state(client: Client) -> Message:
    return {k: v.clone() for k, v in client.nets["personal"].state_dict().items()}


def _load(net: torch.nn.Module, state: Message) -> None:
    """Load weights by their order, because the names differ."""
    net.load_state_dict(dict(zip(net.state_dict(), state.values(), strict=True)))


def _apart(net: torch.nn.Module, state: Message) -> float:
    pairs = zip(net.state_dict().values(), state.values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)
