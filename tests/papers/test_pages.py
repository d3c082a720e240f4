"""The pages are made from results, without training."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedmutual_papers import pages
from fedmutual_papers.experiment_files import read_experiment
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.store import ResultStore
from made_results import MADE, result

pytestmark = pytest.mark.long


def test_all_verdicts_are_counted(papers, store):
    """One of runs at full length, one of shortened ones, one not run; a bar in a claim breaks no table."""
    index = papers / "looker/index.toml"
    index.write_text(index.read_text().replace("FML serves clients", "FML | serves clients"))
    table9, looker = (read_experiment(papers, id) for id in ("table9", "looker"))
    for seed in range(3):
        for job in list_jobs(table9.cells[0], [seed], Scale()):
            store.add(
                job.cell.id,
                result(job.arm, seed, curve=(0.1, 0.9 if job.arm == "fml" else 0.5), fingerprint=job.fingerprint),
            )
    paper_pages = pages.adjust([pages.make_page(e, read_measured_cells(e, store)) for e in (table9, looker)])
    assert counts(paper_pages) == {"Supported": ["1", "1", "1"], "Not run": ["1", "", ""]}
    assert "| 1 | FML \\| serves clients better than training alone. | Not run |" in pages.render_overview(paper_pages)
    chance = [replace(paper_pages[0], claims=((replace(paper_pages[0].judged[0], p=0.04),),)) for _ in range(2)]
    assert counts(pages.adjust(chance)) == {"Supported": ["2", "2", "0"]}  # 0.04 alone on its page, 0.08 of two


def counts(claims):
    """Verdict -> [how many, after Holm a page, after Holm over all], where there are any."""
    rows = [[cell.text for cell in row] for row in pages.count_verdicts([j for page in claims for j in page.judged]).rows]
    return {verdict: numbers for verdict, *numbers in rows if numbers[0] != "0"}


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
        store.add(job.cell.id, result(job.arm, 0, fingerprint=job.fingerprint, made=made))
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
