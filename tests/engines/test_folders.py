"""Starts, extensions, kills and resumes, and several processes at one run folder."""

import json
import time

import pytest
import torch

import fedmutual
import forked
from fedmutual.config import parse_config
from fedmutual.events import Noted
from fedmutual.rundir.checkpoint import remove_other_states
from fedmutual.rundir.file_names import CHECKPOINT
from kills import same, trial

WARM = """
from dataclasses import dataclass, replace
from fedmutual.algorithms import FML

@dataclass(frozen=True, kw_only=True)
class Warm(FML):
    def algorithm(self):
        return replace(super().algorithm(), start=(self,))
"""


def test_a_start_is_not_run_again_on_resume(small, cli, monkeypatch):
    from fedmutual.engines import base

    (small.parent / "warm.py").write_text(WARM)
    settings = ("--set", "algorithm.name=warm:Warm")
    assert cli("run", small, *settings, "--out", "whole")[0] == 0
    real, calls = base.participate, []

    def stopped(*args):
        calls.append(1)
        if len(calls) > 4:  # three clients' start, one client of round 1
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(base, "participate", stopped)
        assert cli("run", small, *settings, "--out", "part")[0] == 130
    assert json.loads((small.parent / "part" / CHECKPOINT).read_text())["round"] == 0
    assert cli("run", small, *settings, "--out", "part", "--resume")[0] == 0
    assert same(small.parent / "part", small.parent / "whole") == []


def test_an_extension_that_cannot_be_made_leaves_the_finished_run_as_it_was(small, cli):
    import numpy as np

    np.savez(small.parent / "a.npz", x=np.random.default_rng(0).normal(size=(90, 4)).astype("f4"), y=np.arange(90) % 3)
    small.write_text('name = "own"\nrounds = 2\ndata = { name = "npz", root = "a.npz" }\npartition = { clients = 2 }\n')
    assert cli("run", small)[0] == 0
    folder = small.parent / "runs/own"
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    (small.parent / "a.npz").rename(small.parent / "b.npz")
    assert "a.npz" in cli.fail("run", small, "--resume", "--set", "rounds=4")
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    (small.parent / "b.npz").rename(small.parent / "a.npz")
    assert cli("run", small, "--resume")[0] == 0
    assert cli("run", small, "--resume", "--set", "rounds=4")[0] == 0
    assert fedmutual.Run(folder).summary["rounds"] == 4


DAMAGED = {
    "server/round-2.safetensors": "is truncated",
    "clients/1/round-2.safetensors": "is truncated",
    "clients/1/best.safetensors": "is truncated",
    "metrics.jsonl": "line 1 is not what fedmutual writes",
    "ledger.jsonl": "line 1 is not what fedmutual writes",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_an_extension_of_a_damaged_state_leaves_the_finished_run_as_it_was(small, cli, name):
    """Otherwise a report would call the run unfinished, and the run could not be finished."""
    keep = ("--set", "records.keep_best=true")
    assert cli("run", small, "--set", "rounds=2", *keep)[0] == 0
    folder = small.parent / "runs/small"
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-50] if name.endswith("safetensors") else b"?" + content)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert f"{name}: {DAMAGED[name]}" in cli.fail("run", small, "--resume", "--set", "rounds=4", *keep)
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.process
def test_a_second_process_is_turned_away(small, cli):
    folder = small.parent / "runs/small"
    imports = "from fedmutual.rundir.folder import lock_folder\nfrom pathlib import Path\nimport time\n"
    hold = f"{imports}with lock_folder(Path({str(folder)!r})):\n"
    code = hold + " print('held', flush=True); time.sleep(60)"
    out, err = small.parent / "out.txt", small.parent / "err.txt"
    holder = forked.start(["python", "-c", code], small.parent, out, err)
    try:
        while not out.read_text() and holder.poll() is None:
            time.sleep(0.01)
        assert out.read_text().strip() == "held", err.read_text()
        assert "another process is writing this run" in cli.fail("run", small)
    finally:
        holder.kill()
        holder.wait()
    assert cli("run", small)[0] == 0, "a killed process lets go"


