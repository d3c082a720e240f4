"""What the papers' printed numbers and claims come to: counted, sorted and written from results alone."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from committed import read_committed_experiments
from fedmutual_papers import pages
from fedmutual_papers.experiment_files import find_home, read_experiment, read_experiments
from fedmutual_papers.findings import TEMPLATE, PaperFinding, find_findings, make_forest
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.printed import count_printed, make_printed_frame
from fedmutual_papers.reproduce import make_marks
from fedmutual_papers.store import ResultStore
from made_results import result

pytestmark = pytest.mark.long

BEGIN, END = make_marks("printed numbers")


def test_the_papers_print_468_numbers(tmp_path):
    """Table 1: 72; v1: 24; FedH2L's Tables 2 to 4: 13, 5 and 5 rows of 15; its Tables 5 to 7: 9 rows of 3."""
    experiments, empty_store = list(read_committed_experiments().values()), ResultStore(tmp_path)
    counts = count_printed(make_printed_frame([(e, read_measured_cells(e, empty_store)) for e in experiments]))
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
    (line,) = (line for line in front.read_text().splitlines() if "all" in line)
    assert line == "| **all** | 0 | 0 | 0 | 0 |"


WHOLE = Scale()


def keep(store, experiment, seeds=3, scale=WHOLE, **arms):
    for cell in experiment.cells[:1]:
        for job in list_jobs(cell, range(seeds), scale):
            if job.arm in arms:
                curve = [0.1013] * (job.config.rounds - 1) + [arms[job.arm] + job.seed / 1000]
                store.add(job, result(job.arm, job.seed, curve=curve, fingerprint=job.fingerprint, limit=scale.rounds))


def states(papers, store):
    measured = [(e, read_measured_cells(e, store)) for e in read_experiments(papers)]
    return count_printed(make_printed_frame(measured)).loc["all"].to_dict()


def test_a_printed_number_is_full_shortened_or_not_run(papers, store):
    table9 = read_experiment(papers, "table9")
    assert states(papers, store) == {"full": 0, "shortened": 0, "not run": 4}
    keep(store, table9, scale=Scale(1), fml=0.8)
    assert states(papers, store) == {"full": 0, "shortened": 1, "not run": 3}
    keep(store, table9, fml=0.8, fedavg=0.7)
    assert states(papers, store) == {"full": 2, "shortened": 0, "not run": 2}


def test_a_number_beside_which_two_cells_stand_is_counted_once_and_the_fullest_counts(papers, store):
    cell = papers / "table9/digits/iid.toml"
    again = (
        cell.read_text().replace("alpha = 0.4", "alpha = 0.9").replace("[cell]", '[cell]\nprinted_in = "table9/digits/iid"')
    )
    (papers / "table9/digits/again.toml").write_text(again.replace('row = "IID"', 'row = "again"'))
    table9 = read_experiment(papers, "table9")
    assert table9.names[0] == "digits/again"
    assert states(papers, store) == {"full": 0, "shortened": 0, "not run": 4}
    keep(store, table9, fml=0.8)
    assert states(papers, store) == {"full": 1, "shortened": 0, "not run": 3}


def named(papers):
    """The made-up claim with a finding, and a second reading of it."""
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
def test_a_finding_is_sorted_by_the_verdicts_that_stand(papers, store, verdicts, holm, outcome):
    page = pages.make_page(experiment := named(papers), read_measured_cells(experiment, store))
    readings = [replace(j, verdict=v, holm=(holm, holm)) for j, v in zip(page.claims[0], verdicts, strict=True)]
    finding = PaperFinding(page, tuple(readings))
    assert finding.outcome == outcome
    by_chance = [v for v in verdicts if v in ("supported", "contradicted") and holm > 0.05]
    assert finding.verdicts.count("after Holm's adjustment the claim is not decided") == len(by_chance)


def test_the_findings_are_written_beside_the_folder_of_the_pages(papers, store, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = named(papers)
    keep(store, experiment, fml=0.85, fedavg=0.6)
    shutil.copy(find_home() / TEMPLATE, papers / TEMPLATE)
    front = tmp_path / "docs/pages/README.md"
    front.parent.mkdir(parents=True)
    front.write_text(f"Before.\n{BEGIN}\nold\n{END}\nAfter.\n")
    arguments = ("--pages", "docs/pages", "--results", store.folder, "--experiments", papers)
    code, out, _ = cli("reproduce", *arguments)
    assert code == 0
    assert [Path(line).as_posix() for line in out.split()][-2:] == ["docs/pages/README.md", "docs/findings.md"]
    text = (tmp_path / "docs/findings.md").read_text()
    assert "The papers print 4 numbers: 2 are measured with all rounds" in text
    depends = text.partition("## Depends on the reading")[2].partition("##")[0]
    assert depends.count("**FML beats FedAvg.**") == 1
    assert (tmp_path / "docs/pages/figures/findings.svg").read_text().startswith("<svg")
    table = front.read_text().partition(BEGIN)[2].partition(END)[0]
    assert "| [table9](table9.md) | 4 | 2 | 0 | 2 |" in table
    assert front.read_text().startswith("Before.")
    assert front.read_text().endswith("After.\n")


def test_only_what_is_long_enough_is_drawn(papers, store):
    experiment = named(papers)
    keep(store, experiment, fml=0.85, fedavg=0.6)
    (page,) = pages.adjust([pages.make_page(experiment, read_measured_cells(experiment, store))])
    drawn = make_forest(find_findings([page]))
    assert [(label, sign) for label, _, sign in drawn.rows] == [("FML beats FedAvg", 1), ("… the other way", -1)]
    assert [round(difference.mean, 4) for _, difference, _ in drawn.rows] == [0.25, -0.25]
    short = pages.make_page(
        experiment, [replace(measured, scale=Scale(1)) for measured in read_measured_cells(experiment, store)]
    )
    assert make_forest(find_findings([short])).rows  # one of two rounds is half
    assert not make_forest(
        find_findings([pages.make_page(experiment, read_measured_cells(experiment, ResultStore(papers / "none")))])
    ).rows
