"""Epsilon: equal to Opacus' and to dp-accounting's, planned as it is spent, and recorded."""

import json
import math
import warnings

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from fedmutual import run, sweep
from fedmutual.config import parse_config
from fedmutual.errors import ConfigError
from fedmutual.federation import build
from fedmutual.privacy import accountant
from fedmutual.privacy.accountant import NoisedSteps, compute_total_epsilon, find_sigma
from fedmutual.results.frame import read_run
from fedmutual.studies import privacy_plan

pytestmark = pytest.mark.long

TEN = [
    (1.0, 256 / 12_000, 940, 1e-5),
    (2.0, 256 / 12_000, 940, 1e-5),
    (0.8, 0.05, 100, 1e-5),
    (0.6, 0.01, 500, 1e-6),
    (1.1, 0.001, 10_000, 1e-5),
    (4.0, 0.2, 300, 1e-5),
    (3.0, 1.0, 20, 1e-5),
    (1.5, 0.1, 1, 1e-4),
    (10.0, 0.5, 1000, 1e-7),
    (30.0, 0.02, 200, 1e-5),
]


def by_dp_accounting(kind, sigma, rate, steps, delta):
    event = GaussianDpEvent(sigma) if rate == 1.0 else PoissonSampledDpEvent(rate, GaussianDpEvent(sigma))
    return kind.compose(SelfComposedDpEvent(event, steps)).get_epsilon(delta)


@pytest.mark.parametrize("setting", TEN, ids=str)
def test_epsilon_is_that_of_opacus_and_of_dp_accounting(setting):
    from opacus.accountants import RDPAccountant

    sigma, rate, steps, delta = setting
    ours = compute_total_epsilon([NoisedSteps(sigma, rate, steps)], delta)
    theirs = by_dp_accounting(RdpAccountant(accountant.ORDERS), *setting)
    assert ours <= theirs * (1 + 1e-9)  # which rounds the divergence of a fractional order up
    assert math.isclose(ours, theirs, rel_tol=0.01)
    opacus = RDPAccountant()
    opacus.history = [(sigma, rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        standard = opacus.get_epsilon(delta)
        assert math.isclose(opacus.get_epsilon(delta, alphas=accountant.ORDERS), ours, rel_tol=1e-12)
    assert ours <= standard * (1 + 1e-12)  # more orders can but lower the bound
    tight = compute_total_epsilon([NoisedSteps(sigma, rate, steps)], delta, "prv")
    exact = by_dp_accounting(PLDAccountant(), *setting)
    assert exact - 1e-6 <= tight <= exact + 0.03
    assert tight <= ours + 0.02


def test_steps_of_other_kinds_add_up():
    parts = [NoisedSteps(1.0, 0.02, 300), NoisedSteps(2.0, 0.05, 100), NoisedSteps(1.0, 0.02, 200)]
    of = RdpAccountant(accountant.ORDERS)
    for sigma, rate, steps in parts:
        of.compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps))
    assert math.isclose(compute_total_epsilon(parts, 1e-5), of.get_epsilon(1e-5), rel_tol=1e-4)
    assert compute_total_epsilon(parts, 1e-5) == compute_total_epsilon(reversed(parts), 1e-5)
    assert compute_total_epsilon([], 1e-5) == 0.0
    assert compute_total_epsilon([NoisedSteps(1.0, 0.1, 0)], 1e-5) == 0.0


@pytest.mark.parametrize(("wished", "rate", "steps"), [(8.0, 0.02, 940), (1.0, 0.02, 940), (0.1, 0.05, 100), (2.0, 1.0, 5)])
def test_a_planned_sigma_keeps_the_budget_and_wastes_little(wished, rate, steps):
    sigma = find_sigma(wished, rate, steps, 1e-5)
    assert compute_total_epsilon([NoisedSteps(sigma, rate, steps)], 1e-5) <= wished
    assert compute_total_epsilon([NoisedSteps(0.99 * sigma, rate, steps)], 1e-5) > wished


def test_a_budget_that_no_noise_can_keep_is_refused():
    with pytest.raises(ConfigError, match="no noise"):
        find_sigma(1e-9, 1.0, 10**6, 1e-12)


def tables(name="fml", nets="both", **further_tables):
    """A small experiment on digits."""
    settings = {"fml": {"beta": 1.0}, "fedavg": {"weighting": "uniform"}, "fedprox": {"weighting": "uniform"}}
    return {
        "name": "small",
        "rounds": 2,
        "partition": {"clients": 2, "examples": 60},
        "training": {"local_epochs": 1, "batch_size": 16, **further_tables.pop("training", {})},
        "algorithm": {"name": name, **settings.get(name, {}), **further_tables.pop("algorithm", {})},
        "engine": {"name": "inprocess", "device": "cpu", **further_tables.pop("engine", {})},
        "privacy": {"nets": nets, "sigma": 1.0, **further_tables.pop("privacy", {})},
        **further_tables,
    }


PUBLIC = {"split": {"public": 0.3}}
ALL = {
    "fml": {},
    "fedavg": {"nets": "meme"},
    "fedprox": {"nets": "meme"},
    "proxyfl": {"nets": "meme", "algorithm": {"beta": 1.0}},
    "independent": {},
    "fedh2l": {**PUBLIC, "algorithm": {"public_batch": 4}, "training": {"local_steps": 2}},
    "fedmd": {**PUBLIC, "algorithm": {"public_batch": 4, "transfer_epochs": 2}},
    "aggregate": PUBLIC,
}


