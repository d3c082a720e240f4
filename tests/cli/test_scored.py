"""`records.evaluate_on = "holdout"`: a run that is scored on nothing else, and the commands that cannot do with it."""

import re
from pathlib import Path
from statistics import fmean

import pytest

from fedmutual.files import read_json
from fedmutual.rundir import best
from log_lines import read_lines

pytestmark = pytest.mark.run


@pytest.mark.parametrize("method", ["fml", "fedavg", "centralised"])
def test_only_hold_out_rows_are_scored_where_that_is_asked_for(small, cli, method):
    held = ("--set", "records.evaluate_on=holdout", "--set", "split.holdout=0.2", "--set", "records.keep_best=true")
    out, err = cli.run("run", small, "--set", f"algorithm.name={method}", *held, "--out", "x")
    assert re.search(r"round 3/3 .*shared [0-9.]+ % on hold-out", err)
    lines = read_lines(Path("x/metrics.jsonl"))
    scores = [s for line in lines for s in line["scores"]]
    assert {s["data"] for s in scores} == {"holdout"}
    assert {s["client"] for s in scores} == {"0", "1", "2"}
    summary = read_json(Path("x/summary.json"))
    assert summary["global"]["test_accuracy"] is summary["personal"]["val_accuracy"] is None
    judged = [fmean(s["accuracy"] for s in line["scores"] if s["model"] == "global") for line in lines]
    folder_of_best = Path("x/clients/pooled" if method == "centralised" else "x/server")
    assert best.find_best(folder_of_best, 3)[0] == 1 + judged.index(max(judged))
    assert out == "x: only hold-out rows were scored; metrics.jsonl has the scores that clients share\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("compare", "small.toml", "--methods", "fml,independent"), "leaves out the validation and test scores that are"),
        (
            ("sweep", "small.toml", "--set", "optimizer.lr=0.1,0.2"),
            "a sweep always scores hold-out rows only; remove the key",
        ),
        (("adapt", "first", "--data", "small.toml"), "leaves out the validation and test scores that are compared"),
        (("reproduce", "stability"), "leaves out the validation and test scores that are compared"),
        (
            ("run", "small.toml", "--set", "records.keep_best=true", "--set", "share.metrics=none"),
            "no client sends its hold-out scores",
        ),
    ],
)
def test_records_that_need_other_scores_refuse_hold_out_rows_only(small, cli, command, message):
    if command[0] == "adapt":
        cli.run("run", small, "--set", "rounds=1", "--out", "first")
        lines = [line for line in small.read_text().splitlines() if line.split(" ")[0] not in ("partition", "model")]
        small.write_text("\n".join(lines))
    err = cli.fail(*command, "--set", "records.evaluate_on=holdout", "--set", "split.holdout=0.2", "--out", "x")
    assert message in " ".join(err.split())
    assert not Path("x").exists()
