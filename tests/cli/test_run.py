"""`run`, `compare`, `report`, `list` as their users type them."""

import json
import re
from pathlib import Path

import pytest
import torch

import fedmutual
from fedmutual.engines import child_process
from log_lines import read_lines

pytestmark = pytest.mark.run


def test_the_summary_has_the_numbers_of_the_last_and_the_best_round(small, cli):
    code, out, err = cli("run", small)
    folder = small.parent / "runs" / "small"
    assert code == 0
    assert "round 3/3" in err
    assert "fedmutual report runs/small" in out
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["format"] == 1
    assert (summary["algorithm"], summary["rounds"], summary["seed"]) == ("fml", 3, 0)
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["round"] for line in lines] == [1, 2, 3]
    test = [s["accuracy"] for line in lines for s in line["scores"] if s["client"] is None]
    accuracies = summary["global"]["test_accuracy"]
    assert (accuracies["last"], accuracies["best"], accuracies["best_by"]) == (test[-1], max(test), "test")
    assert test[accuracies["best_round"] - 1] == max(test)
    by_client = {
        s["client"]: s["accuracy"] for s in lines[-1]["scores"] if (s["model"], s["data"]) == ("personal", "validation")
    }
    last = summary["personal"]["val_accuracy"]["last"]
    assert last["per_client"] == by_client
    assert last["mean"] == pytest.approx(sum(by_client.values()) / 3)
    assert last["worst"] == min(by_client.values())


def test_the_ledger_counts_the_tensors_sent(small, cli):
    """An MLP 64-200-200-10: (64 + 1) 200 + (200 + 1) 200 + (200 + 1) 10 = 55,210 floats of 4 bytes."""
    cli("run", small)
    folder = small.parent / "runs" / "small"
    lines = read_lines(folder / "ledger.jsonl")
    assert len(lines) == 9
    assert {(line["down"], line["up"]) for line in lines} == {(220840, 220840)}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["bytes"] == {"up": 9 * 220840, "down": 9 * 220840, "seed": 0}
    assert sum(torch.Size(shape).numel() for _, shape in summary["leaves"]["fml"].values()) == 55210


def test_set_changes_one_key_and_drops_what_another_algorithm_lacks(small, cli):
    _, err = cli.run("run", small, "--set", "algorithm.name=fedavg", "--set", "rounds=1", "--out", "x")
    assert "algorithm 'fedavg' has no algorithm.alpha, algorithm.beta: dropped" in err
    assert fedmutual.load_config("x/config.toml").algorithm == {"name": "fedavg"}
    assert "key 'algorithm.alpha' is a setting of fml and proxyfl, and the algorithm is 'fedavg'; remove it" in cli.fail(
        "run", small, "--set", "algorithm.name=fedavg", "--set", "algorithm.alpha=0.1", "--out", "y"
    )


def test_a_finished_run_is_not_trained_again_and_more_rounds_are(small, cli):
    cli("run", small)
    folder = small.parent / "runs" / "small"
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    _, err = cli.run("run", small, "--resume")
    assert "round" not in err
    assert before == {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    cli("run", small, "--resume", "--set", "rounds=5")
    cli("run", small, "--set", "rounds=5", "--out", "whole")
    for name in ("metrics.jsonl", "ledger.jsonl", "server/round-5.safetensors", "clients/1/round-5.safetensors"):
        assert (folder / name).read_bytes() == (small.parent / "whole" / name).read_bytes(), name


def test_rounds_grow_over_sparse_evaluations_as_if_they_had_been_asked_for_at_once(small, cli):
    sparse = ["--set", "records.evaluate_every=2", "--set", "records.checkpoint_every=2"]
    cli("run", small, *sparse)
    cli("run", small, *sparse, "--set", "rounds=6", "--resume")
    cli("run", small, *sparse, "--set", "rounds=6", "--out", "whole")
    for name in ("metrics.jsonl", "server/round-6.safetensors"):
        assert (small.parent / "runs/small" / name).read_bytes() == (small.parent / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["optimizer.lr=0.2"], "was started with another 'optimizer.lr'"),
        (["rounds=2"], "runs/small: its run has 3 rounds, and a resume cannot reduce them to 2; set 'rounds' to 3 or more"),
        (["algorithm.alpha=0.9", "seed=3"], "was started with another 'algorithm.alpha'"),
        (["rounds=9"], "because the schedule 'optimizer.lr' depends on their number"),
    ],
)
def test_a_changed_configuration_is_not_resumed_into(small, cli, change, sentence):
    schedule = ("--set", "optimizer.lr={start=0.1,end=0.01}") if "schedule" in sentence else ()
    cli("run", small, *schedule)
    assert sentence in cli.fail("run", small, "--resume", *schedule, *(x for c in change for x in ("--set", c)))


