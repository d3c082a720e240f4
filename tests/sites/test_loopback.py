"""A real federation on this machine: a server and two sites over mutual TLS, FML with a kill, and FedH2L."""

import json

import pytest
import torch

import fedmutual
from fedmutual.config import parse_config
from loopback import loopback
from wards import COMMON, SITES, together

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

TWO = {"north": SITES["north"], "south": {**SITES["south"], "model": {"personal": "lenet:Tiny"}}}
LENET = """
from torch import nn

def Tiny(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))
"""


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_a_kill_in_the_middle_costs_nothing(tmp_path, monkeypatch):
    """Two architectures, one of them the site's own; kill -9 of a site's job: the bits of a run in one process."""
    common = {**COMMON, "rounds": 6}
    (tmp_path / "lenet.py").write_text(LENET)
    monkeypatch.chdir(tmp_path)
    run = fedmutual.run(parse_config(together(common, TWO)), tmp_path / "one")
    with loopback(tmp_path / "fed", common, TWO) as fed:
        (fed.configs["south"].parent / "lenet.py").write_text(LENET)
        fed.start("server", "north", "south")
        fed.submit()
        fed.round(2)
        fed.kill_job("south")
        fed.done()
        fed.wait(lambda: fed.processes["submit"].poll() is not None, 30, "the lead's command ends")
        assert fed.processes["submit"].returncode == 0, fed.log("submit")
    result = fedmutual.Run(fed.folder / "result")
    assert same(result.global_model().state_dict(), run.global_model().state_dict())
    for i in TWO:
        mine = fedmutual.Run(fed.configs[i].parent / "state" / "wards")
        assert same(mine.personal_model(i).state_dict(), run.personal_model(i).state_dict())
    assert result.summary["personal"]["val_accuracy"] == run.summary["personal"]["val_accuracy"]
    assert result.summary["bytes"] == run.summary["bytes"]
    captured(fed)


def captured(fed):
    """All that a site's ledger has, and nothing else, came to the server: tensors of the contract, losses, scores."""
    lines = [json.loads(line) for line in (fed.configs["north"].parent / "state" / "wards" / "left.jsonl").open()]
    names = {t["name"] for line in lines for t in line["tensors"]}
    assert names == set(fedmutual.Run(fed.folder / "result").global_model().state_dict())
    assert {line["to"] for line in lines} == {"server"}
    assert {key for line in lines for key in line["told"]} <= {"train", "scores"}
