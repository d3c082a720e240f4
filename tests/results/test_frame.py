"""The tables that a notebook gets of run folders: a row for each number, named by its run; steps, last and best rounds."""

import json

import pytest

import fedmutual
from fedmutual.errors import RunError
from run_folders import Made, write_all

METHODS = [Made("fml", lambda s, r, c: 0.5 + 0.1 * r, lambda s, r: 0.4 + 0.1 * s), Made("independent", lambda s, r, c: 0.5)]


@pytest.fixture
def folder(tmp_path):
    """Runs of two methods and two seeds; in each round client k takes k + 1 steps."""
    for path in write_all(tmp_path, METHODS, [0, 1]):
        lines = [json.loads(line) for line in (path / "ledger.jsonl").read_text().splitlines()]
        counted = [line | {"steps": 1 + int(line["client"])} for line in lines]
        (path / "ledger.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in counted))
    return tmp_path


def test_each_row_names_its_run(folder):
    results = fedmutual.read(folder)
    assert [list(table)[:4] for table in results] == [["study", "method", "variant", "seed"]] * 3
    for table in results:
        assert {*zip(table["method"], table["seed"], strict=True)} == {
            (m, s) for m in ("fml", "independent") for s in (0, 1)
        }
    assert results.runs["state"].unique().tolist() == ["finished"]
    assert results.runs["seconds"].tolist() == [12.5] * 4


def test_a_score_has_the_steps_of_its_client_and_of_the_test_set_their_mean(folder):
    scores = fedmutual.read(folder).scores.query("method == 'fml' and seed == 1 and metric == 'accuracy'")
    own = scores[scores["data"] == "validation"].set_index(["round", "client"])
    assert own.loc[(2, "2"), ["steps", "value", "examples"]].tolist() == [6, pytest.approx(0.7), 50]
    test = scores[scores["client"].isna()].set_index("round")
    assert test["steps"].tolist() == [2, 4]
    assert test["value"].tolist() == [0.5, 0.5]


def test_last_and_best_rounds_are_marked(folder):
    scores = fedmutual.read(folder).scores
    assert scores.loc[scores["last"], "round"].unique().tolist() == [2]
    assert scores.loc[scores["best"], "round"].unique().tolist() == [1]  # which the summaries of these runs name


def test_scores_are_those_of_the_history_of_each_run(folder):
    one = fedmutual.read(folder / "fml" / "0").scores
    history = fedmutual.Run(folder / "fml" / "0").history()
    history = history[history["metric"] != "examples"].reset_index(drop=True)
    assert one[list(history)].equals(history)


def test_steps_that_were_not_recorded_are_missing(tmp_path):
    write_all(tmp_path, METHODS, [0])
    assert fedmutual.read(tmp_path).scores["steps"].isna().all()
    assert fedmutual.read(tmp_path).work["steps"].isna().all()


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        fedmutual.read(tmp_path)
