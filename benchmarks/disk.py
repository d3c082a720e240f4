"""Section disk: memory and seconds of runs on MNIST, with states of clients stored in the run folder or all in memory.

FML with the MLP on the images of MNIST, two worker processes, 100 participants a round: of 2,000 clients with 30 examples
(5 %), and of 200 with 300 examples; one epoch a round. Each run is a process of its own; after the last round it
scores all clients on hold-out rows, and saves a checkpoint. Memory is the greatest sum of the proportional set sizes of all
processes; seconds are of a round of training, without the first. FEDMUTUAL_DATA names the folder of MNIST. With --before:
also a clone of an earlier version, for the pace of 200 clients.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import Options, figure, read_children_seconds, spread
from scale import MIB, measure_process

ROUNDS, PARTICIPANTS, WORKERS = 6, 100, 2
TINY = 20  # with --tiny, each number of clients is divided by this
Setting = tuple[int, int, int | None, Path | None]  # clients, participants of a round, resident clients, earlier version


def measure(options: Options) -> list[dict[str, Any]]:
    """Return a row for each number of clients, with and without states on disk."""
    turns, divisor = (1, TINY) if options.tiny else (min(options.pairs, 3), 1)
    participants, many, few = PARTICIPANTS // divisor, 2000 // divisor, 200 // divisor
    stored = (many, participants, 50 // divisor, None)
    rows = [_summarise(stored, [run_in_child(*stored)])]
    settings = [(few, participants, None, None), (few, participants, 25 // divisor, None)]
    settings += [(few, participants, None, options.before)] if options.before else []
    measured = [[run_in_child(*setting) for setting in settings] for _ in range(turns)]
    return rows + [_summarise(setting, list(of)) for setting, of in zip(settings, zip(*measured, strict=True), strict=True)]


def _summarise(setting: Setting, measured: list[dict[str, Any]]) -> dict[str, Any]:
    clients, _, resident, before = setting
    row = {
        "clients": clients,
        "resident": resident,
        "earlier_version": before is not None,
        "peak_gib": figure(max(m["peak"] for m in measured) / MIB / 1024, 3),
        "clock_seconds_of_a_round": spread([seconds for m in measured for seconds in m["clock"]]).to_json(),
        "processor_seconds_of_a_round": spread([m["processor"] for m in measured]).to_json(),
        "runs": len(measured),
    }
    print(row, flush=True)
    return row


def run_in_child(clients: int, participants: int, resident: int | None, before: Path | None) -> dict[str, Any]:
    """Return the peak memory in bytes, and the seconds of rounds 2 to the last but one, of the clock and of processors."""
    words = [sys.executable, __file__, "--clients", str(clients), "--participants", str(participants)]
    words += ["--resident", str(resident)] if resident else []
    environment = os.environ | ({"PYTHONPATH": str(before / "src")} if before else {})
    measured, peak = measure_process(words, environment)
    return {"peak": peak, **measured}


def run_here(clients: int, participants: int, resident: int | None) -> dict[str, Any]:
    """Train in this process and its workers; return the seconds of the rounds of training."""
    from fedmutual import run
    from fedmutual.config import parse_config
    from fedmutual.engines import allocator
    from fedmutual.events import Event, RoundDone

    allocator.keep_freed_memory()
    times: list[tuple[float, float]] = []

    def observe(event: Event) -> None:
        if isinstance(event, RoundDone):
            times.append((time.monotonic(), time.process_time() + read_children_seconds()))

    engine = {"name": "processes", "workers": WORKERS, "device": "cpu", "participation": participants / clients}
    config = parse_config(
        {
            "name": "disk",
            "rounds": ROUNDS,
            "data": {"name": "mnist"},
            "partition": {"kind": "iid", "clients": clients},
            "algorithm": {"name": "fml"},
            "model": {"shared": "mlp"},
            "training": {"local_epochs": 1},
            "engine": engine | ({"resident": resident} if resident else {}),
            "split": {"holdout": 0.2},
            "records": {"evaluate_every": ROUNDS, "evaluate_on": "holdout", "checkpoint_every": ROUNDS},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder) / "run", observers=[observe])
    clock = [figure(after - before) for (before, _), (after, _) in pairwise(times[:-1])]
    return {"clock": clock, "processor": figure((times[-2][1] - times[0][1]) / len(clock))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--participants", type=int, required=True)
    parser.add_argument("--resident", type=int)
    args = parser.parse_args()
    print(json.dumps(run_here(args.clients, args.participants, args.resident)))


if __name__ == "__main__":
    main()
