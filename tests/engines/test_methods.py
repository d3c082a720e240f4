"""Every method in whole runs: on every engine of one machine, stopped and resumed, its models read back."""

import json

import pytest
import torch

import fedmutual
from fedmutual.algorithms import ALGORITHMS
from fedmutual.config import parse_config
from kills import same, stop_and_resume, tensors
from toy import difference

pytestmark = pytest.mark.long

NORMED = """
from torch import nn

def net(shape, classes):
    flat = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(flat, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, classes))
"""
OF_STEPS = {"fedh2l": {"public_batch": 8}, "fedmd": {"public_batch": 8}, "kt-pfl": {"public_batch": 8}}
SETTINGS = OF_STEPS | {
    "fedtgp": {"server_epochs": 5},
    "feddf": {"distill_steps": 4},
    "fedrep": {"head_epochs": 1},
    "apfl": {"adaptive": True},
    "fedavg-ft": {"tune_every": 2},
}


def config(name, **changes):
    """Three clients, two in a round; networks of their own where the method takes them."""
    algorithm = ALGORITHMS[name](**SETTINGS.get(name, {})).algorithm()
    tables = {
        "name": name,
        "rounds": 3,
        "data": {"name": "digits"},
        "partition": {"kind": "shards", "clients": 3, "classes_per_client": 4, "examples": 40},
        "split": {"test": 0.5, "public": 0.0 if algorithm.public is None else 0.3},
        "algorithm": {"name": name, **SETTINGS.get(name, {})},
        "model": {"shared": "normed:net" if name == "fedbn" else "mlp"},
        "training": {"local_epochs": 1, "batch_size": 16},
        "engine": {"device": "cpu", "name": "inprocess", "participation": 0.7},
    }
    if "personal" in algorithm.scores and not (algorithm.alike or algorithm.same_heads) and name != "centralised":
        tables["model"]["personal"] = ["mlp", "cnn1", "mlp"]
    return parse_config(tables, overrides=changes)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "normed.py").write_text(NORMED)
    return tmp_path


@pytest.fixture(scope="session")
def find_run(tmp_path_factory):
    """The folder of a method's run in one process: made once for all tests of it, which only read it."""
    folders = {}

    def find(name):
        if name not in folders:
            folders[name] = fedmutual.run(config(name), tmp_path_factory.mktemp("whole") / "run").folder
        return folders[name]

    return find


def stop_last_phase(whole_folder, folder, settings):
    """Return the folder of a run that was stopped in the last phase of its last round, and resumed.

    What the phases before it left at clients comes back from what was saved.
    """
    last = json.loads((whole_folder / "ledger.jsonl").read_text().splitlines()[-1])["phase"]
    return stop_and_resume(settings, folder, settings.rounds, last)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_stop_in_a_phase_loses_nothing(name, place, find_run):
    assert same(stop_last_phase(find_run(name), "part", config(name)), find_run(name)) == []


@pytest.mark.process
@pytest.mark.parametrize("name", ALGORITHMS)
def test_worker_processes_come_to_the_same_bytes_also_after_a_stop(name, place, find_run):
    workers = config(name, **{"engine.name": "processes", "engine.workers": 2})
    assert same(stop_last_phase(find_run(name), "processes", workers), find_run(name)) == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_stacked_clients_come_to_the_same_but_for_rounding_also_after_a_stop(name, place, find_run):
    changes = {"rounds": 2, "engine.participation": 1.0}
    stacked = config(name, **changes, **{"engine.name": "stacked"})
    runs = {
        "inprocess": fedmutual.run(config(name, **changes), "inprocess").folder,
        "stacked": stop_last_phase(find_run(name), "stacked", stacked),
    }
    assert "vmap refuses" not in (runs["stacked"] / "log.txt").read_text()
    in_turns, stacked_state = (tensors(folder) for folder in runs.values())
    if name == "feddf":  # Adam's steps are as long as the rate, even where the gradient is a rounding error of either sign
        distances = torch.cat([(in_turns[k].double() - stacked_state[k].double()).abs().flatten() for k in in_turns])
        assert distances.quantile(0.95) < 1e-4
        assert distances.max() < 2 * 2 * 4 * 1e-3  # either way, in 2 rounds, by 4 steps of at most the server's rate
    else:
        assert difference(in_turns, stacked_state) < 1e-4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_a_method_leaves_is_read_back_and_scored(name, place, find_run):
    run = fedmutual.Run(find_run(name))
    summary, algorithm = run.summary, ALGORITHMS[name](**SETTINGS.get(name, {})).algorithm()
    scores = {s["model"] for s in json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[-1])["scores"]}
    assert all(t.isfinite().all() for t in tensors(run.folder).values())
    x = torch.rand(2, 1, 8, 8)
    if "personal" in scores:
        assert run.personal_model("1")(x).shape == (2, 10)
    if {"global", "proxy"} & set(algorithm.scores):
        assert run.meme("1")(x).shape == (2, 10)
    assert run.complete is ("global" in algorithm.scores and "meme" not in scores)
    if run.complete:
        assert run.global_model()(x).shape == (2, 10)
        assert summary["global"]["test_accuracy"]["last"] > 0
    assert summary["personal"]["val_accuracy"]["last"]["mean"] > 0
    assert (summary["bytes"]["up"] > 0) is (name not in ("independent", "centralised"))
