"""Processes that are given the same command: each trains what no other does, and all results are kept."""

import io
import json
import re

import pytest
from rich.console import Console

import forked
from fedmutual.errors import RunError
from fedmutual.rundir.folder import lock_folder
from fedmutual_papers import reproduce as command
from fedmutual_papers.experiment_files import read_experiment
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.run import train_cells
from fedmutual_papers.run_dirs import lock_run
from fedmutual_papers.store import ResultStore

pytestmark = pytest.mark.long


def nothing(label):
    return lambda event: None


class Stopped(Exception):
    """As by a key that was pressed."""


def stopping(event):
    if type(event).__name__ == "RoundDone":
        raise Stopped


@pytest.fixture
def meanwhile(tmp_path):
    """Do some cells, and all of them elsewhere while a run is trained here -> (what one did, the other, what was said)."""

    def train_in_both(cells, here):
        out, inner_outcomes, messages = tmp_path / "out", [], []

        def watch(label):
            def observer(event):
                if here in label and not inner_outcomes and type(event).__name__ == "RoundDone":
                    inner_outcomes.append(train_cells(cells, 1, Scale(), out, ResultStore(out / "results")))

            return observer

        outer_outcome = train_cells(cells, 1, Scale(), out, ResultStore(out / "results"), None, watch, messages.append)
        return outer_outcome, *inner_outcomes, messages

    return train_in_both


@pytest.fixture
def table9(papers):
    return read_experiment(papers, "table9")


def labels(experiment):
    return {job.label: job for cell in experiment.cells for job in list_jobs(cell, range(1), Scale())}


def count_trained(output):
    return int(re.search(r"^(\d+) runs? trained", output, re.MULTILINE)[1])


def list_results(out):
    files = sorted((out / "results").rglob("*.json"))
    return sorted((f.stem, run["arm"], run["seed"]) for f in files for run in json.loads(f.read_text())["runs"])


def test_a_run_in_training_elsewhere_is_skipped_with_a_remark(reproduce, table9, tmp_path):
    job = labels(table9)["digits/noniid, fml, seed 0"]
    with lock_run(tmp_path / "out", job.fingerprint):
        code, output, _ = reproduce("table9", "--seeds", "1", "--out", "out")
    assert code == 0
    assert "3 runs trained, 0 known" in output
    assert "1 run left to other processes" in output
    assert f"{job.label} (is in training there). Run this command again when they are done" in output
    output = reproduce("table9", "--seeds", "1", "--out", "out")[1]
    assert "1 run trained, 3 known" in output
    assert "other processes" not in output


def test_runs_that_start_from_a_skipped_run_are_skipped_too(reproduce, newcomer, dependent_arm, tmp_path):
    newcomer.write_text(newcomer.read_text() + dependent_arm)
    names = labels(read_experiment(newcomer.parent.parent, "newcomer"))
    with lock_run(tmp_path / "out", names["digits, federation, seed 0"].fingerprint):
        output = reproduce("newcomer", "--seeds", "1", "--out", "out")[1]
    assert "1 run trained" in output
    assert "2 runs left to other processes" in output
    assert "digits, federation, seed 0 (is in training there); digits, given, seed 0 (starts from federation)." in output


def test_a_finished_source_run_is_not_trained_again_while_another_process_trains_its_dependent(
    newcomer, dependent_arm, tmp_path
):
    newcomer.write_text(newcomer.read_text() + dependent_arm)
    cells, out = read_experiment(newcomer.parent.parent, "newcomer").cells, tmp_path / "out"
    names = labels(read_experiment(newcomer.parent.parent, "newcomer"))
    with lock_run(out, names["digits, given, seed 0"].fingerprint):
        assert [train_cells(cells, 1, Scale(), out, ResultStore(out / "results")).trained for _ in range(2)] == [2, 0]


def test_what_others_trained_meanwhile_is_known(table9, meanwhile, tmp_path):
    """While one trains its first run, another that was begun later does all the rest."""
    one, two, output = meanwhile(table9.cells, "iid, fedavg")
    assert (one.trained, two.trained) == (1, 3)
    assert (one.known, two.known) == (3, 0)
    assert (one.elsewhere, [*two.elsewhere.values()]) == ({}, ["digits/iid, fedavg, seed 0 (is in training there)"])
    assert "1 of 4 runs done" in output[-1]
    assert len(list_results(tmp_path / "out")) == 4


def test_what_others_let_go_of_is_trained(table9, tmp_path):
    """A run that another process holds at first, and not any more when all else is trained."""
    out = tmp_path / "out"
    holding = lock_run(out, next(iter(labels(table9).values())).fingerprint)
    holding.__enter__()

    def watch(label):
        def observer(event):
            if "noniid, fml" in label and type(event).__name__ == "RoundDone" and event.round == 1:
                holding.__exit__(None, None, None)

        return observer

    outcome = train_cells(table9.cells, 1, Scale(), out, ResultStore(out / "results"), None, watch)
    assert (outcome.trained, outcome.elsewhere) == (4, {})


