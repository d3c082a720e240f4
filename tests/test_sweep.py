"""A sweep from its grid to what it chooses: real runs over few digits."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import fedmutual
import objectives
from fedmutual.config import load_config
from fedmutual.core import Diverged
from fedmutual.errors import ConfigError
from fedmutual.events import Evaluated, Finished, Replied
from fedmutual.studies.compare import compare
from fedmutual.studies.sweep import plan_sweep, sweep

pytestmark = pytest.mark.long

RATES = [1e-6, 0.1]


def result(folder):
    return json.loads((Path(folder) / "sweep.json").read_text())


def events_by(seen):
    def watch(name):
        return lambda event: seen.append((name, event))

    return watch


def test_a_grid_is_trained_into_run_folders_and_the_best_is_chosen(held_out_config):
    swept = fedmutual.sweep(
        held_out_config, {"optimizer.lr": RATES, "algorithm.alpha": [0.4, 0.6], "rounds": [2]}, seeds=2, out="s"
    )
    folders = {str(p.parent.relative_to("s")) for p in Path("s").rglob("summary.json")}
    settings = [f"lr={lr},alpha={alpha}" for lr in ("1e-06", "0.1") for alpha in (0.4, 0.6)]
    assert folders == {
        f"{name}/{seed}" for name in (*settings, "independent,lr=1e-06", "independent,lr=0.1") for seed in (0, 1)
    }
    assert [t.label for t in swept.tried] == [name.replace(",", ", ") for name in settings]
    assert swept.chosen.values["optimizer.lr"] == 0.1
    config = fedmutual.Run("s/lr=0.1,alpha=0.6/1").config
    assert (config.seed, config.rounds, config.optimizer.lr, config.algorithm["alpha"]) == (1, 2, 0.1, 0.6)
    assert fedmutual.Run("s/independent,lr=0.1/0").config.algorithm == {"name": "independent"}
    held_out = result("s")
    assert held_out["chosen"] == {
        "optimizer.lr": "0.1",
        "algorithm.alpha": str(swept.chosen.values["algorithm.alpha"]),
        "rounds": "2",
    }
    assert held_out["settings"][3]["runs"] == ["lr=0.1,alpha=0.6/0", "lr=0.1,alpha=0.6/1"]
    assert held_out["settings"][3]["holdout_accuracy"]["last"] == {
        "mean": swept.tried[3].last.mean,
        "half": swept.tried[3].last.half,
        "n": 2,
        "over": "seeds",
    }


def test_the_score_is_the_mean_of_the_personal_models_on_hold_out_rows(held_out_config):
    swept = sweep(held_out_config, {"optimizer.lr": RATES}, out="s")
    lines = (Path("s") / "lr=0.1" / "0" / "metrics.jsonl").read_text().splitlines()
    accuracies = {
        model: [s["accuracy"] for s in json.loads(lines[-1])["scores"] if (s["model"], s["data"]) == (model, "holdout")]
        for model in ("personal", "global")
    }
    assert len(accuracies["personal"]) == 3
    assert swept.tried[1].last.mean == pytest.approx(sum(accuracies["personal"]) / 3)
    shared = sweep(held_out_config, {"optimizer.lr": RATES}, out="s", resume=True, by="global")
    assert shared.tried[1].last.mean == pytest.approx(sum(accuracies["global"]) / 3)
    assert result("s")["by"] == "global"


def digits(path, shift):
    """Digits whose test labels are `shift` off."""
    x, y = load_digits(return_X_y=True)
    x = (x * 15).astype("uint8").reshape(-1, 8, 8)
    np.savez(path, x=x[:300], y=y[:300], x_test=x[900:], y_test=(y[900:] + shift) % 10)


POISONED = """
name = "poisoned"
rounds = 3
data = {{ name = "npz", root = "{root}", mean = [0.3], std = [0.4] }}
partition = {{ kind = "iid", clients = 2 }}
split = {{ holdout = 0.2 }}
model = {{ shared = "mlp" }}
training = {{ local_epochs = 2, batch_size = 16 }}
engine = {{ device = "cpu" }}
"""


def test_test_and_validation_labels_do_not_move_the_choice(tmp_path, in_tmp_path):
    """With wrong labels in the test set, of which validation data are taken, the untrained setting scores best there."""
    results = {}
    for name, shift in (("right", 0), ("wrong", 1)):
        digits(tmp_path / f"{name}.npz", shift)
        (tmp_path / f"{name}.toml").write_text(POISONED.format(root=f"{name}.npz"))
        results[name] = sweep(f"{name}.toml", {"optimizer.lr": RATES}, out=name)
    configs = {lr: fedmutual.load_config("wrong.toml", **{"optimizer.lr": lr}) for lr in RATES}
    last = {lr: fedmutual.run(config, f"plain/{lr}").summary for lr, config in configs.items()}
    for score in ("personal", "global"):
        by = {lr: summary[score] for lr, summary in last.items()}
        last_scores = {lr: (s.get("val_accuracy") or s["test_accuracy"])["last"] for lr, s in by.items()}
        means = {lr: s["mean"] if isinstance(s, dict) else s for lr, s in last_scores.items()}
        assert means[1e-6] > means[0.1], "a choice by these would be another"
    assert results["right"].chosen.label == results["wrong"].chosen.label == "lr=0.1"
    assert result("right") == result("wrong")


def test_a_diverged_setting_is_a_finding(held_out_config):
    swept = sweep(held_out_config, {"optimizer.lr": [0.05, 1e30, 0.1]}, out="s")
    first, broken, last = swept.tried
    assert broken.last is None
    assert re.match(r"client '\d' diverged in round 1", broken.diverged[0])
    assert first.last
    assert last.last
    assert swept.chosen in (first, last)
    assert result("s")["settings"][1]["diverged"] == {"0": broken.diverged[0]}
    assert not any(warning.startswith("lr=1e+30") for warning in swept.warnings)
    assert swept.budget["steps"] is not None, "of the others, although nothing is recorded of a first round that diverged"


def test_a_setting_that_harms_is_warned_of(held_out_config):
    """With alpha = beta = 0 nobody looks at a label."""
    fixed = {"algorithm.beta": 0.0, "optimizer.lr": 0.1, "rounds": 4, "partition.clients": 6}
    swept = sweep(held_out_config, {"algorithm.alpha": [0.9, 0.0], **fixed}, out="s")
    (warning_text,) = [warning for warning in swept.warnings if warning.startswith("alpha=0.0: ")]
    assert re.search(
        r"personal models are \d\d\.\d\d points worse than local-only \(95 % interval over 6 clients", warning_text
    )
    assert warning_text.endswith("which excludes 0)")
    assert swept.tried[1].gain.estimate.sign == -1
    assert sorted(p.name for p in Path("s").iterdir()) == ["alpha=0.0", "alpha=0.9", "independent", "sweep.json"]


def test_local_only_among_the_settings_is_trained_once(held_out_config):
    grid = {"algorithm.name": ["fml", "independent", "fedavg"], "rounds": [1]}
    held_out_config.write_text(held_out_config.read_text().replace(", alpha = 0.4, beta = 0.6", ""))
    swept = sweep(held_out_config, grid, out="s")
    assert sorted(p.name for p in Path("s").iterdir()) == ["name=fedavg", "name=fml", "name=independent", "sweep.json"]
    assert [t.model for t in swept.tried] == ["personal", "personal", "global"]
    assert [t.local_only is not None for t in swept.tried] == [True, False, False]


def edge_warnings(result):
    return [warning for warning in result.warnings if "was tried" in warning]


def test_the_end_of_a_grid_is_warned_of_but_not_the_end_of_what_is_possible(held_out_config):
    swept = sweep(held_out_config, {"optimizer.lr": RATES, "rounds": [1]}, out="s")
    assert edge_warnings(swept) == ["the best optimizer.lr, 0.1, is the largest that was tried: try larger ones too"]
    swept = sweep(held_out_config, {"algorithm.alpha": [1.0, 0.0], "optimizer.lr": [0.1], "rounds": [3]}, out="a")
    assert swept.chosen.label == "alpha=1.0"
    assert edge_warnings(swept) == [], "alpha ends at 1"
    swept = sweep(held_out_config, {"optimizer.lr": [0.1, 1e-6, 1e30], "rounds": [1]}, out="b")
    assert edge_warnings(swept) == [], "the larger one was tried, and diverged"


def test_a_stopped_sweep_goes_on_and_trains_nothing_twice(held_out_config):
    grid = {"optimizer.lr": RATES}

    def watch(name):
        def stop(event):
            if name == "lr=0.1, seed 0" and isinstance(event, Replied) and event.round == 2:
                raise KeyboardInterrupt

        return stop

    with pytest.raises(KeyboardInterrupt):
        sweep(held_out_config, grid, out="s", watch=watch)
    assert not Path("s/sweep.json").exists()
    before = {p: p.stat().st_mtime_ns for p in Path("s/lr=1e-06").rglob("*")}
    events = []
    swept = sweep(held_out_config, grid, out="s", resume=True, watch=events_by(events))
    trained = [(name, e.round) for name, e in events if isinstance(e, Evaluated)]
    alone = [(f"independent, lr={lr}, seed 0", n) for lr in ("1e-06", "0.1") for n in (1, 2, 3)]
    assert trained == [("lr=0.1, seed 0", 2), ("lr=0.1, seed 0", 3), *alone]
    assert before == {p: p.stat().st_mtime_ns for p in Path("s/lr=1e-06").rglob("*")}
    events.clear()
    again = sweep(held_out_config, grid, out="s", resume=True, watch=events_by(events))
    assert events == []
    assert again == swept
    uninterrupted = sweep(held_out_config, grid, out="whole")
    assert [t.last for t in uninterrupted.tried] == [t.last for t in swept.tried]


def test_a_grid_may_grow_on_resume(held_out_config):
    sweep(held_out_config, {"optimizer.lr": [0.05, 0.1], "rounds": [1]}, out="s")
    seen = []
    sweep(held_out_config, {"optimizer.lr": [0.05, 0.1, 0.2], "rounds": [1]}, out="s", resume=True, watch=events_by(seen))
    assert {name for name, e in seen if isinstance(e, Finished)} == {"lr=0.2, seed 0", "independent, lr=0.2, seed 0"}


def test_missing_hold_out_rows_are_made_with_a_remark(small):
    with pytest.warns(UserWarning, match=r"split.holdout = 0.1 is set for the sweep: a tenth") as caught:
        swept = sweep(small, {"optimizer.lr": RATES, "rounds": [1]}, out="s")
    assert len([w for w in caught if "holdout" in str(w.message)]) == 1
    assert {
        p.parent.name for p in Path("s").rglob("config.toml") if fedmutual.Run(p.parent).config.split.holdout == 0.1
    } == {"0"}
    assert all(fedmutual.Run(p.parent).config.split.holdout == 0.1 for p in Path("s").rglob("config.toml"))
    assert swept.chosen.examples == 3 * 4
    assert result("s")["holdout"] == 0.1


def test_a_configuration_in_memory(held_out_config):
    config = fedmutual.load_config(held_out_config, rounds=1)
    swept = sweep(config, {"optimizer.lr": RATES}, out="s")
    assert swept.chosen.label == "lr=0.1"
    changed = {"optimizer.lr": 0.1, "records.evaluate_on": "holdout"}
    assert fedmutual.Run("s/lr=0.1/0").config == fedmutual.load_config(held_out_config, rounds=1, **changed)


def test_the_data_that_choose_a_round_of_a_run_do_not_choose_of_a_sweep(held_out_config):
    """A file may say so; the sweep's runs have no such score."""
    held_out_config.write_text(f'{held_out_config.read_text()}records = {{ best_by = "test" }}\n')
    swept = sweep(held_out_config, {"optimizer.lr": RATES, "rounds": [1]}, out="s")
    assert fedmutual.Run("s/lr=0.1/0").config.records.best_by is None
    assert any("is the largest that was tried" in warning for warning in swept.warnings)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (
            {"optimizer.lrr": [0.1, 0.2]},
            "with lrr=0.1: small.toml: unknown key 'optimizer.lrr'; did you mean 'optimizer.lr'?",
        ),
        ({"algorithm.alpha": [0.5, 3]}, "with alpha=3: small.toml: key 'algorithm.alpha' must be between 0 and 1, not 3"),
        ({"model.shared": ["mlp", "mlpp"]}, "with shared=mlpp, seed 0: "),
        ({"optimizer.lr": [0.1]}, "there is nothing to choose from; give a key several values"),
        ({}, "there is nothing to choose from"),
        ({"optimizer.lr": [0.1, 0.1]}, "lr=0.1 and lr=0.1 are equal settings; name each value once"),
        ({"algorithm.alpha": [1, 1.0]}, "are equal settings"),
        (
            {"seed": [1, 2]},
            "key 'seed' of the grid: settings are compared on the same hold-out rows, so it takes one value; --seeds 3",
        ),
        (
            {"partition.clients": [2, 3]},
            "key 'partition.clients' of the grid: settings are compared on the same hold-out rows",
        ),
        ({"split.holdout": [0.1, 0.2]}, "it takes one value; make a sweep for each"),
    ],
)
def test_invalid_values_of_a_sweep_are_an_error_before_training(held_out_config, grid, message):
    with pytest.raises(ConfigError) as problem:
        sweep(Path("small.toml"), grid, out="s")
    assert str(problem.value).startswith(message) or message in str(problem.value)
    assert not Path("s").exists()


