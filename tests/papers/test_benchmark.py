"""The benchmark page: who leads and who loses, whom a method harms, and what the committed results make of it."""

import json
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

from committed import read_committed_experiments
from fedmutual.config import read_tables
from fedmutual_papers import pages
from fedmutual_papers.benchmark import (
    ID,
    NAME,
    TEMPLATE,
    compare_methods,
    count_bytes,
    describe_rivals,
    make_recommendations,
    render_benchmark,
    select,
    summarise,
    tabulate_cell,
)
from fedmutual_papers.claims import CONTRADICTED, INCONCLUSIVE, SUPPORTED
from fedmutual_papers.experiment_files import RESULTS, find_home, read_experiment
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.store import ResultStore
from fedmutual_papers.tables import OWN as OWN_DATA
from made_results import result

pytestmark = pytest.mark.long

INDEX = """
title = "Four methods"
about = "Digits."
measures = ["own_validation", "worst", "harmed", "global_test"]
differences = ["None."]
"""
CELL = """
rounds = 2
data = { name = "digits" }
partition = { kind = "iid", clients = 2 }
training = { local_epochs = 1, batch_size = 16 }

[cell]
row = "Label skew"
column = "digits"
"""
ARMS = ("independent", "fml", "ditto", "fedprox")
# seeds 0 to 4: FML less Ditto is -0.10, -0.11, -0.09, -0.10, -0.10; FML less local-only +0.2 each; FedProx is now above, now
# below FML
OWN = {
    "independent": (0.60, 0.61, 0.59, 0.60, 0.60),
    "fml": (0.80, 0.81, 0.79, 0.80, 0.80),
    "ditto": (0.90, 0.92, 0.88, 0.90, 0.90),
    "fedprox": (0.70, 0.95, 0.75, 0.80, 0.80),
}


@pytest.fixture
def benchmark(papers):
    """The experiment "benchmark" among the made-up ones."""
    (papers / ID).mkdir()
    (papers / ID / "index.toml").write_text(INDEX)
    arms = "".join(f'\n[cell.arms.{arm}]\nset = {{ "algorithm.name" = "{arm}" }}\n' for arm in ARMS)
    (papers / ID / "labels.toml").write_text(CELL + arms)
    (papers / TEMPLATE).write_text((find_home() / TEMPLATE).read_text(encoding="utf-8"))
    return read_experiment(papers, ID)


@pytest.fixture
def fill(benchmark, store):
    """Keep results of each arm; two clients, of which the second is 0.1 worse than the first -> the cells."""

    def keep(accuracy=lambda arm, seed: OWN[arm][seed], seeds=5):
        for job in list_jobs(benchmark.cells[0], range(seeds), Scale()):
            own = accuracy(job.arm, job.seed)
            added = {
                "clients": {"0": (40, own + 0.05), "1": (40, own - 0.05)},
                "traffic": {"up": 6000, "down": 3000, "seed": 1000},
                "budget": {"steps": 12, "forwards": 24 if job.arm == "fml" else 12},
            }
            made = result(job.arm, job.seed, curve=(0.5, own), fingerprint=job.fingerprint, **added)
            store.add(job.cell.id, made)
        return read_measured_cells(benchmark, store)

    return keep


@pytest.fixture
def measured(fill):
    """The cell with five seeds of each arm."""
    (of_cell,) = fill()
    return of_cell


def test_a_method_leads_or_loses_by_the_interval_of_paired_seeds(measured):
    """P-values are adjusted over all pairs, each counted once.

    FML and Ditto: t of -0.10, -0.11, -0.09, -0.10, -0.10 is -0.1 / (0.00707 / sqrt 5) = -31.6 with 4 degrees of freedom,
    p = 0.000006. Five pairs: of FML and local-only with each other and with two more. Two have smaller p-values: FML and
    local-only, Ditto and local-only.
    """
    compared = compare_methods([measured])  # the cell has no FedH2L
    assert list(dict.fromkeys(j.claim.arm for j in compared)) == ["fml", "independent"]
    rivals = [describe_rivals(compared, "fml", v, measured) for v in (CONTRADICTED, SUPPORTED, INCONCLUSIVE)]
    assert rivals == ["**Ditto (\N{MINUS SIGN}10.0)**", "**Local-only (+20.0)**", "FedProx (0.0)"]
    (ditto,) = select(compared, "fml", CONTRADICTED)
    assert (ditto.p, ditto.adjusted) == (pytest.approx(5.97e-6, rel=0.01), pytest.approx(3 * ditto.p))