def test_what_another_process_holds_only_to_look_at_it_is_known(table9, tmp_path):
    out = tmp_path / "out"
    stale = ResultStore(out / "results")
    train_cells(table9.cells, 1, Scale(), out, ResultStore(out / "results"))
    with lock_run(out, next(iter(labels(table9).values())).fingerprint):
        outcome = train_cells(table9.cells, 1, Scale(), out, stale)
    assert (outcome.trained, outcome.known, outcome.elsewhere) == (0, 4, {})


DIVERGES = 'set = { "algorithm.name" = "fedavg", "optimizer.lr" = 1e30 }'


def test_a_divergence_at_another_process_is_reported(papers, meanwhile):
    cell = papers / "table9/digits/noniid.toml"
    cell.write_text(cell.read_text().replace('set = { "algorithm.name" = "fedavg" }', DIVERGES))
    one, two, _ = meanwhile(read_experiment(papers, "table9").cells, "iid, fedavg")
    assert len(one.failed) == len(two.failed) == 1
    assert one.failed == two.failed
    assert "digits/noniid, fedavg, seed 0: client '0' diverged in round 1" in one.failed[0]


def test_a_run_that_others_start_from_diverges_once(newcomer, dependent_arm, tmp_path):
    """Also while another process trains another run and this process reads the results repeatedly."""
    cell = newcomer.read_text().replace("set = { rounds = 2 }", 'set = { rounds = 2, "optimizer.lr" = 1e30 }')
    newcomer.write_text(cell + dependent_arm)
    experiment, out = read_experiment(newcomer.parent.parent, "newcomer"), tmp_path / "out"
    with lock_run(out, labels(experiment)["digits, scratch, seed 0"].fingerprint):
        for trained in (1, 0):
            outcome = train_cells(experiment.cells, 1, Scale(), out, ResultStore(out / "results"))
            assert outcome.trained == trained
            assert [line.partition(":")[0] for line in outcome.failed] == [
                "digits, federation, seed 0",
                "digits, given, seed 0",
            ]
            assert [*outcome.elsewhere.values()] == ["digits, scratch, seed 0 (is in training there)"]


@pytest.fixture
def two_cells(newcomer):
    """Two cells that share a run."""
    text = newcomer.read_text()
    (newcomer.parent / "more.toml").write_text(
        text.replace("examples = 20", "examples = 30").replace('row = "20', 'row = "30')
    )
    return read_experiment(newcomer.parent.parent, "newcomer")


def test_a_run_that_cells_share_is_left_once(two_cells, tmp_path):
    job = labels(two_cells)["digits, federation, seed 0"]
    with lock_run(tmp_path / "out", job.fingerprint):
        outcome = train_cells(two_cells.cells, 1, Scale(), tmp_path / "out", ResultStore(tmp_path / "out/results"))
    assert len(outcome.elsewhere) == 1


def test_a_run_that_cells_share_is_kept_once(two_cells, tmp_path):
    """Another process lets go of it between two reads of the cells: the work is done."""
    out, other_outcomes = tmp_path / "out", []
    holding = lock_run(out, labels(two_cells)["digits, federation, seed 0"].fingerprint)
    holding.__enter__()

    def watch(label):
        def observer(event):
            if "digits, scratch" in label and type(event).__name__ == "RoundDone" and not other_outcomes:
                holding.__exit__(None, None, None)
                other_outcomes.append(train_cells(two_cells.cells[:1], 1, Scale(), out, ResultStore(out / "results")))

        return observer

    outcome = train_cells(two_cells.cells, 1, Scale(), out, ResultStore(out / "results"), None, watch)
    assert (other_outcomes[0].trained, outcome.trained) == (1, 2)
    assert [arm for _, arm, _ in list_results(out)].count("federation") == 1


def test_a_run_that_is_being_copied_is_left(table9, tmp_path):
    """One process begins a longer run with a copy of it, while another comes to go on with it."""
    out, short = tmp_path / "out", labels(table9)["digits/iid, fedavg, seed 0"]
    train_cells(table9.cells[:1], 1, Scale(1), out, ResultStore(out / "results"))
    with lock_run(out, f"{short.fingerprint.partition('-')[0]}-1"):
        outcome = train_cells(table9.cells[:1], 1, Scale(), out, ResultStore(out / "results"))
    assert outcome.trained == 2
    (begun,) = (out / "runs").glob(f"{short.fingerprint}-*/log.txt")
    assert "resumed" not in begun.read_text()  # who holds a run may be writing it


