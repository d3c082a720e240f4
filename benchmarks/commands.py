"""Section commands: seconds of whole commands, from their start: the import, the first step of a run, the demo, the page.

Each command is a process of its own, in turns with the same command of an earlier version (--before). The clock's seconds
are those to the first line of output and to the end; processor seconds are those of all its processes. The runs of the
pages have artificial numbers: four methods over the seeds, with five clients, ten classes and ten evaluations.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from common import Options, figure, ratios, spread

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from run_folders import Made, write_all

RUNS = (100, 300, 1000)
METHODS = {"fml": 0.86, "fedavg": 0.82, "fedprox": 0.83, "independent": 0.8}
ONE_STEP = """
name = "first"
rounds = 1
data = { name = "digits" }
partition = { kind = "iid", clients = 5 }
split = { test = 0.1 }
algorithm = { name = "fml" }
model = { shared = "mlp" }
training = { local_steps = 1 }
"""


class Seconds(NamedTuple):
    """What a command took."""

    first: float  # to the first line of output, by the clock
    end: float  # by the clock
    processor: float  # of all its processes


def measure(options: Options) -> dict[str, Any]:
    sources = {"now": Path(__file__).resolve().parents[1] / "src"}
    if options.before:
        sources["before"] = options.before / "src"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first.toml").write_text(ONE_STEP)
        seeds = 1 if options.tiny else 5
        results = {
            "import fedmutual": _compare("import fedmutual", ["-c", "import fedmutual"], sources, folder, options.pairs),
            "first step": _compare("first step", ["-m", "fedmutual", "run", "first.toml"], sources, folder, options.pairs),
            "demo": _compare(
                "demo", ["-m", "fedmutual", "demo", "--seeds", str(seeds)], sources, folder, min(options.pairs, 3)
            ),
        }
        for runs in RUNS[:1] if options.tiny else RUNS:
            make_runs(folder / str(runs), runs)
            words = ["-m", "fedmutual", "report", str(folder / str(runs)), "-o", "report.html"]
            results[f"page of {runs} runs"] = _compare(f"page of {runs} runs", words, sources, folder, min(options.pairs, 3))
    return results


def _compare(what: str, words: list[str], sources: dict[str, Path], folder: Path, turns: int) -> dict[str, Any]:
    """Run a command of each version in turns; return the spread of its seconds, and the ratios of both versions."""
    taken: dict[str, list[Seconds]] = {version: [] for version in sources}
    for turn in range(turns):
        for version in list(sources)[:: -1 if turn % 2 else 1]:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                for file in folder.glob("*.toml"):
                    (Path(place) / file.name).write_bytes(file.read_bytes())
                taken[version].append(time_command([sys.executable, *words], Path(place), sources[version]))
    by_field = {v: dict(zip(Seconds._fields, zip(*of, strict=True), strict=True)) for v, of in taken.items()}
    about: dict[str, Any] = {v: {n: spread(values).to_json() for n, values in of.items()} for v, of in by_field.items()}
    if "before" in sources:
        about["now over before"] = {
            n: ratios(values, by_field["before"][n]).to_json() for n, values in by_field["now"].items()
        }
    for version, of_version in about.items():
        print(what, version, {n: one["median"] for n, one in of_version.items()}, flush=True)
    return about


def time_command(words: list[str], place: Path, source: Path) -> Seconds:
    """Run a command in a folder, with fedmutual from `source`, and wait for all its processes.

    Needs `common.adopt_orphans`: workers that end after the command are then waited for here.
    """
    environment = os.environ | {"PYTHONPATH": str(source)}
    with (place / "output.txt").open("w+b") as output:
        begun = time.monotonic()
        process = subprocess.Popen(words, cwd=place, env=environment, stdout=output, stderr=subprocess.STDOUT)
        first = end = processor = 0.0
        while True:
            if not first and os.fstat(output.fileno()).st_size:
                first = time.monotonic() - begun
            try:
                pid, status, used = os.wait4(-1, 0 if end else os.WNOHANG)
            except ChildProcessError:  # none is left
                break
            if pid:
                processor += used.ru_utime + used.ru_stime
            if pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                end = time.monotonic() - begun
            if not pid:
                time.sleep(0.002)
        if process.returncode:
            raise SystemExit(f"{words}: {(place / 'output.txt').read_text()}")
    return Seconds(first or end, end, processor)


def make_runs(folder: Path, runs: int) -> None:
    """Write this many run folders."""

    def draw(method: str) -> Callable[..., float]:
        def score(seed: int, round: int, client: str = "") -> float:
            chance = random.Random(f"{method} {seed} {round} {client}").gauss(0, 0.03)
            return figure(METHODS[method] - 0.3 / round + chance, 6)

        return score

    def count(client: int, seed: int) -> list[int]:
        return [random.Random(f"{seed} {client} {label}").randrange(1, 20) for label in range(10)]

    methods = [
        Made(
            method,
            draw(method),
            draw(method) if method != "independent" else lambda seed, round: None,
            rounds=20,
            every=2,
            clients=tuple(map(str, range(5))),
            classes=tuple(map(str, range(10))),
            best_round=20,
            counts=count,
            name="pages",
        )
        for method in METHODS
    ]
    write_all(folder, methods, range(runs // len(methods)))
