"""Kill a run repeatedly, resume it each time, and compare the result with an undisturbed run.

uv run python tests/kills.py --kills 20 [--seed 0]
"""

import argparse
import contextlib
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor

import fedmutual
import forked
from fedmutual.events import Event, Replied
from fedmutual.rundir.file_names import CHECKPOINT
from fedmutual.tensor_files import read_tensors

CONFIG = """
name = "killed"
rounds = {rounds}
data = {{ name = "digits" }}
partition = {{ kind = "shards", clients = 3, classes_per_client = 4, examples = 60 }}
split = {{ test = 0.5, holdout = 0.2 }}
algorithm = {{ name = "{algorithm}" }}
model = {{ shared = "cnn1" }}
training = {{ local_epochs = 2, batch_size = 16 }}
engine = {{ threads = 1, device = "cpu", participation = 0.7 }}
records = {{ checkpoint_every = 2, evaluate_every = 3, keep_best = true }}
"""
DEADLINE = 300.0  # seconds for one attempt
SAID = "said.txt"


class Trial(NamedTuple):
    """The outcome of one trial."""

    kills: list[str]  # a line each
    output: str  # by the command that ended the run


def stop_and_resume(config: Any, folder: Path | str, round: int, phase: str | None = None, resumed: Any = None) -> Path:
    """Train a run that is stopped at a reply of this round, and resume it; return its folder.

    phase: in which it is stopped; None: in the first. resumed: the configuration with which it is resumed.
    """

    def stop(event: Event) -> None:
        if isinstance(event, Replied) and event.round == round and phase in (None, event.phase):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedmutual.run(config, folder, observers=[stop])
    return fedmutual.run(resumed or config, folder, resume=True).folder


def start(folder: Path, out: Path) -> forked.Fork | subprocess.Popen[bytes]:
    words = ("fedmutual", "run", "config.toml", "--out", out, "--resume")
    return forked.start(words, folder, folder / SAID, folder / SAID)


def finish(folder: Path, out: Path) -> str:
    """Resume the run to its end and return its output."""
    code = start(folder, out).wait(DEADLINE)
    output = (folder / SAID).read_text()
    assert code == 0, output
    return output


def whole_run(folder: Path) -> Path:
    """Run the undisturbed run in this process, where hashed collections have another order than in the killed processes."""
    with contextlib.chdir(folder):
        return fedmutual.run(fedmutual.load_config("config.toml"), folder / "whole").folder


def kill_once(folder: Path, out: Path, rng: random.Random) -> str:
    """Start or resume the run and kill it: one time in four while the folder is opened, else during training."""
    watched = ("config.toml", "log.txt", "metrics.jsonl", CHECKPOINT) if rng.random() < 0.25 else (CHECKPOINT,)
    before = stamp(out, watched)
    begun = time.monotonic()
    process = start(folder, out)
    while stamp(out, watched) == before and process.poll() is None and time.monotonic() - begun < DEADLINE:
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.3))
    assert process.poll() is None, "the run ended before it could be killed; give it more rounds"
    process.kill()  # SIGKILL: nothing can be tidied up
    process.wait()
    saved = sorted(p.name for p in (out / "server").glob("round-*.safetensors")) if out.exists() else []
    return f"killed {time.monotonic() - begun:.2f} s after the start; server files: {', '.join(saved) or 'none'}"


def stamp(out: Path, names: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Return the values that change when a run writes one of these files."""
    return tuple((n, (out / n).stat().st_mtime_ns) for n in names if (out / n).exists())


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a run folder."""
    return {f"{p.relative_to(folder)}/{k}": t for p in folder.rglob("*.safetensors") for k, t in read_tensors(p)[0].items()}


def same(a: Path, b: Path) -> list[str]:
    """Return the result files that differ between two run folders."""

    def results(root: Path) -> dict[str, bytes]:
        kinds = ("*.safetensors", "metrics.jsonl", "ledger.jsonl", "partition.json")
        return {str(p.relative_to(root)): p.read_bytes() for kind in kinds for p in root.rglob(kind)}

    ours, theirs = results(a), results(b)
    assert any(k.endswith(".safetensors") for k in ours)
    return sorted(k for k in ours.keys() | theirs.keys() if ours.get(k) != theirs.get(k))


def trial(
    folder: Path,
    kills: int,
    seed: int,
    algorithm: str = "fml",
    rounds: int = 40,
    config: str | None = None,
    uninterrupted: Path | None = None,
) -> Trial:
    """Kill a run a number of times, let it finish and compare it; raise if a byte differs.

    whole: an undisturbed run of the same configuration, if there is one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config or CONFIG.format(rounds=rounds, algorithm=algorithm))
    rng = random.Random(seed)
    lines = [kill_once(folder, folder / "killed", rng) for _ in range(kills)]
    output = finish(folder, folder / "killed")
    different = same(folder / "killed", uninterrupted or whole_run(folder))
    assert not different, different
    return Trial(lines, output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(*trial(Path(place), args.kills, args.seed, rounds=args.rounds).kills, sep="\n")
    print(f"{args.kills} kills, then finished: models, scores and bytes equal those of the run that nobody touched")
