"""Section growth: memory and seconds of runs by the number of clients, of which at most 32 of a worker are in memory.

Each run is a process of its own: FML with MLPs of 3,910 parameters, two worker processes, and clients of 12 rows of 16
numbers, 9 of them to train on; one step a round. All clients take part in a round, or a tenth, or a hundredth of them. After
the last round the run scores all clients on their hold-out rows and saves a checkpoint. Memory is the greatest sum of the
proportional set sizes of all processes. `uv run python benchmarks/growth.py --page` draws docs/growth.svg from the results
of this section and of the section commands.
"""

import argparse
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import Options, figure, read_children_seconds
from scale import MIB, measure_process

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs" / "growth.svg"
CLIENTS, SHARES = (100, 1000, 3000, 10000), (1, 10, 100)  # of SHARES: one of how many clients takes part in a round
ROWS, FEATURES, CLASSES, RESIDENT, ROUNDS = 12, 16, 10, 32, 4
COLORS = {1: "#1f5fa8", 10: "#c8501e", 100: "#3a7d44"}
NAMES = {1: "all take part", 10: "a tenth takes part", 100: "a hundredth takes part"}


def measure(options: Options) -> list[dict[str, Any]]:
    """Return a row for each number of clients and each share that takes part."""
    return [run_in_child(k, share) for share in SHARES for k in (CLIENTS[:1] if options.tiny else CLIENTS)]


def run_in_child(clients: int, share: int) -> dict[str, Any]:
    measured, peak = measure_process([sys.executable, __file__, "--clients", str(clients), "--share", str(share)])
    row = measured | {"memory_mib": figure(peak / MIB)}
    print(row, flush=True)
    return row


def run_here(clients: int, share: int) -> dict[str, Any]:
    """Train in this process and its workers; return the seconds by the clock and of processors."""
    from fedmutual import run
    from fedmutual.config import parse_config
    from fedmutual.engines import allocator
    from fedmutual.events import Evaluated, Event, RoundDone, Started

    allocator.keep_freed_memory()
    times: dict[str, list[tuple[float, float]]] = {"Started": [], "Evaluated": [], "RoundDone": []}

    def observe(event: Event) -> None:
        if isinstance(event, Started | Evaluated | RoundDone):
            times[type(event).__name__].append((time.monotonic(), time.process_time() + read_children_seconds()))

    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "noise.npz", **_draw_noise(clients))
        config = parse_config(
            {
                "name": "growth",
                "rounds": ROUNDS,
                "data": {
                    "name": "npz",
                    "root": str(folder / "noise.npz"),
                    "mean": [0.0] * FEATURES,
                    "std": [1.0] * FEATURES,
                },
                "partition": {"kind": "iid", "clients": clients},
                "split": {"holdout": 0.25},
                "algorithm": {"name": "fml"},
                "model": {"shared": "wide:h50"},
                "training": {"local_epochs": 1},
                "engine": {
                    "name": "processes",
                    "workers": 2,
                    "device": "cpu",
                    "resident": RESIDENT,
                    "participation": 1 / share,
                },
                "records": {"evaluate_every": ROUNDS, "evaluate_on": "holdout", "checkpoint_every": ROUNDS},
            }
        )
        run(config, folder / "run", observers=[observe])
    ended, (started,), (evaluated,) = time.monotonic(), times["Started"], times["Evaluated"]
    rounds = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(times["RoundDone"][:-1])]
    return {
        "clients": clients,
        "participants": max(1, round(clients / share)),
        "share": share,
        "start_seconds": figure(started[0] - begun),
        "round_seconds": figure(median(clock for clock, _ in rounds)),
        "round_processor_seconds": figure(median(processor for _, processor in rounds)),
        "last_round_seconds": figure(evaluated[0] - times["RoundDone"][-2][0]),  # with the scores of all clients
        "checkpoint_seconds": figure(ended - evaluated[0]),
    }


def _draw_noise(clients: int) -> dict[str, Any]:
    """Return the training rows of all clients and the test rows."""
    rng, rows = np.random.default_rng(0), {"": clients * ROWS, "_test": max(clients, CLASSES)}
    inputs = {f"x{part}": rng.normal(size=(n, FEATURES)).astype(np.float32) for part, n in rows.items()}
    return inputs | {f"y{part}": np.arange(n) % CLASSES for part, n in rows.items()}


def draw(rows: list[dict[str, Any]], pages: dict[int, float]) -> None:
    """Draw docs/growth.svg. pages: number of runs -> seconds of their page."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "growth"
    from matplotlib import pyplot

    picture, (seconds, memory, page) = pyplot.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for share in sorted({row["share"] for row in rows}):
        of_share = [row for row in rows if row["share"] == share]
        for axes, name in ((seconds, "round_processor_seconds"), (memory, "memory_mib")):
            axes.plot(*zip(*((row["clients"], row[name]) for row in of_share), strict=True), "o-", color=COLORS[share])
            axes.lines[-1].set_label(NAMES[share])
    page.plot(*zip(*pages.items(), strict=True), "o-", color=COLORS[1])
    seconds.set(xscale="log", yscale="log", xlabel="clients", title="processor seconds of a round")
    memory.set(xlabel="clients", ylim=(0, None), title="peak memory, MiB")
    page.set(xlabel="runs", xlim=(0, None), ylim=(0, None), title="seconds of a page of runs")
    seconds.legend(fontsize="small")
    picture.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--share", type=int, default=1, help="one of how many clients takes part in a round")
    parser.add_argument("--page", action="store_true", help="draw docs/growth.svg")
    args = parser.parse_args()
    if args.page:
        read = {
            name: json.loads((HERE / "results" / f"{name}.json").read_text())["results"] for name in ("growth", "commands")
        }
        pages = {int(name.split()[2]): of["now"]["end"]["median"] for name, of in read["commands"].items() if "page" in name}
        draw(read["growth"], pages)
    elif args.clients:
        print(json.dumps(run_here(args.clients, args.share)))
    else:
        parser.error("give --clients or --page; all runs: uv run python benchmarks/run.py growth")


if __name__ == "__main__":
    main()
