"""What an arm spends: counted from its configuration as a real run counts, and kept with its result."""

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import ClassVar

import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from committed import read_committed_experiments
from fedmutual import run
from fedmutual.config import make_algorithm, parse_config
from fedmutual.core import Phase
from fedmutual.results.frame import read_run
from fedmutual_papers.collect import count_budget
from fedmutual_papers.experiment_files import RESULTS, find_home, read_experiment
from fedmutual_papers.measured_cell import MeasuredCell, read_measured_cells
from fedmutual_papers.plan import Scale, list_jobs, make_arm_config
from fedmutual_papers.run import train_cells
from fedmutual_papers.store import ResultStore
from fedmutual_papers.tables import find_budget, make_spent_table
from made_results import result

pytestmark = pytest.mark.long

TABLES = {
    "name": "counted",
    "rounds": 3,
    "data": {"name": "digits", "angles": [0, 45, 90], "per_class": 9},  # 90 images each: 48 private, 18 public
    "partition": {"kind": "domains"},
    "split": {"private": 0.53, "public": 0.2, "validation": 0.1, "test": 0.17},
    "model": {"shared": "mlp", "personal": ["mlp"]},
    "engine": {"device": "cpu", "threads": 1, "name": "inprocess"},
}
STEPS, EPOCHS = {"local_steps": 4, "batch_size": 8}, {"local_epochs": 2, "batch_size": 13}  # 66 = 5 * 13 + 1: one row alone


@pytest.mark.parametrize(("method", "training", "more"), [
    ("fml", EPOCHS, {}),
    ("fml", STEPS, {}),
    ("fedavg", EPOCHS, {}),
    ("fedprox", STEPS, {}),
    ("independent", EPOCHS, {}),
    ("centralised", EPOCHS, {}),
    ("aggregate", STEPS, {}),
    ("aggregate", EPOCHS, {}),
    ("fedh2l", STEPS, {"public_batch": 5}),
    ("fedh2l", STEPS, {"public_batch": 5, "peers": "pairs"}),
    ("fedh2l", {"local_steps": 1, "batch_size": 200}, {"public_batch": 5, "local_data": "private"}),
    ("fedmd", STEPS, {"public_batch": 5, "transfer_epochs": 2, "digest_steps": 3}),
    ("fedmd", EPOCHS, {"public_batch": 5, "transfer_epochs": 1}),
])  # fmt: skip
def test_the_budget_of_a_configuration_is_what_its_run_counts(method, training, more, tmp_path, monkeypatch):
    config = parse_config({**TABLES, "training": training, "algorithm": {"name": method, **more}}, "counted")
    steps, examples = count_in(monkeypatch, make_algorithm(config))
    hook = register_optimizer_step_post_hook(lambda *_: steps.append(1))  # one call for both networks of fml
    try:
        run(config, tmp_path / "run")
    finally:
        hook.remove()
    counts = {i: held.counts for i, held in read_run(tmp_path / "run").partition.clients.items()}
    private, public = {i: sum(c["private"]) for i, c in counts.items()}, {i: sum(c["public"]) for i, c in counts.items()}
    clients = 1 if method == "centralised" else len(private)
    counted = count_budget(config, private, public)
    assert [number * clients for number in counted] == pytest.approx([len(steps), sum(examples)])


def count_in(monkeypatch, algorithm):
    """Two lists that fill while a run trains: a one for each optimiser's step, and how many examples each loss saw."""
    steps, examples = [], []

    def counting(loss):
        def counted(self, nets, batch, const):
            examples.append(len(batch[0]))
            return loss(self, nets, batch, const)

        return counted

    losses = {type(phase): type(phase).loss for phase in (*algorithm.start, *algorithm.phases)}
    for kind, loss in losses.items():
        monkeypatch.setattr(kind, "loss", counting(loss))
    return steps, examples


def test_a_phase_of_ones_own_is_not_guessed_at():
    config = parse_config({**TABLES, "training": STEPS, "algorithm": {"name": f"{__name__}:Own"}}, "own")
    assert count_budget(config, {"0": 48}, {}) is None


@dataclass(frozen=True, kw_only=True)
class Own(Phase):
    """An algorithm of somebody's own, whose phase says nothing of how many steps it takes."""

    scores: ClassVar[tuple[str, ...]] = ("personal",)

    def batches(self, client, inbox, at):
        return ()

    def loss(self, nets, batch, const):
        return {}


def test_a_result_keeps_its_budget(papers, store, tmp_path):
    cell = read_experiment(papers, "table9").cells[0]
    train_cells([cell], 1, Scale(), tmp_path / "out", store)
    for job in list_jobs(cell, [0], Scale()):
        stored = job.find_result(ResultStore(store.folder))
        assert stored.budget["steps"] == 2 * 3  # two rounds of one pass over 40 examples in batches of 16
        assert stored.budget["examples"] == 2 * 40
        assert stored.budget["forwards"] == {"fml": 2, "fedavg": 1}[job.arm] * 6  # FML's step passes both networks


