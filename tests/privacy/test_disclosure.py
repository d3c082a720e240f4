"""`share.metrics`: what a client tells of its scores and losses, and what stays in its own folder. In one process."""

import pytest

import fedmutual
from fedmutual.scores import LEAST_ROWS, coarsen_accuracy
from log_lines import read_lines

NEVER_TOLD = {"examples", "loss", "recall", "auroc", "majority", "balanced_accuracy"}


@pytest.mark.parametrize(
    ("accuracy", "rows", "expected"),
    [
        (98 / 126, 126, 0.78),
        (97 / 126, 126, 0.77),
        (0.77777, 50, 0.78),
        (1.0, 50, 1.0),
        (0, 50, 0.0),
        (0.5, 49, None),
        (None, 500, None),
    ],
)
def test_an_accuracy_is_sent_in_whole_percent_for_at_least_fifty_rows(accuracy, rows, expected):
    values = {"examples": rows, "accuracy": accuracy, "loss": 0.123456, "recall": [0.1, 0.2]}
    assert coarsen_accuracy(values, rows) == (None if expected is None else {"accuracy": expected})


def test_a_task_without_an_accuracy_tells_nothing():
    assert coarsen_accuracy({"examples": 900, "loss": 2.5, "mean_absolute_error": 1.25, "r2": 0.5}, 900) is None


def run(small, **overrides):
    """Three clients with validation rows of their own, all of fifty or more -> the run, and its lines of scores."""
    config = fedmutual.load_config(small, rounds=2, **{"split.test": 0.2, "split.validation": 0.4, **overrides})
    made = fedmutual.run(config, "run")
    return made, read_lines(small.parent / "run" / "metrics.jsonl")


def test_only_accuracies_are_sent_and_other_scores_stay_at_the_client(small):
    small.write_text(small.read_text().replace("examples = 40", "examples = 150"))
    finished_run, lines = run(small, **{"share.metrics": "accuracy", "records.copies": True})
    at_home = {i: read_lines(small.parent / f"run/clients/{i}/metrics.jsonl") for i in "012"}
    disclosed = {
        (line["round"], s["client"], s["model"], s["data"]): s for line in lines for s in line["scores"] if s["client"]
    }
    assert {line["round"] for line in lines} == {1, 2}
    assert all(line["train"] == {} for line in lines)
    measured = {
        (line["round"], i, s["model"], s["data"]): s
        for i, client_lines in at_home.items()
        for line in client_lines
        for s in line["scores"]
    }
    assert disclosed.keys() == {key for key, s in measured.items() if s["examples"] >= LEAST_ROWS and key[2] != "copy"}
    assert {data for *_, data in disclosed} == {"validation", "test"}
    for key, score in disclosed.items():
        assert not NEVER_TOLD & score.keys()
        assert score["accuracy"] == round(measured[key]["accuracy"], 2)
    assert any(key[2] == "copy" for key in measured)
    assert finished_run.summary["personal"]["val_accuracy"]["last"]["per_client"] == {
        i: disclosed[2, i, "personal", "validation"]["accuracy"] for i in "012"
    }
    assert finished_run.summary["projected"] is None


def test_scores_of_few_rows_are_not_sent(small):
    _, lines = run(small, **{"share.metrics": "accuracy", "split.validation": None, "split.preset": "v1"})
    assert {s["data"] for line in lines for s in line["scores"] if s["client"]} == {"test"}


def test_the_default_shares_all_metrics(small):
    _, lines = run(small)
    assert all(s.keys() >= NEVER_TOLD for line in lines for s in line["scores"])
    assert all(line["train"].keys() == set("012") for line in lines)
    assert not list((small.parent / "run" / "clients").glob("*/metrics.jsonl"))


def test_an_empty_table_of_a_client_sets_nothing(small):
    small.write_text(small.read_text() + "[clients.1]\nshare = {}\n")
    config = fedmutual.load_config(small, **{"share.metrics": "accuracy"})
    assert [config.disclosure(i) for i in "012"] == ["accuracy"] * 3


def test_hold_out_rows_that_are_too_few_choose_no_setting(small):
    with pytest.raises(fedmutual.ConfigError, match="no client sends its scores, so no score can choose a setting"):
        fedmutual.sweep(small, {"optimizer.lr": [0.1, 0.2], "share.metrics": ["accuracy"], "split.holdout": [0.2]}, out="s")


def test_hold_out_rows_that_are_too_few_keep_no_shared_model(small, cli):
    keep = ("records.evaluate_on=holdout", "records.keep_best=true", "share.metrics=accuracy", "split.holdout=0.2")
    code, _, err = cli("run", small, *(word for key in keep for word in ("--set", key)))
    assert (code, "no client sends its hold-out scores" in " ".join(err.split())) == (2, True)
