"""What an arm spends: kept with its result as its run counts it, and equal for the arms of a claim."""

from fnmatch import fnmatch
from statistics import fmean

import pytest

from committed import read_committed_experiments
from fedmutual_papers.experiment_files import RESULTS, find_home, read_experiment
from fedmutual_papers.measured_cell import MeasuredCell, read_measured_cells
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.run import train_cells
from fedmutual_papers.store import ResultStore
from fedmutual_papers.tables import make_spent_table
from made_results import result

pytestmark = pytest.mark.long


def test_a_result_keeps_its_budget(papers, store, tmp_path):
    cell = read_experiment(papers, "table9").cells[0]
    train_cells([cell], 1, Scale(), tmp_path / "out", store)
    for job in list_jobs(cell, [0], Scale()):
        stored = job.find_result(ResultStore(store.folder))
        assert stored.budget["steps"] == 2 * 3  # two rounds of one pass over 40 examples in batches of 16
        assert stored.budget["forwards"] == {"fml": 2, "fedavg": 1}[job.arm] * 6  # FML's step passes both networks


def test_the_steps_of_a_result_are_those_that_were_taken(papers, store, tmp_path):
    """FedRep trains its head first: two rounds of three passes of three steps."""
    path = papers / "table9/digits/iid.toml"
    rep = '[cell.arms.fedrep]\nset = { "algorithm.name" = "fedrep", "algorithm.head_epochs" = 2 }\n'
    path.write_text(path.read_text().replace("[cell.arms.fml]", f"{rep}\n[cell.arms.fml]"))
    cell = read_experiment(papers, "table9").cells[0]
    train_cells([cell], 1, Scale(), tmp_path / "out", store)
    (budget,) = (job.find_result(store).budget for job in list_jobs(cell, [0], Scale()) if job.arm == "fedrep")
    assert budget == {"steps": 2 * (2 + 1) * 3, "forwards": 18}


def test_the_table_of_what_was_spent(papers):
    path = papers / "table9/digits/iid.toml"
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 4"))
    cell = read_experiment(papers, "table9").cells[0]
    clients = {"0": (30, 0.5), "1": (17, 0.5)}
    traffic = {"up": 2_000, "down": 4_000, "seed": 200}
    results = {
        "fml": {s: result("fml", s, clients=clients, traffic=traffic, budget={"steps": 3.0}) for s in range(2)},
        "fedavg": {},
    }
    table = make_spent_table([MeasuredCell(cell, Scale(2), results)])
    (row,) = [[c.text for c in row] for row in table.rows]
    assert row[1:] == ["FML", "2 of 4", "3", "1,000", "2,000", "100"]
    assert make_spent_table([MeasuredCell(cell, Scale(), {"fml": {}, "fedavg": {}})]) is None


ALIKE = 0.01  # of the gradient steps: an exchange every 350 steps leaves 50 of 20,000 over


def steps_of(cells, claim, cell):
    """The gradient steps that both arms of a claim took in a cell; None where one was not run."""
    than, elsewhere = claim.other
    arms = [(cell, claim.arm), (next((c for c in cells if c.cell.name == elsewhere), cell), than or claim.arm)]
    steps = [[r.budget["steps"] for r in measured.list_finished(arm).values()] for measured, arm in arms]
    return [fmean(of_arm) for of_arm in steps] if all(steps) else None


@pytest.fixture(scope="module")
def committed_store():
    return ResultStore(find_home() / RESULTS)


@pytest.mark.parametrize("experiment", read_committed_experiments().values(), ids=lambda e: e.id)
def test_a_claim_of_unequal_budgets_is_judged_at_equal_steps_too(experiment, committed_store):
    cells = [cell for cell in read_measured_cells(experiment, committed_store) if not cell.words]  # of full length
    for claim in experiment.index.claims:
        if claim.measure in ("bytes_up", "bytes_down"):
            continue  # a number of one step is the same whatever the budget
        for cell in (c for c in cells if fnmatch(c.cell.name, claim.cells)):
            if (first := steps_of(cells, claim, cell)) is None or first[0] == pytest.approx(first[1], rel=ALIKE):
                continue
            readings = [reading for _, reading in claim.list_readings()[1:]]
            others = [steps_of(cells, reading, cell) for reading in readings]
            is_fair = any(s and s[0] == pytest.approx(s[1], rel=ALIKE) for s in others)
            assert is_fair or (readings and None in others), (claim.text, cell.cell.id, first, others)
            assert experiment.index.supports, "say which reading the paper's text supports"
