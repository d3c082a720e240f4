"""One node looked at closely: its model's features of everybody's test data, by numpy and by hand."""

import pickle

import numpy as np
import pytest
import torch
from torch import nn

import fedmutual
from fedmutual import data
from fedmutual.config.schema import RecordsConfig
from fedmutual.errors import RunError
from fedmutual_papers import collect
from fedmutual_papers.collect import close_up, compute_features

pytestmark = pytest.mark.long

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
