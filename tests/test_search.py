"""Random search and successive halving: what is drawn, which settings go on, what a resume does, what the search costs."""

import json
from pathlib import Path

import pytest

import fedmutual
from fedmutual.cli.conclude import print_sweep
from fedmutual.cli.terminal import Code
from fedmutual.config.grid import list_rows
from fedmutual.errors import ConfigError
from fedmutual.events import Evaluated, Replied
from fedmutual.report.choice import ScoredTrial
from fedmutual.studies.compare import tune
from fedmutual.studies.sweep import Sweep, plan_combinations, plan_sweep, sweep
from log_lines import read_lines, read_trials

RATES = [1e-6, 1e-5, 1e-4, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2]
FEDAVG = {"algorithm.name": ["fedavg"]}


@pytest.fixture
def nine(small):
    """A file of nine short rounds of FedAvg, which has no local-only training beside; its rows are few."""
    text = (
        small.read_text().replace("rounds = 3", "rounds = 9").replace("split = { test = 0.5 }", "split = { holdout = 0.3 }")
    )
    small.write_text(
        text.replace('algorithm = { name = "fml", alpha = 0.4, beta = 0.6 }', 'algorithm = { name = "fedavg" }')
    )
    return small


def read_rounds(folder):
    return {p.parents[1].name: json.loads(p.read_text())["rounds"] for p in Path(folder).rglob("summary.json")}


def read_means(folder, round):
    """The mean hold-out accuracy over clients of each setting after a round, from the run folders."""
    means = {}
    for log in Path(folder).rglob("metrics.jsonl"):
        lines = read_lines(log)
        scores = [
            s["accuracy"] for line in lines if line["round"] == round for s in line["scores"] if s["data"] == "holdout"
        ]
        if scores:
            means[log.parents[1].name] = sum(scores) / len(scores)
    return means


@pytest.mark.parametrize(
    ("settings", "rounds", "every", "rungs"),
    [
        (9, 9, 1, [(1, 9), (3, 3), (9, 1)]),
        (8, 10, 1, [(4, 8), (10, 2)]),
        (27, 10, 1, [(2, 27), (4, 9), (10, 3)]),
        (9, 20, 2, [(4, 9), (8, 3), (20, 1)]),
        (9, 3, 1, [(1, 9), (3, 3)]),
        (30, 9, 1, [(1, 30), (3, 10), (9, 3)]),
    ],
)
def test_the_best_third_goes_on_for_three_times_as_many_rounds(small, settings, rounds, every, rungs):
    config = fedmutual.load_config(small, **{"rounds": rounds, "records.evaluate_every": every, "split.holdout": 0.1})
    combinations = [*list_rows({"optimizer.lr": [0.01 * (n + 1) for n in range(settings)]})]
    assert plan_combinations(config, combinations, Path("s"), halving=True).rungs == rungs
    assert plan_combinations(config, combinations, Path("s")).rungs == [(rounds, settings)]


def test_halving_continues_the_runs_of_the_best_settings(nine):
    swept = sweep(nine, {"optimizer.lr": RATES}, out="s", halving=True)
    first, second = read_means("s", 1), read_means("s", 3)
    assert len(first) == 9
    third = sorted([t.label for t in swept.tried], key=first.get, reverse=True)[:3]  # of equal ones the first given
    best = max(third, key=second.get)
    assert read_rounds("s") == {**dict.fromkeys(first, 1), **dict.fromkeys(third, 3), best: 9}
    assert swept.chosen.label == best
    assert swept.budget["rounds"] == 6 * 1 + 2 * 3 + 1 * 9
    record = json.loads(Path("s/sweep.json").read_text())
    assert record["budget"] == swept.budget
    assert {s["label"]: s["rounds"] for s in record["settings"]} == read_rounds("s")
    straight = fedmutual.run(fedmutual.load_config(f"s/{best}/0/config.toml"), "straight")
    assert (straight.folder / "metrics.jsonl").read_text() == Path(f"s/{best}/0/metrics.jsonl").read_text()


@pytest.mark.long
def test_a_stopped_search_chooses_as_one_that_was_not_stopped(nine):
    whole = sweep(nine, {"optimizer.lr": RATES}, out="whole", halving=True)

    def watch(name):
        def stop(event):
            if isinstance(event, Replied) and event.round == 2:
                raise KeyboardInterrupt

        return stop

    with pytest.raises(KeyboardInterrupt):
        sweep(nine, {"optimizer.lr": RATES}, out="s", halving=True, watch=watch)
    trained = []

    def see(name):
        return lambda event: trained.append((name, event.round)) if isinstance(event, Evaluated) else None

    swept = sweep(nine, {"optimizer.lr": RATES}, out="s", halving=True, resume=True, watch=see)
    assert all(round > 1 for _, round in trained), "the first rounds are not trained again"
    assert [(t.label, t.round, t.last) for t in swept.tried] == [(t.label, t.round, t.last) for t in whole.tried]
    assert (swept.best[0].label, swept.budget) == (whole.best[0].label, whole.budget)
    trained.clear()
    assert sweep(nine, {"optimizer.lr": RATES}, out="s", halving=True, resume=True, watch=see).budget == whole.budget
    assert trained == []