def test_models_are_read_back_and_score_as_recorded(small, cli):
    cli("run", small)
    run = fedmutual.Run("runs/small")
    from fedmutual import data

    federation = data.load(run.config)
    x, y = next(iter(federation.test.rows([torch.arange(len(federation.test))])))
    accuracy = (run.global_model()(x).argmax(1) == y).double().mean().item()
    assert accuracy == pytest.approx(run.summary["global"]["test_accuracy"]["last"])
    validation = federation.clients["2"].validation
    x, y = next(iter(validation.rows([torch.arange(len(validation))])))
    accuracy = (run.personal_model("2")(x).argmax(1) == y).double().mean().item()
    assert accuracy == pytest.approx(run.summary["personal"]["val_accuracy"]["last"]["per_client"]["2"])
    with pytest.raises(fedmutual.RunError, match="no personal model of client '7'; there are 0, 1, 2"):
        run.personal_model("7")


def test_compare_writes_a_run_for_each_method_and_seed_and_a_page(small, cli):
    out, _ = cli.run(
        "compare", small, "--methods", "fml,fedavg,independent,centralised", "--seeds", 2, "--out", "c", "--set", "rounds=2"
    )
    folders = {str(p.parent.relative_to(small.parent / "c")) for p in (small.parent / "c").rglob("summary.json")}
    assert folders == {f"{m}/{s}" for m in ("fml", "fedavg", "independent", "centralised") for s in (0, 1)}
    assert (small.parent / "c/report.html").stat().st_size > 10_000
    assert "report: c/report.html" in out
    alone = json.loads((small.parent / "c/independent/0/summary.json").read_text())
    assert alone["global"]["test_accuracy"] is None
    assert alone["bytes"] == {"up": 0, "down": 0, "seed": 0}
    average = json.loads((small.parent / "c/fedavg/0/summary.json").read_text())
    assert average["personal"]["model"] == "global"
    ceiling = json.loads((small.parent / "c/centralised/0/summary.json").read_text())
    assert set(ceiling["personal"]["val_accuracy"]["last"]["per_client"]) == {"0", "1", "2"}
    assert fedmutual.Run("c/centralised/0").global_model() is not None
    _, err = cli.run("compare", small, "--methods", "fml", "--seeds", 3, "--out", "c", "--set", "rounds=2", "--resume")
    assert "seed 2" in err
    assert "seed 0" not in err


def test_compare_sets_a_key_for_the_methods_that_have_it(small, cli):
    """The file's algorithm, fml, has neither mu nor weighting; alpha it has."""
    sets = ("algorithm.mu=0.1", "algorithm.weighting=uniform", "algorithm.alpha=0.3", "rounds=1")
    options = ("--methods", "fml,fedavg,fedprox", "--seeds", 1, "--out", "c", *(x for s in sets for x in ("--set", s)))
    for resume_option in ((), ("--resume",)):
        cli.run("compare", small, *options, *resume_option)
    assert fedmutual.load_config("c/fml/0/config.toml").algorithm == {"name": "fml", "alpha": 0.3, "beta": 0.6}
    assert fedmutual.load_config("c/fedavg/0/config.toml").algorithm == {"name": "fedavg", "weighting": "uniform"}
    assert fedmutual.load_config("c/fedprox/0/config.toml").algorithm == {
        "name": "fedprox",
        "weighting": "uniform",
        "mu": 0.1,
    }
    schedule = ("--set", "algorithm.name=fedavg", "--set", "algorithm.mu.start=0.1", "--set", "algorithm.mu.end=0")
    one_round = ("--seeds", 1, "--set", "rounds=1", "--out", "d")
    cli.run("compare", small, "--methods", "fedavg,fedprox", *schedule, *one_round)
    assert fedmutual.load_config("d/fedprox/0/config.toml").algorithm["mu"] == {"start": 0.1, "end": 0}
    assert "c/fedprox/0: the run in it was started with another 'algorithm.mu'" in cli.fail(
        "compare", small, *options, "--resume", "--set", "algorithm.mu=0.2"
    )