def test_the_steps_of_a_result_are_those_that_were_taken(papers, store, tmp_path):
    """FedRep trains its head first, of which `count_budget` does not know: two rounds of three passes of three steps."""
    path = papers / "table9/digits/iid.toml"
    rep = '[cell.arms.fedrep]\nset = { "algorithm.name" = "fedrep", "algorithm.head_epochs" = 2 }\n'
    path.write_text(path.read_text().replace("[cell.arms.fml]", f"{rep}\n[cell.arms.fml]"))
    cell = read_experiment(papers, "table9").cells[0]
    train_cells([cell], 1, Scale(), tmp_path / "out", store)
    (budget,) = (job.find_result(store).budget for job in list_jobs(cell, [0], Scale()) if job.arm == "fedrep")
    assert budget == {"steps": 2 * (2 + 1) * 3, "forwards": 18}


def test_a_result_without_a_stored_budget_gets_the_budget_of_its_cell():
    """Of Table 2, 10 % public: FedH2L takes a local and a mutual step a round, AGG one; FedMD transfers before round 1."""
    table2 = read_committed_experiments()["rotated-mnist"]
    (measured,) = (
        x for x in read_measured_cells(table2, ResultStore(find_home() / RESULTS)) if x.cell.name == "shared/public-10"
    )
    budgets = {
        arm: find_budget(measured, arm, next(iter(results_by_seed.values())))
        for arm, results_by_seed in measured.results.items()
        if results_by_seed
    }
    assert budgets["fedh2l"] == {"steps": 20_000, "examples": 10_000 * 32 + 10_000 * 3 * 32}
    assert budgets["aggregate"] == {"steps": 10_000, "examples": 10_000 * 32}
    assert budgets["fedavg-matched"]["steps"] == 57 * 175
    # five passes over 4 * 100 public images, 13 batches of 32 each, and over 650 of one's own, 21 batches each
    fedmd = {"steps": 2 * 10_000 + 5 * 13 + 5 * 21, "examples": 2 * 10_000 * 32 + 5 * 400 + 5 * 650}
    assert budgets["fedmd"] == fedmd


def test_the_table_of_what_was_spent(papers):
    path = papers / "table9/digits/iid.toml"
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 4"))
    cell = read_experiment(papers, "table9").cells[0]
    clients = {"0": (30, 0.5), "1": (17, 0.5)}  # batches of 16: 2, and 1 of which one row joins the batch before
    traffic = {"up": 2_000, "down": 4_000, "seed": 200}
    results = {"fml": {s: result("fml", s, clients=clients, traffic=traffic) for s in range(2)}, "fedavg": {}}
    table = make_spent_table([MeasuredCell(cell, Scale(2), results)])
    (row,) = [[c.text for c in row] for row in table.rows]
    assert row[1:] == ["FML", "2 of 4", "3", "47", "1,000", "2,000", "100"]
    assert make_spent_table([MeasuredCell(cell, Scale(), {"fml": {}, "fedavg": {}})]) is None


ALIKE = 0.01  # of the gradient steps: an exchange every 350 steps leaves 50 of 20,000 over
ROWS = dict.fromkeys("0123", 650)  # any, for arms are only compared with each other


def steps_of(experiment, claim, cell):
    """The gradient steps of both arms of a claim in a cell."""
    than, elsewhere = claim.other
    arms = [(cell, claim.arm), (next((c for c in experiment.cells if c.name == elsewhere), cell), than or claim.arm)]
    if not all(arm in place.arms for place, arm in arms):
        return None
    return [count_budget(make_arm_config(c, arm, 0, Scale()), ROWS, dict.fromkeys(ROWS, 100))[0] for c, arm in arms]


REAL = [*read_committed_experiments().values()]
CLAIMS = [(e, claim) for e in REAL for claim in e.index.claims]


@pytest.mark.parametrize(("experiment", "claim"), CLAIMS, ids=lambda v: getattr(v, "id", None) or v.text)
def test_a_claim_of_unequal_budgets_is_judged_at_equal_steps_too(experiment, claim):
    if claim.measure in ("bytes_up", "bytes_down"):
        return  # a number of one step is the same whatever the budget
    for cell in (c for c in experiment.cells if fnmatch(c.name, claim.cells)):
        if (first := steps_of(experiment, claim, cell)) is None or first[0] == pytest.approx(first[1], rel=ALIKE):
            continue
        others = [steps_of(experiment, reading, cell) for _, reading in claim.list_readings()[1:]]
        assert any(s and s[0] == pytest.approx(s[1], rel=ALIKE) for s in others), (cell.id, first, others)
        assert experiment.index.supports, "say which reading the paper's text supports"
