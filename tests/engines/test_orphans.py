"""Whatever ends a command, no process of the command is left, also in the middle of work that would last for minutes."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from fedmutual.engines.child_process import IS_FORKED

pytestmark = pytest.mark.process

SECONDS = 30
MARK = "FEDMUTUAL_TEST_OF_ORPHANS"
WORK = """
import os, pathlib, time
from torch import nn

def stop_here(place):
    if pathlib.Path(place, "parent").read_text() != str(os.getpid()):
        pathlib.Path(place, "at work").touch()
        time.sleep(600)

class Net(nn.Sequential):
    def __init__(self, shape, classes):
        super().__init__(nn.Flatten(), nn.Linear(64, classes))
        self.place = os.environ["PLACE"]

    def forward(self, x):
        stop_here(self.place)
        return super().forward(x)
"""
READ = """
import os
import numpy as np
import torch
import work
from fedmutual.data.stores import StreamedStore

class Rows:
    def take(self, rows):
        work.stop_here(os.environ["PLACE"])

store = StreamedStore(Rows(), np.arange(4) % 2, None, None, workers=1)
next(store.batches([torch.arange(4)]))
"""
IMPORT = """
import time
from fedmutual.engines import child_process
child_process._PRELOADED.append("slow")
child_process._start_fork_server()
time.sleep(600)
"""
SLOW = """
import os
import work
work.stop_here(os.environ["PLACE"])
"""
CONFIG = """
name = "stuck"
rounds = 2
data = { name = "digits" }
partition = { kind = "shards", clients = 2, classes_per_client = 5, examples = 60 }
split = { test = 0.5, holdout = 0.2 }
algorithm = { name = "fml" }
model = { shared = "work:Net" }
engine = { device = "cpu" }
"""
FEDMUTUAL = ("-m", "fedmutual")
OUT = ("--out", "out")
KINDS = {
    "workers of an engine": (*FEDMUTUAL, "run", "config.toml", *OUT, "--set", "engine.name=processes"),
    "runs side by side": (
        *FEDMUTUAL,
        "compare",
        "config.toml",
        *OUT,
        "--methods",
        "fml,fedavg",
        "--seeds",
        "2",
        "--jobs",
        "2",
    ),
    "Ray": (*FEDMUTUAL, "run", "config.toml", *OUT, "--set", "engine.name=cluster", "--set", "engine.workers=1"),
    "readers of rows": ("read.py",),
    "the fork server": ("import.py",),
}


def list_processes(mark):
    """Return the running processes that have this mark in their environment."""
    living = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def start_work(folder, words):
    """Start Python with these words, and return the process as soon as another process of the command is at work."""
    env = os.environ | {MARK: str(folder), "PLACE": str(folder), "PYTHONPATH": str(folder)}
    for name, text in {
        "work.py": WORK,
        "read.py": READ,
        "import.py": IMPORT,
        "slow.py": SLOW,
        "config.toml": CONFIG,
    }.items():
        (folder / name).write_text(text)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *words], cwd=folder, env=env, stdout=log, stderr=log)
    (folder / "parent").write_text(str(process.pid))
    until = time.monotonic() + 300
    while not (folder / "at work").exists():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < until, (folder / "log").read_text()
        time.sleep(0.05)
    return process


ENDS = [(kind, signal.SIGKILL) for kind in KINDS]
ENDS += [(kind, signal.SIGTERM) for kind in KINDS if FEDMUTUAL[1] in KINDS[kind]]  # a script of Python has no handler


@pytest.mark.parametrize(("kind", "end"), ENDS)
def test_no_process_is_left_of_a_command(tmp_path, kind, end):
    if kind == "Ray":
        pytest.importorskip("ray", reason="the extra `ray` is not installed")
    elif kind == "the fork server" and not IS_FORKED:
        pytest.skip("worker processes are no forks here")
    process, mark = start_work(tmp_path, KINDS[kind]), str(tmp_path)
    try:
        assert len(list_processes(mark)) > 1
        assert "raylet" not in (tmp_path / "log").read_text(), "the cluster that a command starts for itself is quiet"
        process.send_signal(end)
        process.wait(SECONDS)
        until = time.monotonic() + SECONDS
        while list_processes(mark) and time.monotonic() < until:
            time.sleep(0.1)
        assert [left.cmdline() for left in list_processes(mark)] == []
    finally:
        for left in list_processes(mark):
            left.kill()
        process.wait()
