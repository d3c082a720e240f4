"""Section privacy: seconds of a step with differential privacy over seconds of the same step without."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bare import SHAPES
from common import Options, ratios, verdict
from ours import save_noise

from fedmutual.config import parse_config
from fedmutual.core import At
from fedmutual.engines import allocator
from fedmutual.federation.build import build
from fedmutual.stepping import work

GOALS = {"mlp": 3.0, "lenet5": 4.0}  # times the seconds without privacy, at most
SETTINGS: dict[str, dict[str, Any]] = {"none": {}, "meme": {"sigma": 1.0}, "both": {"sigma": 1.0}}
BATCH, STEPS = 250, 8  # expected rows of a batch; steps of a turn


def measure(options: Options) -> list[dict[str, Any]]:
    print(f"FML, batches of {BATCH}, one client, one thread: seconds of a step with privacy over without, turn by turn")
    allocator.keep_freed_memory()  # as the command line's process
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_measure_network(network, goal, options) for network, goal in GOALS.items()]
    finally:
        torch.set_num_threads(threads)


def _measure_network(network: str, goal: float, options: Options) -> dict[str, Any]:
    steps = 1 if options.tiny else STEPS
    with tempfile.TemporaryDirectory() as name:
        data = save_noise(Path(name) / "noise.npz", SHAPES[network], BATCH * STEPS, 10)
        contestants = {nets: _make_phase(network, data, nets, steps) for nets in SETTINGS}
        seconds: dict[str, list[float]] = {nets: [] for nets in SETTINGS}
        for turn in range(2 if options.tiny else options.pairs + 1):
            order = list(contestants) if turn % 2 else list(contestants)[::-1]
            for nets in order:
                began = time.perf_counter()
                contestants[nets](turn)
                if turn:  # the first turn warms up
                    seconds[nets].append((time.perf_counter() - began) / steps)
    line: dict[str, Any] = {"network": network, "batch": BATCH, "goal": goal}
    for nets in ("meme", "both"):
        ratio = ratios(seconds[nets], seconds["none"])
        met = verdict(ratio.median <= goal)
        print(f"{network:7} noise on {nets}: {ratio:.2f} times the seconds; goal {goal:g} at most: {met}")
        line[nets] = ratio.to_json()
    return line


def _make_phase(network: str, data: Path, nets: str, steps: int) -> Callable[[int], None]:
    """Return a function that trains one client for some steps of a round."""
    tables = {
        "data": {"name": "npz", "root": str(data), "mean": [0.5], "std": [0.289]},
        "partition": {"kind": "iid", "clients": 1},
        "algorithm": {"name": "fml", "beta": 1.0},
        "model": {"shared": network},
        "training": {"local_steps": steps, "batch_size": BATCH},
        "engine": {"name": "inprocess", "device": "cpu", "threads": 1},
        "privacy": {"nets": nets, **SETTINGS[nets]},
    }
    experiment = build(parse_config(tables))
    client, server = experiment.build_client(experiment.clients[0]), experiment.make_server_state()
    phase = experiment.algorithm.phases[0]

    def train(round: int) -> None:
        work(phase, client, server, At(0, round, 1000, 0))

    return train