@pytest.mark.parametrize("name", ALL)
def test_what_is_planned_is_what_is_spent(name, tmp_path):
    config = parse_config(tables(name, **ALL[name]))
    plan = privacy_plan.plan_privacy(build.build(config))
    finished_run = run(config, tmp_path / "run")
    record = json.loads((finished_run.folder / "summary.json").read_text())["privacy"]
    assert record["delta"] == 1e-5
    assert set(record["clients"]) == set(plan) == {"0", "1"}
    for client, cost in plan.items():
        recorded = record["clients"][client]
        assert recorded["steps"] == cost.steps > 0
        assert (
            recorded["epsilon"]
            == cost.compute_epsilon(config)
            == compute_total_epsilon([NoisedSteps(1.0, cost.rate, cost.steps)], 1e-5)
        )
        assert recorded["rate"] == cost.rate == 16 / cost.rows


def test_rounds_that_a_client_sits_out_cost_nothing(tmp_path):
    config = parse_config(tables(rounds=4, engine={"participation": 0.5}))
    plan = privacy_plan.plan_privacy(build.build(config))
    finished_run = run(config, tmp_path / "run")
    record = json.loads((finished_run.folder / "summary.json").read_text())["privacy"]["clients"]
    assert {i: recorded["steps"] for i, recorded in record.items()} == {i: cost.steps for i, cost in plan.items()}
    assert sum(cost.steps for cost in plan.values()) == 4 * plan["0"].steps / max(1, plan["0"].steps // 4)


def test_a_pause_changes_neither_the_model_nor_epsilon(tmp_path):
    uninterrupted = run(parse_config(tables()), tmp_path / "whole")
    run(parse_config(tables(rounds=1)), tmp_path / "paused")
    paused = run(parse_config(tables()), tmp_path / "paused", resume=True)
    summaries = [json.loads((r.folder / "summary.json").read_text()) for r in (uninterrupted, paused)]
    assert summaries[0]["privacy"] == summaries[1]["privacy"]
    assert summaries[0]["personal"] == summaries[1]["personal"]
    assert (uninterrupted.folder / "metrics.jsonl").read_bytes() == (paused.folder / "metrics.jsonl").read_bytes()


def test_a_run_with_an_infinite_personal_loss_is_recorded_to_its_end(tmp_path):
    """A network without noise must not stop a client, so the run continues, and its folder stays readable."""

    def read_losses(lr):
        changed = {"optimizer": {"name": "sgd", "lr": lr}, "algorithm": {"beta": 1.0}}
        recorded = read_run(run(parse_config(tables(nets="meme", **changed)), tmp_path / f"lr {lr}").folder)
        assert recorded.finished
        return recorded.evaluations[-1].train.get("0", {})  # a client without a finite loss has no entry

    assert "personal" in read_losses(0.1)
    assert "personal" not in read_losses(1e4)


def test_a_run_without_noise_records_no_epsilon(tmp_path):
    done = run(parse_config(tables(nets="none", privacy={})), tmp_path / "run")
    assert "privacy" not in json.loads((done.folder / "summary.json").read_text())


def test_a_run_that_would_cost_more_than_its_budget_is_not_begun(tmp_path):
    with pytest.raises(ConfigError, match=r"privacy.epsilon = 1: .* set privacy.sigma = ") as caught:
        run(parse_config(tables(privacy={"epsilon": 1.0})), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    sigma = float(str(caught.value).split("privacy.sigma = ")[1].split(",")[0])
    run(parse_config(tables(privacy={"epsilon": 1.0, "sigma": sigma})), tmp_path / "run")


def test_a_sweep_says_what_its_trainings_cost_together(tmp_path):
    plain = tables(rounds=1, privacy={"sigma": 3.0})
    result = sweep(parse_config(plain), {"optimizer.lr": [0.01, 0.1]}, out=tmp_path)
    (sentence,) = (warning for warning in result.warnings if "privacy" in warning)
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("*/0/summary.json")]
    assert len(summaries) == 4  # two settings, and local-only training with each
    taken = [
        NoisedSteps(3.0, s["privacy"]["clients"]["0"]["rate"], s["privacy"]["clients"]["0"]["steps"]) for s in summaries
    ]
    assert f"epsilon {compute_total_epsilon(taken, 1e-5):.3g} at delta 1e-05" in sentence
    assert compute_total_epsilon(taken, 1e-5) > compute_total_epsilon(taken[:1], 1e-5)
    assert "not known" not in sentence
    folders = sorted(path.parent for path in tmp_path.glob("*/0/summary.json"))
    (folders[0] / "summary.json").unlink()  # as of a training that diverged
    assert ", without 1 that stopped and whose steps are not known;" in privacy_plan.describe_trials(
        folders, parse_config(plain)
    )


def test_groups_are_the_unit_where_they_are_asked_for(tmp_path):
    csv = tmp_path / "rows.csv"
    lines = ["a,b,patient,label"]
    lines += [f"{k % 7},{(3 * k) % 5},p{k // 6},{'yes' if k % 2 else 'no'}" for k in range(120)]
    csv.write_text("\n".join(lines))
    data = {"name": "csv", "root": str(csv), "group_by": "patient"}
    config = parse_config(
        tables(data=data, partition={"clients": 1}, privacy={"unit": "group", "group_rows": 2}, split={"validation": 0.2})
    )
    (cost,) = privacy_plan.plan_privacy(build.build(config)).values()
    assert cost.units == math.ceil(cost.rows / 6)
    assert math.isclose(cost.rate, 16 / (2 * cost.units))
    done = run(config, tmp_path / "run")
    (recorded,) = json.loads((done.folder / "summary.json").read_text())["privacy"]["clients"].values()
    assert recorded["epsilon"] == cost.compute_epsilon(config)