def test_a_study_without_seeds_is_refused(held_out_config):
    with pytest.raises(ConfigError, match="seeds = 0"):
        sweep(held_out_config, {"optimizer.lr": RATES}, seeds=0, out="s")
    with pytest.raises(ConfigError, match="seeds = 0"):
        compare(load_config(held_out_config), ["fml"], 0, Path("s"))
    assert not Path("s").exists()


def test_a_sweep_by_the_score_of_a_missing_model_is_refused(held_out_config):
    rates = {"optimizer.lr": RATES}
    with pytest.raises(ConfigError, match="algorithm 'fedavg' has no personal models; leave it out"):
        plan_sweep(held_out_config, {**rates, "algorithm.name": ["fedavg"]}, by="personal")
    with pytest.raises(ConfigError, match="algorithm 'independent' has no shared model; leave it out"):
        plan_sweep(held_out_config, {**rates, "algorithm.name": ["independent"]}, by="global")


def test_no_client_shares_its_scores(held_out_config):
    with pytest.raises(
        ConfigError, match=r"no client sends its scores, so no score can choose a setting; set share.metrics"
    ):
        sweep(held_out_config, {"optimizer.lr": RATES, "share.metrics": ["none"]}, out="s")
    assert not Path("s").exists()


def test_a_partition_file_without_hold_out_rows(small, held_out_config):
    fedmutual.run(fedmutual.load_config(small, rounds=1, **{"split.holdout": 0.0}), "first")
    grid = {"optimizer.lr": RATES, "partition": [{"kind": "file", "file": "first/partition.json"}]}
    held_out_config.write_text(
        held_out_config.read_text().replace(
            'partition = { kind = "shards", clients = 3, classes_per_client = 4, examples = 40 }', ""
        )
    )
    with pytest.raises(ConfigError, match=r"hold-out rows, which client '0' lacks; first/partition\.json has none"):
        sweep(held_out_config, grid, out="s")