def test_a_pair_that_the_first_look_decides_keeps_its_verdict(fill):
    """FML is 0.1 worse than Ditto with five seeds; with ten it is now better, now worse."""
    fml = (0.80, 0.81, 0.79, 0.80, 0.80, 0.94, 0.70, 0.94, 0.70, 0.94)
    compared = compare_methods(fill(lambda arm, seed: fml[seed] if arm == "fml" else OWN[arm][seed % 5], seeds=10))
    of = {(j.claim.arm, j.claim.than): (j.verdict, j.overall.n) for j in compared}
    assert of["fml", "ditto"] == (CONTRADICTED, 5)
    assert (of["fml", "independent"], of["independent", "fml"]) == ((SUPPORTED, 5), (CONTRADICTED, 5))
    assert of["fml", "fedprox"] == (INCONCLUSIVE, 10)


def test_the_table_begins_with_the_highest_mean(measured):
    rows = [[cell.text for cell in row] for row in tabulate_cell(measured).rows]
    assert [row[0] for row in rows] == ["Ditto", "FML", "FedProx", "Local-only"]
    # of two clients: (6,000 + 3,000 + 1,000) / 2 bytes; FedProx's seed 0 is better than local-only for both clients
    assert rows[1][1:] == ["80.0", "75.0", "0.0", "80.0", "5.0 kB", "12", "24", "5"]
    assert rows[3][3] == "n/a"
    summary = summarise(measured)
    assert [summary[key] for key in ("best", "best_percent", "local_percent", "seeds")] == ["Ditto", "90.0", "60.0", 5]
    assert (summary["harmless"], summary["missing"]) == (("FML", "Ditto", "FedProx"), ())


def test_the_method_to_take_harms_the_fewest_and_then_leads_most(measured):
    """All three lead local-only training but FedProx, whose difference is 0.1, 0.34, 0.16, 0.2, 0.2; no client is harmed."""
    table = make_recommendations(compare_methods([measured]), [measured])
    ((setting, first, cheapest),) = [[cell.text for cell in row] for row in table.rows]
    assert setting == "Label skew"
    assert first == "Ditto: +30.0 points compared with local-only training, 0.0 clients harmed, 5.0 kB"
    assert cheapest.startswith("Ditto")  # all send as many bytes


def test_where_no_method_leads_local_only_training_the_page_says_so(fill):
    cells = fill(lambda arm, seed: 0.7 + (0.1 if (arm == "fml") == (seed == 0) else 0.0))
    table = make_recommendations(compare_methods(cells), cells)
    assert {cell.text for cell in table.rows[0][1:]} == {"local-only training: no method is shown to be better"}


def test_a_page_of_too_few_seeds_gives_no_verdict(benchmark, fill, papers):
    cells = fill(seeds=2)
    assert not any(j.adjusted for j in compare_methods(cells))
    text = render_benchmark(pages.make_page(benchmark, cells), papers, "reproduction")
    assert "worse than" not in text
    empty = read_measured_cells(benchmark, ResultStore(papers / "none"))
    assert "Not run yet." in render_benchmark(pages.make_page(benchmark, empty), papers, "reproduction")


def test_the_page_is_written_beside_the_folder_of_the_pages(measured, papers, store, cli, tmp_path, in_tmp_path):
    out, _ = cli.run("reproduce", "--pages", "docs/pages", "--results", store.folder, "--experiments", papers)
    assert Path(out.split()[-1]).as_posix() == f"docs/{NAME}"
    text = (tmp_path / "docs" / NAME).read_text(encoding="utf-8")
    assert "| Ditto | 30.0 ± 0.9 |" in text  # over local-only training: 0.30, 0.31, 0.29, 0.30 and 0.30
    assert "- Label skew: better than **Local-only (+20.0)**; worse than **Ditto" in text
    page_text = (tmp_path / "docs/pages/benchmark.md").read_text(encoding="utf-8")
    assert "## Numbers" in page_text
    assert "paper" not in page_text


