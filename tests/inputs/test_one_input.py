"""One input of another form than images: ids, series, volumes and integers, from arrays and Datasets."""

import json

import datasets
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import StackDataset, TensorDataset

from fedmutual import UserError
from fedmutual.core import match_inputs
from fedmutual.data.objects import make_memory_source
from fedmutual.federation import experiment
from fedmutual.federation.evaluation import forward_in_parts
from input_kinds import (
    PRIVACY,
    PUBLIC,
    WORDS,
    Fusion,
    Words,
    check_by_hand,
    draw_fusion,
    federate,
    federate_with_public_rows,
    ids,
    items,
    numbers,
    refusal,
)

pytestmark = pytest.mark.run


class Recurrent(nn.Module):
    """Series [B, 3, T] -> logits [B, 2]."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x.transpose(1, 2))[0][:, -1])


def volumes(norm=nn.BatchNorm3d):
    """Volumes [B, 1, D, H, W] -> logits [B, 2]."""
    up = nn.ConvTranspose3d(4, 2, 2, stride=2)
    layers = nn.Conv3d(1, 4, 3, padding=1), norm(4), nn.ReLU(), up, nn.AdaptiveAvgPool3d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2, 2))


CONTAINERS = {
    "int64": lambda x, y: (x, y),
    "int32": lambda x, y: (x.astype(np.int32), y),
    "uint8": lambda x, y: (x.astype(np.uint8), y),
    "float64": lambda x, y: (x.astype(np.float64), y),
    "tensors": lambda x, y: (torch.tensor(x), torch.tensor(y)),
    "TensorDataset": lambda x, y: TensorDataset(torch.tensor(x), torch.tensor(y)),
    "Dataset": items,
    "above 2^24": lambda x, y: (x + WORDS * 2**30, y),
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_ids_train_as_a_plain_loop_trains(container):
    torch.manual_seed(0)
    data, net = {i: ids(k) for k, i in enumerate("ab")}, Words()
    run = check_by_hand(net, net, lambda x: (torch.tensor(x),), data, CONTAINERS[container], 2)
    assert len(run.predict(data["a"][0])) == 40


MORE = ({}, {"engine": "stacked"}, {"settings": {"engine.precision": "bf16"}})
TRAINED = [
    *((ids, Words(kind), more) for kind in ("embedding", "bag", "packed") for more in MORE),
    *((ids, Words(kind), {"settings": PRIVACY}) for kind in ("embedding", "bag")),
    (ids, Words("packed", words=50), {}),  # a probe with the id 0, which is padding here, would be an error
    (lambda k: numbers(k, (3, 40)), Recurrent(), {"settings": {"model.personal": ["conv1d"]}}),  # a series beside a user's
    *((lambda k: numbers(k, (1, 4, 4, 4)), volumes(n), MORE[1]) for n in (nn.BatchNorm3d, nn.InstanceNorm3d)),
]


@pytest.mark.parametrize(("make", "net", "more"), TRAINED)
def test_networks_of_ids_series_and_volumes_train(make, net, more):
    run = federate(make, net, **more)
    assert run.finished
    assert run.history()["value"].notna().all()


@pytest.mark.parametrize("method", PUBLIC)
def test_messages_beside_ids_stay_decimal_numbers(method):
    """Posteriors of public rows, and their consensus, are not rounded to the type of the ids."""
    assert federate_with_public_rows(ids, lambda: Words(words=50), method).finished
    assert match_inputs(torch.tensor([0.4]), torch.tensor([3])).tolist() == pytest.approx([0.4])


@pytest.mark.parametrize("kind", ["embedding", "packed"])
def test_ids_are_checked_on_the_rows_with_the_extreme_ids_and_on_no_made_row(kind, monkeypatch):
    tried, read, private = [], [], {row.tobytes() for k in (0, 1) for row in ids(k, n=900)[0]}
    monkeypatch.setattr(experiment, "forward_in_parts", lambda net, x: tried.append(len(x)) or forward_in_parts(net, x))
    monkeypatch.setattr(Words, "forward", lambda self, x, real=Words.forward: read.extend(x) or real(self, x))
    assert federate(lambda k: ids(k, n=900), Words(kind)).finished
    assert max(tried) <= 2 * 6
    assert {row.long().numpy().tobytes() for row in read} <= private


@pytest.mark.parametrize(
    ("make", "net", "settings", "words"),
    [
        (lambda k: numbers(k, (6,)), Words(), {}, "it takes ids, but its inputs here are float32 numbers: give x whole"),
        (lambda k: ids(k, low=1000, high=1025), Words(words=50), {}, "the first examples have ids from 10"),
        (lambda k: rare(k), Words(words=50), {}, "refuses ids of the private rows (index out of range in self)"),
        (ids, Words("packed"), PRIVACY, "the gradient of each example of the personal network of client 'a' cannot be"),
        (ids, Words(sparse=True), {}, "has sparse gradients of 'embed.weight'"),
        (ids, Words(), {"model.personal": ["mlp"]}, "the examples are ids, because another network takes nothing else"),
        (ids, Words(), {"data.mean": [0.0] * 6, "data.std": [1.0] * 6}, "changes numbers, but the network takes ids"),
        (ids, Words(), {"data.mean": "federated", "data.std": "federated"}, "changes numbers, but the network takes ids"),
        (lambda k: ids(k, low=2**25, high=2**25 + 9), nn.Linear(6, 2), {}, "which is a whole number above 2^24"),
        (lambda k: items(*ids(k, low=2**25, high=2**25 + 9)), nn.Linear(6, 2), {}, "which is a whole number above 2^24"),
        (lambda k: numbers(k, (1, 1, 4, 4, 4)), volumes(), {}, "does not take examples of shape (1, 1, 4, 4, 4)"),
        (draw_fusion, "mlp", {}, "takes one input, but the examples have several (image [1, 6, 6], table [3], ids"),
        (draw_fusion, Fusion(), {"data.mean": [0.0], "data.std": [1.0]}, "give a table of an input's name"),
        (draw_fusion, Fusion(), {"data.mean": {"ids": [0.0]}, "data.std": {"ids": [1.0]}}, "changes numbers"),
        (lambda k: ({"a": np.zeros((3, 1)), "b": np.zeros((4, 1))}, np.zeros(3)), Fusion(), {}, "'a' 3, 'b' 4 rows"),
        (lambda k: numbers(k, (1, 4, 4, 4)), volumes(), {"data.augment": "crop-flip"}, "the examples are volumes"),
    ],
)
def test_inputs_that_no_network_can_take_are_refused(make, net, settings, words):
    assert words in refusal(make, net, settings=settings)


@pytest.mark.parametrize(
    "container",
    [
        lambda x, y: [*zip(x, y, strict=True)],
        lambda x, y: [{"image": one, "target": label} for one, label in zip(x, y, strict=True)],
        lambda x, y: datasets.Dataset.from_dict({"x": x.tolist(), "label": y.tolist()}),
    ],
)
def test_what_acts_as_a_dataset_is_one(container):
    x, y = numbers(0, (6,))
    rows = container(x, y)
    run = federate(lambda _: rows, nn.Linear(6, 2), "fedavg")
    assert run.score(rows, client="a").values["examples"] == len(y)
    assert run.predict({"x": x}).equals(run.predict(x))


def rare(seed):
    """Ids of which one, in a late row, is above the words of an embedding: in a stack it would be another client's word."""
    x, y = ids(seed)
    x[5:, 0][y[5:] == 0] = 60
    return x, y


