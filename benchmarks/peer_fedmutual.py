"""A contestant (peer.py): FedAvg as `fedmutual run` trains it, with two worker processes and the ledger."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from ours import config, hosted
from peer import CORES, Contest

from fedmutual.config import Config
from fedmutual.engines import allocator
from fedmutual.engines.loop import federate
from fedmutual.events import Evaluated, Event, PhaseDone, RoundDone, Started
from fedmutual.rundir.logs import Ledger

DATA = "noise.npz"


def make_config(folder: Path, model: str, clients: int, epochs: int) -> Config:
    """Return the experiment on FOLDER/noise.npz."""
    engine: dict[str, Any] = {"name": "processes", "workers": CORES, "threads": 1}
    return config(model, folder / DATA, clients, "fedavg", epochs, **engine)


class Reporter:
    """Observer: tells the work of each turn."""

    def __init__(self, contest: Contest) -> None:
        self._contest = contest

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._contest.begin()
        elif isinstance(event, PhaseDone):
            self._steps = sum(work.steps for work in event.work.values())
        elif isinstance(event, Evaluated):
            (score,) = event.scores
            self._accuracy = score.values["accuracy"]
        elif isinstance(event, RoundDone) and event.round:
            tested = len(self._contest.work.test[1])
            done = {"steps": self._steps, "correct": round(self._accuracy * tested), "tested": tested}
            self._contest.end_round(event.server.values, **done)


def main() -> None:
    allocator.keep_freed_memory()  # a process of our own, as the command line's
    contest = Contest("fedmutual")
    work = contest.work
    experiment_config = make_config(contest.folder, work.model, len(work.clients), work.epochs)
    with hosted(experiment_config) as handle, tempfile.TemporaryDirectory() as folder:
        experiment = handle.experiment
        plan = replace(experiment.make_plan({}), evaluations={})  # only the shared model is evaluated
        observers = [Ledger(Path(folder)), Reporter(contest)]
        federate(plan, handle.engine, experiment.make_server_state(), None, observers, experiment.make_judge())


if __name__ == "__main__":
    main()