COMMITTED = read_committed_experiments()[ID]


@cache
def read_committed_cells():
    """Return the cells with their committed results, by name."""
    return {m.cell.name: m for m in read_measured_cells(COMMITTED, ResultStore(find_home() / RESULTS))}


@pytest.mark.parametrize("cell", COMMITTED.cells, ids=lambda c: c.name)
def test_a_cell_is_what_its_sweeps_tuned(cell):
    """Except for the name, the keys of each arm and, with public data, the rounds and the public rows."""
    tuned = read_tables(find_home() / f"sweeps/benchmark-{cell.name}.toml")
    assert {key: value for key, value in tuned.items() if key != "name"} == cell.tables
    assert cell.tunings.keys() == cell.arms.keys()
    assert all(3 <= len(tuning.settings) <= 6 for tuning in cell.tunings.values()), "equal budgets"


def test_a_rate_at_the_end_of_its_grid_is_counted():
    measured = read_committed_cells()["digits"]
    at_end = 0
    for arm in measured.cell.arms:
        settings = json.loads((find_home() / f"sweeps/benchmark-digits-{arm}.json").read_text())["settings"]
        rates = [float(setting["set"]["optimizer.lr"]) for setting in settings]
        at_end += float(measured.cell.tunings[arm].chosen["optimizer.lr"]) in (min(rates), max(rates))
    assert summarise(measured)["rates_at_end"] == at_end > 0


def test_a_run_that_diverged_is_stated():
    assert summarise(read_committed_cells()["labels"])["diverged"] == ("SCAFFOLD in 1 of 5 seeds",)
    assert summarise(read_committed_cells()["digits"])["diverged"] == ()


@pytest.mark.parametrize("cell", COMMITTED.cells, ids=lambda c: c.name)
def test_all_methods_take_as_many_gradient_steps(cell):
    """20 rounds of 20; FedMD's passes before round 1 are 14 more."""
    measured = read_committed_cells()[cell.name]
    steps = {arm: {r.budget["steps"] for r in measured.list_finished(arm).values()} for arm in measured.results}
    assert all(400 <= count <= 414 for of_arm in steps.values() for count in of_arm), steps


def test_what_the_page_calls_surprising_holds_in_the_committed_results():
    cells = read_committed_cells()

    def average_own(cell, arm):
        return cells[cell].estimate(OWN_DATA, arm).mean

    assert min(average_own("labels", arm) for arm in ("fedavg-ft", "fedper")) > average_own("labels", "fml")
    for cell in ("labels-networks", "rotations"):
        assert average_own(cell, "fedproto") > average_own(cell, "fml")
        moved = count_bytes(cells[cell])
        assert 35 < moved["FML"] / moved["FedProto"] < 45
        assert max(cells[cell].cell.arms, key=lambda arm: average_own(cell, arm)) == "fd"
        assert 16 < moved["FedProto"] / moved["FD"] < 18
    for cell in ("labels", "digits"):
        assert abs(average_own(cell, "fd") - average_own(cell, "independent")) < 0.01
    assert average_own("labels", "fedavg") > average_own("labels", "independent")
    assert average_own("rotations", "fedavg") < average_own("rotations", "independent")
    others = set(cells["pacs-small"].cell.arms) - {"proxyfl", "fml"}
    assert max(average_own("pacs-small", arm) for arm in others) < min(
        average_own("pacs-small", arm) for arm in ("proxyfl", "fml")
    )
    with_batchnorm = "rotations-batchnorm"
    assert average_own(with_batchnorm, "fedavg") < average_own(with_batchnorm, "fedbn")
    assert average_own(with_batchnorm, "fedbn") <= average_own(with_batchnorm, "independent")
    of_seeds = [fmean(c.last for c in r.clients.values()) for r in cells[with_batchnorm].results["fedmd"].values()]
    assert [accuracy < 0.12 for accuracy in sorted(of_seeds)] == [True, True, False, False, False]
