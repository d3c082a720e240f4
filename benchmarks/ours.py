"""The work of bare.py through fedmutual: an experiment on noise, with the engine and the clients of a user's run.

Evaluation and checkpoints are off; all else is as in a run: the privacy boundary, finiteness, the ledger's file. As a script
it is a contestant (turns.py); with --evaluate, as `fedmutual run` with evaluation and a checkpoint in every round; with
--rounds, a whole run each time, which opens its data and its engine anew.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bare import BATCH, CLASSES, SGD, SHAPES
from turns import RoundTimer, Stage

from fedmutual.config import Config, parse_config
from fedmutual.core import Message
from fedmutual.engines import allocator, processes
from fedmutual.engines.child_process import start_fork_server_early
from fedmutual.engines.loop import federate
from fedmutual.events import Event, Observer, RoundDone, Started
from fedmutual.federation.build import build
from fedmutual.federation.experiment import Experiment, RoundPlan
from fedmutual.rundir.logs import Ledger
from fedmutual.studies.run import EngineHandle
from fedmutual.studies.study import run

FOREVER = 10**9


def save_noise(path: Path, shape: tuple[int, ...], rows: int, test: int, signal: float = 0.0) -> Path:
    """Save images of uniformly drawn bytes with labels as an npz file. signal: the share of its class's image in each."""
    rng = np.random.default_rng(0)
    classes = np.random.default_rng(1).integers(256, size=(CLASSES, *shape))
    arrays = {}
    for suffix, n in (("", rows), ("_test", test)):
        noise, labels = rng.integers(256, size=(n, *shape), dtype=np.uint8), np.arange(n) % CLASSES
        arrays[f"x{suffix}"] = ((1 - signal) * noise + signal * classes[labels]).astype(np.uint8) if signal else noise
        arrays[f"y{suffix}"] = labels
    np.savez(path, **arrays)
    return path


def config(
    model: str, data: Path, clients: int = 5, method: str = "fml", epochs: int = 1, batch_size: int = BATCH, **engine: Any
) -> Config:
    """Return an experiment on saved noise, scaled to mean 0 and standard deviation 1."""
    channels = SHAPES.get(model, SHAPES["mlp"])[0]
    return parse_config(
        {
            "data": {"name": "npz", "root": str(data), "mean": [0.5] * channels, "std": [0.289] * channels},
            "rounds": FOREVER,
            "partition": {"kind": "iid", "clients": clients},
            "algorithm": {"name": method},
            "model": {"shared": model},
            "training": {"local_epochs": epochs, "batch_size": batch_size},
            "optimizer": {"name": "sgd", **SGD},
            "engine": {"name": "inprocess", "device": "cpu", **engine},
        }
    )


@contextmanager
def noisy(model: str, clients: int, rows: int, test_rows: int = 20, **settings: Any) -> Iterator[Config]:
    """Yield `config` on noise with this many rows a client; its file exists as long as the context."""
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES.get(model, SHAPES["mlp"])
        data = save_noise(Path(folder) / "noise.npz", shape, clients * rows, clients * test_rows)
        yield config(model, data, clients, **settings)


@contextmanager
def hosted(experiment_config: Config) -> Iterator[EngineHandle]:
    """Yield the experiment with its engine, while torch uses the engine's number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(experiment_config.engine.threads)
    try:
        with closing(EngineHandle(build(experiment_config), None)) as handle:
            yield handle
    finally:
        torch.set_num_threads(before)


def train(handle: EngineHandle, rounds: int, observers: Sequence[Observer]) -> Message:
    """Run this many rounds of training and nothing else; return the server's state."""
    return federate(
        quiet(handle.experiment, rounds), handle.engine, handle.experiment.make_server_state(), None, observers, judge=None
    )


def quiet(experiment: Experiment, rounds: int) -> RoundPlan:
    """Return the experiment's plan without evaluation."""
    plan = experiment.make_plan({})
    return replace(plan, rounds=rounds, evaluate_every=FOREVER, evaluations={}, notes=())


class Timer:
    """Observer: waits on the stage before every turn's first round, and reports its seconds after the last."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._timer = stage, RoundTimer(stage)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._stage.tell("ready")
            self._timer.wait()
        elif isinstance(event, RoundDone):
            self._timer.end_round()


def time_whole_runs(experiment_config: Config, stage: Stage, folder: Path) -> None:
    """Report the seconds of a whole run each time, with new worker processes."""
    stage.tell("ready")
    start_fork_server_early()
    while stage.wait():
        while processes.idle_workers:
            processes.idle_workers.pop().stop()
        begun = time.perf_counter()
        with hosted(experiment_config) as handle:
            train(handle, experiment_config.rounds, [Ledger(folder)])
            seconds = time.perf_counter() - begun
        stage.tell(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--test-rows", type=int, default=20, help="of a client")
    parser.add_argument("--algorithm", default="fml")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="of a whole run")
    parser.add_argument("--engine", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--graphs", action="store_true")
    args = parser.parse_args()
    allocator.keep_freed_memory()  # a process of our own, as the command line's
    stage = Stage()
    engine = {key: getattr(args, key) for key in ("threads", "device", "precision", "graphs")} | {"name": args.engine}
    if args.workers:
        engine["workers"] = args.workers
    settings = {"method": args.algorithm, "epochs": args.epochs, **engine}
    with (
        noisy(args.model, args.clients, args.rows, args.test_rows, **settings) as experiment_config,
        tempfile.TemporaryDirectory() as folder,
    ):
        if args.rounds:
            time_whole_runs(experiment_config.model_copy(update={"rounds": args.rounds}), stage, Path(folder))
        elif args.evaluate:
            run(experiment_config, Path(folder) / "run", observers=[Timer(stage)])
        else:
            with hosted(experiment_config) as handle:
                train(handle, FOREVER, [Ledger(Path(folder)), Timer(stage)])


if __name__ == "__main__":
    main()
