"""Settings that trials on hold-out rows choose before a comparison: the budget, the order, and where the choice is told."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

import fedmutual
from fedmutual.algorithms import ALGORITHMS, FML
from fedmutual.algorithms.registry import METHODS
from fedmutual.config import list_setting_types, list_tunable_settings, replace_algorithm
from fedmutual.config.methods import list_tried_values
from fedmutual.studies.compare import tune
from log_lines import read_trials


def tuned(small, method, most, **more):
    config = fedmutual.load_config(small, rounds=1)
    return tune(config, [method], most, Path("c"), method_settings=more.pop("own", None), **more)[method,]


def test_half_of_the_trials_go_to_the_learning_rate_and_the_rest_to_the_methods_settings(small):
    choice = tuned(small, "fedprox", 6)
    tried = read_trials("c/tune/fedprox")
    assert [t["optimizer.lr"] for t in tried[:3]] == ["0.01", "0.003", "0.03"]
    assert {t["algorithm.mu"] for t in tried[:3]} == {"0.01"}
    assert [t["algorithm.mu"] for t in tried[3:]] == ["0.001", "0.1", "1.0"]
    assert {t["optimizer.lr"] for t in tried[3:]} == {best_rate(tried[:3], "c/tune/fedprox")}
    assert (choice.tried, choice.most) == (6, 6)


def best_rate(tried, folder):
    """The learning rate of the highest hold-out accuracy, the first of equal ones."""
    settings = json.loads((Path(folder) / "sweep.json").read_text())["settings"][: len(tried)]
    best = max(settings, key=lambda s: s["holdout_accuracy"]["last"]["mean"])
    return best["set"]["optimizer.lr"]


def test_a_method_without_settings_tries_learning_rates_alone(small):
    assert tuned(small, "independent", 4).tried == 4
    assert [t["optimizer.lr"] for t in read_trials("c/tune/independent")] == ["0.01", "0.003", "0.03", "0.001"]


def test_a_key_that_is_fixed_is_not_tuned(small):
    choice = tuned(small, "fedprox", 4, fixed={"optimizer.lr"})
    assert [t["algorithm.mu"] for t in read_trials("c/tune/fedprox")] == ["0.01", "0.001", "0.1", "1.0"]
    assert set(choice.values) == {"algorithm.mu"}
    assert tuned(small, "fedavg", 4, fixed={"optimizer.lr"}).values == {}


def test_trials_score_hold_out_rows_alone(small):
    tuned(small, "fedavg", 2)
    (line,) = (Path("c/tune/fedavg/lr=0.01/0/metrics.jsonl")).read_text().splitlines()
    assert {score["data"] for score in json.loads(line)["scores"]} == {"holdout"}


@dataclass(frozen=True, kw_only=True)
class OwnBeta(FML):
    """FML with a beta of its own."""

    beta: float = 0.3


def test_a_derived_class_is_tuned_as_its_base_unless_it_declares_the_setting_anew():
    tried = {f.name: values for f in fields(OwnBeta) if (values := list_tried_values(f))}
    assert tried == {"alpha": METHODS["fml"].tune["alpha"]}


@pytest.mark.parametrize("method", ALGORITHMS)
def test_values_to_try_are_values_of_the_setting(small, method):
    config, _ = replace_algorithm(fedmutual.load_config(small), method)
    for key, (_, values) in list_tunable_settings(config).items():
        assert key in list_setting_types(method)
        for value in values:
            replace_algorithm(config, method, {key: value})  # which raises where the value is out of range


def test_the_chosen_settings_are_trained_recorded_and_printed_and_a_resume_trains_nothing(small, cli):
    arguments = (
        "compare",
        small,
        "--methods",
        "ditto,independent",
        "--tune",
        4,
        "--seeds",
        2,
        "--set",
        "rounds=1",
        "--out",
        "c",
    )
    out, _ = cli.run(*arguments)
    choices = {m: json.loads(Path(f"c/{m}/1/tuned.json").read_text())["set"] for m in ("ditto", "independent")}
    assert set(choices["ditto"]) == {"optimizer.lr", "algorithm.lam"}
    for method, choice in choices.items():
        config = fedmutual.load_config(f"c/{method}/1/config.toml")
        assert config.optimizer.lr == float(choice["optimizer.lr"])
        assert f"tuned: {method}: optimizer.lr = {choice['optimizer.lr']}" in out
        assert config.split.holdout == 0, "the rows that chose are trained on again"
    page = Path("c/report.html").read_text()
    assert page.count("chosen on hold-out rows before these runs") == 2
    assert "Ditto, optimizer.lr" not in page
    _, err = cli.run(*arguments, "--resume")
    assert "round" not in err


def test_trials_that_would_cost_privacy_are_refused(small):
    config = fedmutual.load_config(small)
    noised = config.model_copy(update={"privacy": config.privacy.model_copy(update={"nets": "both"})})
    with pytest.raises(fedmutual.ConfigError, match="--tune"):
        tune(noised, ["fml"], 4, Path("c"))
    assert not Path("c").exists()


def test_a_budget_of_one_is_refused(small, cli):
    assert cli("compare", small, "--tune", 1)[0] == 2
