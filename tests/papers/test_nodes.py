"""Nodes that are domains: in tables, pictures and numbers, and the features of one node, by numpy and by hand."""

import pickle
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from torch import nn

import fedmutual
from fedmutual import data
from fedmutual.config.schema import RecordsConfig
from fedmutual.errors import RunError
from fedmutual_papers import collect, pages
from fedmutual_papers.collect import close_up, compute_features
from fedmutual_papers.experiment_files import read_experiment
from fedmutual_papers.figures import CLASS_MARKS, Scatter, choose_marks, describe_picture, make_standalone_svg
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.store import Cloud, ResultStore
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


SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("classes", [("dog", "house"), tuple("0123456789"), tuple(f"c{n}" for n in range(40))])
def test_every_point_is_drawn_once(classes):
    domains, kinds = ("photo", "sketch"), range(len(classes))
    points = tuple((d, k, float(d), float(k) + 0.125 * n) for d in (0, 1) for k in kinds for n in range(3))
    cloud = Cloud(domains=domains, classes=classes, explained=(0.34, 0.12), silhouette=0.305, points=points)
    made = Scatter("features", "features of node photo", cloud)
    root = ElementTree.fromstring(make_standalone_svg(made))
    legend = 2 + (len(classes) if classes == ("dog", "house") else 0)
    assert len(root.findall(f".//{SVG}use")) == len(points) + legend
    texts = " ".join(t.text for t in root.iter(f"{SVG}text"))
    assert ("photo" in texts, "dog" in texts) == (True, "dog" in classes)
    assert describe_picture(made) == "features of node photo. The axes hold 34 % and 12 % of the variance; silhouette 0.30"
    table = made.make_table()
    assert [c.text for c in table.rows[1]] == ["photo", classes[1], "3", "0.00", "1.12"]  # mean 1.125


def test_marks_tell_the_classes_as_far_as_there_are_marks():
    assert choose_marks(tuple("0123456789")) == [f"${n}$" for n in range(10)]
    assert len(set(choose_marks([f"c{n}" for n in range(len(CLASS_MARKS))]))) == len(CLASS_MARKS)
    assert set(choose_marks([f"c{n}" for n in range(len(CLASS_MARKS) + 1)])) == {"o"}


TURNED = """
name = "turned"
rounds = 2
data = { name = "digits", angles = [0, 90], per_class = 20 }
partition = { kind = "domains" }
split = { private = 0.65, public = 0.10, validation = 0.10, test = 0.15 }
algorithm = { name = "independent" }
model = { personal = ["mlp"] }
training = { local_epochs = 1, batch_size = 16 }
records = { best_by = "validation", keep_best = true }
engine = { device = "cpu", name = "inprocess" }
"""


@pytest.fixture(scope="module")
def turned(tmp_path_factory):
    """A finished run of two domains, the same digits upright and lying."""
    folder = tmp_path_factory.mktemp("closeup")
    (folder / "turned.toml").write_text(TURNED)
    return fedmutual.run(fedmutual.load_config(folder / "turned.toml"), folder / "run")


class Few:
    """Examples as a store gives them out: all in one batch."""

    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 1.0]])
    y = torch.tensor([0, 1, 1])

    def __len__(self):
        return len(self.y)

    def rows(self, plan):
        return [(self.x[rows], self.y[rows]) for rows in plan]


def test_features_are_what_the_last_linear_layer_takes():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3), nn.Softmax(1))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, 1.0], [2.0, -1.0]]))
        net[0].bias.copy_(torch.tensor([0.0, 1.0]))
    layer_inputs, labels = compute_features(net, Few())
    # x1 + x2 and 2 x1 - x2 + 1, below 0 cut off: (1, 3), (2, -1) and (0, -2)
    assert layer_inputs.tolist() == [[1, 3], [2, 0], [0, 0]]
    assert labels.tolist() == [0, 1, 1]
    pickle.dumps(net)  # no hook is left in the net: pickle would refuse its lambda


def test_the_cloud_is_the_plane_of_the_largest_variance(turned, monkeypatch):
    cloud = close_up(turned, "0").cloud
    clients = data.load(turned.config).clients
    net = turned.personal_model("0", best=True)
    seen = np.concatenate([compute_features(net, shares.test)[0] for shares in clients.values()])
    left, sizes, _ = np.linalg.svd(seen - seen.mean(0), full_matrices=False)
    assert cloud.explained == pytest.approx((sizes[:2] ** 2 / (sizes**2).sum()).tolist(), abs=1e-4)
    places = np.array([p[2:] for p in cloud.points])
    assert np.abs(places) == pytest.approx(np.abs((left * sizes)[:, :2]), abs=2e-3)  # an axis may point either way
    assert cloud.domains == ("0", "90")
    of = [p[0] for p in cloud.points]
    assert [of.count(d) for d in (0, 1)] == [len(shares.test) for shares in clients.values()]
    monkeypatch.setattr(collect, "POINTS", 10)  # a large cloud is thinned, and its axes are not
    thin = close_up(turned, "0").cloud
    assert len(thin.points) == 10
    assert set(thin.points) < set(cloud.points)
    assert (thin.explained, thin.silhouette) == (cloud.explained, cloud.silhouette)
    monkeypatch.setattr(collect, "DRAWN", 1)  # points are kept of one seed
    assert close_up(turned, "0").cloud.points == ()


def test_separate_classes_have_a_large_silhouette(turned, monkeypatch):
    def apart(net, examples):
        labels = next(y for _, y, *_ in examples.rows([torch.arange(len(examples))])).numpy()
        return np.eye(10)[labels] + 1e-6 * np.arange(len(labels))[:, None], labels

    monkeypatch.setattr(collect, "compute_features", apart)
    closeup = close_up(turned, "90")
    assert closeup.cloud.silhouette > 0.99
    assert [*closeup.losses] == ["personal"]
    assert closeup.losses["personal"][1] < closeup.losses["personal"][0]


def test_the_best_round_is_looked_at(turned, tmp_path):
    config = turned.config.model_copy(update={"records": RecordsConfig()})
    with pytest.raises(RunError, match="no best weights are kept"):
        close_up(fedmutual.run(config, tmp_path / "run"), "0")
