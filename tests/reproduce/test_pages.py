"""The pages: made from results alone; those that are committed are what the committed results make."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedmutual.reproduce import ResultStore, Scale, overview, pages, read_experiment, read_experiments
from fedmutual.reproduce.cell_results import read_measured_cells
from fedmutual.reproduce.cells import RESULTS, find_home
from fedmutual.reproduce.plan import list_jobs
from made_results import MADE, result

DOCS = Path(__file__).parents[2] / "docs" / "reproduction"
STORE = ResultStore(find_home() / RESULTS)
REAL = read_experiments(find_home())


@cache
def committed_pages():
    """The pages of all experiments, from the committed results."""
    return pages.adjust([pages.make_page(e, read_measured_cells(e, STORE)) for e in REAL])


def committed(id):
    """The page of an experiment, from the committed results."""
    (page,) = (p for p in committed_pages() if p.experiment.id == id)
    return page


@pytest.mark.parametrize("experiment", REAL, ids=lambda e: e.id)
def test_a_committed_page_is_what_its_results_make(experiment):
    paper_page = committed(experiment.id)
    assert (DOCS / f"{experiment.id}.md").read_text(encoding="utf-8") == pages.render_markdown(paper_page, DOCS), (
        "make it anew: fedmutual reproduce --pages docs/reproduction --results experiments/results"
    )
    assert {p.name for p in (DOCS / "figures").glob(f"{experiment.id}-*.svg")} == {
        Path(paper_page.figure(p)).name for p in paper_page.pictures
    }


def test_the_committed_verdicts_are_what_all_results_make():
    page_text = overview.render_overview(committed_pages())
    assert (DOCS / overview.NAME).read_text(encoding="utf-8") == page_text
    claims = [claim for e in REAL for claim in e.index.claims]
    assert f"\n{len(claims)} claims, " in page_text
    assert all(f" | {claim.text} | " in page_text for claim in claims)


def test_all_verdicts_are_counted(papers, store):
    """One of runs at full length, one of shortened ones, one not run; a bar in a claim breaks no table."""
    index = papers / "looker/index.toml"
    index.write_text(index.read_text().replace("FML serves clients", "FML | serves clients"))
    table9, looker = (read_experiment(papers, id) for id in ("table9", "looker"))
    for seed in range(3):
        for job in list_jobs(table9.cells[0], [seed], Scale()):
            store.add(job, result(job.arm, seed, curve=(0.1, 0.9 if job.arm == "fml" else 0.5), fingerprint=job.fingerprint))
    paper_pages = pages.adjust([pages.make_page(e, read_measured_cells(e, store)) for e in (table9, looker)])
    assert counts(paper_pages) == {"Supported": ["1", "1", "1"], "Not run": ["1", "", ""]}
    assert "| 1 | FML \\| serves clients better than training alone. | Not run |" in overview.render_overview(paper_pages)
    chance = [replace(paper_pages[0], claims=((replace(paper_pages[0].judged[0], p=0.04),),)) for _ in range(2)]
    assert counts(pages.adjust(chance)) == {"Supported": ["2", "2", "0"]}  # 0.04 alone on its page, 0.08 of two


def counts(claims):
    """Verdict -> [how many, after Holm a page, after Holm over all], where there are any."""
    rows = [[cell.text for cell in row] for row in overview.count_verdicts(claims).rows]
    return {verdict: numbers for verdict, *numbers in rows if numbers[0] != "0"}


def test_a_committed_result_belongs_to_a_cell():
    known = {cell.id for e in REAL for cell in e.cells}
    files = {
        p.relative_to(find_home() / RESULTS).with_suffix("").as_posix() for p in (find_home() / RESULTS).rglob("*.json")
    }
    assert files <= known


def test_a_page_without_results_says_so(papers, store):
    experiment = read_experiment(papers, "table9")
    text = pages.render_markdown(pages.make_page(experiment, read_measured_cells(experiment, store)))
    assert "Not run yet." in text
    assert text.count("not run<br>paper") == 4
    assert "Nothing was run yet." in text


def test_a_page_says_what_networks_began_with(papers, store):
    experiment = read_experiment(papers, "table9")
    for job in list_jobs(experiment.cells[0], [0], Scale()):
        message = ("ImageNet's weights of resnet18, a new head",) if job.arm == "fml" else ()
        made = MADE.model_copy(update={"weights": message})
        store.add(job, result(job.arm, 0, fingerprint=job.fingerprint, made=made))
    paper_page = pages.make_page(experiment, read_measured_cells(experiment, store))
    assert paper_page.differences[-1] == "Initial weights of the networks: ImageNet's weights of resnet18, a new head."
    assert len(paper_page.differences) == 2


def test_the_page_is_one_file_and_its_figures_stand_alone(pages_folder):
    page = (pages_folder / "looker.html").read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert "Differences from the paper" in page
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for figure in (pages_folder / "figures").glob("*.svg"):
        root = ElementTree.fromstring(figure.read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in figure.read_text(encoding="utf-8")
    text = (pages_folder / "looker.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (pages_folder / target).exists()


def test_a_best_chosen_on_test_images_is_called_so(papers, pages_folder):
    store = ResultStore(pages_folder / "results")
    assert "own validation data, %, best on test" in (pages_folder / "looker.md").read_text(encoding="utf-8")
    for path in (papers / "table9/digits").iterdir():
        path.write_text(path.read_text().replace("test = 0.5 }", 'test = 0.5, preset = "v1" }'))
    experiment = read_experiment(papers, "looker")
    assert not any(measured.run for measured in read_measured_cells(experiment, store)), "another split is another run"
    assert not any(cell.validates_on_test for cell in experiment.cells)


def test_pages_alone_train_nothing(pages_folder, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ("--pages", "docs", "--results", pages_folder / "results", "--experiments", pages_folder.parent / "papers")
    code, out, _ = cli("reproduce", *arguments)
    assert code == 0
    assert [Path(line).name for line in out.split()] == ["table9.md", "looker.md", "verdicts.md"]
    page_text = Path("docs/verdicts.md").read_text(encoding="utf-8")
    assert "| Inconclusive | 2 |  |  |" in page_text
    assert page_text.count("\n## ") == page_text.count(".md)\n") == 2
    assert Path("docs/looker.md").read_text(encoding="utf-8") == (pages_folder / "looker.md").read_text(encoding="utf-8")
    assert not Path("runs").exists()
    (old := Path("docs/figures/looker-gone.svg")).write_text("")
    cli("reproduce", "looker", *arguments)
    assert not old.exists()
