"""FedH2L's experiments: the paper's numbers as it prints them, equal budgets, and runs that are shared."""

from math import prod
from statistics import fmean

import pytest

from committed import read_committed_experiments
from fedmutual import models
from fedmutual.core import At
from fedmutual_papers.experiment_files import AVERAGE
from fedmutual_papers.plan import Scale, list_jobs

pytestmark = pytest.mark.long

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


def test_the_papers_numbers_are_shares_of_one_runs_images_but_for_inds():
    """IND's numbers are means over three runs. Test sets have 600, 150 and 450 images; numbers are rounded to 0.01."""
    images = {"acc": 600, "bwt": 150, "fwt": 450}

    def share(of, n, runs):
        return of == pytest.approx(100 * round(of * n * runs / 100) / n / runs, abs=0.0051 if runs == 1 else 0.0101)

    deviations = [
        (cell, arm, measure, i)
        for (cell, arm, measure), nodes in printed("rotated-mnist").items()
        for i, of in nodes.items()
        if i != AVERAGE and not share(of, images[measure], 3 if arm == "independent" else 1)
    ]
    assert deviations == [("shared/public-15", "aggregate", "bwt", "20")]


def test_the_average_accuracies_of_the_printed_tables():
    acc = {where[:2]: of[AVERAGE] for id in IDS[:4] for where, of in printed(id).items() if where[2] == "acc"}
    assert acc["shared/public-10", "fedh2l"] == 89.13
    assert acc["shared/public-10", "independent"] == 68.45
    assert acc["shared/public-15", "fedmd"] == 86.75
    assert acc["shared/public-10-unlabelled", "fedh2l"] == 88.67
    assert acc["shared/public-10-fedprox", "fedprox-matched"] == 86.67
    assert acc["networks", "fedmd"] == 56.97  # Office-Home's, which comes after PACS's
    assert printed("pacs")["networks", "aggregate", "acc"][AVERAGE] == 77.00
    ablated = {arm: of for (_, arm), of in acc.items() if arm in ("no-kl", "no-projection", "pcgrad", "e5", "e10", "pairs")}
    assert ablated == {
        "no-kl": 86.79, "no-projection": 88.46, "pcgrad": 88.34, "e5": 88.04, "e10": 87.25, "pairs": 88.21,
    }  # fmt: skip


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
