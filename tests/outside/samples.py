"""The sample run folders: which there are, the command that wrote each, and the way to write them again.

`PYTHONPATH=tests uv run python -m outside.samples NAME...` writes samples with today's code. A sample stands for the folders
that users have from earlier versions, so it is written once, and again only where a change of the format is meant.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from numerics_golden import machine

FOLDER = Path(__file__).parent / "samples"
COMMANDS = {
    "fml": "run fml.toml",
    "records": "run records.toml",
    "part": "run part.toml",
    "fedh2l": "run fedh2l.toml",
    "compare": "compare methods.toml --methods fml,fedavg,independent,centralised --seeds 1",
    "sweep": "sweep methods.toml --set algorithm.alpha=0.3,0.6 --seeds 1",
    "adapt": "adapt fml --data newcomer.toml --examples 40 --seeds 1",
    "reproduce": "reproduce tiny --seeds 1 --rounds 1 --experiments papers",
}
"""Sample -> the command, which is run in the folder of all samples; `--out SAMPLE` is added."""
SITES = "sites"
"""The sample of a federation of real sites: the server's folder and those of the sites."""
RUNS = {
    "fml": "fml",
    "records": "records",
    "part": "part",
    "fedh2l": "fedh2l",
    "compare/fml": "compare/fml/0",
    "compare/fedavg": "compare/fedavg/0",
    "compare/independent": "compare/independent/0",
    "compare/centralised": "compare/centralised/0",
    "adapt/fml": "adapt/fml/40/0",
    "adapt/fine-tune": "adapt/fine-tune/40/0",
    "adapt/scratch": "adapt/scratch/40/0",
    "site": "sites/north/state/wards",
    "server": "sites/server/wards",
}
"""Kind of run folder -> a folder of it."""
PLACE = "@SAMPLES@"
"""What stands in the committed files for the absolute path of the folder of all samples."""
_MACHINES = FOLDER / "machines.json"
_DERIVED = ("*.html", "*.lock", "tensorboard")  # not committed: pages can be made anew, locks and events cannot be compared
_TEXT = (".json", ".jsonl", ".toml", ".txt")

_FEDERATION = {
    "name": "wards",
    "rounds": 2,
    "data": {"classes": [str(digit) for digit in range(10)], "size": [4, 4], "mean": [0.3], "std": [0.4]},
    "split": {"private": 0.03, "validation": 0.03, "test": 0.03},
    "algorithm": {"name": "fml", "alpha": 0.4, "beta": 0.6},
    "model": {"shared": "cnn1"},
    "training": {"local_epochs": 1, "batch_size": 16},
    "optimizer": {"lr": 0.05, "momentum": 0.0},
    "share": {"metrics": "all"},
}
_SITE = {"model": {"personal": "cnn1"}, "data": {"name": "digits"}, "share": {"metrics": "all"}}


def copy(folder: Path) -> Path:
    """Copy all samples, with absolute paths as if they had been written there -> the folder."""
    shutil.copytree(FOLDER, folder)
    _replace(folder, PLACE, str(folder))
    return folder


def read_machines() -> dict[str, str]:
    """Sample -> the machine on which it was written."""
    return json.loads(_MACHINES.read_text(encoding="utf-8")) if _MACHINES.exists() else {}


def words(name: str) -> list[str]:
    """The command of a sample, as `fedmutual` takes it."""
    return [*COMMANDS[name].split(), "--out", name]


def write(names: list[str]) -> Iterator[Path]:
    """Write samples anew -> their folders."""
    with tempfile.TemporaryDirectory() as temporary:
        work = copy(Path(temporary).resolve() / "samples")
        for name in names:
            shutil.rmtree(work / name, ignore_errors=True)
            _federate(work) if name == SITES else _call(work, words(name))
            shutil.rmtree(FOLDER / name, ignore_errors=True)
            shutil.copytree(work / name, FOLDER / name, ignore=shutil.ignore_patterns(*_DERIVED))
            _replace(FOLDER / name, str(work), PLACE)
            _replace(FOLDER / name, sys.prefix, "@PYTHON@")
            machines = json.dumps(read_machines() | {name: machine()}, indent=1, sort_keys=True)
            _MACHINES.write_text(machines + "\n", encoding="utf-8")
            yield FOLDER / name


def _call(work: Path, words: list[str]) -> None:
    """Run a command in a process of its own that knows no path of this machine."""
    code = "import sys; from fedmutual.cli import main; sys.argv[0] = 'fedmutual'; main()"
    subprocess.run([sys.executable, "-c", code, *words], cwd=work, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _federate(work: Path) -> None:
    """Two sites, a server and a lead over NVIDIA FLARE, each in processes of its own."""
    from loopback import loopback

    with loopback(work / SITES, _FEDERATION, {"north": _SITE, "south": _SITE}, input=[1, 4, 4]) as federation:
        federation.start("server", "north", "south")
        federation.submit()
        federation.done()
        federation.processes["submit"].wait(120)
    (work / SITES / "server" / "connected.json").unlink()
    for path in [*(work / SITES).iterdir(), *(work / SITES).glob("*/flare"), *(work / SITES).glob("*/state/flare")]:
        if path.name in ("flare", "kits", "result") or path.suffix == ".log":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _replace(folder: Path, before: str, after: str) -> None:
    for path in folder.rglob("*"):
        if path.suffix in _TEXT and path.is_file():
            text = path.read_text(encoding="utf-8")
            if before in text:
                path.write_text(text.replace(before, after), encoding="utf-8")


if __name__ == "__main__":
    for path in write(sys.argv[1:] or [*COMMANDS, SITES]):
        print(path)
