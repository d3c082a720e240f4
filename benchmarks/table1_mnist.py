"""The MNIST half of Table 1 of FML: the global model's accuracy, two networks, four settings, three methods, five clients.

    FEDMUTUAL_DATA=... uv run python benchmarks/table1_mnist.py [--rounds 200] [--seeds 3] [--only mlp/iid ...]

One TOML file a cell goes to OUT/<net>-<setting>.toml, to be run by hand as well (`fedmutual compare FILE`); runs go to
OUT/<net>-<setting>/<method>/<seed>. What is finished is not trained again, and what was stopped goes on: call it again.
On a GPU the nine runs of a cell share stacks: the seconds of each are then those of all nine.
Shen et al., Federated Mutual Learning, 2020, https://arxiv.org/abs/2006.16765 (later version), Table 1.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w
from bare import SGD
from common import command, interval, machine, write

from fedmutual.compare import compare
from fedmutual.config import load_config
from fedmutual.errors import UserError
from fedmutual.runs import Run

METHODS = ("fml", "fedavg", "fedprox")
SETTINGS = {"iid": ("IID", None), "p6": ("Non-IID 1", 6), "p4": ("Non-IID 2", 4), "p2": ("Non-IID 3", 2)}  # classes a client
PAPER = {  # %, by METHODS
    "mlp/iid": (98.49, 98.44, 98.14),
    "mlp/p6": (97.70, 97.40, 97.35),
    "mlp/p4": (97.00, 96.84, 96.98),
    "mlp/p2": (93.77, 90.46, 80.03),
    "lenet5/iid": (99.37, 99.29, 99.13),
    "lenet5/p6": (99.07, 98.92, 98.75),
    "lenet5/p4": (98.71, 98.67, 98.50),
    "lenet5/p2": (96.70, 96.45, 87.55),
}
PERCENT = 100.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PAPER, default=list(PAPER), metavar="CELL", help=", ".join(PAPER))
    parser.add_argument("--every", type=int, default=10, help="rounds from one scoring, and one saved state, to the next")
    parser.add_argument("--out", type=Path, default=Path("runs") / "table1-mnist")
    parser.add_argument("--json-dir", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    about = {"command": command("table1_mnist.py"), "machine": machine()}
    begun = time.monotonic()
    files = {cell: _file(args.out, cell, args.rounds, args.every) for cell in args.only}
    print(f"%, global model on the test set after round {args.rounds}: mean ± half of the 95 % interval, {args.seeds} seeds")
    print(f"{'':8}{'':11}{'':9}{'ours':>15}{'paper':>8}{'s a run':>9}")
    try:
        rows = [row for cell, file in files.items() for row in _cell(cell, file, args.seeds)]
    except UserError as problem:
        parser.exit(2, f"{problem}\n")
    took = time.monotonic() - begun  # of what was not finished before
    print(f"{took:.0f} s in all")
    results = {"rounds": args.rounds, "seeds": args.seeds, "seconds_now": round(took), "rows": rows}
    write(args.json_dir, "table1_mnist", about, results)


def _file(out: Path, cell: str, rounds: int, every: int) -> Path:
    """The cell's experiment, as TOML."""
    net, _, setting = cell.partition("/")
    classes = SETTINGS[setting][1]
    kind = {"kind": "iid"} if classes is None else {"kind": "shards", "classes_per_client": classes}
    tables: dict[str, Any] = {
        "name": f"{net}-{setting}",
        "rounds": rounds,
        "data": {"name": "mnist"},
        "partition": {**kind, "clients": 5},
        "algorithm": {"name": "fml", "alpha": 0.5, "beta": 0.5},
        "model": {"shared": net},
        "training": {"local_epochs": 5, "batch_size": 128},
        "optimizer": {"name": "sgd", **SGD},
        "records": {"evaluate_every": every, "checkpoint_every": every},
    }
    path = out / f"{net}-{setting}.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def _cell(cell: str, file: Path, seeds: int) -> Iterator[dict[str, Any]]:
    """Its runs, on a GPU all at once; then a row a method."""
    net, _, setting = cell.partition("/")
    name = SETTINGS[setting][0]
    runs = compare(load_config(file), METHODS, seeds, file.with_suffix(""), resume=True)
    for number, (method, paper) in enumerate(zip(METHODS, PAPER[cell], strict=True)):
        mine = runs[number * seeds : (number + 1) * seeds]
        ours, seconds = [_accuracy(run) for run in mine], [run.summary["seconds"] for run in mine]
        mean = sum(seconds) / len(seconds)
        print(f"{net:8}{name:11}{method:9}{interval(ours, '.2f'):>15}{paper:>8.2f}{mean:>9.0f}", flush=True)
        yield {"net": net, "setting": name, "method": method, "ours": ours, "paper": paper, "seconds": seconds}


def _accuracy(run: Run) -> float:
    return round(PERCENT * run.summary["global"]["test_accuracy"]["last"], 4)


if __name__ == "__main__":
    main()
