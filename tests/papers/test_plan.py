"""What makes two runs the same."""

import pytest

from fedmutual.errors import ConfigError
from fedmutual_papers.experiment_files import read_experiment
from fedmutual_papers.plan import Scale, check, has_effect, list_jobs

pytestmark = pytest.mark.long


def prints(papers, scale=None, here=None, seed=0, id="table9"):
    cell = read_experiment(papers, id).cells[0]
    return {job.arm: job.fingerprint for job in list_jobs(cell, [seed], scale or Scale(), here or {})}


def test_what_tells_in_the_result_makes_another_run(papers):
    fingerprints = prints(papers)
    assert len(set(fingerprints.values())) == 2
    assert prints(papers) == fingerprints
    assert prints(papers, seed=1)["fml"] != fingerprints["fml"]
    assert prints(papers, Scale(1))["fml"] != fingerprints["fml"]
    assert prints(papers, Scale(None, (("optimizer.lr", 0.1),)))["fml"] != fingerprints["fml"]
    assert prints(papers, here={"engine.name": "stacked", "data.root": "elsewhere", "engine.threads": 2}) == fingerprints


def test_a_run_is_the_same_whoever_asks_and_whatever_it_is_called(papers):
    looker = prints(papers, id="looker")
    assert {k: looker[k] for k in ("fedavg", "fml")} == prints(papers)
    moved = papers / "table9/a.toml"
    (papers / "table9/digits/iid.toml").rename(moved)
    assert prints(papers) == {k: looker[k] for k in ("fedavg", "fml")}


def test_writing_out_a_default_keeps_the_run_identity(papers):
    same, path = prints(papers), papers / "table9/digits/iid.toml"
    path.write_text(path.read_text().replace("split = { test = 0.5 }", 'split = { test = 0.5, preset = "journal" }'))
    assert prints(papers) == same


def test_a_limit_above_the_number_of_rounds_has_no_effect(papers):
    cell = read_experiment(papers, "table9").cells[0]
    assert Scale(2).fit_to(cell) == Scale(7).fit_to(cell) == Scale().fit_to(cell)
    assert Scale(1).fit_to(cell).describe(cell) == "shortened: 1 of 2 rounds"
    assert Scale().fit_to(cell).describe(cell) == ""
    changed = Scale(1, (("partition.examples", 20),)).fit_to(cell)
    assert changed.describe(cell) == "shortened: 1 of 2 rounds, partition.examples = 20"


@pytest.mark.parametrize(("arm_rounds", "limit", "cut"), [
    (57, 250, 1),  # 57 exchanges of 175 steps in the place of 10,000 rounds: 1.4 of them
    (57, 2000, 11),  # 11.4
    (57, 5000, 29),  # 28.5, rounded up: half of an arm's rounds is half
    (10_000, 250, 250),
    (2000, 250, 50),
    (20_000, 250, 250),  # an arm with more rounds than the cell, as a federation that others start from
    (20_000, 15_000, 15_000),
    (57, 1, 1),
])  # fmt: skip
def test_each_arm_is_cut_in_proportion_to_its_own_rounds(papers, arm_rounds, limit, cut):
    path = papers / "table9/digits/iid.toml"
    arm = '"algorithm.name" = "fedavg"'
    text = path.read_text().replace("rounds = 2", "rounds = 10_000").replace(arm, f"{arm}, rounds = {arm_rounds}")
    path.write_text(text.replace("local_epochs = 1", "local_steps = 1"))
    cell = read_experiment(papers, "table9").cells[0]
    rounds = {j.arm: j.config.rounds for j in list_jobs(cell, [0], Scale(limit))}
    assert rounds == {"fedavg": cut, "fml": min(limit, 10_000)}


def test_as_many_gradient_steps_are_cut_to_as_many(papers):
    """An arm with two local steps a round keeps its rounds, so half of a cell is half of it, too."""
    path = papers / "table9/digits/iid.toml"
    arm = '"algorithm.name" = "fedavg"'
    text = path.read_text().replace("rounds = 2", "rounds = 100").replace(arm, f'{arm}, "training.local_steps" = 2')
    path.write_text(text.replace("local_epochs = 1", "local_steps = 1"))
    cell = read_experiment(papers, "table9").cells[0]
    assert {j.config.rounds for j in list_jobs(cell, [0], Scale(50))} == {50}


def test_an_algorithm_setting_applies_to_the_methods_that_have_it(papers):
    cell = read_experiment(papers, "table9").cells[0]
    planned = {j.arm: j.config.algorithm for j in list_jobs(cell, [0], Scale(None, (("algorithm.weighting", "uniform"),)))}
    assert planned["fedavg"]["weighting"] == "uniform"
    assert "weighting" not in planned["fml"]


def test_keys_that_tell_and_keys_that_do_not():
    assert all(map(has_effect, ("optimizer.lr", "data.name", "engine.precision", "records.evaluate_every", "rounds")))
    assert not any(map(has_effect, ("engine.name", "engine.threads", "data.root", "name", "records.checkpoint_every")))


@pytest.mark.parametrize("key", ["seed", "rounds", "name"])
def test_keys_with_their_own_option_are_refused_by_set(key):
    with pytest.raises(ConfigError, match=f"--set {key}"):
        check({key: 3}, ())


@pytest.mark.parametrize(("key", "value", "message"), [
    ("algorithm.alhpa", 0.3, "unknown key 'algorithm.alhpa'; did you mean 'algorithm.alpha'? (of algorithms fedavg, fml)"),
    ("algorithm.mu", 0.3, "key 'algorithm.mu' is a setting of fedprox, and the methods are fedavg, fml; remove it"),
    ("algorithm.name", "fedavg", "--set algorithm.name: each arm has an algorithm of its own"),
    ("algorithm", {"alpha": 0.3}, "--set algorithm: it is a table; set its keys one by one, as --set algorithm.alpha=..."),
    ("algorithm", 3, "--set algorithm: it is a table"),
    ("optimizer", {"lr": 0.3}, "--set optimizer: it is a table; set its keys one by one, as --set optimizer.name=..."),
    ("clients", {"0": {"share": {}}}, "--set clients: it is a table"),
])  # fmt: skip
def test_what_no_arm_takes_is_not_set(papers, key, value, message):
    with pytest.raises(ConfigError) as problem:
        check({key: value}, read_experiment(papers, "table9").cells)
    assert str(problem.value).removeprefix("--set: ").startswith(message)


def test_what_some_arm_takes_is_set(papers):
    cells = read_experiment(papers, "table9").cells
    check({"algorithm.alpha": 0.3, "algorithm.alpha.start": 0.3, "algorithm.weighting": "uniform", "data.labels": {}}, cells)


def test_a_key_that_no_arm_accepts_leaves_the_cell_unchanged(papers):
    path = papers / "table9/digits/iid.toml"
    alone = '[cell.arms.fml]\nset = { "algorithm.name" = "independent" }'
    path.write_text(path.read_text().replace("[cell.arms.fml]", alone))
    changed = Scale(None, (("algorithm.alpha", 0.3),))
    without, with_fml = read_experiment(papers, "table9").cells
    assert changed.fit_to(without) == Scale()
    assert changed.fit_to(with_fml) == changed
