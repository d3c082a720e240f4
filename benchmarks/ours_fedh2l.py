"""The work of bare_fedh2l.py through fedmutual: a contestant (turns.py)."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bare import SHAPES
from bare_fedh2l import ADAM, BATCH, NODES, PRIVATE, PUBLIC
from ours import FOREVER, Timer, hosted, save_noise, train
from turns import Stage

from fedmutual.config import Config, parse_config
from fedmutual.engines import allocator
from fedmutual.rundir.logs import Ledger
from fedmutual.studies.run import EngineHandle

VALIDATION, TEST = 100, 150  # rows of a node, for what is reported apart


def config(data: Path) -> Config:
    """Return the configuration of FedH2L with four LeNet5 on noise."""
    rows = PRIVATE + PUBLIC + VALIDATION + TEST
    return parse_config(
        {
            "data": {"name": "npz", "root": str(data), "mean": [0.5], "std": [0.289]},
            "partition": {"kind": "iid", "clients": NODES},
            "split": {
                "private": PRIVATE / rows,
                "public": PUBLIC / rows,
                "validation": VALIDATION / rows,
                "test": TEST / rows,
            },
            "algorithm": {"name": "fedh2l", "public_batch": BATCH},
            "model": {"personal": "lenet5"},
            "training": {"local_steps": 1, "batch_size": BATCH},
            "optimizer": {"name": "adam", **ADAM},
            "engine": {"name": "inprocess", "device": "cpu", "threads": 1},
        }
    )


@contextmanager
def ready() -> Iterator[tuple[EngineHandle, Path]]:
    """Yield the experiment with its engine, and a folder."""
    with tempfile.TemporaryDirectory() as folder:
        rows = NODES * (PRIVATE + PUBLIC + VALIDATION + TEST)
        data = save_noise(Path(folder) / "noise.npz", SHAPES["lenet5"], rows, 20)
        with hosted(config(data)) as handle:
            yield handle, Path(folder)


def main() -> None:
    allocator.keep_freed_memory()
    stage = Stage()
    with ready() as (handle, folder):
        train(handle, FOREVER, [Ledger(folder), Timer(stage)])


if __name__ == "__main__":
    main()
