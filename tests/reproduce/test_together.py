"""Processes that are given the same command: each trains what no other does, and all results are kept."""

import io
import json
import re

import pytest
from rich.console import Console

import forked
from fedmutual.cli import reproduce as command
from fedmutual.reproduce import Scale, Store, read_experiment, results
from fedmutual.reproduce import reproduce as call
from fedmutual.reproduce.places import claim
from fedmutual.reproduce.plan import jobs


def nothing(label):
    return lambda event: None


@pytest.fixture
def table9(papers):
    return read_experiment(papers, "table9")


def labels(experiment):
    return {job.label: job for cell in experiment.cells for job in jobs(cell, range(1), Scale())}


def trained(said):
    return int(re.search(r"^(\d+) runs? trained", said, re.MULTILINE)[1])


def kept(out):
    files = sorted((out / "results").rglob("*.json"))
    return sorted((f.stem, run["arm"], run["seed"]) for f in files for run in json.loads(f.read_text())["runs"])


def test_what_another_process_trains_is_left_to_it_and_said(reproduce, table9, tmp_path):
    job = labels(table9)["digits/noniid, fml, seed 0"]
    with claim(tmp_path / "out", job):
        code, said, _ = reproduce("table9", "--seeds", "1", "--out", "out")
    assert code == 0
    assert "3 runs trained, 0 known before" in said
    assert "1 run left to other processes" in said
    assert f"{job.label}. Give the same command when those are done" in said
    said = reproduce("table9", "--seeds", "1", "--out", "out")[1]
    assert "1 run trained, 3 known before" in said
    assert "other processes" not in said


def test_what_starts_from_such_a_run_is_left_too(reproduce, newcomer, given, tmp_path):
    newcomer.write_text(newcomer.read_text() + given)
    found = labels(read_experiment(newcomer.parent.parent, "newcomer"))
    with claim(tmp_path / "out", found["digits, federation, seed 0"]):
        said = reproduce("newcomer", "--seeds", "1", "--out", "out")[1]
    assert "1 run trained" in said
    assert "2 runs left to other processes" in said
    assert "digits, federation, seed 0; digits, given, seed 0." in said


def test_a_run_that_is_known_and_there_is_not_trained_again_for_one_that_another_process_trains(newcomer, given, tmp_path):
    newcomer.write_text(newcomer.read_text() + given)
    cells, out = read_experiment(newcomer.parent.parent, "newcomer").cells, tmp_path / "out"
    found = labels(read_experiment(newcomer.parent.parent, "newcomer"))
    with claim(out, found["digits, given, seed 0"]):
        assert [call(cells, 1, Scale(), out, Store(out / "results")).trained for _ in range(2)] == [2, 0]


def test_what_others_trained_meanwhile_is_known(table9, tmp_path):
    """While one trains its first run, another that was begun later does all the rest."""
    out, other = tmp_path / "out", []

    def watch(label):
        def observer(event):
            if not other and type(event).__name__ == "RoundDone":
                other.append(call(table9.cells, 1, Scale(), out, Store(out / "results")))

        return observer

    said = []
    one = call(table9.cells, 1, Scale(), out, Store(out / "results"), None, watch, said.append)
    (two,) = other
    assert (one.trained, two.trained) == (1, 3)
    assert (one.known, two.known) == (3, 0)
    assert (one.elsewhere, two.elsewhere) == ([], ["digits/iid, fedavg, seed 0"])
    assert "1 of 4 runs done" in said[-1]
    assert len(kept(out)) == 4


def test_what_others_let_go_of_is_trained(table9, tmp_path):
    """A run that another process holds at first, and not any more when all else is trained."""
    out = tmp_path / "out"
    holding = claim(out, next(iter(labels(table9).values())))
    holding.__enter__()

    def watch(label):
        def observer(event):
            if "noniid, fml" in label and type(event).__name__ == "RoundDone" and event.round == 1:
                holding.__exit__(None, None, None)

        return observer

    told = call(table9.cells, 1, Scale(), out, Store(out / "results"), None, watch)
    assert (told.trained, told.elsewhere) == (4, [])


def test_two_processes_share_the_work(reproduce, papers, tmp_path):
    words, there = ["reproduce", "table9", "--seeds", "3", "--out", "out"], tmp_path / "there.txt"
    other = forked.start(["fedmutual", *words, "--experiments", papers], tmp_path, there, tmp_path / "err.txt")
    code, here, _ = reproduce(*words[1:])
    assert (code, other.wait(120)) == (0, 0), (tmp_path / "err.txt").read_text()
    assert trained(here) + trained(there.read_text()) == 12
    assert kept(tmp_path / "out") == [(c, a, n) for c in ("iid", "noniid") for a in ("fedavg", "fml") for n in range(3)]
    for log in (tmp_path / "out/runs").glob("*/log.txt"):
        assert log.read_text().count("finished 2 rounds") == 1, log


def test_results_that_another_process_does_not_get_done_with(table9, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "PATIENCE", 0.1)
    folder = tmp_path / "out/results"
    store, silent = Store(folder), Console(file=io.StringIO())
    with results.held(folder), pytest.raises(results.RunError, match="another process has been writing results for a"):
        command.train("table9", (), 1, None, {}, tmp_path / "out", None, table9.cells[0].path.parents[2], nothing, silent)
    assert not [*store.all()]
