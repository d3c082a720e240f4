"""Processes that are given the same command: each trains what no other does, and all results are kept."""

import io
import json

import pytest
from rich.console import Console

import forked
from fedmutual.errors import RunError
from fedmutual.rundir.folder import lock_folder
from fedmutual_papers import reproduce as command
from fedmutual_papers.experiment_files import read_experiment
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.run import lock_run, train_cells
from fedmutual_papers.store import ResultStore
from made_results import count_trained

pytestmark = pytest.mark.long


class Stopped(Exception):
    """As by a key that was pressed."""


def when_trained(label, do):
    """Return a watch that does something once, after the first round of the run with such a label."""
    done = []

    def watch(of_run):
        def observer(event):
            if label in of_run and not done and type(event).__name__ == "RoundDone":
                done.append(True)
                do()

        return observer

    return watch


def nothing(label):
    return lambda event: None


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def train(out):
    """Train cells with one seed into OUT, with the results of OUT as they are at the start -> the outcome."""
    return lambda cells, rounds=None, **more: train_cells(cells, 1, Scale(rounds), out, ResultStore(out / "results"), **more)


@pytest.fixture
def table9(papers):
    return read_experiment(papers, "table9")


def labels(experiment):
    return {job.label: job for cell in experiment.cells for job in list_jobs(cell, range(1), Scale())}


def list_results(out):
    files = sorted((out / "results").rglob("*.json"))
    return sorted((f.stem, run["arm"], run["seed"]) for f in files for run in json.loads(f.read_text())["runs"])


def test_a_run_in_training_elsewhere_is_skipped_with_a_remark(reproduce, table9, out):
    job = labels(table9)["digits/noniid, fml, seed 0"]
    with lock_run(out, job.fingerprint):
        code, output, _ = reproduce("table9", "--seeds", "1", "--out", "out")
    assert (code, count_trained(output)) == (0, 3)
    remark = "1 run left to other processes: digits/noniid, fml, seed 0 (is in training there). Run this command again"
    assert remark in output
    code, output, _ = reproduce("table9", "--seeds", "1", "--out", "out")
    assert (code, count_trained(output)) == (0, 1)
    assert "left to other processes" not in output


@pytest.mark.parametrize("diverges", [False, True])
def test_what_others_trained_meanwhile_is_known(papers, train, out, diverges):
    """While one trains its first run, another that was begun later does all the rest; both report what diverged."""
    cell = papers / "table9/digits/noniid.toml"
    rate = ', "optimizer.lr" = 1e30' if diverges else ""
    cell.write_text(cell.read_text().replace('"algorithm.name" = "fedavg"', f'"algorithm.name" = "fedavg"{rate}'))
    cells, other, said = read_experiment(papers, "table9").cells, [], []
    one = train(cells, watch=when_trained("iid, fedavg", lambda: other.append(train(cells))), say=said.append)
    (two,) = other
    assert [(one.trained, one.known), (two.trained, two.known)] == [(1, 3), (3, 0)]
    assert (one.elsewhere, [*two.elsewhere.values()]) == ({}, ["digits/iid, fedavg, seed 0 (is in training there)"])
    assert "1 of 4 runs done" in said[-1]
    assert len(list_results(out)) == 4
    assert one.failed == two.failed
    assert [line.split(" in round")[0] for line in one.failed] == (
        ["digits/noniid, fedavg, seed 0: client '0' diverged"] if diverges else []
    )


def test_what_others_let_go_of_is_trained(table9, train, out):
    """A run that another process holds at first, and not any more when all else is trained."""
    holding = lock_run(out, next(iter(labels(table9).values())).fingerprint)
    holding.__enter__()
    outcome = train(table9.cells, watch=when_trained("noniid, fml", lambda: holding.__exit__(None, None, None)))
    assert (outcome.trained, outcome.elsewhere) == (4, {})


def test_what_another_process_holds_only_to_look_at_it_is_known(table9, train, out):
    stale = ResultStore(out / "results")
    train(table9.cells)
    with lock_run(out, next(iter(labels(table9).values())).fingerprint):
        outcome = train_cells(table9.cells, 1, Scale(), out, stale)
    assert (outcome.trained, outcome.known, outcome.elsewhere) == (0, 4, {})


def test_a_run_that_others_start_from_diverges_once(newcomer, dependent_arm, train, out):
    """Also while another process trains another run and this process reads the results repeatedly."""
    cell = newcomer.read_text().replace("set = { rounds = 2 }", 'set = { rounds = 2, "optimizer.lr" = 1e30 }')
    newcomer.write_text(cell + dependent_arm)
    experiment = read_experiment(newcomer.parent.parent, "newcomer")
    with lock_run(out, labels(experiment)["digits, scratch, seed 0"].fingerprint):
        for trained in (1, 0):
            outcome = train(experiment.cells)
            assert outcome.trained == trained
            assert [line.partition(",")[2].partition(",")[0] for line in outcome.failed] == [" federation", " given"]
            assert [*outcome.elsewhere.values()] == ["digits, scratch, seed 0 (is in training there)"]


