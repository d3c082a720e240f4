"""`adapt` compares by the main metric of the run's task: numbers and masks as well as classes."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits

import fedmutual
from own_data import OWN_TASK

pytestmark = pytest.mark.long

RUN = """
name = "shared"
rounds = 2
data = {{ name = "{source}", root = "{old}" }}
partition = {{ kind = "iid", clients = 2 }}
model = {{ shared = "{network}" }}
training = {{ task = "{task}", local_epochs = 1, batch_size = 8 }}
optimizer = {{ lr = 0.02 }}
engine = {{ device = "cpu", threads = 1 }}
"""
NEWCOMER = """
rounds = 1
data = {{ name = "{source}", root = "{new}" }}
training = {{ local_epochs = 1, batch_size = 8 }}
optimizer = {{ lr = 0.02 }}
engine = {{ device = "cpu", threads = 1 }}
"""


def write_numbers():
    table = load_diabetes(as_frame=True)
    frame = (table.data * 20).assign(label=table.target / 100)
    frame[:200].to_csv("old.csv", index=False)
    frame[200:280].to_csv("new.csv", index=False)
    return {"source": "csv", "old": "old.csv", "new": "new.csv", "network": "mlp", "task": "regression"}


def write_masks():
    images = (load_digits().images[:140] / 16).astype("float32")
    for name, rows in (("old", slice(80)), ("new", slice(80, 140))):
        np.savez(f"{name}.npz", x=images[rows], y=(images[rows] > 0.4).astype(int), classes=["paper", "ink"])
    return {"source": "npz", "old": "old.npz", "new": "new.npz", "network": "unet", "task": "segmentation"}


def write_own_task():
    Path("own_task.py").write_text(OWN_TASK)
    return {**write_numbers(), "task": "own_task:Median"}


@pytest.mark.parametrize(
    ("write", "metric", "title", "sign"),
    [
        (write_numbers, "mean_absolute_error", "Mean absolute error", -1),
        (write_masks, "dice", "Dice", 1),
        (write_own_task, "median_error", "Median error", -1),
    ],
)
def test_the_main_metric_compares_the_ways(in_tmp_path, cli, write, metric, title, sign):
    words = write()
    Path("run.toml").write_text(RUN.format(**words))
    Path("new.toml").write_text(NEWCOMER.format(**words))
    cli.run("run", "run.toml", "--out", "r")
    out, _ = cli.run("adapt", "r", "--data", "new.toml", "--examples", "20", "--seeds", "2", "--out", "a")
    assert title in out
    page = re.sub("pixel.accuracy", "", Path("a/report.html").read_text().lower())
    assert "accura" not in out + page
    about = json.loads(Path("a/adapt.json").read_text())
    assert about["metric"]["name"] == metric
    for way, by_size in about["values"].items():
        for seed, value in by_size["20"].items():
            history = fedmutual.Run(f"a/{way}/20/{seed}").history()
            last = history[
                (history["metric"] == metric) & (history["model"] == "personal") & (history["data"] == "validation")
            ]
            assert value == pytest.approx(last["value"].iloc[-1])
    ways, unchanged = about["values"], about["as it is"]["20"]
    ahead = np.mean([sign * (ways["fml"]["20"][seed] - unchanged[seed]) for seed in unchanged])
    sentence = " ".join(out.split()).split("the unchanged shared model it")[1]
    expected = "level" if abs(ahead) < 5e-4 else "ahead" if ahead > 0 else "behind"
    assert expected in sentence.split("(")[0]


def test_a_metric_that_is_undefined_on_the_rows_is_reported_by_adapt_sweep_and_report(in_tmp_path, cli):
    """The rows of one class of labels have no AUROC: a newcomer's validation rows, and all rows of a sweep."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(80, 4)).astype("float32")
    for name, y in (("old", x[:, :2] > 0), ("new", np.zeros((80, 2)))):
        np.savez(f"{name}.npz", x=x, y=y.astype("float32"))
    words = {"source": "npz", "old": "old.npz", "new": "new.npz", "network": "mlp", "task": "multilabel"}
    Path("run.toml").write_text(RUN.format(**words))
    Path("new.toml").write_text(NEWCOMER.format(**words))
    cli.run("run", "run.toml", "--out", "r")
    message = cli.fail("adapt", "r", "--data", "new.toml", "--examples", "20", "--seeds", "1", "--out", "a")
    assert "new.toml: macro AUROC is undefined on the newcomer's validation rows" in message
    assert not Path("a").exists(), "nothing was trained"
    Path("empty.toml").write_text(RUN.format(**words | {"old": "new.npz"}))
    message = cli.fail("sweep", "empty.toml", "--set", "optimizer.lr=0.01,0.1", "--out", "s")
    assert "macro AUROC is undefined on the hold-out rows" in message
    assert "diverged" not in message
    out, _ = cli.run("compare", "empty.toml", "--methods", "fml,independent", "--seeds", "1", "--out", "c")
    assert "macro AUROC is undefined on the clients' rows" in " ".join(out.split())


def test_another_task_than_that_of_the_run_is_refused(in_tmp_path, cli):
    words = write_numbers()
    Path("run.toml").write_text(RUN.format(**words))
    Path("new.toml").write_text(NEWCOMER.format(**words).replace("training = {", 'training = { task = "classification",'))
    cli.run("run", "run.toml", "--out", "r")
    assert "key 'training.task' is 'classification', and r has 'regression'; remove the key" in cli.fail(
        "adapt", "r", "--data", "new.toml", "--out", "a"
    )
    assert not Path("a").exists()


@pytest.mark.parametrize(
    ("task", "module", "sentence"),
    [
        ("os:abort", "", "names code of the module 'os'"),
        ("hostile:Task", 'open("taken", "w").close()', "names code of the module 'hostile'"),
        ("own_task:Median", OWN_TASK.replace("metric: Metric = MEDIAN_ERROR", "metric: None = None"), "has no main metric"),
    ],
)
def test_an_own_task_is_imported_only_if_it_is_the_one_that_the_run_recorded(in_tmp_path, cli, task, module, sentence):
    words = write_numbers()
    named = task.partition(":")[0]
    if named == "own_task":
        Path("own_task.py").write_text(module)
        words["task"] = task
    Path("run.toml").write_text(RUN.format(**words))
    Path("new.toml").write_text(NEWCOMER.format(**words))
    cli.run("run", "run.toml", "--out", "r")
    if named != "own_task":
        Path("hostile.py").write_text(module)
        config = Path("r/config.toml")
        config.write_text(config.read_text().replace('"regression"', f'"{task}"'))
    assert sentence in cli.fail("adapt", "r", "--data", "new.toml", "--out", "a")
    assert not Path("a").exists()
    assert not Path("taken").exists()
