"""Gradient steps and forward passes in the ledger of a simulation: counted by hand, the same on every engine."""

import json

import pytest

import fedmutual

# 3 clients of 40 rows, batches of 16: 3 steps in a pass of one epoch, 9 of all clients; 2 rounds.
STEPS = 18


def count(small, name, engine, **more):
    overrides = {"rounds": 2, "algorithm.name": name, "engine.name": engine, **more}
    fedmutual.run(fedmutual.load_config(small, **overrides), "out")
    lines = [json.loads(line) for line in (small.parent / "out/ledger.jsonl").read_text().splitlines()]
    return [sum(line[key] for line in lines) for key in ("steps", "forwards")]


@pytest.mark.filterwarnings("ignore:algorithm ")
@pytest.mark.parametrize("engine", ["inprocess", "stacked"])
@pytest.mark.parametrize(
    ("name", "networks", "passes"),
    [
        ("independent", 1, 1),
        ("fedavg", 1, 1),
        ("fedprox", 1, 1),
        ("fml", 2, 1),  # the personal network and the meme
        ("ditto", 2, 1),
        ("fedrep", 1, 11),  # ten epochs of the classifier, one of the features
    ],
)
def test_steps_and_forward_passes_are_counted(small, name, networks, passes, engine):
    assert count(small, name, engine) == [STEPS * passes, STEPS * passes * networks]


@pytest.mark.process
def test_worker_processes_count_too(small):
    assert count(small, "fml", "processes", **{"engine.workers": 2}) == [STEPS, 2 * STEPS]


def test_a_resumed_run_counts_each_round_once(small):
    fedmutual.run(fedmutual.load_config(small, rounds=1), "out")
    config = fedmutual.load_config(small, rounds=2)
    fedmutual.run(config, "out", resume=True)
    lines = (small.parent / "out/ledger.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["steps"] for line in lines) == STEPS


def test_the_report_sums_them_and_has_none_where_a_line_lacks_them(small):
    from fedmutual.report.columns import COSTS
    from fedmutual.results.comparison import make_comparisons
    from fedmutual.results.estimate import Missing
    from fedmutual.results.frame import read_runs

    fedmutual.run(fedmutual.load_config(small, rounds=2), "out")

    def costs():
        (comparison,) = make_comparisons(read_runs(["out"]))
        return {cost.name: cost.read(comparison.lines[0]) for cost in COSTS}

    assert [costs()[key] for key in ("Gradient steps", "Forward passes")] == [STEPS, 2 * STEPS]
    assert costs()["Bytes"] == sum(fedmutual.Run("out").summary["bytes"].values())
    ledger = small.parent / "out/ledger.jsonl"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    del lines[0]["steps"]
    lines[0]["forwards"] = None
    ledger.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert all(isinstance(costs()[key], Missing) for key in ("Gradient steps", "Forward passes"))
