"""The run folders of the goldens: the commands that trained them, and the way to train them again.

`PYTHONPATH=tests uv run python -m goldens.make NAME...` writes folders with today's code; without a NAME, all folders.
test_goldens.py reads the folders and trains nothing, so they also stand for the folders that users have from earlier
versions. They are written once, and again only where a change of their format is meant.
"""

import json
import re
import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import tomli_w
from sklearn.datasets import load_diabetes, load_digits

FOLDERS = Path(__file__).parent / "folders"
REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "src" / "fedmutual" / "demo"
OWN_ALGORITHM = REPOSITORY / "docs" / "own-algorithm.md"
_LEFT_OUT = ("*.safetensors", "*.html", "*.lock", "federation", "journal.sqlite*")
_SHORT = "--set rounds=6 --set records.evaluate_every=3 --seeds 3 --jobs 1"

_BASE: dict[str, Any] = {
    "name": "methods",
    "rounds": 4,
    "data": {"name": "digits"},
    "partition": {"kind": "shards", "clients": 3, "classes_per_client": 4, "examples": 40},
    "split": {"test": 0.1, "holdout": 0.2},
    "algorithm": {"name": "fml", "alpha": 0.5, "beta": 0.5},
    "model": {"shared": "mlp"},
    "training": {"local_epochs": 2, "batch_size": 16},
    "optimizer": {"lr": 0.05},
    "records": {"evaluate_every": 2},
    "engine": {"name": "inprocess", "device": "cpu", "threads": 1},
    "share": {"metrics": "all"},
}
_IID = {"kind": "iid", "clients": 3}
EXPERIMENTS: dict[str, dict[str, Any]] = {
    "methods": _BASE,
    "own": _BASE | {"name": "own", "records": {"evaluate_every": 2, "ensemble": True}},
    "newcomer": {
        "name": "newcomer",
        "rounds": 2,
        "data": {"name": "digits"},
        "split": {"test": 0.1},
        "model": {"personal": "mlp"},
        "training": {"local_epochs": 3, "batch_size": 8},
        "optimizer": {"lr": 0.05},
        "engine": {"name": "inprocess", "device": "cpu", "threads": 1},
    },
    "memorised": _BASE
    | {
        "name": "memorised",
        "rounds": 2,
        "partition": {"kind": "iid", "clients": 2, "examples": 100},
        "training": {"local_epochs": 40, "batch_size": 16},
    },
    "private": _BASE
    | {
        "name": "private",
        "partition": {"kind": "iid", "clients": 2, "examples": 100},
        "privacy": {"nets": "both", "sigma": 2.0},
    },
    "numbers": _BASE
    | {
        "name": "numbers",
        "data": {"name": "csv", "root": "numbers.csv"},
        "partition": _IID | {"examples": 60},
        "training": {"task": "regression", "local_epochs": 2, "batch_size": 16},
        "optimizer": {"lr": 0.02},
    },
    "labels": _BASE
    | {
        "name": "labels",
        "data": {"name": "npz", "root": "labels.npz"},
        "partition": _IID | {"examples": 60},
        "training": {"task": "multilabel", "local_epochs": 2, "batch_size": 16},
    },
    "masks": _BASE
    | {
        "name": "masks",
        "rounds": 2,
        "data": {"name": "npz", "root": "masks.npz"},
        "partition": _IID | {"examples": 24},
        "model": {"shared": "unet"},
        "training": {"task": "segmentation", "local_epochs": 1, "batch_size": 8},
        "optimizer": {"lr": 0.02},
        "records": {"evaluate_every": 1},
    },
    "angles": _BASE
    | {
        "name": "angles",
        "data": {"name": "digits", "angles": [0.0, 90.0, 180.0]},
        "partition": {"kind": "domains", "examples": 60},
        "split": {"test": 0.05, "public": 0.2, "holdout": 0.1},
        "algorithm": {"name": "fedh2l", "public_batch": 8},
        "training": {"local_steps": 10, "batch_size": 8},
    },
}
"""Name -> an experiment, which `make` writes to NAME.toml in the working folder of the commands."""

COMMANDS = {
    "demo": (
        f"compare DEMO/different-networks.toml {_SHORT} --methods fml,fedavg,independent --out demo/different-networks",
        f"compare DEMO/different-digits.toml {_SHORT} --methods fml,fedavg,fedprox,independent --out demo/different-digits",
    ),
    "own-method": (
        "compare own.toml --methods my_algorithms:FedAvgM,fml,fedavg,independent,centralised --seeds 2 --jobs 1 "
        "--out own-method",
    ),
    "sweep": (
        "sweep methods.toml --set algorithm.alpha=0.3,0.6 --set optimizer.lr=0.005,0.05 --seeds 2 --jobs 1 --out sweep",
    ),
    "tuned": ("compare methods.toml --methods fml,fedavg,independent --seeds 2 --tune 3 --jobs 1 --out tuned",),
    "adaptation": (
        "run methods.toml --out source",
        "adapt source --data newcomer.toml --examples 20,40 --seeds 3 --out adaptation",
    ),
    "audit": (
        "run memorised.toml --out audit/memorised",
        "audit audit/memorised --shadows 4",
        "run private.toml --out audit/private",
        "audit audit/private",
    ),
    "regression": ("compare numbers.toml --methods fml,fedavg,independent --seeds 3 --jobs 1 --out regression",),
    "multilabel": ("compare labels.toml --methods fml,fedavg,independent --seeds 2 --jobs 1 --out multilabel",),
    "masks": ("compare masks.toml --methods fml,fedavg,independent --seeds 2 --jobs 1 --out masks",),
    "domains": ("compare angles.toml --methods fedh2l,aggregate,fedavg,independent --seeds 3 --jobs 1 --out domains",),
}
"""Folder -> the commands that train it, in the working folder; DEMO stands for the folder of the demo's experiments."""

