"""Section bytes: the bytes that a round sends down and up, from a run's ledger."""

import tempfile
from pathlib import Path
from typing import Any

from bare import BATCH, NETS
from common import Options
from ours import hosted, noisy, train

from fedmutual.rundir.file_names import LEDGER
from fedmutual.rundir.logs import Ledger
from fedmutual.rundir.record_files import read_records
from fedmutual.rundir.schema import LedgerLine

CLIENTS = 5
METHODS = ("fml", "fedavg", "fedprox")


def measure(options: Options) -> list[dict[str, Any]]:
    print(f"bytes of a round of {CLIENTS} clients")
    results = []
    for model in list(NETS)[: 1 if options.tiny else None]:
        for method in METHODS:
            down, up = _round(model, method)
            print(f"{model:7} {method:8} {down:>11,} down, {up:>11,} up; a client {down // CLIENTS:,} and {up // CLIENTS:,}")
            results.append({"model": model, "method": method, "clients": CLIENTS, "down": down, "up": up})
    return results


def _round(model: str, method: str) -> tuple[int, int]:
    """Run a round of one step a client, on four examples: the bytes do not depend on the length of training."""
    with (
        noisy(model, CLIENTS, BATCH // 32, method=method) as config,
        hosted(config) as handle,
        tempfile.TemporaryDirectory() as folder,
    ):
        train(handle, 1, [Ledger(Path(folder))])
        lines = list(read_records(Path(folder) / LEDGER, LedgerLine))
    return sum(line.down for line in lines), sum(line.up for line in lines)
