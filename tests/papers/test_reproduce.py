"""From the command to the page: trained once, kept, shared, resumed; what is shortened says so."""

import json
import shutil
import time
import tomllib
from pathlib import Path

import pytest
import typer

import forked
from fedmutual.cli import app as command_line
from fedmutual_papers.command import app
from made_results import count_trained

pytestmark = pytest.mark.long


def rows(path, id="table9"):
    numbers = json.loads((path / f"{id}.json").read_text())["numbers"]
    return {(n["cell"], n["arm"], n["measure"], n["at"]): n for n in numbers}


def test_a_list(reproduce):
    code, out, _ = reproduce("--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["table9", "looker"]


def test_every_installation_lists_the_ids(cli):
    out, _ = cli.run("list", "experiments")
    assert all(id in out for id in ("table1", "oh", "fairness"))


def test_trained_once_then_known(reproduce, tmp_path):
    code, out, _ = reproduce("table9", "--seeds", "2", "--out", "out")
    assert code == 0, out
    assert count_trained(out) == 8
    assert "about" in out  # how much time is left
    assert "left" in out
    numbers = rows(tmp_path / "out")
    assert numbers["digits/iid", "fml", "global_test", "last"]["seeds"] == 2
    assert numbers["digits/iid", "fml", "global_test", "last"]["paper"] == 81.5
    before = (tmp_path / "out/table9.md").read_text()
    assert "paper 81.50" in before
    assert "shortened" not in before.lower()

    assert count_trained(reproduce("table9", "--seeds", "2", "--out", "out")[1]) == 0
    shutil.rmtree(tmp_path / "out/runs")  # committed results are all that another checkout has
    code, out, _ = reproduce("table9", "--seeds", "2", "--out", "out")
    assert (code, count_trained(out)) == (0, 0)
    assert (tmp_path / "out/table9.md").read_text() == before

    code, out, _ = reproduce("looker", "--seeds", "2", "--out", "out")
    assert (code, count_trained(out)) == (0, 4), "only the arm that is new"
    numbers = rows(tmp_path / "out", "looker")
    assert numbers["digits/iid", "fml", "noise:0.1", "last"]["mean"] > 0
    assert ("digits/iid", "independent", "noise:0.1", "last") not in numbers, "it has no global model"
    assert not list((tmp_path / "out/results").rglob("looker*"))


def test_only_some_cells_and_fewer_rounds_are_marked(reproduce, tmp_path):
    code, out, _ = reproduce("table9", "--only", "*/iid", "--seeds", "1", "--rounds", "1", "--out", "out")
    assert (code, count_trained(out)) == (0, 2)
    text, page = ((tmp_path / f"out/table9.{kind}").read_text() for kind in ("md", "html"))
    for page_text in (text, page, out, (tmp_path / "out/table9.json").read_text()):
        assert "1 of 2 rounds" in page_text
        assert "not run" in page_text
    assert "Too short (1 of 2 rounds)" in text
    assert "1 of 2 rounds" in (tmp_path / "out/figures/table9-digits-iid-global-test.svg").read_text()


def test_a_changed_key_is_marked_and_where_the_work_is_done_is_not(reproduce, tmp_path):
    arguments = ("table9", "--only", "*/iid", "--seeds", "2", "--out", "out")
    code, out, _ = reproduce(*arguments, "--set", "optimizer.lr=0.05", "--set", "engine.threads=2", "--engine", "stacked")
    assert (code, count_trained(out)) == (0, 4)
    assert "optimizer.lr = 0.05" in out
    assert "threads" not in (tmp_path / "out/table9.md").read_text().split("## Hardware")[0]
    recorded = json.loads((tmp_path / "out/results/table9/digits/iid.json").read_text())["runs"]
    assert [run["made"]["together"] for run in recorded] == [2, 2, 2, 2], "the seeds of an arm"
    assert count_trained(reproduce(*arguments, "--set", "optimizer.lr=0.05")[1]) == 0
    moving = ("--set", "algorithm.alpha={ start = 0.9, end = 0.1 }", "--rounds", "1")
    code, out, _ = reproduce(*arguments, *moving)  # a table for a value; FedAvg has no alpha
    assert (code, count_trained(out)) == (0, 4)
    assert 'algorithm.alpha = {"start": 0.9, "end": 0.1}' in out


@pytest.mark.process
def test_a_killed_command_goes_on_from_its_last_round(cli, papers, tmp_path):
    cell = papers / "table9/digits/iid.toml"
    cell.write_text(cell.read_text().replace("rounds = 2", "rounds = 25"))
    words = ["reproduce", "table9", "--only", "*/iid", "--seeds", "1", "--experiments", papers]
    killed = forked.start(["fedmutual", *words, "--out", "killed"], tmp_path, tmp_path / "out.txt", tmp_path / "err.txt")
    deadline = time.monotonic() + 60
    while not (saved := list((tmp_path / "killed").glob("runs/*/checkpoint.json"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert saved
    assert not list((tmp_path / "killed/results").rglob("*.json")), "it was to be killed before its first run ended"
    for out in ("killed", "whole"):
        assert cli(*words, "--out", out)[0] == 0
    log = next(p for p in (tmp_path / "killed").glob("runs/*/log.txt") if "resumed" in p.read_text())
    assert "finished 25 rounds" in log.read_text()
    recorded, uninterrupted = (
        [run["curves"] for run in json.loads((tmp_path / out / "results/table9/digits/iid.json").read_text())["runs"]]
        for out in ("killed", "whole")
    )
    assert recorded == uninterrupted


def test_an_optional_cell_without_its_data_is_left_out(reproduce, papers):
    cell = (papers / "table9/digits/iid.toml").read_text()
    missing_folder = 'name = "folder", root = "nowhere"'
    (papers / "table9/away.toml").write_text(
        cell.replace('name = "digits"', missing_folder).replace('row = "IID"', 'row = "away"\noptional = true')
    )
    arguments = ("table9", "--only", "away", "--seeds", "1", "--out", "out")
    code, out, _ = reproduce(*arguments)
    assert (code, count_trained(out)) == (0, 0)
    assert "away is left out: " in out
    assert "nowhere" in out
    (papers / "table9/away.toml").write_text((papers / "table9/away.toml").read_text().replace("optional = true", ""))
    assert reproduce(*arguments)[0] == 2


def test_more_rounds_go_on_from_fewer(reproduce, papers, tmp_path):
    arguments = ("table9", "--only", "*/iid", "--seeds", "1")
    assert reproduce(*arguments, "--rounds", "1", "--out", "grown")[0] == 0
    for out in ("grown", "whole"):
        assert count_trained(reproduce(*arguments, "--out", out)[1]) == 2
    logs = [p.read_text() for p in (tmp_path / "grown/runs").glob("*-2-*/log.txt")]
    assert len(logs) == 2
    assert all("resumed, going on with round 2 of 2" in log for log in logs)
    assert rows(tmp_path / "grown") == rows(tmp_path / "whole")


def test_a_schedule_does_not_grow(reproduce, papers):
    path = papers / "table9/digits/iid.toml"
    moving = "algorithm.alpha = { start = 0.9, end = 0.1 }"
    path.write_text(path.read_text().replace("paper = 81.50", f"[cell.arms.fml.set]\n{moving}"))
    arguments = ("table9", "--only", "*/iid", "--seeds", "1", "--out", "out")
    assert reproduce(*arguments, "--rounds", "1")[0] == 0
    assert reproduce(*arguments)[0] == 0
    assert len([p for p in (papers.parent / "out/runs").glob("*-2-*/log.txt") if "resumed" in p.read_text()]) == 1


def test_what_a_cell_asks_for_later_is_looked_up_in_the_run(reproduce, papers, tmp_path):
    path, arguments = papers / "table9/digits/iid.toml", ("table9", "--only", "*/iid", "--seeds", "1", "--out", "out")
    assert reproduce(*arguments)[0] == 0
    logs = {p: p.read_text() for p in (tmp_path / "out/runs").glob("*/log.txt")}
    path.write_text(path.read_text().replace("noise = [0.1]", "noise = [0.1, 0.5]\neach = true"))
    assert count_trained(reproduce(*arguments)[1]) == 2
    assert {p: p.read_text() for p in logs} == logs  # no round was trained again
    recorded = json.loads((tmp_path / "out/results/table9/digits/iid.json").read_text())["runs"]
    assert all(run["noise"].keys() == {"0", "0.1", "0.5"} for run in recorded)
    assert all(len(run["clients"]["0"]["curve"]) == 2 for run in recorded)


@pytest.mark.parametrize("engine", ["inprocess", "stacked"])
def test_a_diverged_run_is_stored_as_diverged(reproduce, papers, tmp_path, engine):
    path, before = papers / "table9/digits/iid.toml", '"algorithm.name" = "fedavg"'
    path.write_text(path.read_text().replace(before, f'{before}, "optimizer.lr" = 1e30'))
    arguments = ("table9", "--only", "*/iid", "--seeds", "1", "--out", "out", "--engine", engine)
    code, _, err = reproduce(*arguments)
    assert code == 3
    assert "fedavg, seed 0: client '0' diverged in round 1" in err
    assert "| Diverged: fedavg diverged in 1 of 1 run |" in (tmp_path / "out/table9.md").read_text()
    (of_claim,) = json.loads((tmp_path / "out/table9.json").read_text())["claims"]
    assert of_claim["diverged"] == of_claim["where"][0]["diverged"] == {"fedavg": 1}
    assert rows(tmp_path / "out")["digits/iid", "fml", "global_test", "last"]["mean"] > 0.1
    code, out, again = reproduce(*arguments)
    assert (code, count_trained(out)) == (3, 0)  # nothing is trained, and the same runs have no numbers
    assert "fedavg, seed 0: client '0' diverged in round 1" in again
    assert reproduce("table9", "--only", "*/noniid", *arguments[3:])[0] == 0  # of other runs nothing is said


def test_a_loss_under_noise_that_is_not_finite_is_kept_as_a_failure(reproduce, papers, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fedmutual_papers.collect.score_under_noise",
        lambda folder, deviations: {"0": (0.5, 0.9), "0.1": (float("nan"), 0.1)},
    )
    arguments = ("table9", "--only", "*/iid", "--seeds", "1", "--out", "out")
    code, _, err = reproduce(*arguments)
    assert code == 3
    assert "fml, seed 0: the loss with noise 0.1 on the weights is not finite" in err
    assert (count_trained(reproduce(*arguments)[1]), reproduce(*arguments)[0]) == (0, 3)


def test_a_newcomers_rows_belong_to_no_other_client(reproduce, newcomer, tmp_path):
    code, out, _ = reproduce("newcomer", "--seeds", "1", "--out", "out")
    assert (code, count_trained(out)) == (0, 2), out
    recorded = [json.loads(p.read_text())["clients"] for p in (tmp_path / "out").glob("runs/*/partition.json")]
    federation, alone = sorted(recorded, key=len, reverse=True)
    assert (set(federation), set(alone)) == ({"0", "1"}, {"2"})
    taken = {row for client in federation.values() for row in client["private"]["rows"]}
    assert len(alone["2"]["private"]["rows"]) == 20
    assert taken.isdisjoint(alone["2"]["private"]["rows"])
    assert "From scratch" in out


@pytest.mark.parametrize(("before", "after", "message"), [
    ('clients = ["2"]', 'clients = ["7"]', "there is no client '7' in its partition; there are 0, 1, 2"),
    ("examples = 20", "examples = 2000", "training examples, not 2000; lower 'examples'"),
])  # fmt: skip
def test_a_part_that_is_not_there(reproduce, newcomer, before, after, message):
    newcomer.write_text(newcomer.read_text().replace(before, after))
    code, _, err = reproduce("newcomer", "--seeds", "1", "--out", "out")
    assert code == 2
    assert message in err


def test_an_arm_starts_from_the_run_that_it_needs(reproduce, newcomer, dependent_arm, tmp_path):
    newcomer.write_text(newcomer.read_text() + dependent_arm)
    code, out, err = reproduce("newcomer", "--seeds", "1", "--out", "out")
    assert code == 0, err
    assert count_trained(out) == 3
    numbers = rows(tmp_path / "out", "newcomer")
    assert ("digits", "federation", "own_validation", "last") not in numbers
    from_federation, from_scratch = (
        numbers["digits", arm, "own_validation", "last"]["mean"] for arm in ("given", "scratch")
    )
    assert from_federation > from_scratch  # two rounds of two others' 900 digits, against twenty digits of its own
    shutil.rmtree(tmp_path / "out/runs")
    assert count_trained(reproduce("newcomer", "--seeds", "1", "--out", "out")[1]) == 0
    shorter = reproduce("newcomer", "--seeds", "1", "--rounds", "1", "--out", "out")[1]
    assert count_trained(shorter) == 2  # the federation is another then, and what starts from it; from scratch is as before


@pytest.mark.parametrize(("arguments", "message"), [
    (("tabel9",), "did you mean 'table9'?"),
    (("table9", "--only", "digits/idd"), "did you mean 'digits/iid'?"),
    ((), "name an experiment"),
    (("table9", "--set", "seed=3"), "use --seeds"),
    (("table9", "--set", "optimizer.lrr=3"), "unknown key 'optimizer.lrr'"),
    (("table9", "--set", "algorithm.alhpa=0.3"), "did you mean 'algorithm.alpha'?"),
    (("table9", "--set", "algorithm={alpha=0.3}"), "as --set algorithm.alpha=..."),
    (("table9", "--engine", "gpu"), "engine.name"),
    (("table9", "--results", "out"), "--results out: is OUT or contains OUT"),
    (("table9", "--results", "."), "--results .: is OUT or contains OUT"),
    (("table9", "--results", "papers/table9/index.toml/x"), "cannot be written"),
    (("table9", "--pages", "out", "--only", "digits/iid"), "--pages writes from results alone; remove --only"),
    (("--pages", "out", "--rounds", "1"), "remove --rounds"),
    (("--pages", "out", "--seeds", "3"), "remove --seeds"),
    (("--pages", "out", "--set", "optimizer.lr=1"), "remove --set"),
    (("--pages", "out", "--engine", "stacked"), "remove --engine"),
    (("--list", "--only", "digits/iid"), "--list lists all experiments; remove --only"),
    (("--list", "--pages", "out"), "remove --pages"),
    (("table9", "--list"), "remove ID"),
])  # fmt: skip
def test_bad_input_is_one_sentence_and_nothing_is_written(reproduce, tmp_path, arguments, message):
    code, _, err = reproduce(*arguments, *(() if {"--pages", "--list"} & {*arguments} else ("--out", "out")))
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_a_damaged_results_file_is_named(reproduce, tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/iid.json").write_text("{")
    code, _, err = reproduce("table9", "--results", "kept", "--out", "out")
    assert code == 2
    assert "kept/iid.json" in err


ROOT = Path(__file__).parents[2]


def test_the_two_distributions_have_one_version():
    library, papers = (tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"] for path in ("", "papers"))
    assert papers["version"] == library["version"]
    assert f"fedmutual=={library['version']}" in papers["dependencies"]


def test_the_list_of_commands_has_the_help_of_the_command():
    listed = typer.main.get_command(command_line.app).commands["reproduce"].help
    assert typer.main.get_command(app).help.startswith(f"{listed}\n")


@pytest.mark.parametrize("arguments", [("reproduce", "table1", "--seeds", "1"), ("list", "experiments")])
def test_without_the_distribution_one_sentence_says_how_to_install_it(cli, monkeypatch, arguments):
    monkeypatch.setattr(command_line, "entry_points", lambda **chosen: ())
    code, output, error = cli(*arguments)
    assert (code, output) == (2, "")
    assert error == (
        "error: the papers' experiments come with the distribution fedmutual-papers; "
        "run `pip install CLONE/papers`, with the path of a clone of fedmutual\n"
    )
