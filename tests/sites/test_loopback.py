"""A real federation on this machine: a server and two sites over mutual TLS, FML with a kill, and FedH2L."""

import json

import pytest

import fedmutual
from fedmutual.config import parse_config, replace_algorithm
from fedmutual.sites.flare.workspace import JOB, LAST_LOG
from fedmutual.sites.ledger import read_ledger
from loopback import JOBS, loopback
from wards import COMMON, SEEDED, SITES, TELLING, same, together, with_data

pytestmark = pytest.mark.sites

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

TWO = {"north": SITES["north"], "south": {**SITES["south"], "model": {"personal": "mine:Tiny"}}}
MINE = """
from dataclasses import dataclass

from torch import nn

from fedmutual.algorithms import FML

@dataclass(frozen=True, kw_only=True)
class Mine(FML):
    "FML."

def Tiny(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, classes))
"""


def test_a_kill_in_the_middle_costs_nothing(tmp_path, monkeypatch):
    """An algorithm of the users' own, which server and sites trust; two architectures, one of them a site's own; kill -9 of
    a site's job: the bits of a run in one process. So have the networks that the sites train alone.
    """
    common = {**COMMON, **TELLING, "rounds": 6, "algorithm": {**COMMON["algorithm"], "name": "mine:Mine"}}
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    run = fedmutual.run(parse_config(together(common, TWO)), tmp_path / "one")
    alone = fedmutual.run(replace_algorithm(parse_config(together(common, TWO)), "independent")[0], tmp_path / "alone")
    with loopback(tmp_path / "fed", common, TWO, modules={"mine": MINE}, baseline=True) as fed:
        fed.start("server", "north", "south", jobs=JOBS)
        fed.submit()
        fed.round(2)
        fed.submit("another", "looked-on")  # looks on, and begins nothing
        fed.kill_job("south")
        fed.done()
        for name in ("submit", "another"):
            fed.wait(lambda name=name: fed.processes[name].poll() is not None, 30, "the lead's command ends")
            assert fed.processes[name].returncode == 0, fed.log(name)
        assert "federation 'wards' is running already" in fed.log("another")
        jobs = [*(fed.folder / "server" / "flare" / "jobs").iterdir()]
        assert len(jobs) <= 2  # the one submitted, and the one begun anew
        fed.wait(lambda: nothing_left(fed, jobs), 60, "what came with the jobs is removed")
    result = fedmutual.Run(fed.folder / "result")
    assert set(json.loads((result.folder / "environment.json").read_text())["modules"]) == {"mine"}
    assert same(result.global_model().state_dict(), run.global_model().state_dict())
    for i in TWO:
        mine = fedmutual.Run(fed.configs[i].parent / "state" / "wards")
        assert same(mine.personal_model(i).state_dict(), run.personal_model(i).state_dict())
    assert get_scores(result, "alone") == get_scores(alone, "personal")
    assert result.summary["personal"]["val_accuracy"] == run.summary["personal"]["val_accuracy"]
    assert result.summary["bytes"] == run.summary["bytes"]
    captured(fed)


def test_sites_register_again_at_a_server_with_a_renewed_key(tmp_path):
    """The server refuses what its old key signed: sites register anew by themselves, and the bits stay as in one process."""
    common = {**COMMON, **TELLING, "rounds": 6}
    two = {i: SITES[i] for i in ("north", "south")}
    run = fedmutual.run(parse_config(together(common, two)), tmp_path / "one")
    with loopback(tmp_path / "fed", common, two) as fed:
        fed.start("server", *two, jobs=JOBS)
        fed.submit()
        fed.round(2)
        fed.kill("server")
        fed.cli("provision", fed.file, "--out", fed.folder / "kits", "--renew", "server")
        fed.start("server", jobs=JOBS)
        fed.done()
        assert fed.alike(run)
        for i in two:
            assert fed.log(i).count("connected to the server") == 2