def test_local_only_training_has_the_rounds_of_its_setting(nine):
    grid = {"algorithm.name": ["fml"], "optimizer.lr": [1e-6, 0.05, 0.1], "rounds": [3]}
    swept = sweep(nine, grid, out="s", halving=True)
    rounds = read_rounds("s")
    assert sorted(rounds.values()) == [1, 1, 1, 1, 3, 3]
    assert rounds[f"independent,{swept.chosen.label}"] == 3
    assert len(swept.chosen.gain) == 3
    assert plan_sweep(nine, grid, halving=True).most_trainings == 6 + 2


NO_SCORE = (
    "accuracy is undefined on the hold-out rows, for example because they lack a label or an event; hold out more rows "
    "with split.holdout"
)


@pytest.mark.parametrize(
    ("rounds", "diverged", "seeds", "failure"),
    [
        ((None, None), (1, 1), 1, "every setting diverged"),
        ((None, None), (1, 1), 3, "every setting diverged in at least one seed"),
        ((None, None), (0, 0), 1, NO_SCORE),
        ((None, None), (1, 0), 1, NO_SCORE),
        ((1, 3), (0, 1), 1, "every setting that halving continued to round 3 diverged; the others were ended early"),
    ],
)
def test_a_search_without_a_choice_says_what_diverged(monkeypatch, capsys, rounds, diverged, seeds, failure):
    monkeypatch.setattr("fedmutual.report.choice._read_finished", lambda *_: ())
    folders = dict.fromkeys(range(seeds), Path("s"))
    ended = [dict.fromkeys(range(n), "Diverged") for n in diverged]
    tried = tuple(ScoredTrial({}, "lr", folders, how, None, None, n) for n, how in zip(rounds, ended, strict=True))
    searched = Sweep(Path("s"), tried, (), (), {})
    assert searched.failure == failure
    with pytest.raises(SystemExit) as ended_with:
        print_sweep(searched, Path("nine.toml"))
    is_undefined = failure == NO_SCORE  # no other rate defines it
    assert ended_with.value.code == (Code.BAD_INPUT if is_undefined else Code.DIVERGED)
    assert ("A smaller optimizer.lr" in capsys.readouterr().err) != is_undefined


def test_random_search_trains_equal_draws_once(nine):
    grid = {"training.local_epochs": {"integers": [1, 2]}, "rounds": 1}
    swept = sweep(nine, grid, out="s", trials=6)
    assert {t.values["training.local_epochs"] for t in swept.tried} == {1, 2}
    assert swept.budget["runs"] == 2


@pytest.mark.parametrize(
    ("grid", "more", "message"),
    [
        ({"optimizer.lr": {"uniform": [0.1, 0.2]}}, {}, "has a range, of which not every value can be tried; say how many"),
        ({"optimizer.lr": {"uniform": [0.2, 0.1]}}, {"trials": 3}, "write two numbers, the smaller one first"),
        ({"optimizer.lr": [{"uniform": [0.1, 0.2]}, 0.5]}, {"trials": 3}, "a range stands alone, and here are 2 values"),
        ({"optimizer.lr": [0.5, {"uniform": [0.1, 0.2]}]}, {}, "has a range, of which not every value can be tried"),
        (
            {"optimizer.lr": {"normal": [0.1, 0.2]}},
            {"trials": 3},
            "; the ranges are uniform, log-uniform",
        ),
        (
            {"optimizer.lr": {"normal": [0.1, 0.2]}, "rounds": [1, 2]},
            {"trials": 3},
            "key 'optimizer.lr': a schedule is { start = 0.9, end = 0.3, shape = \"linear\" } of finite numbers, not "
            "{'normal': [0.1, 0.2]}; the ranges are uniform, log-uniform, integers, choices",
        ),
        ({"optimizer.lr": [0.1, 0.2]}, {"trials": 0}, "trials = 0: must be 1 or more"),
        ({"optimizer.lr": [0.1, 0.2]}, {"halving": True}, "halving: of 2 settings with 9 rounds none can end early"),
        ({"optimizer.lr": [0.1, 0.2, 0.3], "rounds": [2]}, {"halving": True}, "of 3 settings with 2 rounds none can end"),
        ({"optimizer.lr": [0.1, 0.2], "rounds": [3, 9]}, {"halving": True}, "halving: 'rounds' takes one value"),
        (
            {"optimizer.lr": [0.1, {"start": 0.1, "end": 0.01}, 0.2]},
            {"halving": True},
            "halving: the schedule 'optimizer.lr' depends on the number of rounds",
        ),
        ({"optimizer.lrr": {"uniform": [0.1, 0.2]}}, {"trials": 3}, "unknown key 'optimizer.lrr'"),
    ],
)
def test_a_search_that_cannot_be_made_is_refused_before_training(nine, grid, more, message):
    with pytest.raises(ConfigError) as problem:
        plan_sweep(nine, grid, **more)
    assert message in str(problem.value)