def test_paths_and_names_that_look_like_markup_are_printed_as_they_are(small, cli):
    out, _ = cli.run("run", small, "--set", "rounds=1", "--out", "c3/[/x]")
    assert "c3/[/x]: `fedmutual report 'c3/[/x]' -o report.html`" in out
    out, _ = cli.run("report", "c3/[/x]", "-o", "c3/[red]z.html")
    assert "report: c3/[red]z.html" in out
    settings = ("--methods", "independent", "--seeds", 1, "--set", "rounds=1", "--set", "name=[bold]n", "--out", "[i]c")
    out, _ = cli.run("compare", small, *settings)
    assert "\n[bold]n\n" in out
    assert "report: [i]c/report.html" in out


def test_data_notes_that_look_like_markup_are_printed_as_they_are(small, cli):
    rows = "".join(f"{i % 2},{domain},{i},{-i}\n" for i in range(40) for domain in ("[red]", "[bold]"))
    (small.parent / "t.csv").write_text("label,domain,a,b\n" + rows)
    small.write_text('data = { name = "csv", root = "t.csv" }\npartition = { kind = "domains" }\n')
    for command in ("check", "show"):
        out, _ = cli.run("data", command, small)
        assert "client '[red]' has " in out


def test_metrics_none_keeps_the_scores_at_the_client(small, cli):
    small.write_text(small.read_text() + '\n[clients.1]\nshare = { metrics = "none" }\n')
    code, _, _ = cli("run", small)
    folder = small.parent / "runs" / "small"
    assert code == 0
    for line in read_lines(folder / "metrics.jsonl"):
        assert set(line["train"]) == {"0", "2"}
        assert "1" not in {s["client"] for s in line["scores"]}
    lines_of_client = read_lines(folder / "clients/1/metrics.jsonl")
    assert [line["round"] for line in lines_of_client] == [1, 2, 3]
    assert {s["data"] for s in lines_of_client[0]["scores"]} == {"validation", "test"}
    cli("run", small, "--set", "share.metrics=none", "--out", "all")
    summary = json.loads((small.parent / "all/summary.json").read_text())
    assert summary["personal"]["val_accuracy"] is None
    assert summary["global"]["test_accuracy"]["last"] > 0


NORMED = """
from torch import nn


def net(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, classes))
"""
LOCAL = ["--set", "model.shared=normed:net", "--set", "model.batchnorm=local", "--set", "model.personal=mlp"]


def test_local_batchnorm_leaves_no_complete_global_model(small, cli):
    (small.parent / "normed.py").write_text(NORMED)
    cli.run("run", small, *LOCAL)
    run = fedmutual.Run("runs/small")
    assert run.summary["global"]["test_accuracy"] is None
    assert set(run.summary["leaves"]["fml"]) == {"1.weight", "1.bias", "4.weight", "4.bias"}
    with pytest.raises(fedmutual.RunError, match="no complete global model"):
        run.global_model()
    assert {s["model"] for s in read_lines(run.folder / "metrics.jsonl")[-1]["scores"]} == {"personal", "meme"}


def test_a_shared_part_of_batchnorm_alone_that_stays_home_is_refused(small, cli):
    (small.parent / "normed.py").write_text(NORMED)
    err = cli.fail("run", small, *LOCAL, "--set", "model.part='2'", "--set", "model.adaptor=rest")
    assert err.count("\n") == 1
    assert all(word in err for word in ("'normed:net'", "model.part", "model.batchnorm = 'average'"))
    assert not (small.parent / "runs").exists()


def test_tensorboard_draws_the_same_scores(small, cli):
    pytest.importorskip("tensorboard", reason="the extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cli("run", small, "--set", "records.tensorboard=true")
    events = EventAccumulator("runs/small/tensorboard").Reload()
    drawn = [e.value for e in events.Scalars("accuracy/global/test")]
    assert drawn[-1] == pytest.approx(fedmutual.Run("runs/small").summary["global"]["test_accuracy"]["last"])
    assert "train/personal/0" in events.Tags()["scalars"]


def test_lists(cli):
    algorithms = cli("list", "algorithms")[1]
    assert all(name in algorithms for name in ("fml", "fedprox", "independent", "centralised", "alpha, beta, temperature"))
    assert "lenet5" in cli("list", "models")[1]
    assert "mnist" in cli("list", "data")[1]
    fix = "name algorithms, models, data, experiments, keys, methods or an algorithm, your own as module:Class"
    assert cli("list", "things")[2].strip() == f"error: there is nothing to list called 'things'; {fix}"
    assert cli("list")[2].strip() == f"error: {fix}"


@pytest.mark.parametrize(("what", "page"), [("keys", "configuration.md"), ("methods", "methods.md")])
def test_a_page_is_what_the_command_prints(cli, what, page):
    out, _ = cli.run("list", what)
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    assert text == out, f"renew it: uv run fedmutual list {what} > docs/{page}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.classes=['0','1']", "error: "),
        ("model.shared=mpl", "there is no network 'mpl'; did you mean 'mlp'?"),
        ("model.personal=alexnet", "network 'alexnet' has a stem for images of 3 channels"),
        ("model.shared=math:sqrt", "network 'math:sqrt' cannot be made"),
    ],
)
def test_data_check_says_what_run_would_say(small, cli, change, message):
    err = cli.fail("data", "check", small, "--set", change)
    assert err.count("\n") == 1
    assert message in err


