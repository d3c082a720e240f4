"""Kill processes of runs on worker processes, and compare the results. Writes benchmarks/results/worker-kills.json.

    uv run python benchmarks/worker_kills.py [--times 20] [--seed 0]

Each trial is a run of FML on the digits with two worker processes; in every second trial only one client of a worker stays
in memory. At a random moment between the start and the end of an undisturbed run one process gets SIGKILL: a worker, the
fork server, or the parent process, in turns; a process that has not started yet gets it as soon as it has. A run whose
parent process was killed is resumed.
For each trial: the seconds to the kill, the saved round at the kill (0: none), the line of the log that names the loss, the
result files that differ from those of the undisturbed run, and the processes of the trial that are left 60 s after its end.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from common import command, figure, machine, versions

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from fedmutual.rundir.file_names import CHECKPOINT  # noqa: E402
from kills import same  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "worker-kills.json"
VICTIMS = ("worker", "fork server", "parent")
MARK = "FEDMUTUAL_KILL_TRIAL"
DEADLINE = 300.0
CONFIG = """
name = "killed"
rounds = 40
data = { name = "digits" }
partition = { kind = "shards", clients = 4, classes_per_client = 4, examples = 200 }
split = { test = 0.5, holdout = 0.2 }
algorithm = { name = "fml" }
model = { shared = "mlp", personal = ["mlp", "cnn1", "mlp", "cnn1"] }
training = { local_epochs = 2, batch_size = 16 }
engine = { name = "processes", workers = 2, device = "cpu", participation = 0.75 }
records = { checkpoint_every = 2, evaluate_every = 3, keep_best = true }
"""


def start(folder: Path, out: str, mark: str, resident: int | None = None) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "fedmutual", "run", "config.toml", "--out", out, "--resume"]
    words += ["--set", f"engine.resident={resident}"] if resident else []
    with (folder / f"{out}.txt").open("ab") as output:
        return subprocess.Popen(words, cwd=folder, env=os.environ | {MARK: mark}, stdout=output, stderr=output)


def list_processes(mark: str) -> list[psutil.Process]:
    """Return the living processes of a trial: its parent process hands its environment on to all of them."""
    living = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
        except psutil.Error:
            continue
    return living


def find_victim(kind: str, parent: int, rng: random.Random) -> psutil.Process | None:
    """Return the process to kill; None if it is not there yet."""
    if kind == "parent":
        return psutil.Process(parent)
    children = psutil.Process(parent).children(recursive=True)
    servers = [p for p in children if p.ppid() == parent and any("forkserver" in word for word in p.cmdline())]
    if kind == "fork server":
        return servers[0] if servers else None
    workers = [p for p in children if p.ppid() in {s.pid for s in servers}]
    return rng.choice(workers) if workers else None


def try_once(folder: Path, number: int, kind: str, rng: random.Random, seconds: float) -> dict[str, Any] | None:
    """Run one trial; return None if the run ended before the process could be killed. seconds: of the undisturbed run."""
    out, mark, resident = f"run-{number}", f"{os.getpid()}-{number}", 1 if number % 2 else None
    begun, process = time.monotonic(), start(folder, out, mark, resident)
    commit, moment, victim = folder / out / CHECKPOINT, rng.uniform(0, seconds), None
    while victim is None and process.poll() is None and time.monotonic() < begun + DEADLINE:
        if time.monotonic() >= begun + moment:
            with suppress(psutil.Error):  # the run has just ended
                victim = find_victim(kind, process.pid, rng)
        time.sleep(0.005)
    if victim is None:
        process.wait(DEADLINE)
        return None
    saved = json.loads(commit.read_text())["round"] if commit.exists() else 0
    seconds, pid = time.monotonic() - begun, victim.pid
    victim.send_signal(signal.SIGKILL)
    code = process.wait(DEADLINE)
    if kind == "parent":
        left = count_left(mark)
        code = start(folder, out, mark, resident).wait(DEADLINE)
        left += count_left(mark)
    else:
        left = count_left(mark)
    log, output = folder / out / "log.txt", folder / f"{out}.txt"
    lines = [line for file in (log, output) if file.exists() for line in file.read_text().splitlines()]
    return {
        "killed": kind,
        "resident": resident,
        "after_seconds": figure(seconds, 3),
        "saved_round": saved,
        "exit_code": code,
        "named": next((line for line in lines if f"process {pid} " in line), None),
        "files_that_differ": same(folder / out, folder / "undisturbed"),
        "processes_left": left,
    }


def count_left(mark: str) -> int:
    """Return the number of processes of a trial that live 60 s after its end: a new fork server first ends its imports."""
    until = time.monotonic() + 60
    while (left := list_processes(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    return len(left)


def main() -> None:
    """Run all trials; write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, trials = random.Random(args.seed), list[dict[str, Any]]()
    about = {"command": command("worker_kills.py"), "machine": machine(), "versions": versions()}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.toml").write_text(CONFIG)
        begun = time.monotonic()
        if start(folder, "undisturbed", "undisturbed").wait(DEADLINE):
            raise SystemExit((folder / "undisturbed.txt").read_text())
        seconds, number = time.monotonic() - begun, 0
        while len(trials) < args.times:
            trial = try_once(folder, number, VICTIMS[len(trials) % 3], rng, seconds)
            number += 1
            print(trial or "the run ended before its process could be killed", flush=True)
            if trial is not None:
                trials.append(trial)
                RESULTS.write_text(json.dumps({**about, "trials": trials}, indent=1) + "\n")


if __name__ == "__main__":
    main()