def test_methods_are_tuned_with_equal_draws_and_the_configured_setting_first(nine):
    config = fedmutual.load_config(nine, rounds=1)
    tuned = tune(config, ["fedprox", "independent"], 4, Path("c"), search="random")
    of_prox, alone = read_trials("c/tune/fedprox"), read_trials("c/tune/independent")
    assert [t["optimizer.lr"] for t in of_prox] == [t["optimizer.lr"] for t in alone]
    assert of_prox[0] == {"optimizer.lr": "0.01", "algorithm.mu": "0.01"}
    assert all(
        0.0001 <= float(t["optimizer.lr"]) <= 1 and float(t["algorithm.mu"]) in (0.001, 0.01, 0.1, 1) for t in of_prox
    )
    assert {choice.cost["rounds"] for choice in tuned.values()} == {4}


def test_methods_are_halved_alike(nine):
    ranges = {"optimizer.lr": {"log-uniform": [0.02, 0.2]}, "algorithm.mu": {"uniform": [0.1, 0.2]}}
    config = fedmutual.load_config(nine, rounds=3)
    tuned = tune(config, ["fedavg", "fedprox"], 3, Path("c"), search="halving", ranges=ranges)
    assert {choice.cost["rounds"] for choice in tuned.values()} == {1 + 1 + 3}
    assert all("algorithm.mu" not in trial for trial in read_trials("c/tune/fedavg"))
    assert all(0.1 <= float(trial["algorithm.mu"]) <= 0.2 for trial in read_trials("c/tune/fedprox"))
    assert all(0.02 <= float(trial["optimizer.lr"]) <= 0.2 for trial in read_trials("c/tune/fedprox"))
    with pytest.raises(ConfigError, match="of 2 settings none can end early; use --tune 3 or more"):
        tune(config, ["fedavg"], 2, Path("d"), search="halving")
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm\.nu'"):
        tune(config, ["fedavg", "fedprox"], 3, Path("d"), ranges={"algorithm.nu": {"uniform": [0.1, 0.2]}})


@pytest.mark.parametrize("key", ["seed", "split.holdout", "partition.alpha", "data.size"])
def test_methods_are_not_tuned_on_different_rows(nine, key):
    with pytest.raises(ConfigError, match=f"the range of '{key}': settings are compared on the same rows"):
        tune(fedmutual.load_config(nine, rounds=1), ["fedavg"], 3, Path("d"), ranges={key: {"uniform": [0.1, 0.2]}})


def test_the_command_line_searches(nine, cli):
    out, _ = cli.run(
        *("sweep", nine, "--set", "optimizer.lr={log-uniform=[0.001,0.2]}", "--set", "rounds=3"),
        *("--trials", 4, "--halving", "--out", "s"),
    )
    assert "all trainings: 4 runs, 6 rounds, " in out
    assert "rounds" in out
    out, _ = cli.run(
        *("compare", nine, "--methods", "fedavg,independent", "--tune", 3, "--halving", "--seeds", 1),
        *("--set", "rounds=3", "--set", "optimizer.lr={log-uniform=[0.01,0.1]}", "--out", "c"),
    )
    assert "(3 tried; 3 runs, 5 rounds, " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--random",), "--random is for the trials of --tune"),
        (("--halving",), "--halving is for the trials of --tune"),
        (("--set", "optimizer.lr={uniform=[0.1,0.2]}"), "the range of 'optimizer.lr' is for the trials of --tune"),
        (("--tune", "19"), "--tune 19: there are at most 18 settings to try; --random draws as many as you like"),
    ],
)
def test_what_compare_cannot_search_is_refused(nine, cli, words, message):
    assert message in cli.fail("compare", nine, *words)
    assert not Path("runs").exists()