SITES: dict[str, dict[str, Any]] = {"sites": {}, "masked-sites": {"server": {"sum": "masked"}}}
"""Folder of a federation of real sites -> the tables of its contract that differ."""
NAMES = (*COMMANDS, *SITES)


def make(names: list[str]) -> None:
    """Train folders anew, and keep their text."""
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary).resolve()
        _write_inputs(work)
        for name in names:
            for command in COMMANDS.get(name, ()):
                _call(work, command.replace("DEMO", str(DEMO)).split())
            if name in SITES:
                _federate(work / name, SITES[name])
            shutil.rmtree(FOLDERS / name, ignore_errors=True)
            shutil.copytree(work / name, FOLDERS / name, ignore=shutil.ignore_patterns(*_LEFT_OUT))
            _tidy(FOLDERS / name, {str(work): "@WORK@", sys.prefix: "@PYTHON@", str(REPOSITORY): "@REPOSITORY@"})
            print(FOLDERS / name)


def write_experiments(folder: Path) -> None:
    """Write the TOML file of each experiment."""
    for name, tables in EXPERIMENTS.items():
        (folder / f"{name}.toml").write_text(tomli_w.dumps(tables), encoding="utf-8")


def _write_inputs(work: Path) -> None:
    """Write the experiments, their data and the user's own method."""
    write_experiments(work)
    table = load_diabetes(as_frame=True)
    (table.data * 20).assign(label=table.target / 100).to_csv(work / "numbers.csv", index=False)
    digits, images = load_digits().target, (load_digits().images / 16).astype("float32")
    labels = np.stack([digits % 2 == 0, digits > 4, digits == 7], 1)
    np.savez(work / "labels.npz", x=images, y=labels, classes=["even", "high", "seven"])
    np.savez(work / "masks.npz", x=images[:120], y=(images[:120] > 0.4).astype(int), classes=["paper", "ink"])
    (method,) = re.findall(r'```python title="my_algorithms\.py"\n(.*?)```', OWN_ALGORITHM.read_text("utf-8"), re.DOTALL)
    (work / "my_algorithms.py").write_text(method, encoding="utf-8")


def _call(work: Path, words: list[str]) -> None:
    """Run a command in this process."""
    from fedmutual.cli import main

    with chdir(work), patch("sys.argv", ["fedmutual", *words]):
        try:
            main()
        except SystemExit as stop:
            if stop.code:
                raise


def _federate(folder: Path, changed: dict[str, Any]) -> None:
    """Run a federation of three real sites in this process; the folder has the results of the server and of one site.

    One site shares no scores.
    """
    import wards
    from authority import write_startup
    from fedmutual.sites import contract as contracts
    from fedmutual.sites.coordinator import Coordinator
    from fedmutual.sites.site_runtime import SiteRuntime
    from fedmutual.sites.site_settings import read_site_file

    place = folder / "federation"
    place.mkdir(parents=True)
    sites = {
        name: {
            "model": {"personal": "mlp"},
            "data": {"name": "digits"},
            "optimizer": {"lr": lr},
            "share": {"metrics": share},
        }
        for name, lr, share in (("ash", 0.05, "all"), ("birch", 0.04, "all"), ("cedar", 0.03, "none"))
    }
    agreed = contracts.read_contract(wards.contract(place, wards.COMMON | changed, sites))
    halves = {}
    for name, tables in sites.items():
        startup = write_startup(place / name / "startup", name)
        halves[name] = SiteRuntime(agreed, read_site_file(wards.site(place, name, tables)), startup=startup)
    startup = write_startup(place / "server-kit", "server")
    Coordinator(agreed, folder / "server" / "wards", startup).run(wards.InMemoryTransport(halves))
    shutil.copytree(halves["ash"].folder, folder / "ash" / "wards")


def _tidy(folder: Path, replaced: dict[str, str]) -> None:
    """Remove paths of this machine, line breaks of JSON, and the lists of rows in partition.json, which no report reads."""
    for path in folder.rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            for before, after in replaced.items():
                text = text.replace(before, after)
            if path.suffix == ".json":
                hook = _drop_rows if path.name == "partition.json" else None
                text = json.dumps(json.loads(text, object_hook=hook)) + "\n"
            path.write_text(text, encoding="utf-8")


def _drop_rows(table: dict[str, Any]) -> dict[str, Any]:
    return table | {"rows": []} if isinstance(table.get("rows"), list) else table


if __name__ == "__main__":
    make(sys.argv[1:] or list(NAMES))
