"""Nodes that are domains, in tables and numbers: each beside the paper's, their mean in the last column."""

import pytest

from fedmutual_papers import pages
from fedmutual_papers.experiment_files import read_experiment
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.store import ResultStore
from fedmutual_papers.tables import list_records, make_tables
from made_results import closeup, result

pytestmark = pytest.mark.long

NODES = """
title = "Table 8: two nodes"
paper = "a made-up paper"
about = "Each on both."
view = "nodes"
measures = ["acc", "bytes_up"]
differences = ["None."]
"""
PAPER = """
[cell.arms.fml.paper]
acc = { 0 = 81.00, 90 = 84.00, average = 82.50 }
"""


@pytest.fixture
def nodes(papers):
    """An experiment whose one cell has the paper's numbers of two nodes."""
    (papers / "nodes").mkdir()
    (papers / "nodes/index.toml").write_text(NODES)
    cell = (papers / "table9/digits/iid.toml").read_text().replace("paper = 81.50", PAPER).replace("paper = 80.00", "")
    (papers / "nodes/both.toml").write_text(cell.replace("noise = [0.1]", 'node = "0"'))
    return read_experiment(papers, "nodes")


@pytest.fixture
def measured(nodes, store):
    """Its cell with two seeds of FML."""
    for job in list_jobs(nodes.cells[0], (0, 1), Scale()):
        best = {"0": 0.75 + job.seed / 10, "90": 0.65 + job.seed / 10}
        losses = {"kl": (0.5, 0.25), "ce": (1.0, 0.5), "local": (0.9, 0.3)}
        close = closeup(losses=losses) if job.seed == 0 else closeup(losses=losses, points=())
        about = {"transfer": {"acc": {"last": {"0": 0.5, "90": 0.5}, "best": best}}, "closeup": close}
        if job.arm == "fml":
            store.add(job.cell.id, result("fml", job.seed, fingerprint=job.fingerprint, **about))
    return read_measured_cells(nodes, store)


def read_row(table, number):
    return [(cell.text, cell.sub) for cell in table.rows[number][2:]]


def test_each_node_has_the_papers_number_beside_it(nodes, measured):
    table, last = make_tables(nodes, measured)
    assert [c.name for c in table.columns] == ["Setting", "Method", "0", "90", "average"]
    assert read_row(table, 0) == [("not run", "")] * 3
    assert read_row(table, 1) == [("80.00", "paper 81.00"), ("70.00", "paper 84.00"), ("75.00", "paper 82.50")]
    assert "the best round of each node, chosen on validation data" in table.caption
    assert "the last round" in last.caption  # a table of its own, without the paper
    assert read_row(last, 1) == [("50.00", ""), ("n/a", "")]


def test_what_is_read_off_the_best_round_alone_is_in_no_table_of_the_last(papers, measured):
    path = papers / "nodes/index.toml"
    path.write_text(path.read_text().replace('"bytes_up"', '"separation"').replace('view = "nodes"', ""))
    best, last = make_tables(read_experiment(papers, "nodes"), measured)
    assert [c.name for c in best.columns][2:] == [
        "ACC, all nodes' test data, %",
        "silhouette of the classes in the features",
    ]
    assert [c.name for c in last.columns][2:] == ["digits MLP"]
    assert best.rows[1][3].text == "0.250"


def test_nothing_run_shows_the_papers_nodes(nodes, tmp_path):
    (table,) = make_tables(nodes, read_measured_cells(nodes, ResultStore(tmp_path)))
    assert read_row(table, 1) == [("not run", f"paper {number}") for number in ("81.00", "84.00", "82.50")]


def test_a_node_is_the_same_however_a_copy_spells_it(papers, nodes, store):
    path = papers / "nodes/both.toml"
    path.write_text(path.read_text().replace("90 = 84.00", '"Real_world" = 84.00'))
    experiment = read_experiment(papers, "nodes")
    (job,) = (j for j in list_jobs(experiment.cells[0], [0], Scale()) if j.arm == "fml")
    transfer = {"acc": {"last": {}, "best": {"0": 0.8, "Real World": 0.7}}}
    store.add(job.cell.id, result("fml", 0, fingerprint=job.fingerprint, transfer=transfer))
    table = make_tables(experiment, read_measured_cells(experiment, store))[0]
    assert [c.name for c in table.columns][2:] == ["0", "Real_world", "average"]
    assert read_row(table, 1)[1] == ("70.00", "paper 84.00")


def test_numbers_name_the_node(nodes, measured):
    by_node = {(n["arm"], n["at"], n["node"]): n for n in list_records(nodes, measured) if n["measure"] == "acc"}
    assert by_node["fml", "best", "90"]["mean"] == pytest.approx(0.7)
    assert [by_node["fml", "best", node]["paper"] for node in ("0", "90", None)] == [81, 84, 82.5]
    assert by_node["fml", "last", "0"]["paper"] is None
    assert by_node["fedavg", "best", None]["state"] == "not run"


def test_a_node_looked_at_closely_has_pictures(nodes, measured, monkeypatch):
    page = pages.make_page(nodes, measured)
    pictures = list(page.figures.values())
    named = ["both-features-fml", "both-validation", "both-local-loss", "both-mutual-loss"]
    assert [p.id for p in pictures] == named
    assert [c.label for c in pictures[-1].curves] == ["FML, KL", "FML, CE"]
    text = pages.render_markdown(page)
    assert "FML, KL 0.250 after round 2; FML, CE 0.500 after round 2" in text
    assert "features of node 0's model, FML, seed 0" in text
    assert pages.render_html(page).count("<svg") == 4
    monkeypatch.setattr("fedmutual_papers.figures.EARLY", 1)  # mutual losses are drawn of the first rounds
    (*_, drawn) = pages.make_page(nodes, measured).figures.values()
    assert [[p.round for p in c.points] for c in drawn.curves] == [[1], [1]]
