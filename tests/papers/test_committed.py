"""The committed experiments: the papers' printed numbers, equal budgets, and what the pages must say beside them."""

import tomllib
from math import prod
from pathlib import Path
from statistics import fmean

import pytest

from committed import read_committed_experiments
from fedmutual import models
from fedmutual.core import At
from fedmutual.privacy import accountant
from fedmutual_papers.claims import NOT_RUN
from fedmutual_papers.experiment_files import AVERAGE, NOTES, RESULTS, find_home
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.store import ResultStore
from fedmutual_papers.tables import make_tables

pytestmark = pytest.mark.long

# the page of proxyfl names the differences from ProxyFL's public code in its own list
REAL = {id: e for id, e in read_committed_experiments().items() if e.index.paper and id != "proxyfl"}
FML = [e for e in REAL.values() if e.index.code == "fml"]


def test_every_page_holds_the_authors_code_against_ours():
    assert {e.index.code for e in REAL.values()} == {"fml", "fedh2l"}
    assert all(e.code for e in REAL.values())


@pytest.mark.parametrize("experiment", FML, ids=lambda e: e.id)
def test_a_page_of_fml_says_how_its_learning_rate_was_chosen(experiment):
    """By thin sweeps, in words; or by a sweep of each method, in a table."""
    swept = all(cell.tunings.keys() == cell.arms.keys() for cell in experiment.cells)
    assert swept or {"learning-rate", "learning-rate-v1"} & set(experiment.index.notes)


@pytest.mark.parametrize("experiment", FML, ids=lambda e: e.id)
def test_the_notes_state_the_start_of_personal_networks(experiment):
    """In the papers personal networks begin with the server's model; a claim of Table 1 compares both starts."""
    if experiment.id != "newcomer":  # which says it of its own arms
        assert "personal-start" in experiment.index.notes
    (claim,) = (c for c in REAL["table1"].index.claims if c.sign == "same")
    (cell,) = (c for c in REAL["table1"].cells if c.name == claim.cells)
    starts = {arm: cell.make_config(arm).model.start for arm in (claim.arm, claim.than)}
    assert starts == {"fml-from-server": "server", "fml": "own"}


def test_table_1_lists_our_last_and_best_rounds_beside_the_paper():
    """Because the printed numbers may be the best on the test set."""
    table1 = REAL["table1"]
    assert "best-on-test" in table1.index.notes
    made = list(make_tables(table1, read_measured_cells(table1, ResultStore(find_home() / RESULTS))))
    captions = [t.caption for t in made]
    assert ["mean of the last 10 evaluated rounds" in c for c in captions] == [True, False]
    assert ["best on test" in c for c in captions] == [False, True]
    last, best = ([(cell.text, cell.sub) for row in t.rows for cell in row if cell.sub] for t in made)
    assert sum("paper" in sub for _, sub in last) == 24 * 3
    ran = [sub.rpartition(", ")[2] for text, sub in last if text != NOT_RUN and "paper" in sub]
    assert ran
    assert [printed for text, printed in best if text != NOT_RUN] == ran


def test_shared_sentences_are_stored_outside_the_pages():
    shared = set(tomllib.loads((find_home() / NOTES).read_text(encoding="utf-8"))["differences"].values())
    for experiment in REAL.values():
        assert not set(experiment.index.differences) & shared


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


IDS = ("rotated-mnist", "pacs", "office-home", "h2l-ablation", "h2l-figures")
FOUND = {id: {c.name: c for c in read_committed_experiments()[id].cells} for id in IDS}
ODD = {("shared/public-5", "fedmd", "bwt"): (89.11, 91.50), ("shared/public-15", "aggregate", "bwt"): (92.47, 92.36)}


def printed(id):
    """(cell, arm, measure) -> the paper's numbers of the nodes and their average."""
    arms = {(cell.name, k): arm.paper for cell in FOUND[id].values() for k, arm in cell.arms.items()}
    return {(*where, m): of for where, paper in arms.items() if paper for m, of in paper.items()}