@pytest.fixture
def two_cells(newcomer):
    """Two cells that share a run."""
    text = newcomer.read_text().replace("examples = 20", "examples = 30").replace('row = "20', 'row = "30')
    (newcomer.parent / "more.toml").write_text(text)
    return read_experiment(newcomer.parent.parent, "newcomer")


def test_a_run_that_cells_share_is_left_once(two_cells, train, out):
    with lock_run(out, labels(two_cells)["digits, federation, seed 0"].fingerprint):
        assert len(train(two_cells.cells).elsewhere) == 1


def test_a_run_that_cells_share_is_kept_once(two_cells, train, out):
    """Another process lets go of it between two reads of the cells: the work is done."""
    holding, other = lock_run(out, labels(two_cells)["digits, federation, seed 0"].fingerprint), []
    holding.__enter__()

    def let_go():
        holding.__exit__(None, None, None)
        other.append(train(two_cells.cells[:1]))

    outcome = train(two_cells.cells, watch=when_trained("digits, scratch", let_go))
    assert (other[0].trained, outcome.trained) == (1, 2)
    assert [arm for _, arm, _ in list_results(out)].count("federation") == 1


def test_a_run_that_is_being_copied_is_left(table9, train, out):
    """One process begins a longer run with a copy of it, while another comes to go on with it."""
    short = labels(table9)["digits/iid, fedavg, seed 0"]
    train(table9.cells[:1], 1)
    with lock_run(out, f"{short.fingerprint.partition('-')[0]}-1"):
        assert train(table9.cells[:1]).trained == 2
    (begun,) = (out / "runs").glob(f"{short.fingerprint}-*/log.txt")
    assert "resumed" not in begun.read_text()  # who holds a run may be writing it


def move_runs(out):
    """Let all runs have been begun on a device that this machine lacks."""
    for about in (out / "runs").glob("*/environment.json"):
        about.write_text(json.dumps(json.loads(about.read_text()) | {"device": "xpu:9"}))


def test_a_run_that_was_begun_on_another_device_is_left_and_the_others_are_trained(papers, train, out):
    def stop():
        raise Stopped

    for cell in (papers / "table9/digits").glob("*.toml"):
        cell.write_text(cell.read_text().replace('device = "cpu", ', ""))
    cells = read_experiment(papers, "table9").cells
    with pytest.raises(Stopped):
        train(cells, watch=when_trained("", stop))
    move_runs(out)
    outcome = train(cells)
    assert outcome.trained == 3
    assert [*outcome.elsewhere.values()] == ["digits/iid, fedavg, seed 0 (was begun on 'xpu:9', which this machine lacks)"]


def test_a_longer_run_does_not_begin_with_one_of_another_device(table9, train, out):
    train(table9.cells, 1)
    move_runs(out)
    outcome = train(table9.cells)
    assert (outcome.trained, outcome.elsewhere) == (4, {})


def test_the_page_holds_what_others_kept_meanwhile_of_other_cells(papers, out):
    arguments, silent = (1, None, {}, out, None, papers), Console(file=io.StringIO())
    watch = when_trained("", lambda: command.train("table9", ["*/noniid"], *arguments, nothing, silent))
    command.train("table9", ["*/iid"], *arguments, watch, silent)
    recorded = json.loads((out / "table9.json").read_text())["numbers"]
    assert {n["cell"] for n in recorded} == {"digits/iid", "digits/noniid"}


@pytest.mark.process
def test_two_processes_share_the_work(reproduce, papers, out):
    words, other_output = ["reproduce", "table9", "--seeds", "3", "--out", "out"], out.with_name("there.txt")
    files = out.parent, other_output, out.with_name("err.txt")
    other_process = forked.start(["fedmutual", *words, "--experiments", papers], *files)
    code, output, _ = reproduce(*words[1:])
    assert (code, other_process.wait(120)) == (0, 0), files[2].read_text()
    assert count_trained(output) + count_trained(other_output.read_text()) == 12
    assert list_results(out) == [(c, a, n) for c in ("iid", "noniid") for a in ("fedavg", "fml") for n in range(3)]
    for log in (out / "runs").glob("*/log.txt"):
        assert log.read_text().count("finished 2 rounds") == 1, log


def test_results_that_another_process_does_not_get_done_with(table9, papers, out, monkeypatch):
    monkeypatch.setattr("fedmutual_papers.store.LOCK_LIMIT", 0.1)
    store, silent = ResultStore(out / "results"), Console(file=io.StringIO())
    with (
        lock_folder(out / "results"),
        pytest.raises(RunError, match="another process has been writing results for a"),
    ):
        command.train("table9", (), 1, None, {}, out, None, papers, nothing, silent)
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