def test_stacked_runs_go_on_at_once_and_one_that_diverges_stops_no_other(held_out_config):
    grid = {"optimizer.lr": [0.05, 1e30], "algorithm.alpha": [0.3, 0.7], "rounds": [2]}
    alone = sweep(held_out_config, grid, out="alone")
    at_once = sweep(held_out_config, {**grid, "engine.name": ["stacked"]}, out="together")
    assert [bool(t.diverged) for t in at_once.tried] == [False, False, True, True] == [bool(t.diverged) for t in alone.tried]
    for one, other in zip(at_once.tried[:2], alone.tried[:2], strict=True):
        assert one.last.mean == pytest.approx(other.last.mean, abs=0.05)
    assert "runs at once" in Path("together/lr=0.05,alpha=0.3/0/log.txt").read_text()


def test_networks_of_unlike_shapes_are_stacked_apart(held_out_config):
    swept = sweep(held_out_config, {"model.shared": ["mlp", "cnn1"], "rounds": [1], "engine.name": ["stacked"]}, out="s")
    assert all(t.last for t in swept.tried)


def test_a_run_that_diverged_is_tried_again_from_its_last_saved_round_on_resume(held_out_config):
    diverging = {"armed": True}

    def watch(name):
        def look(event):
            if diverging["armed"] and name == "lr=0.1, seed 0" and isinstance(event, Replied) and event.round == 2:
                raise Diverged("0", 1, 0, "made up")

        return look

    swept = sweep(held_out_config, {"optimizer.lr": RATES}, out="s", watch=watch)
    assert swept.tried[1].diverged == {0: "client '0' diverged in round 2 at batch 1: made up"}
    diverging["armed"] = False
    assert sweep(held_out_config, {"optimizer.lr": RATES}, out="s", resume=True, watch=watch).tried[1].diverged == {}