@pytest.mark.parametrize(("id", "nodes", "rows"), [
    ("rotated-mnist", ["0", "20", "40", "60"], 13 + 4 + 8),  # Table 2, and rows again beside other readings
    ("pacs", ["photo", "art_painting", "cartoon", "sketch"], 5),
    ("office-home", ["Art", "Clipart", "Product", "Real_world"], 5),
])  # fmt: skip
def test_the_papers_averages_follow_from_its_nodes_but_for_two(id, nodes, rows):
    numbers = printed(id)
    assert len(numbers) == 3 * rows
    for where, of in numbers.items():
        assert [*of] == [*nodes, AVERAGE]
        mean = fmean(of[i] for i in nodes)
        if where in ODD:
            assert (of[AVERAGE], round(mean, 2)) == ODD[where]
        else:
            assert of[AVERAGE] == pytest.approx(mean, abs=0.0101), where


def test_the_papers_acc_follows_from_bwt_and_fwt_but_for_four():
    """Of nodes with as many test images each, ACC = (BWT + 3 FWT) / 4."""
    numbers = {where: of for where, of in printed("rotated-mnist").items() if where[0].startswith("shared/")}
    deviations = {}
    for cell, arm, measure in numbers:
        for i in ("0", "20", "40", "60") if measure == "acc" else ():
            acc, bwt, fwt = (numbers[cell, arm, m][i] for m in ("acc", "bwt", "fwt"))
            if acc != pytest.approx((bwt + 3 * fwt) / 4, abs=0.0101):
                deviations[cell, arm, i] = (acc, pytest.approx((bwt + 3 * fwt) / 4, abs=0.0101))
    assert deviations == {
        ("shared/public-5", "fedh2l", "20"): (86.33, 87.17),
        ("shared/public-5", "fedh2l", "40"): (87.50, 87.67),
        ("shared/public-10", "independent", "60"): (56.89, 57.05),
        ("shared/public-15", "aggregate", "20"): (89.67, 89.36),
    }


def test_fedavg_at_fedh2ls_bandwidth():
    cell = FOUND["rotated-mnist"]["shared/public-10"]
    lenet = models.build("lenet5", (1, 28, 28), 10, At(0, -1, 1).rng("any"))
    batch, classes = cell.tables["training"]["batch_size"], 10
    sent, parameters = 4 * batch * classes + 4 * batch + 4, 4 * sum(prod(p.shape) for p in lenet.parameters())
    assert (sent, parameters) == (1412, 246824)
    matched = {"shared/public-10": "fedavg", "shared/public-10-fedprox": "fedprox", "unsaid/tanh": "fedavg"}
    for name, arm in ((name, f"{algorithm}-matched") for name, algorithm in matched.items()):
        made = FOUND["rotated-mnist"][name].arms[arm].set
        steps = round(parameters / sent)
        assert (made["training.local_steps"], made["rounds"]) == (steps, cell.tables["rounds"] // steps)
        assert parameters / steps == pytest.approx(sent, rel=0.01)


def test_arms_take_as_many_local_steps_and_are_cut_down_alike():
    """Those at equal gradient steps are held to those in test_budget."""
    for cells in FOUND.values():
        for cell in cells.values():
            for arm, about in cell.arms.items():
                assert cell.limit_rounds(arm, 1000) == max(round(cell.get_rounds(arm) / 10), 1)
                if arm.endswith("-equal-steps"):
                    continue
                steps = about.set.get("training.local_steps", 1)
                assert 10_000 - steps < cell.get_rounds(arm) * steps <= 10_000
                every = about.set.get("records.evaluate_every", 50)
                assert every * steps == 50 or every == 1  # scored every 50 local steps, or every round


def planned(id, pattern=""):
    return {
        j.fingerprint: j for name, c in FOUND[id].items() if name.startswith(pattern) for j in list_jobs(c, [0], Scale())
    }


def test_figures_and_ablation_ask_for_the_runs_of_the_tables():
    tables = planned("rotated-mnist", "shared/public-10") | planned("pacs", "networks") | planned("office-home", "networks")
    drawn = planned("h2l-figures")
    assert drawn.keys() < tables.keys()
    assert all(tables[key].config.records.keep_best for key in drawn)  # what is looked at closely is the best round's model
    table_fingerprints = {
        j.fingerprint for j in list_jobs(FOUND["rotated-mnist"]["shared/public-10"], [0], Scale()) if j.arm == "fedh2l"
    }
    for cell in FOUND["h2l-ablation"].values():
        assert table_fingerprints < {j.fingerprint for j in list_jobs(cell, [0], Scale())}
    assert planned("rotated-mnist", "unshared").keys().isdisjoint(planned("rotated-mnist", "shared"))