def test_integers_that_float32_holds_train_as_the_same_floats():
    (x, y), net = ids(0), nn.Linear(6, 2)
    kinds = (np.int64, np.int32, np.float32, np.float64)
    nets = [federate(lambda k, t=t: ((x * 2**17).astype(t), y), net, lr=1e-9).global_model() for t in kinds]
    assert all(torch.equal(net.weight, nets[0].weight) for net in nets)


@pytest.mark.parametrize("container", [tuple, lambda rows: items(*rows)])
@pytest.mark.parametrize(
    ("shape", "net", "takes"),
    [
        ((3, 40), Recurrent(), (3, 40)),
        ((3, 40), nn.Sequential(nn.Flatten(), nn.Linear(120, 2)), (1, 3, 40)),  # this network takes images
        ((1, 4, 6, 8), volumes(), (1, 4, 6, 8)),
        ((4, 6, 8, 1), volumes(nn.InstanceNorm3d), (1, 4, 6, 8)),
    ],
)
def test_series_and_volumes_reach_the_network_as_documented(container, shape, net, takes):
    run = federate(lambda k: container(numbers(k, shape)), net)
    about = json.loads((run.folder / "environment.json").read_text())["clients"]["a"]
    assert tuple(about["input"]) == takes
    assert "dtype" not in about["scaling"]
    assert len(run.predict(numbers(5, shape)[0])) == 40


class Centred(nn.Module):
    """Series [B, 3, 40] less the mean of their channels, which is 0 for an image [B, 1, 3, 40] -> logits [B, 2]."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(120, 2)

    def forward(self, x):
        return self.head((x - x.mean(1, keepdim=True)).flatten(1))


class Mean(nn.Module):
    """Squares [B, 8, 8], or images [B, 1, 8, 8] with other outputs -> logits [B, 2]."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(x.mean(-2).flatten(1) * x.dim())


def test_squares_are_images_and_other_arrays_series_if_a_network_computes_other_outputs(recwarn):
    made = []

    def make(shape):
        made.append(shape)
        return Centred()

    run = federate(lambda k: numbers(k, (3, 40)), make)
    assert json.loads((run.folder / "environment.json").read_text())["clients"]["a"]["input"] == [3, 40]
    assert any("give x the shape [examples, 1, 3, 40]" in str(warning.message) for warning in recwarn)
    assert made.count((1, 3, 40)) == 1  # the form is found once for all clients
    square = federate(lambda k: numbers(k, (8, 8)), Mean())
    assert json.loads((square.folder / "environment.json").read_text())["clients"]["a"]["input"] == [1, 8, 8]
    assert any("they get images; for series" in str(warning.message) for warning in recwarn)
    run = federate(lambda k: numbers(k, (1, 3, 40)), Centred())
    assert json.loads((run.folder / "environment.json").read_text())["clients"]["a"]["input"] == [1, 3, 40]


def test_labels_above_2_24_are_compared_as_whole_numbers():
    labels = [2**24 + row % 2 for row in range(40)]
    rows = StackDataset(np.zeros((40, 3), np.float32), labels)
    rows.targets = labels
    assert make_memory_source(rows, None, None, "site").train.labels.tolist() == rows.targets
    rows.targets = [2**24] * 40  # float32 holds no difference
    with pytest.raises(UserError, match="example 3 has the label 16777217"):
        make_memory_source(rows, None, None, "site")
