"""Settings that a sweep chose: taken over by an arm, and said with how they were chosen."""

import json

import pytest

from committed import read_committed_experiments
from fedmutual.errors import ConfigError
from fedmutual_papers.experiment_files import read_experiment
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.pages import make_page, render_markdown
from fedmutual_papers.plan import Scale, list_jobs

pytestmark = pytest.mark.long

TRIED = [
    {"rounds": "5", "optimizer.lr": rate, "algorithm.mu": mu} for mu in ("0.1", "1.0") for rate in ("0.01", "0.03", "0.1")
]
SWEEP = {
    "format": 1,
    "name": "digits",
    "seeds": [0, 1],
    "by": "global",
    "holdout": 0.1,
    "settings": [{"set": values} for values in TRIED],
    "chosen": TRIED[4],  # mu = 1.0 and lr = 0.03
    "warnings": [],
}


@pytest.fixture
def swept(papers):
    """The made-up papers with a sweep that chose for FedProx, in the place of FedAvg -> (its file, the cell's file)."""
    (papers / "sweeps").mkdir()
    file, cell = papers / "sweeps/digits-fedprox.json", papers / "table9/digits/iid.toml"
    file.write_text(json.dumps(SWEEP))
    arm = 'set = { "algorithm.name" = "fedavg" }'
    cell.write_text(cell.read_text().replace(arm, 'set = { "algorithm.name" = "fedprox" }\nsweep = "digits-fedprox"'))
    return file, cell


@pytest.mark.parametrize(("changes", "rates", "mu"), [
    ((), (0.03, 0.01), 1.0),
    ((('"fedprox" }', '"fedprox", "algorithm.mu" = 0.5 }'),), (0.03, 0.01), 0.5),  # its own settings come after
    ((("paper = 80.00", "rate_times = 0.5"), ("paper = 81.50", "rate_times = 0.5")), (0.015, 0.005), 1.0),
])  # fmt: skip
def test_an_arm_takes_what_its_sweep_chose_and_no_more(papers, swept, changes, rates, mu):
    """A share of the rate is of the sweep's, or else of the cell's."""
    _, cell = swept
    for before, after in changes:
        cell.write_text(cell.read_text().replace(before, after))
    configs = {j.arm: j.config for j in list_jobs(read_experiment(papers, "table9").cells[0], [0], Scale())}
    assert (configs["fedavg"].optimizer.lr, configs["fml"].optimizer.lr) == rates
    assert (configs["fedavg"].algorithm["mu"], configs["fedavg"].rounds) == (mu, 2)


def test_a_share_of_a_rate_that_moves_is_an_error(papers):
    cell = papers / "table9/digits/iid.toml"
    moving = "optimizer.lr = { start = 0.1, end = 0.01 }\n"
    cell.write_text(moving + cell.read_text().replace("paper = 81.50", "rate_times = 0.5"))
    with pytest.raises(ConfigError, match=r"iid.toml, arm 'fml': 'rate_times' needs optimizer.lr as a number"):
        read_experiment(papers, "table9")


@pytest.mark.parametrize(("change", "message"), [
    (None, "there is no such file"),
    ({"format": 2}, "is of format 2"),
    ({"chosen": None}, "chosen: input should be a valid dictionary"),
    ({"seeds": "x"}, "seeds: input should be a valid tuple"),
    ({"settings": [{}]}, "it does not have 'set'"),
    ({"settings": SWEEP["settings"][:1]}, "its sweep tried no key with several values"),
])  # fmt: skip
def test_a_sweep_that_chose_nothing_is_named(papers, swept, change, message):
    file, cell = swept
    if change is None:
        file.unlink()
    else:
        file.write_text(json.dumps({**SWEEP, **change}))
    with pytest.raises(ConfigError) as problem:
        read_experiment(papers, "table9")
    assert str(problem.value).startswith(f"{cell}, arm 'fedavg': the sweep 'digits-fedprox' cannot be used (")
    assert message in str(problem.value)


def test_the_report_says_how_a_setting_was_chosen(papers, swept, store, tmp_path):
    experiment = read_experiment(papers, "table9")
    text = render_markdown(make_page(experiment, read_measured_cells(experiment, store)), tmp_path / "docs/pages")
    assert (
        "| optimizer.lr = 0.03, algorithm.mu = 1.0 | sweeps/digits-fedprox.json | "
        "optimizer.lr: 0.01, 0.03, 0.1; algorithm.mu: 0.1, 1.0 | algorithm.mu | shared | 10 % | 5 of 2 | 2 |\n"
    ) in text
    assert "[digits-fedprox.json](../../papers/sweeps/digits-fedprox.json)" in text
    assert "## How settings were chosen" not in render_markdown(make_page(read_experiment(papers, "looker"), []))


def test_a_sweep_command_without_rounds_uses_the_configured_rounds(papers, swept):
    file, _ = swept
    without = [{k: v for k, v in values.items() if k != "rounds"} for values in TRIED]
    file.write_text(json.dumps({**SWEEP, "settings": [{"set": v} for v in without], "chosen": without[0]}))
    (papers / "sweeps/digits.toml").write_text("rounds = 7\n")
    (tuning,) = read_experiment(papers, "table9").cells[0].tunings.values()
    assert (tuning.rounds, tuning.ends) == (7, ["optimizer.lr", "algorithm.mu"])


def test_every_method_of_the_tuned_cells_has_its_own_sweep():
    for cell in read_committed_experiments()["tuned"].cells:
        assert set(cell.tunings) == set(cell.arms)
        for arm, tuning in cell.tunings.items():
            assert tuning.ends == [], "a better rate may lie beyond the grid"
            config = cell.make_config(arm)
            assert config.optimizer.lr == tuning.chosen["optimizer.lr"] * cell.arms[arm].rate_times
            assert tuning.winner.get("algorithm.name", "fml") == config.algorithm["name"]