def test_clients_of_other_tasks_have_no_part_in_the_choice(tmp_path, in_tmp_path):
    path = objectives.write(tmp_path, objectives.NUMBERS)
    fixed = {"rounds": 1, "split": {"holdout": 0.2}, "engine.device": "cpu"}
    swept = sweep(path, {"optimizer.lr": [1e-6, 0.02], **fixed}, out="mixed")
    scores = [s for s in last_line("mixed/lr=0.02/0")["scores"] if (s["model"], s["data"]) == ("personal", "holdout")]
    shares = [s["accuracy"] for s in scores if s["client"] != "light"]
    assert (len(scores), len(shares)) == (4, 3)
    assert swept.tried[1].last.mean == pytest.approx(sum(shares) / 3)
    (warning_text,) = [warning for warning in swept.warnings if "no accuracy" in warning]
    assert warning_text == "the choice does not count 'light', which has no accuracy on hold-out rows"


def last_line(folder):
    return json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[-1])


def write_numbers(task):
    x = np.random.default_rng(0).normal(size=(120, 4))
    np.savez("numbers.npz", x=x, y=x.sum(1))
    Path("numbers.toml").write_text(
        'data = { name = "npz", root = "numbers.npz", mean = [0, 0, 0, 0], std = [1, 1, 1, 1] }\n'
        f'partition = {{ clients = 2 }}\ntraining = {{ task = "{task}", local_epochs = 1 }}\n'
        "split = { holdout = 0.2 }\nrounds = 2\n"
    )


