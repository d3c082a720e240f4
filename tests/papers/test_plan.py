"""What makes two runs the same."""

import pytest

from fedmutual.errors import ConfigError
from fedmutual_papers.experiment_files import read_experiment
from fedmutual_papers.plan import Scale, check, has_effect, list_jobs

pytestmark = pytest.mark.long

LR = Scale(None, (("optimizer.lr", 0.1),))


def list_prints(papers, scale=None, here=None, seed=0, id="table9"):
    cell = read_experiment(papers, id).cells[0]
    return {job.arm: job.fingerprint for job in list_jobs(cell, [seed], scale or Scale(), here or {})}


def change(papers, *pairs, name="iid"):
    path = papers / f"table9/digits/{name}.toml"
    for before, after in pairs:
        assert before in path.read_text()
        path.write_text(path.read_text().replace(before, after))


def test_what_tells_in_the_result_makes_another_run(papers):
    fingerprints = list_prints(papers)
    assert len(set(fingerprints.values())) == 2
    for more in ({"seed": 1}, {"scale": Scale(1)}, {"scale": LR}):
        assert list_prints(papers, **more)["fml"] != fingerprints["fml"]
    here = {"engine.name": "stacked", "data.root": "elsewhere", "engine.threads": 2}
    assert list_prints(papers) == list_prints(papers, here=here) == fingerprints
    looker = list_prints(papers, id="looker")  # whoever asks
    assert {k: looker[k] for k in ("fedavg", "fml")} == fingerprints
    change(papers, ("split = { test = 0.5 }", 'split = { test = 0.5, preset = "journal" }'))  # a default, written out
    assert list_prints(papers) == fingerprints
    (papers / "table9/digits/iid.toml").rename(papers / "table9/a.toml")  # whatever it is called
    assert list_prints(papers) == fingerprints


def test_a_limit_above_the_number_of_rounds_has_no_effect(papers):
    cell = read_experiment(papers, "table9").cells[0]
    assert Scale(2).fit_to(cell) == Scale(7).fit_to(cell) == Scale().fit_to(cell)
    changed = (("partition.examples", 20),)
    for scale, words in (
        (Scale(1), "shortened: 1 of 2 rounds"),
        (Scale(), ""),
        (Scale(1, changed), "shortened: 1 of 2 rounds, partition.examples = 20"),
    ):
        assert scale.fit_to(cell).describe(cell) == words


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
    """Not to its local steps: an arm with two a round is cut as the others."""
    arm = '"algorithm.name" = "fedavg"'
    longer = f'{arm}, "training.local_steps" = 2, rounds = {arm_rounds}'
    change(papers, ("rounds = 2", "rounds = 10_000"), (arm, longer), ("local_epochs = 1", "local_steps = 1"))
    cell = read_experiment(papers, "table9").cells[0]
    rounds = {j.arm: j.config.rounds for j in list_jobs(cell, [0], Scale(limit))}
    assert rounds == {"fedavg": cut, "fml": min(limit, 10_000)}


def test_an_algorithm_setting_applies_to_the_methods_that_have_it(papers):
    cell, changed = read_experiment(papers, "table9").cells[0], Scale(None, (("algorithm.weighting", "uniform"),))
    planned = {j.arm: j.config.algorithm for j in list_jobs(cell, [0], changed)}
    assert planned["fedavg"]["weighting"] == "uniform"
    assert "weighting" not in planned["fml"]


def test_a_key_that_no_arm_accepts_leaves_the_cell_unchanged(papers):
    change(papers, ("[cell.arms.fml]", '[cell.arms.fml]\nset = { "algorithm.name" = "independent" }'))
    changed = Scale(None, (("algorithm.alpha", 0.3),))
    without, with_fml = read_experiment(papers, "table9").cells
    assert changed.fit_to(without) == Scale()
    assert changed.fit_to(with_fml) == changed


def test_keys_that_tell_and_keys_that_do_not():
    assert all(map(has_effect, ("optimizer.lr", "data.name", "engine.precision", "records.evaluate_every", "rounds")))
    assert not any(map(has_effect, ("engine.name", "engine.threads", "data.root", "name", "records.checkpoint_every")))


@pytest.mark.parametrize(("key", "value", "message"), [
    ("seed", 3, "--set seed: cells and arms have their own; use --seeds"),
    ("rounds", 3, "--set rounds: cells and arms have their own; use --rounds"),
    ("name", 3, "--set name: cells and arms have their own; use --out"),
    ("algorithm.name", "fedavg", "--set algorithm.name: cells and arms have their own; write a cell of your own"),
    ("algorithm.alhpa", 0.3, "unknown key 'algorithm.alhpa'; did you mean 'algorithm.alpha'? (of algorithms fedavg, fml)"),
    ("algorithm.mu", 0.3, "key 'algorithm.mu' is a setting of fedprox, and the methods are fedavg, fml; remove it"),
    ("algorithm", {"alpha": 0.3}, "--set algorithm: it is a table; set its keys one by one, as --set algorithm.alpha=..."),
    ("algorithm", 3, "--set algorithm: it is a table"),
    ("optimizer", {"lr": 0.3}, "--set optimizer: it is a table; set its keys one by one, as --set optimizer.name=..."),
    ("clients", {"0": {"share": {}}}, "--set clients: it is a table"),
])  # fmt: skip
def test_what_no_arm_takes_is_not_set(papers, key, value, message):
    cells = read_experiment(papers, "table9").cells
    with pytest.raises(ConfigError) as problem:
        check({key: value}, cells)
    assert str(problem.value).removeprefix("--set: ").startswith(message)
    # what some arm takes is set
    check({"algorithm.alpha": 0.3, "algorithm.alpha.start": 0.3, "algorithm.weighting": "uniform", "data.labels": {}}, cells)