def get_scores(run, model):
    """Return all scores of a model."""
    history = run.history()
    return history[history["model"] == model].drop(columns="model").to_dict("records")


def nothing_left(fed, jobs):
    """Neither folders of jobs, at the server and the sites, nor their archives; the last job's log is kept."""
    works = [fed.folder / "server" / "flare", *(fed.configs[i].parent / "state" / "flare" for i in TWO)]
    archives = [part for job in jobs for part in job.iterdir() if part.name != "meta" and part.stat().st_size]
    folders = [path for work in works for path in work.iterdir() if JOB.fullmatch(path.name)]
    return not archives and not folders and all((work / LAST_LOG).exists() for work in works[1:])


def captured(fed):
    """All that a site's ledger has, and nothing else, came to the server: tensors of the contract, losses, scores."""
    lines = read_ledger(fed.configs["north"].parent / "state" / "wards")
    names = {t["name"] for line in lines for t in line["tensors"]}
    assert names == set(fedmutual.Run(fed.folder / "result").global_model().state_dict())
    assert {line["to"] for line in lines} == {"server"}
    assert {key for line in lines for key in line["told"]} <= {"train", "scores"}


def test_masked_updates_are_a_fixed_sum_in_one_process(tmp_path):
    """Three sites sign with the keys of their kits; the server has their sums, of rows and of updates: the bits of a run in
    one process.
    """
    three = {i: {"model": {"personal": "mlp"}, "data": {"name": "digits"}} for i in ("north", "south", "west")}
    data = {"classes": COMMON["data"]["classes"], "mean": "federated", "std": "federated"}
    common = {**COMMON, **TELLING, "rounds": 2, "data": data}
    run = fedmutual.run(parse_config(together(common | {"server": {"sum": "fixed"}}, three)), tmp_path / "one")
    with loopback(tmp_path / "fed", common, three, server={"sum": "masked"}) as fed:
        fed.start("server", *three, jobs=JOBS)
        fed.submit()
        fed.done()
        assert fed.progress()["notes"] == []
    assert fed.alike(run)
    lines = read_ledger(fed.configs["north"].parent / "state" / "wards")
    assert {t["name"] for line in lines for t in line["tensors"]} == {"content", "words"}


def test_peers_send_to_each_other(tmp_path):
    """FedH2L: posteriors go from site to site, and the server gets none of them; the bits of a run in one process."""
    sites = {i: tables for i, tables in with_data(tmp_path).items() if i != "west"}
    common = {**SEEDED, **TELLING, "rounds": 12, "records": {"evaluate_every": 6}}
    run = fedmutual.run(parse_config(together(common, sites)), tmp_path / "one")
    public_table = {"public": {"folder": str(tmp_path / "fed" / "public")}}
    with loopback(
        tmp_path / "fed", common, {i: tables | public_table for i, tables in sites.items()}, public="public"
    ) as fed:
        for i in sites:
            fed.cli("data", "give", fed.file, "--site", fed.configs[i], "-o", fed.folder / "public")
        fed.start("server", *sites, jobs=JOBS)
        fed.submit()
        fed.done()
        assert fed.progress()["notes"] == []
    lines = read_ledger(fed.configs["north"].parent / "state" / "wards")
    disclosed = {(line["to"], tuple(t["name"] for t in line["tensors"])) for line in lines}
    assert disclosed == {
        ("server", ()), ("south", ("counts", "digest", "rows")), ("south", ("accuracy", "index", "posterior"))
    }  # fmt: skip
    for i in sites:
        mine = fedmutual.Run(fed.configs[i].parent / "state" / "wards")
        assert same(mine.personal_model(i).state_dict(), run.personal_model(i).state_dict())
    server = fedmutual.Run(fed.folder / "server" / "wards")
    assert server.summary["personal"]["val_accuracy"]["last"] == run.summary["personal"]["val_accuracy"]["last"]