def test_a_regression_is_chosen_by_the_lowest_error(in_tmp_path, cli):
    write_numbers("regression")
    swept = sweep("numbers.toml", {"optimizer.lr": [0.05, 1e-6], "training.batch_size": [8]}, seeds=2, out="s")
    errors = {}
    for rate in (0.05, 1e-6):
        by_round = [[], []]
        for seed in range(2):
            for n, line in enumerate((Path(f"s/lr={rate}") / str(seed) / "metrics.jsonl").read_text().splitlines()):
                scores = [s for s in json.loads(line)["scores"] if (s["model"], s["data"]) == ("personal", "holdout")]
                by_round[n].append(np.mean([s["mean_absolute_error"] for s in scores]))
        errors[rate] = by_round
    assert swept.chosen.values["optimizer.lr"] == 0.05
    assert np.mean(errors[0.05][-1]) < np.mean(errors[1e-6][-1])
    errors_recorded = result("s")["settings"][0]["holdout_mean_absolute_error"]
    assert errors_recorded["last"]["mean"] == pytest.approx(np.mean(errors[0.05][-1]))
    assert errors_recorded["best"]["mean"] == pytest.approx(np.mean(np.min(errors[0.05], axis=0)))
    assert errors_recorded["last"]["half"] == pytest.approx(12.706 / 2**0.5 * np.std(errors[0.05][-1], ddof=1), rel=1e-3)
    out, err = cli.run("sweep", "numbers.toml", "--set", "optimizer.lr=0.05,1e-6", "--out", "t")
    assert "accura" not in out + err
    assert "Mean absolute error of the" in out


def test_a_task_without_a_main_metric_cannot_choose(tmp_path, in_tmp_path):
    (tmp_path / "own_objectives.py").write_text(objectives.CODE)
    write_numbers("own_objectives:Absolute")
    with pytest.raises(ConfigError, match="no main metric in common to choose by; declare `metric`"):
        sweep("numbers.toml", {"optimizer.lr": RATES}, out="s")
    assert not Path("s").exists()
