"""The pages of experiments, verdicts and findings, and the front page's tables, are made from results, without training."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from committed import read_committed_experiments
from fedmutual_papers import pages
from fedmutual_papers.experiment_files import find_home, read_experiment, read_experiments
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.pages import TEMPLATE, decide_outcome, describe_readings, make_forest
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.reproduce import TABLE_BEGIN, TABLE_END, fill_front
from fedmutual_papers.store import ResultStore
from fedmutual_papers.tables import make_printed_frame
from made_results import MADE, result

pytestmark = pytest.mark.long


def test_all_verdicts_are_counted(papers, store):
    """One of runs at full length, one of shortened ones, one not run; a bar in a claim breaks no table."""
    index = papers / "looker/index.toml"
    index.write_text(index.read_text().replace("FML serves clients", "FML | serves clients"))
    table9, looker = (read_experiment(papers, id) for id in ("table9", "looker"))
    for seed in range(5):
        for job in list_jobs(table9.cells[0], [seed], Scale()):
            store.add(
                job.cell.id,
                result(job.arm, seed, curve=(0.1, 0.9 if job.arm == "fml" else 0.5), fingerprint=job.fingerprint),
            )
    paper_pages = pages.adjust([pages.make_page(e, read_measured_cells(e, store)) for e in (table9, looker)])
    assert counts(paper_pages) == {"Supported": "1", "Not run": "1"}
    assert "| 1 | FML \\| serves clients better than training alone. | Not run |" in pages.render_overview(paper_pages)
    chance = replace(paper_pages[0], claims=((replace(paper_pages[0].judged[0], p=0.03),),))
    assert counts(pages.adjust([chance])) == {"Inconclusive": "1"}


def counts(claims):
    """Verdict -> how many, where there are any."""
    rows = [[cell.text for cell in row] for row in pages.count_verdicts([j for page in claims for j in page.judged]).rows]
    return {verdict: number for verdict, number in rows if number != "0"}


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


def test_pages_alone_train_nothing(pages_folder, cli, in_tmp_path):
    arguments = ("--pages", "docs", "--results", pages_folder / "results", "--experiments", pages_folder.parent / "papers")
    out, _ = cli.run("reproduce", *arguments)
    assert [Path(line).name for line in out.split()] == ["table9.md", "looker.md", "verdicts.md"]
    page_text = Path("docs/verdicts.md").read_text(encoding="utf-8")
    assert "| Inconclusive | 2 |" in page_text
    assert page_text.count("\n## ") == page_text.count(".md)\n") == 2
    assert Path("docs/looker.md").read_text(encoding="utf-8") == (pages_folder / "looker.md").read_text(encoding="utf-8")
    assert not Path("runs").exists()
    (old := Path("docs/figures/looker-gone.svg")).write_text("")
    cli("reproduce", "looker", *arguments)
    assert not old.exists()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_it_opens_quietly_and_fits(new_page, pages_folder, scheme, width):
    page, console_messages = new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    requested_urls = []
    page.on("request", lambda request: requested_urls.append(request.url))
    page.goto((pages_folder / "looker.html").as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert (console_messages, requested_urls) == ([], [(pages_folder / "looker.html").as_uri()])
    page.locator(".plot rect").first.scroll_into_view_if_needed()
    page.locator(".plot rect").first.hover()
    assert "Round 1" in page.locator("#tip").inner_text()


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
    front.write_text(f"{TABLE_BEGIN}\n{TABLE_END}\n")
    cli.run("reproduce", "--pages", "pages", "--experiments", papers)
    assert "| **all** | 0 | 0 | 0 | 0 |\n" in front.read_text()


def keep(store, experiment, seeds=5, limit=None, **arms):
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
    readings = [replace(j, verdict=v, adjusted=holm) for j, v in zip(page.claims[0], verdicts, strict=True)]
    assert decide_outcome(readings) == outcome
    by_chance = outcome == "open"
    assert by_chance == ("nconclusive" in describe_readings(readings, 1)) or outcome == "depends"


def test_the_findings_are_written_beside_the_folder_of_the_pages(named, papers, store, cli, tmp_path, in_tmp_path):
    keep(store, named, fml=0.85, fedavg=0.6)
    shutil.copy(find_home() / TEMPLATE, papers / TEMPLATE)
    front = tmp_path / "docs/pages/README.md"
    front.parent.mkdir(parents=True)
    front.write_text(f"Before.\n{TABLE_BEGIN}\nold\n{TABLE_END}\nAfter.\n")
    out, _ = cli.run("reproduce", "--pages", "docs/pages", "--results", store.folder, "--experiments", papers)
    assert [Path(line).as_posix() for line in out.split()][-2:] == ["docs/pages/README.md", "docs/findings.md"]
    text = (tmp_path / "docs/findings.md").read_text()
    assert "The papers print 4 numbers: 2 are measured with all rounds" in text
    depends = text.partition("## Depends on the reading")[2].partition("##")[0]
    assert depends.count("**FML beats FedAvg.**") == 1
    assert (tmp_path / "docs/pages/figures/findings.svg").read_text().startswith("<svg")
    before, _, rest = front.read_text().partition(TABLE_BEGIN)
    assert (before, rest.partition(TABLE_END)[2]) == ("Before.\n", "\nAfter.\n")
    assert "| [table9](table9.md) | 4 | 2 | 0 | 2 |" in rest


def test_a_tampered_page_is_told_from_the_results(named, store, papers, cli, in_tmp_path):
    keep(store, named, fml=0.85, fedavg=0.6)
    arguments = ("--pages", "docs", "--results", store.folder, "--experiments", papers)
    cli("reproduce", *arguments)
    assert cli.run("reproduce", "--verify", *arguments)[0] == ""
    page = Path("docs/table9.md")
    printed = page.read_text(encoding="utf-8")
    assert "+25.00 points" in printed
    page.write_text(printed.replace("+25.00 points", "+26.00 points", 1), encoding="utf-8")
    code, out, err = cli("reproduce", "table9", "--verify", *arguments)
    assert code == 2
    (sentence,) = out.splitlines()
    assert re.match(r"docs/table9\.md, line \d+: .*\+26\.00.*\+25\.00", sentence)
    assert "1 line of the pages differs" in err
    assert cli.run("reproduce", "looker", "--verify", *arguments)[0] == ""
    page.unlink()
    assert "does not exist" in cli("reproduce", "--verify", *arguments)[1]


def test_only_what_is_long_enough_is_drawn(named, papers, store):
    keep(store, named, fml=0.85, fedavg=0.6)
    measured = read_measured_cells(named, store)
    drawn = make_forest(pages.adjust([pages.make_page(named, measured)]))
    assert [(label, sign) for label, _, sign in drawn.rows] == [("FML beats FedAvg", 1), ("… the other way", -1)]
    assert [round(difference.mean, 4) for _, difference, _ in drawn.rows] == [0.25, -0.25]
    short, unrun = [replace(of_cell, scale=Scale(1)) for of_cell in measured], ResultStore(papers / "none")
    assert not make_forest([pages.make_page(named, short)]).rows
    assert not make_forest([pages.make_page(named, read_measured_cells(named, unrun))]).rows


def test_a_front_page_without_marks_is_left_as_it_is(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("Before.\nAfter.\n")
    assert fill_front(tmp_path, "| 1 |") == {}
    page.write_text(f"Before.\n{TABLE_BEGIN}\nold\n{TABLE_END}\nAfter.\n")
    assert fill_front(tmp_path, "| 1 |") == {page: f"Before.\n{TABLE_BEGIN}\n\n| 1 |\n\n{TABLE_END}\nAfter.\n"}
    assert fill_front(tmp_path / "none", "| 1 |") == {}