def test_demo_compares_twice_and_ends_with_a_page(tmp_path, cli, in_tmp_path, monkeypatch):
    """Shortened: CI runs the whole of it from the wheel."""
    real = fedmutual.load_config
    monkeypatch.setattr(fedmutual, "load_config", lambda file: real(file, **{"rounds": 3, "training.local_epochs": 1}))
    out, err = cli.run("demo", "--seeds", 1, "--out", "demo")
    runs = tmp_path.glob("demo/different-networks/*/0/summary.json")
    assert {p.parent.parent.name for p in runs} == {"fml", "fedavg", "independent"}
    assert "trains 7 runs" in out.splitlines()[0]
    sections = re.findall(r'<h2 id="c\d">(.*)</h2>', (tmp_path / "demo/report.html").read_text())
    assert sections == ["different-networks", "different-digits"]  # the one in which mutual learning pays comes first
    assert [line.partition(":")[0] for line in out.splitlines()[1:3]] == sections
    assert out.rstrip().splitlines()[-1] == "report: demo/report.html"
    assert {line[:8] for line in err.splitlines() if line.startswith("run ")} == {f"run {n} of" for n in range(1, 8)}
    out, _ = cli.run("demo", "--seeds", 2, "--out", "demo")
    assert "its page is demo/report.html" in out
    assert "`fedmutual demo --seeds 2 --out demo-2`" in out


@pytest.mark.process
def test_mutual_learning_pays_in_the_demo_s_first_federation_and_not_in_its_second(tmp_path):
    gains = []
    for name in ("different-networks", "different-digits"):
        file = Path(fedmutual.__file__).parent / "demo" / f"{name}.toml"
        runs = [
            fedmutual.run(fedmutual.load_config(file, **{"algorithm.name": method}), out=tmp_path / name / method)
            for method in ("fml", "independent")
        ]
        ours, alone = (run.summary["personal"]["val_accuracy"]["last"]["mean"] for run in runs)
        gains.append(ours - alone)
    assert gains[0] > 0.02
    assert abs(gains[1]) < 0.02


def test_a_run_says_how_to_learn_what_it_gains(cli, small):
    folder = "a" * 100  # whose name is in the line twice, beyond the terminal's width
    out, _ = cli.run("run", small, "--set", "rounds=1", "--out", folder)
    assert f"`fedmutual report {folder} -o report.html` makes its page" in out
    assert f"`fedmutual compare {small} --methods fml,independent --set rounds=1` shows the gain over training alone" in out
    assert "gain/" not in out
    out, _ = cli.run("run", small, "--set", "rounds=1", "--set", "algorithm.name=independent", "--out", "b")
    assert "compare" not in out


@pytest.fixture
def server_starts(monkeypatch):
    """Return the list of starts of the fork server, which does not start."""
    if not child_process.IS_FORKED:
        pytest.skip("there is no fork server on this system")
    starts = []
    monkeypatch.setattr(child_process, "count_cores", lambda: 2)
    monkeypatch.setattr(child_process.forkserver, "ensure_running", lambda: starts.append(1))
    return starts


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "started"),
    [
        (("reproduce", "absent"), True),
        (("reproduce", "absent", "--engine", "inprocess"), False),
        (("reproduce", "absent", "--engine", "inprocess", "--jobs", "2"), True),
        (("reproduce", "absent", "--set", "engine.name=stacked"), False),
    ],
)
def test_the_fork_server_starts_only_for_commands_that_need_worker_processes(cli, server_starts, words, started):
    code, _, _ = cli(*words)
    assert code != 0  # there is no such experiment
    assert bool(server_starts) == started


def test_a_run_in_one_process_starts_no_fork_server(small, cli, server_starts):
    cli.run("run", small, "--set", "engine.name=inprocess")
    assert server_starts == []
