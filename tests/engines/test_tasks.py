"""Tasks with targets of every kind in whole runs: all engines and algorithms, noise, and the commands that use a model."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedmutual
from fedmutual import Site
from fedmutual.algorithms.registry import METHODS
from fedmutual.metric import describe_score
from fedmutual.report.tables import make_other_task_table, make_part_tables
from fedmutual.results.comparison import make_comparisons
from fedmutual.results.frame import find_runs, read_runs
from fedmutual.tasks import make_task
from toy import difference

pytestmark = [pytest.mark.run, pytest.mark.filterwarnings("ignore")]
ROWS = 48
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 5)).astype("float32")
TIMES = np.stack([RNG.exponential(np.exp(X[:, 0])), RNG.integers(0, 2, ROWS)], 1)
BLANK = np.where(RNG.random((ROWS, 2)) < 0.3, np.nan, X[:, :2] > 0)
QUANTILES = np.digitize(X[:, 0], [-0.5, 0.5])
TARGETS = {  # task -> targets and settings
    "survival": (TIMES, {"data.times": [0.5, 1, 2]}),
    "cox": (TIMES, {}),
    "ordinal": (QUANTILES, {}),
    "regression": (X[:, :3] * 2, {}),
    "multilabel": (BLANK, {"data.unlabelled": True}),
    "classification": (np.where(np.isnan(BLANK[:, 0]), np.nan, QUANTILES), {"data.unlabelled": True}),
}


def train(task, method="fml", y=None, **settings):
    y, data = TARGETS[task] if y is None else (y, {})
    sites = {i: Site(train=(X[k::2], y[k::2])) for k, i in enumerate("ab")}
    more = {"training.batch_size": 8, "engine.name": "inprocess", **data, **settings}
    return fedmutual.federate(
        sites, method, shared="mlp", task=task, rounds=1, local_epochs=1, settings=more, progress=False
    )


@pytest.mark.parametrize("task", TARGETS)
def test_stacked_clients_learn_a_task_as_single_clients_do(task):
    plain, stacked = (train(task, **{"engine.name": name}) for name in ("inprocess", "stacked"))
    assert difference(*(run.global_model().state_dict() for run in (plain, stacked))) < 1e-5
    scores = plain.history()
    assert set(scores["metric"]) <= {"examples", *plain.task().tells}
    assert np.isfinite(scores[scores["metric"] == plain.task().metric.name]["value"]).all()


OF_CLASSES = ("fedkd", "fedproto", "fedtgp", "feddf", "fedh2l", "fd", "fedgh", "fedgen", "fedapen", "kt-pfl")
PUBLIC = {"split.public": 0.3}
NEEDS = {"aggregate": PUBLIC, "feddf": PUBLIC} | dict.fromkeys(("fedh2l", "fedmd"), PUBLIC | {"algorithm.public_batch": 4})


@pytest.mark.parametrize("method", METHODS)
def test_every_algorithm_learns_survival_or_says_why(method):
    sentences = dict.fromkeys(OF_CLASSES, "task with classes")
    sentences["centralised"] = "pools one data set"
    if method in sentences:
        with pytest.raises(fedmutual.UserError, match=sentences[method]):
            train("survival", method, **NEEDS.get(method, {}))
    else:
        run = train("survival", method, **NEEDS.get(method, {}))
        assert run.history().query("metric == 'concordance'")["value"].between(0, 1).all()


@pytest.mark.parametrize("method", ["fedkd", "fedproto", "fedh2l", "fedmd"])
def test_an_algorithm_that_needs_every_label_refuses_missing_ones(method):
    with pytest.raises(fedmutual.UserError, match=f"algorithm '{method}' needs the label of every row"):
        train("classification", method, **NEEDS.get(method, {}))


def test_noise_covers_losses_that_are_means_over_examples():
    pytest.importorskip("opacus")
    private = {"privacy.nets": "both", "privacy.sigma": 1.0, "privacy.delta": 1e-3}
    for task in ("survival", "ordinal", "multilabel"):
        assert train(task, **private).summary["rounds"] == 1
    with pytest.raises(fedmutual.UserError, match="'survival' in place of 'cox'"):
        train("cox", **private)


PARTS = {  # task -> the scores that are lists: of which parts, and the parts of the outputs
    "survival": {"calibration": ("Time", ["0.5", "1", "2"])},
    "cox": {},
    "ordinal": {},
    "regression": dict.fromkeys(("output_mean_absolute_error", "output_r2"), ("Number", ["0", "1", "2"])),
    "multilabel": {"label_auroc": ("Label", ["0", "1"])},
    "classification": {"recall": ("Class", ["0", "1", "2"])},
}


@pytest.mark.parametrize("task", TARGETS)
def test_the_page_shows_each_score_of_a_task(task, tmp_path):
    """Without rows for a class "no label", and without a table of recalls that no task has."""
    y, settings = TARGETS[task]
    sites = {i: Site(train=(X[k::2], y[k::2])) for k, i in enumerate("ab")}
    how = {"rounds": 1, "seeds": 1, "settings": settings, "progress": False, "out": tmp_path / "runs"}
    fedmutual.compare(sites, ["fedavg", "independent"], "mlp", task=task, **how)
    (comparison,) = make_comparisons(read_runs(find_runs(tmp_path / "runs")))
    shown = {t.id: (t.columns[0].name, [row[0].text for row in t.rows]) for t in make_part_tables(comparison)}
    assert shown == PARTS[task]
    others = make_other_task_table(comparison)
    titles = {row[1].text for row in others.rows} if others else set()
    expected = {describe_score(n, comparison.metric).title for n in get_task(task).tells if n not in ("examples", *shown)}
    assert titles == (set() if task == "classification" else expected)


def test_a_class_may_have_the_name_of_missing_labels():
    run = train("classification", "fedavg", np.where(X[:, 0] > 0, "ill", "no label"))
    assert make_comparisons(read_runs([run.folder]))[0].classes == ("ill", "no label")


def get_task(name):
    return make_task(name, outputs=("0", "1", "2") if name in ("survival", "regression") else ())


def test_cox_has_no_loss_without_an_event_and_no_calibration():
    scores = make_task("cox").score(torch.tensor([[0.0], [1.0]]), torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
    assert scores == {"examples": 2, "loss": None, "concordance": None}
    with pytest.raises(fedmutual.UserError, match="no baseline hazard: it has no probabilities and no calibration"):
        train("cox", **{"data.times": [1, 2]})


def test_the_commands_of_a_model_take_several_answers(in_tmp_path, cli):
    columns = [f"x{k}" for k in range(5)]
    table = pd.DataFrame(X, columns=columns).assign(week=TIMES[:, 0], death=TIMES[:, 1])
    table.to_csv("rows.csv", index=False)
    Path("weeks.toml").write_text(WEEKS)
    cli.run("run", "weeks.toml", "--out", "run")
    answer = json.loads(cli.run("predict", "run", "rows.csv", "--json")[0].splitlines()[0])
    assert answer["names"] == ["0.5", "1", "2"]
    assert 1 >= answer["numbers"][0] >= answer["numbers"][2] >= 0
    scores = json.loads(cli.run("score", "run", "rows.csv", "--json")[0])
    assert scores["concordance_interval"][0] < scores["concordance"] < scores["concordance_interval"][1]
    assert set(scores["calibration"]) == {"0.5", "1", "2"}
    cli.run("export", "run", "--to", "model")
    about = json.loads(Path("model/model.json").read_text())["output"]
    assert (about["kind"], about["classes"]) == ("times", ["0.5", "1", "2"])
    program = torch.export.load("model/model.pt2").module()(torch.tensor(X[:1]))
    assert program[0].tolist() == pytest.approx(answer["numbers"], abs=1e-5)
    assert "the probability of no event up to each time" in Path("model/README.md").read_text()


WEEKS = """
name = "weeks"
rounds = 1
data = { name = "csv", root = "rows.csv", label = ["week", "death"], times = [0.5, 1, 2] }
partition.clients = 2
algorithm.name = "fml"
model.shared = "mlp"
training.task = "survival"
"""
MODULE = """
from dataclasses import dataclass

import torch.nn.functional as F


@dataclass(frozen=True)
class Grid:
    tells: tuple = ("examples", "error")
    outputs: int = 6

    def fit(self, output, target):
        return F.mse_loss(output{view}, target)

    def mutual(self, personal, meme, target, alpha, beta, temperature):
        return (
            alpha * self.fit(personal, target) + (1 - alpha) * F.mse_loss(personal, meme.detach()),
            beta * self.fit(meme, target) + (1 - beta) * F.mse_loss(meme, personal.detach()),
        )

    def score(self, output, target):
        return {{"examples": len(target), "error": self.fit(output, target).item()}}
"""


def test_an_own_task_has_targets_of_any_shape(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "grid_right.py").write_text(MODULE.format(view=".view(-1, 2, 3)"))
    (tmp_path / "grid_wrong.py").write_text(MODULE.format(view=".mean(-1, keepdim=True)"))
    y = RNG.normal(size=(ROWS, 2, 3))
    assert train("grid_right:Grid", y=y).history().query("metric == 'error'")["value"].mean() > 0
    with pytest.raises(fedmutual.UserError, match=r"fit of your task grid_wrong:Grid raised .*\(line 13 of grid_wrong.py\)"):
        train("grid_wrong:Grid", y=y[:, 0])
