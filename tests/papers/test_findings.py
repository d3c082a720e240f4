"""What the papers' printed numbers and claims come to: counted, sorted and written from results alone."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from committed import read_committed_experiments
from fedmutual_papers import pages
from fedmutual_papers.experiment_files import find_home, read_experiment, read_experiments
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.pages import TEMPLATE, decide_outcome, describe_readings, make_forest
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.reproduce import make_marks
from fedmutual_papers.store import ResultStore
from fedmutual_papers.tables import make_printed_frame
from made_results import result

pytestmark = pytest.mark.long

BEGIN, END = make_marks("printed numbers")


def count_printed(experiments, store):
    return make_printed_frame([(e, read_measured_cells(e, store)) for e in experiments])


def test_the_papers_print_468_numbers(tmp_path):
    """Table 1: 72; v1: 24; FedH2L's Tables 2 to 4: 13, 5 and 5 rows of 15; its Tables 5 to 7: 9 rows of 3."""
    counts = count_printed(read_committed_experiments().values(), ResultStore(tmp_path))
    assert counts.sum(axis=1).to_dict() == {
        "table1": 24 * 3,
        "v1-tables": 12 * 2,
        "rotated-mnist": 13 * 15,
        "pacs": 5 * 15,
        "office-home": 5 * 15,
        "h2l-ablation": 9 * 3,
        "all": 468,
    }


def test_experiments_without_printed_numbers_have_a_count_of_0(papers, cli, tmp_path):
    for cell in papers.glob("table9/digits/*.toml"):
        cell.write_text(re.sub("paper = .*", "", cell.read_text()))
    (tmp_path / "pages").mkdir()
    front = tmp_path / "pages/README.md"
    front.write_text(f"{BEGIN}\n{END}\n")
    code, _, err = cli("reproduce", "--pages", "pages", "--experiments", papers)
    assert code == 0, err
    assert "| **all** | 0 | 0 | 0 | 0 |\n" in front.read_text()


def keep(store, experiment, seeds=3, limit=None, **arms):
    for job in list_jobs(experiment.cells[0], range(seeds), Scale(limit)):
        if job.arm in arms:
            curve = [0.1013] * (job.config.rounds - 1) + [arms[job.arm] + job.seed / 1000]
            made = result(job.arm, job.seed, curve=curve, fingerprint=job.fingerprint, limit=limit)
            store.add(job.cell.id, made)


def states(papers, store):
    return list(count_printed(read_experiments(papers), store).loc["all", ["full", "shortened", "not run"]])


def test_a_printed_number_is_full_shortened_or_not_run(papers, store):
    table9 = read_experiment(papers, "table9")
    assert states(papers, store) == [0, 0, 4]
    keep(store, table9, limit=1, fml=0.8)
    assert states(papers, store) == [0, 1, 3]
    keep(store, table9, fml=0.8, fedavg=0.7)
    assert states(papers, store) == [2, 0, 2]


def test_a_number_beside_which_two_cells_stand_is_counted_once_and_the_fullest_counts(papers, store):
    text = (papers / "table9/digits/iid.toml").read_text().replace("alpha = 0.4", "alpha = 0.9")
    again = text.replace("[cell]", '[cell]\nprinted_in = "table9/digits/iid"').replace('row = "IID"', 'row = "again"')
    (papers / "table9/digits/again.toml").write_text(again)
    table9 = read_experiment(papers, "table9")
    assert table9.cells[0].name == "digits/again"
    assert states(papers, store) == [0, 0, 4]
    keep(store, table9, fml=0.8)
    assert states(papers, store) == [1, 0, 3]


@pytest.fixture
def named(papers):
    """The made-up experiment, whose claim has a finding, and a second reading."""
    index = papers / "table9/index.toml"
    reading = 'finding = "FML beats FedAvg"\nreadings = [{ name = "the other way", arm = "fedavg", than = "fml" }]\n'
    index.write_text(index.read_text().replace('measure = "global_test"\narm', f'{reading}measure = "global_test"\narm'))
    return read_experiment(papers, "table9")


@pytest.mark.parametrize(("verdicts", "holm", "outcome"), [
    (("supported", "supported"), 0.01, "holds"),
    (("supported", "not run"), 0.01, "holds"),
    (("supported", "contradicted"), 0.01, "depends"),
    (("supported", "inconclusive"), 0.01, "depends"),
    (("contradicted", "too short"), 0.01, "fails"),
    (("supported", "supported"), 0.2, "open"),  # which may be chance
    (("inconclusive", "not run"), 1.0, "open"),
    (("too short", "not run"), None, "unmeasured"),
    (("diverged", "diverged"), None, "unmeasured"),
])  # fmt: skip
def test_a_finding_is_sorted_by_the_verdicts_that_stand(named, store, verdicts, holm, outcome):
    page = pages.make_page(named, read_measured_cells(named, store))
    readings = [replace(j, verdict=v, holm=(holm, holm)) for j, v in zip(page.claims[0], verdicts, strict=True)]
    assert decide_outcome(readings) == outcome
    by_chance = [v for v in verdicts if v in ("supported", "contradicted") and holm > 0.05]
    assert describe_readings(readings, 1).count("after Holm's adjustment the claim is not decided") == len(by_chance)


def test_the_findings_are_written_beside_the_folder_of_the_pages(named, papers, store, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keep(store, named, fml=0.85, fedavg=0.6)
    shutil.copy(find_home() / TEMPLATE, papers / TEMPLATE)
    front = tmp_path / "docs/pages/README.md"
    front.parent.mkdir(parents=True)
    front.write_text(f"Before.\n{BEGIN}\nold\n{END}\nAfter.\n")
    code, out, _ = cli("reproduce", "--pages", "docs/pages", "--results", store.folder, "--experiments", papers)
    assert code == 0
    assert [Path(line).as_posix() for line in out.split()][-2:] == ["docs/pages/README.md", "docs/findings.md"]
    text = (tmp_path / "docs/findings.md").read_text()
    assert "The papers print 4 numbers: 2 are measured with all rounds" in text
    depends = text.partition("## Depends on the reading")[2].partition("##")[0]
    assert depends.count("**FML beats FedAvg.**") == 1
    assert (tmp_path / "docs/pages/figures/findings.svg").read_text().startswith("<svg")
    before, _, rest = front.read_text().partition(BEGIN)
    assert (before, rest.partition(END)[2]) == ("Before.\n", "\nAfter.\n")
    assert "| [table9](table9.md) | 4 | 2 | 0 | 2 |" in rest


def test_only_what_is_long_enough_is_drawn(named, papers, store):
    keep(store, named, fml=0.85, fedavg=0.6)
    measured = read_measured_cells(named, store)
    drawn = make_forest(pages.adjust([pages.make_page(named, measured)]))
    assert [(label, sign) for label, _, sign in drawn.rows] == [("FML beats FedAvg", 1), ("… the other way", -1)]
    assert [round(difference.mean, 4) for _, difference, _ in drawn.rows] == [0.25, -0.25]
    short, unrun = [replace(of_cell, scale=Scale(1)) for of_cell in measured], ResultStore(papers / "none")
    assert make_forest([pages.make_page(named, short)]).rows  # one of two rounds is half
    assert not make_forest([pages.make_page(named, read_measured_cells(named, unrun))]).rows
