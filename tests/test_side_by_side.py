"""Whole runs in worker processes: the same bits, one progress display, and a clear end where something goes wrong."""

import json
import os
import re
import signal

import pytest

from fedmutual.config import load_config
from fedmutual.core import Diverged
from fedmutual.studies import side_by_side
from fedmutual.studies.compare import compare
from fedmutual.studies.side_by_side import choose_jobs
from kills import tensors
from toy import difference

pytestmark = pytest.mark.process

COMPARE = ("--methods", "fml,independent", "--seeds", "2")


def read_results(folder):
    """All files of the runs in a folder but those that hold the time, the machine or the command."""
    files = {path.relative_to(folder): path for path in folder.glob("*/*/**/*") if path.is_file()}
    contents = {
        name: path.read_bytes() for name, path in files.items() if name.suffix in (".safetensors", ".jsonl", ".toml")
    }
    return {name: content for name, content in contents.items() if name.name != "log.txt"}


def test_the_number_of_jobs_by_hand(monkeypatch):
    monkeypatch.setattr(side_by_side, "count_cores", lambda: 4)
    assert choose_jobs(runs=10, seconds=2.0, threads=1) == 4  # saves 15 of 20 seconds
    monkeypatch.setattr(side_by_side, "START", 5.0)
    assert choose_jobs(runs=3, seconds=2.0, threads=1) == 1  # saves 4 seconds, and the start takes more
    assert choose_jobs(runs=3, seconds=60.0, threads=1) == 3
    assert choose_jobs(runs=10, seconds=60.0, threads=3) == 1  # one run takes three of four cores
    assert choose_jobs(runs=0, seconds=60.0, threads=1) == 1


def test_runs_that_fill_the_cores_run_in_turn_if_the_last_run_would_be_alone(monkeypatch):
    monkeypatch.setattr(side_by_side, "count_cores", lambda: 2)
    monkeypatch.setattr(side_by_side, "EFFICIENCY", 0.9)
    assert choose_jobs(runs=3, seconds=60.0, threads=1, workers=2) == 1  # 180 s; two pairs of 114 s
    assert choose_jobs(runs=4, seconds=60.0, threads=1, workers=2) == 2  # 240 s; two pairs of 114 s
    assert choose_jobs(runs=3, seconds=60.0, threads=1) == 2  # 180 s; two pairs of 60 s


def test_runs_side_by_side_have_the_same_bits_and_one_page(cli, small, tmp_path):
    alone, _ = cli.run("compare", small, *COMPARE, "--jobs", "1", "--out", "alone")
    together, _ = cli.run("compare", small, *COMPARE, "--jobs", "2", "--out", "together")
    assert read_results(tmp_path / "alone") == read_results(tmp_path / "together") != {}
    assert (tmp_path / "together" / "report.html").is_file()
    assert alone.count("%") == together.count("%")
    records = [json.loads(path.read_text()) for path in tmp_path.glob("together/*/*/environment.json")]
    assert [record["engine"]["name"] for record in records] == ["inprocess"] * 4


def test_the_seeds_of_a_method_share_a_stack_in_a_worker(cli, small, tmp_path, monkeypatch):
    """Stacks of other clients round otherwise."""
    train, sent = side_by_side.RunWorker.train, []
    monkeypatch.setattr(side_by_side.RunWorker, "train", lambda worker, runs: (sent.append(runs), train(worker, runs)))
    words = ("compare", small, *COMPARE, "--set", "engine.name=stacked")
    cli.run(*words, "--jobs", "1", "--out", "alone")
    assert not sent
    cli.run(*words, "--jobs", "2", "--out", "together")
    assert [[request.folder.as_posix() for request in requests] for requests in sent] == [
        [f"together/{method}/{seed}" for seed in (0, 1)] for method in ("fml", "independent")
    ]
    runs = sorted(path.parent.relative_to(tmp_path / "together") for path in tmp_path.glob("together/*/*/summary.json"))
    assert len(runs) == 4
    for run in runs:
        alone, together = (tensors(tmp_path / folder / run) for folder in ("alone", "together"))
        assert difference(alone, together) < 1e-5
        assert json.loads((tmp_path / "together" / run / "environment.json").read_text())["engine"]["name"] == "stacked"


@pytest.mark.parametrize(
    "words", [("1",), ("2",), ("1", "--set", "engine.name=stacked"), ("2", "--set", "engine.name=stacked")]
)
def test_a_run_that_fails_ends_the_command_and_names_itself(cli, small, words):
    code, _, error = cli("compare", small, *COMPARE, "--jobs", *words, "--set", "optimizer.lr=1e30", "--out", "failed")
    assert code == 3
    assert re.search(r"^error: (fml|independent), seed [01]: client '\d+' diverged in round 1 ", error, re.MULTILINE)
    assert "Traceback" not in error


def test_in_python_the_error_of_a_run_names_the_run(small, tmp_path):
    with pytest.raises(Diverged) as caught:
        compare(load_config(small, optimizer={"lr": 1e30}), ["fml"], 2, tmp_path / "failed", jobs=2)
    assert caught.value.__notes__[-1].startswith("run: fml, seed ")


def test_a_worker_that_dies_is_named_and_the_command_can_be_resumed(cli, small, tmp_path, monkeypatch):
    train = side_by_side.RunWorker.train

    def train_and_die(worker, requests):
        train(worker, requests)
        if requests[0].folder.name == "1":
            os.kill(worker.process.pid, signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(side_by_side.RunWorker, "train", train_and_die)
        code, _, error = cli("compare", small, *COMPARE, "--jobs", "2", "--out", "died")
    assert code != 0
    assert "--resume" in error
    cli.run("compare", small, *COMPARE, "--jobs", "2", "--resume", "--out", "died")
    assert len(list((tmp_path / "died").glob("*/*/summary.json"))) == 4


@pytest.mark.process
def test_an_engine_with_workers_is_refused_together_with_jobs(cli, small, tmp_path):
    assert "--jobs" in cli.fail(
        "compare", small, *COMPARE, "--jobs", "2", "--set", "engine.name=processes", "--out", "refused"
    )
    assert not list(tmp_path.glob("refused/*/*/summary.json"))


def test_a_sweep_side_by_side_chooses_the_same_and_goes_on_where_a_setting_diverges(cli, small, tmp_path):
    grid = ("--set", "optimizer.lr=0.05,1e30", "--set", "split.holdout=0.2", "--seeds", "2")
    alone, _ = cli.run("sweep", small, *grid, "--jobs", "1", "--out", "alone")
    together, progress = cli.run("sweep", small, *grid, "--jobs", "2", "--out", "together")
    assert read_results(tmp_path / "alone") == read_results(tmp_path / "together") != {}
    assert json.loads((tmp_path / "alone/sweep.json").read_text()) == json.loads(
        (tmp_path / "together/sweep.json").read_text()
    )
    assert together == alone.replace("alone", "together")
    assert "diverged (2 of 2 seeds)" in together
    assert "lr=1e+30, seed 1: client '" in together
    assert "run 6 of 8  " in progress
