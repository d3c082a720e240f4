"""FedH2L over digits turned two ways, reproduced end to end: nodes, bytes, features, and what a cut-down cell says."""

import io
import json

import pytest
from rich.console import Console

from fedmutual_papers import reproduce as command

pytestmark = pytest.mark.long

INDEX = """
title = "Table 7: turned digits"
paper = "a made-up paper"
about = "Two nodes."
view = "nodes"
measures = ["acc", "bwt", "fwt", "bytes_up", "bytes_seed", "projected", "separation"]
differences = ["Digits of 8 by 8 pixels."]

[[claims]]
text = "FedAvg takes over ten times the bandwidth."
measure = "bytes_up"
arm = "fedavg"
than = "fedh2l"
times = 10
"""
CELL = """
rounds = 4
data = { name = "digits", angles = [0, 90], per_class = 20 }
partition = { kind = "domains" }
split = { private = 0.65, public = 0.10, validation = 0.10, test = 0.15 }
algorithm = { name = "fedh2l", public_batch = 8 }
model = { personal = ["mlp"] }
training = { local_steps = 1, batch_size = 8 }
optimizer = { name = "adam", amsgrad = true, lr = 1e-3, weight_decay = 1e-4 }
records = { evaluate_every = 2, checkpoint_every = 2, best_by = "validation", keep_best = true }
engine = { device = "cpu", name = "inprocess" }

[cell]
row = "10 %"
column = "digits"
node = "90"

[cell.arms.fedh2l.paper]
acc = { 0 = 81.00, 90 = 84.00, average = 82.50 }

[cell.arms.seldom]
set = { "training.local_steps" = 2, rounds = 2, "records.evaluate_every" = 1 }

[cell.arms.fedavg]
set = { "algorithm.name" = "fedavg", "model.shared" = "mlp" }
"""
SENT = 4 * 8 * 10 + 4 * 8 + 4  # 4BC + 4B + 4: posteriors, positions, an accuracy
MLP = 4 * (64 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10) + 8  # its weights, and how many examples weigh for it


@pytest.fixture(scope="module")
def turned(tmp_path_factory):
    """A call of the command on the cell -> (what it said, the numbers of the page's JSON, the folder)."""
    root = tmp_path_factory.mktemp("turned")
    (root / "papers/turned").mkdir(parents=True)
    (root / "papers/turned/index.toml").write_text(INDEX)
    (root / "papers/turned/digits.toml").write_text(CELL)

    def call(rounds=None, seeds=1):
        output = io.StringIO()
        given = ("turned", (), seeds, rounds, {}, root / "out", None, root / "papers", lambda label: lambda event: None)
        assert not command.train(*given, Console(file=output, width=200))
        lines = json.loads((root / "out/turned.json").read_text())
        numbers = {(n["arm"], n["measure"], n["at"], n["node"]): n for n in lines["numbers"]}
        return output.getvalue(), numbers, root / "out"

    return call


def test_from_the_command_to_the_page(turned):
    output, numbers, out = turned()
    nodes = [numbers["fedh2l", "acc", "best", node]["mean"] for node in ("0", "90")]
    assert numbers["fedh2l", "acc", "best", None]["mean"] == pytest.approx(sum(nodes) / 2)
    assert [numbers["fedh2l", "acc", "best", node]["paper"] for node in ("0", "90", None)] == [81, 84, 82.5]
    # of two domains with as many test rows each, ACC is the mean of BWT and FWT
    bwt, fwt = (numbers["fedavg", measure, "last", "0"]["mean"] for measure in ("bwt", "fwt"))
    assert numbers["fedavg", "acc", "last", "0"]["mean"] == pytest.approx((bwt + fwt) / 2, abs=1e-5)
    assert (out / "figures/turned-digits-features-fedh2l.svg").exists()
    assert "features of node 90's model" in (out / "turned.md").read_text(encoding="utf-8")
    assert "paper 82.50" in output


def test_bytes_are_those_of_the_ledger(turned):
    _, numbers, _ = turned()
    assert numbers["fedh2l", "bytes_up", "last", None]["mean"] == SENT
    assert numbers["seldom", "bytes_up", "last", None]["mean"] == SENT / 2
    assert numbers["fedavg", "bytes_up", "last", None]["mean"] == MLP
    assert numbers["fedh2l", "bytes_seed", "last", None]["mean"] > 0


def test_arms_of_fewer_rounds_are_cut_down_alike(turned):
    output, _, out = turned(rounds=2)
    assert "shortened: 2 of 4 rounds" in output
    recorded = json.loads((out / "results/turned/digits.json").read_text())["runs"]
    assert {r["arm"]: r["rounds"] for r in recorded if r.get("limit")} == {"fedh2l": 2, "seldom": 1, "fedavg": 2}


def test_node_analysis_of_a_known_run_needs_no_training(turned):
    _, _, out = turned()
    logs = {p: p.read_text() for p in out.glob("runs/*/log.txt")}
    (out.parent / "papers/turned/closer.toml").write_text(CELL.replace('node = "90"', 'node = "0"'))
    turned()
    assert {p: p.read_text() for p in out.glob("runs/*/log.txt")} == logs
    text = (out / "turned.md").read_text(encoding="utf-8")
    assert ("features of node 0's model" in text, "features of node 90's model" in text) == (True, True)


def test_another_cells_run_of_fewer_rounds_is_gone_on_with(turned):
    _, _, out = turned()
    (out.parent / "papers/turned/longer.toml").write_text(CELL.replace("rounds = 4", "rounds = 6"))
    turned()
    logs = [p.read_text() for p in out.glob("runs/*-6-*/log.txt")]
    assert len(logs) == 2  # of FedH2L and FedAvg; the other arm has its own two rounds
    assert all("resumed, going on with round 5 of 6" in log for log in logs)
