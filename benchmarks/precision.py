"""Section precision: the cost of engine.precision in accuracy. FML on MNIST, MLP; each precision from equal seeds."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from bare import BATCH, SGD
from common import Options, interval

import fedmutual
from fedmutual.config import parse_config

PARTITIONS = {"IID": {"kind": "iid"}, "Non-IID 3": {"kind": "shards", "classes_per_client": 2}}
ROUNDS, EPOCHS, CLIENTS = 5, 5, 5
PERCENT = 100.0


def measure(options: Options) -> dict[str, Any]:
    """Return the results. Raises DataError without MNIST."""
    cuda = torch.cuda.is_available()
    precisions = ("float32", "tf32", "bf16") if cuda else ("float32", "bf16")
    seeds, rounds = (1, 1) if options.tiny else (options.seeds, ROUNDS)
    print(f"MNIST, MLP, FML, {rounds} rounds of {EPOCHS} epochs, {seeds} seeds; %, mean and half of the 95 % interval")
    rows = []
    for setting, partition in PARTITIONS.items():
        alone: dict[str, Any] | None = None
        for precision in precisions:
            runs = [_run(partition, precision, seed, rounds) for seed in range(seeds)]
            row = {key: [run[key] for run in runs] for key in runs[0]}
            alone = alone or row
            rows.append({"setting": setting, "precision": precision, **row} | _less(row, alone))
            _print(rows[-1])
    return {"device": "cuda" if cuda else "cpu", "rounds": rounds, "epochs": EPOCHS, "clients": CLIENTS, "rows": rows}


def _run(partition: dict[str, Any], precision: str, seed: int, rounds: int) -> dict[str, float]:
    tables = {
        "name": "precision",
        "seed": seed,
        "rounds": rounds,
        "data": {"name": "mnist"},
        "partition": {**partition, "clients": CLIENTS},
        "model": {"shared": "mlp"},
        "training": {"local_epochs": EPOCHS, "batch_size": BATCH},
        "optimizer": {"name": "sgd", **SGD},
        "engine": {"precision": precision},
        "records": {"evaluate_every": rounds, "checkpoint_every": rounds},
    }
    with tempfile.TemporaryDirectory() as folder:
        summary = fedmutual.run(parse_config(tables), Path(folder) / "run").summary
    return {
        "global_test": round(PERCENT * summary["global"]["test_accuracy"]["last"], 4),
        "own_validation": round(PERCENT * summary["personal"]["val_accuracy"]["last"]["mean"], 4),
        "seconds": summary["seconds"],
    }


def _less(row: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    """Return the difference from float32 with equal seeds, in percentage points."""
    return {
        f"{key}_over_float32": [round(a - b, 4) for a, b in zip(row[key], alone[key], strict=True)]
        for key in ("global_test", "own_validation")
    }


def _print(row: dict[str, Any]) -> None:
    shared, personal = (interval(row[key], ".2f") for key in ("global_test", "own_validation"))
    more = (
        "" if row["precision"] == "float32" else f"; over float32 {interval(row['global_test_over_float32'], '+.2f')} points"
    )
    seconds = sum(row["seconds"]) / len(row["seconds"])
    print(
        f"{row['setting']:9} {row['precision']:7} shared model {shared}, clients' own {personal}{more}; "
        f"{seconds:.0f} s a run",
        flush=True,
    )