def test_a_run_that_was_begun_on_another_device_is_left_and_the_others_are_trained(papers, tmp_path):
    for cell in (papers / "table9/digits").glob("*.toml"):
        cell.write_text(cell.read_text().replace('device = "cpu", ', ""))
    cells, out = read_experiment(papers, "table9").cells, tmp_path / "out"
    with pytest.raises(Stopped):
        train_cells(cells, 1, Scale(), out, ResultStore(out / "results"), None, lambda label: stopping)
    (about,) = (out / "runs").glob("*/environment.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"device": "xpu:9"}))
    outcome = train_cells(cells, 1, Scale(), out, ResultStore(out / "results"))
    assert outcome.trained == 3
    assert [*outcome.elsewhere.values()] == ["digits/iid, fedavg, seed 0 (was begun on 'xpu:9', which this machine lacks)"]


def test_a_longer_run_does_not_begin_with_one_of_another_device(table9, tmp_path):
    out = tmp_path / "out"
    train_cells(table9.cells, 1, Scale(1), out, ResultStore(out / "results"))
    for about in (out / "runs").glob("*/environment.json"):
        about.write_text(json.dumps(json.loads(about.read_text()) | {"device": "xpu:9"}))
    outcome = train_cells(table9.cells, 1, Scale(), out, ResultStore(out / "results"))
    assert (outcome.trained, outcome.elsewhere) == (4, {})


def test_the_page_holds_what_others_kept_meanwhile_of_other_cells(papers, tmp_path):
    arguments = ((), 1, None, {}, tmp_path / "out", None, papers)
    silent, other_outcomes = Console(file=io.StringIO()), []

    def watch(label):
        def observer(event):
            if not other_outcomes and type(event).__name__ == "RoundDone":
                other_outcomes.append(command.train("table9", ["*/noniid"], *arguments[1:], nothing, silent))

        return observer

    command.train("table9", ["*/iid"], *arguments[1:], watch, silent)
    recorded = json.loads((tmp_path / "out/table9.json").read_text())["numbers"]
    assert {n["cell"] for n in recorded} == {"digits/iid", "digits/noniid"}


@pytest.mark.process
def test_two_processes_share_the_work(reproduce, papers, tmp_path):
    words, other_output = ["reproduce", "table9", "--seeds", "3", "--out", "out"], tmp_path / "there.txt"
    other_process = forked.start(
        ["fedmutual", *words, "--experiments", papers], tmp_path, other_output, tmp_path / "err.txt"
    )
    code, output, _ = reproduce(*words[1:])
    assert (code, other_process.wait(120)) == (0, 0), (tmp_path / "err.txt").read_text()
    assert count_trained(output) + count_trained(other_output.read_text()) == 12
    assert list_results(tmp_path / "out") == [
        (c, a, n) for c in ("iid", "noniid") for a in ("fedavg", "fml") for n in range(3)
    ]
    for log in (tmp_path / "out/runs").glob("*/log.txt"):
        assert log.read_text().count("finished 2 rounds") == 1, log


def test_results_that_another_process_does_not_get_done_with(table9, tmp_path, monkeypatch):
    monkeypatch.setattr("fedmutual_papers.store.LOCK_LIMIT", 0.1)
    folder = tmp_path / "out/results"
    store, silent = ResultStore(folder), Console(file=io.StringIO())
    with (
        lock_folder(folder),
        pytest.raises(RunError, match="another process has been writing results for a"),
    ):
        command.train("table9", (), 1, None, {}, tmp_path / "out", None, table9.cells[0].path.parents[2], nothing, silent)
    assert not [*store.list_all_results()]


@pytest.mark.process
def test_runs_side_by_side_give_the_same_numbers_as_in_turn(reproduce, tmp_path):
    for number in ("1", "2"):
        code, out, _ = reproduce("table9", "--seeds", "1", "--jobs", number, "--out", f"jobs{number}")
        assert (code, count_trained(out)) == (0, 4), out
        assert "4 of 4 runs done" in out
    in_turn, side_by_side = (json.loads((tmp_path / f"jobs{n}/table9.json").read_text())["numbers"] for n in "12")
    assert in_turn == side_by_side != []


@pytest.mark.process
def test_a_run_waits_for_the_run_that_it_starts_from_and_one_that_diverges_is_kept_as_failed(
    reproduce, newcomer, dependent_arm
):
    newcomer.write_text(newcomer.read_text() + dependent_arm)
    code, out, _ = reproduce("newcomer", "--seeds", "2", "--jobs", "2", "--out", "out")
    assert code == 0, out
    code, _, error = reproduce("table9", "--seeds", "1", "--jobs", "2", "--set", "optimizer.lr=1e30", "--out", "failed")
    assert (code, error.count("diverged")) == (3, 4), error
