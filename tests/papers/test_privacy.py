"""The table of accuracy against epsilon: the epsilon and the rate of each row, and what docs/privacy.md prints."""

from pathlib import Path

import pytest

from committed import read_committed_experiments
from fedmutual.privacy import accountant
from fedmutual_papers.experiment_files import RESULTS, find_home
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.store import ResultStore

pytestmark = pytest.mark.long

STORE = ResultStore(find_home() / RESULTS)
PRIVACY = read_committed_experiments()["privacy"]
CELLS = pytest.mark.parametrize("cell", PRIVACY.cells, ids=[c.name for c in PRIVACY.cells])
DOCUMENT = Path(__file__).parents[2] / "docs" / "privacy.md"


@CELLS
def test_each_row_has_its_own_rate_inside_its_grid(cell):
    assert set(cell.tunings) == set(cell.arms)
    for arm, tuning in cell.tunings.items():
        set_by_sweep = {"algorithm.name": "fml", **tuning.winner}
        assert tuning.chosen.keys() == {"optimizer.lr"}
        assert tuning.ends == [], f"{arm}: a better rate may lie beyond the grid"
        for key in ("algorithm.name", "algorithm.beta", "privacy.nets", "privacy.sigma"):
            assert str(set_by_sweep.get(key)) == str(cell.arms[arm].set.get(key)), f"the sweep of {arm} had another {key}"


@CELLS
def test_each_run_cost_the_epsilon_of_its_row(cell):
    """By the accountant, from the rows, the batch and the steps: not from what the run wrote."""
    results = STORE.list_results(cell.id)
    assert {(r.arm, r.seed) for r in results} == {(arm, seed) for arm in cell.arms for seed in range(3)}
    for result in results:
        config = cell.make_config(result.arm)
        if config.privacy.nets == "none":
            assert result.epsilon is None
            continue
        rows = min(client.examples for client in result.clients.values())
        steps = accountant.NoisedSteps(
            config.privacy.sigma, config.training.batch_size / rows, round(result.budget["steps"])
        )
        assert result.epsilon == pytest.approx(accountant.compute_total_epsilon([steps], 1e-5), rel=1e-4)
        assert 0.99 * config.privacy.epsilon < result.epsilon <= config.privacy.epsilon


def test_the_page_of_proxyfl_states_the_epsilon_of_all_300_rounds():
    steps = accountant.NoisedSteps(1.0, 250 / 1000, 300 * 4)
    about = (find_home() / "proxyfl" / "index.toml").read_text()
    assert f"After all 300 rounds epsilon would be {accountant.compute_total_epsilon([steps], 1e-5):.1f}" in about


def test_the_docs_print_the_measured_accuracy():
    text = DOCUMENT.read_text()
    measured = [m for m in read_measured_cells(PRIVACY, STORE) if m.results]
    assert f"| | {' | '.join(m.cell.about.row for m in measured)} |" in text
    for arm, words in {
        "independent": "training alone, no noise",
        "none-meme": "beta = 1, no noise",
        **{f"meme-{e}": f"beta = 1, noise on the meme, epsilon {e}" for e in (8, 4, 2, 1)},
        "none": "beta = 0.5, no noise",
        **{f"both-{e}": f"beta = 0.5, noise on both networks, epsilon {e}" for e in (8, 4, 2, 1)},
    }.items():
        assert f"| {words} | {' | '.join(_print(m, arm) for m in measured)} |" in text


def _print(measured, arm):
    """Return the accuracy of the clients' own models and of the shared model, as "88.8 ± 3.9; 75.9 ± 8.7"."""
    estimates = [measured.estimate(name, arm) for name in ("own_validation", "global_test")]
    return "; ".join(f"{100 * e.mean:.1f} ± {100 * e.half:.1f}" for e in estimates if e is not None) or "not run"
