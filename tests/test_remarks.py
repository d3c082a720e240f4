"""Remarks of runs that Python code starts: each is one warning at the line of the caller, in every call again."""

import warnings

import numpy as np
import pandas as pd
import pytest

import fedmutual
from fedmutual import RemarkWarning, Site
from fedmutual.events import Finished, Noted

pytestmark = pytest.mark.run
SMALL = "clients 'a', 'b': each has 14 examples, fewer than batch_size 128: it trains as one smaller batch"


@pytest.fixture
def sites():
    """Two sites with 14 training examples each, which are fewer than the batch size."""
    x = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    return {name: Site(train=(x, np.arange(20) % 2), model="mlp") for name in "ab"}


@pytest.fixture
def config(tmp_path, in_tmp_path, sites):
    np.savez("rows.npz", x=sites["a"].train[0], y=sites["a"].train[1])
    (tmp_path / "f.toml").write_text(
        'rounds = 1\nsplit = { holdout = 0.1 }\nmodel = { shared = "mlp" }\nengine = { device = "cpu" }\n'
        '[clients.a.data]\nname = "npz"\nroot = "rows.npz"\n[clients.b.data]\nname = "npz"\nroot = "rows.npz"\n'
    )
    return fedmutual.load_config("f.toml")


def list_remarks(caught):
    return [str(warning.message) for warning in caught if warning.category is RemarkWarning]


QUICK = {"shared": "mlp", "rounds": 1, "device": "cpu", "progress": False, "settings": {"split.holdout": 0.1}}
CALLS = {
    "federate": lambda sites, config: fedmutual.federate(sites, **QUICK),
    "compare": lambda sites, config: fedmutual.compare(sites, ["fml", "fedavg"], seeds=2, **QUICK),
    "run": lambda sites, config: fedmutual.run(config, "r"),
    "run with an observer": lambda sites, config: fedmutual.run(config, "r", observers=[lambda event: None]),
    "sweep": lambda sites, config: fedmutual.sweep(config, {"optimizer.lr": [0.01, 0.02]}, out="s"),
    "sweep side by side": lambda sites, config: fedmutual.sweep(config, {"optimizer.lr": [0.01, 0.02]}, out="s", jobs=2),
}


@pytest.mark.parametrize("call", [pytest.param(c, marks=[pytest.mark.process] * ("side" in c)) for c in CALLS])
def test_each_remark_is_one_warning_at_the_line_of_the_caller(call, sites, config):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        CALLS[call](sites, config)
    remarks = list_remarks(caught)
    assert remarks.count(SMALL) == 1
    assert len(set(remarks)) == len(remarks)
    assert {w.filename for w in caught if w.category is RemarkWarning} == {__file__}
    assert not [r for r in remarks if r.startswith("engine ")]  # the choice of the engine is no remark


def test_the_next_call_at_the_same_line_warns_again(sites):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for seed in (0, 1):
            fedmutual.federate(sites, seed=seed, **QUICK)
    assert list_remarks(caught).count(SMALL) == 2


def test_a_remark_of_a_round_names_the_run_and_the_round_and_comes_once(config, monkeypatch):
    def drive(rounds, engine):
        observers = rounds.gi_frame.f_locals["observers"]
        for event in (Noted(1, "the server is tired"), Noted(2, "the server is tired"), Finished(2)):
            [observe(event) for observe in observers]

    monkeypatch.setattr("fedmutual.studies.run.drive", drive)
    with pytest.warns(RemarkWarning) as caught:
        fedmutual.run(config, "r")
    assert list_remarks(caught).count("run, round 1: the server is tired") == len(caught) == 1


def test_a_remark_on_the_table_of_a_site_names_the_site_once():
    frame = pd.DataFrame({"a": np.arange(40.0) ** 2, "copy": np.arange(40) % 2, "y": np.arange(40) % 2})
    sites = {name: Site(train=frame, label="y", model="mlp") for name in "ab"}
    with pytest.warns(RemarkWarning) as caught:
        fedmutual.federate(sites, **QUICK)
    (remark,) = (remark for remark in list_remarks(caught) if "determines" in remark)
    assert remark.startswith("clients 'a', 'b': 'copy' determines the label of every training row")


def test_a_user_may_make_remarks_errors(sites):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RemarkWarning)
        with pytest.raises(RemarkWarning, match="clients 'a', 'b'"):
            fedmutual.federate(sites, **QUICK)


@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_command_prints_a_remark_once_and_issues_no_warning(command, config, cli):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RemarkWarning)
        code, _, err = cli(command, "f.toml", *(["--seeds", "1"] if command == "compare" else []))
    assert (code, err.count(f"note: {SMALL}")) == (0, 1)