def test_sweep_takes_other_generations_and_part_files_only(tmp_path):
    server, client = tmp_path / "server", tmp_path / "clients/0"
    remaining = [server / "round-2.safetensors", client / "round-2.safetensors", client / "metrics.jsonl"]
    gone = [server / "round-1.safetensors", client / "round-4.safetensors", tmp_path / ".x.json.7.part"]
    gone.append(client / ".round-2.safetensors.9.part")
    for path in remaining + gone:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    remove_other_states(tmp_path, 2)
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == sorted(remaining)


@pytest.mark.parametrize("text", ['{"format": 1}', '{"format": 1, "run": 3, "round": 1, "seconds": 0.1}'])
def test_a_checkpoint_file_that_says_too_little(small, cli, text):
    cli("run", small, "--set", "rounds=1")
    (small.parent / "runs/small" / CHECKPOINT).write_text(text)
    assert "checkpoint.json: is damaged: run" in cli.fail("run", small, "--resume")


def test_a_run_leaves_the_callers_random_stream_and_threads_alone(small):
    config = fedmutual.load_config(small, rounds=1)
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    first = torch.rand(3)
    torch.manual_seed(3)
    fedmutual.run(config, "x")
    assert torch.equal(torch.rand(3), first)
    assert torch.get_num_threads() == threads


def test_batches_of_one_are_refused_where_a_network_cannot_train_on_them(small, cli):
    (small.parent / "normed_alone.py").write_text(
        "from torch import nn\n"
        "def net(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.BatchNorm1d(9), nn.Linear(9, classes))\n"
    )
    one = ("--set", "model.shared=normed_alone:net", "--set", "training.batch_size=1")
    assert "the batches of client '0' have one example, and the personal network cannot" in cli.fail("run", small, *one)
    assert not (small.parent / "runs").exists()
    assert cli("run", small, "--set", "training.batch_size=1", "--set", "rounds=1")[0] == 0, "an MLP can"


@pytest.mark.process
def test_three_kills_at_random_moments(tmp_path):
    assert len(trial(tmp_path, kills=3, seed=0, rounds=50).kills) == 3


PEERS = """
name = "killed"
rounds = 40
data = { name = "digits", angles = [0, 45, 90], per_class = 20 }
partition = { kind = "domains" }
split = { private = 0.5, public = 0.2, validation = 0.1, test = 0.2 }
algorithm = { name = "fedh2l", public_batch = 8, peers = "pairs", optimizers = 2, eta = 5e-4 }
model = { personal = ["mlp", "cnn1", "mlp"] }
training = { local_steps = 2, batch_size = 16 }
optimizer = { name = "adam", amsgrad = true, lr = 1e-3 }
engine = { threads = 1, device = "cpu" }
records = { checkpoint_every = 5, evaluate_every = 20, best_by = "validation", keep_best = true }
"""


@pytest.mark.process
def test_peers_that_are_killed_lose_nothing(tmp_path):
    """Pairs, a second optimiser and the sum of local gradients come back from what was saved."""
    assert len(trial(tmp_path, kills=1, seed=0, config=PEERS).kills) == 1


TWELVE = {
    "name": "twelve",
    "rounds": 2,
    "data": {"name": "digits"},
    "partition": {"clients": 12},
    "split": {"public": 0.2, "test": 0.2},
    "algorithm": {"name": "fedh2l", "public_batch": 4},
    "model": {"personal": ["mlp"]},
    "training": {"local_steps": 1, "batch_size": 8},
    "engine": {"name": "inprocess", "device": "cpu"},
}


def test_the_owners_of_public_rows_are_known_after_a_resume(tmp_path):
    """A checkpoint sorts its tensors by name, so client 10 comes before client 2."""
    notes = []
    fedmutual.run(parse_config(TWELVE), tmp_path / "whole")
    fedmutual.run(parse_config(TWELVE | {"rounds": 1}), tmp_path / "part")
    seen = [lambda event: notes.append(event.text) if isinstance(event, Noted) else None]
    fedmutual.run(parse_config(TWELVE), tmp_path / "part", resume=True, observers=seen)
    assert notes == []
    assert same(tmp_path / "part", tmp_path / "whole") == []
