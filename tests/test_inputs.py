"""Inputs of each kind, from arrays and Datasets to the exported model: ids, series, volumes and integers."""

import hashlib
import json
import runpy
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import StackDataset, TensorDataset

import fedmutual
from fedmutual import Site, UserError
from fedmutual.config import DataConfig
from fedmutual.core import match_inputs
from fedmutual.data.federation import load
from fedmutual.data.objects import make_memory_source
from fedmutual.data.text import encode_texts, hash_tokens
from fedmutual.federation import experiment
from fedmutual.federation.evaluation import forward_in_parts
from fedmutual.sites.contract import read_contract
from fedmutual.sites.coordinator import build_server_experiment
from fedmutual.sites.site_settings import build_site, read_site_file
from fedmutual.studies.adapt import adapt
from fedmutual.user_code import plugins
from own_data import config, npz
from wards import contract, site

pytestmark = pytest.mark.run

QUICK = {"rounds": 2, "local_epochs": 1, "batch_size": 16, "device": "cpu", "progress": False}
PRIVACY = {"privacy.nets": "both", "privacy.sigma": 1.0, "privacy.clip": 1.0, "privacy.delta": 1e-3}
WORDS = 97
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 4), nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))
"""


FUSION = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape):
        super().__init__()
        assert shape["image"] == (1, 6, 6)
        self.conv, self.embed, self.head = nn.Conv2d(1, 4, 3), nn.Embedding(9, 4), nn.Linear(11, 2)

    def forward(self, image, table, ids):
        return self.head(torch.cat((self.conv(image).amax((2, 3)), table, self.embed(ids).mean(1)), 1))
"""


class Words(nn.Module):
    """Ids [B, L] of any size -> logits [B, 2]. `kind`: the layer that reads the ids."""

    def __init__(self, kind="embedding", words=WORDS, sparse=False):
        super().__init__()
        self.embed = (nn.EmbeddingBag if kind == "bag" else nn.Embedding)(words, 4, sparse=sparse)
        self.gru = nn.GRU(4, 4, batch_first=True) if kind == "packed" else None
        self.head = nn.Linear(4, 2)
        self.kind, self.words = kind, words

    def forward(self, ids):
        seen.add(ids.dtype)
        x = self.embed(ids % WORDS if self.words == WORDS else ids)
        if self.gru is not None:  # 0 is padding, and an example of padding alone is an error
            lengths = (ids != 0).sum(1).cpu()
            x = self.gru(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1]
            return self.head(x[0])
        return self.head(x if self.kind == "bag" else x.mean(1))


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


class Fusion(nn.Module):
    """Images [B, 1, 6, 6], tables [B, 3] and ids [B, 5] of 9 words -> logits [B, 2]."""

    def __init__(self):
        super().__init__()
        self.conv, self.embed, self.head = nn.Conv2d(1, 4, 3), nn.Embedding(9, 4), nn.Linear(11, 2)

    def forward(self, image, table, ids):
        seen.add((image.dtype, table.dtype, ids.dtype))
        parts = self.conv(image).amax((2, 3)), table, self.embed(ids).mean(1)
        return self.head(torch.cat(parts, 1))


class InOne(Fusion):
    """The same, with all inputs in one dictionary."""

    def forward(self, x):
        return super().forward(**x)


def several(seed, n=40):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    image = rng.integers(0, 256, (n, 1, 6, 6)).astype(np.uint8)
    return {"image": image, "table": rng.normal(size=(n, 3)) + y[:, None], "ids": rng.integers(0, 9, (n, 5))}, y


def list_items(x, y):
    return [({k: v[row] for k, v in x.items()}, int(y[row])) for row in range(len(y))]


def items(x, y):
    """A Dataset of (x, y), one by one."""
    return StackDataset(x, y.tolist())


seen = set()  # types of the ids that networks got
seen_rows = []  # rows that networks got


@pytest.fixture(autouse=True)
def forget():
    seen.clear()


def ids(seed, n=40, dtype=np.int64, low=1, high=25):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    return (rng.integers(low, high, (n, 6)) + 25 * y[:, None]).astype(dtype), y


def numbers(seed, shape, n=40):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    return (rng.normal(size=(n, *shape)) + y.reshape(-1, *(1 for _ in shape))).astype(np.float32), y


def federate(make, net, method="fml", **arguments):
    return fedmutual.federate({i: Site(train=make(k)) for k, i in enumerate("ab")}, method, net, **QUICK | arguments)


def refusal(make, net, **arguments):
    with pytest.raises(UserError) as caught:
        federate(make, net, **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    """FedAvg by hand: two passes of one batch at each client, then the mean."""
    torch.manual_seed(0)
    data, start = {i: ids(k) for k, i in enumerate("ab")}, Words()
    sites = {i: Site(train=CONTAINERS[container](*rows), test=CONTAINERS[container](*rows)) for i, rows in data.items()}
    settings = {"optimizer.momentum": 0.0, "optimizer.weight_decay": 0.0}
    arguments = QUICK | {"local_epochs": 2, "batch_size": 64, "lr": 0.5, "settings": settings}
    seen.clear()
    run = fedmutual.federate(sites, "fedavg", start, **arguments)
    expected = {k: v.clone() for k, v in start.state_dict().items()}
    for _ in range(2):
        trained = []
        for x, y in data.values():
            net = Words()
            net.load_state_dict(expected)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(torch.tensor(x)), torch.tensor(y)).backward()
                optimizer.step()
            trained.append(net.state_dict())
        expected = {k: (trained[0][k] + trained[1][k]) / 2 for k in expected}
    torch.testing.assert_close(dict(run.global_model().state_dict()), expected)
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


@pytest.mark.parametrize("method", ["fedh2l", "fedmd"])
def test_messages_beside_ids_stay_decimal_numbers(method):
    """Posteriors of public rows, and their consensus, are not rounded to the type of the ids."""
    x, y = ids(0, n=240)
    settings = {"split.public": 0.3, "algorithm.public_batch": 8, "data.classes": ["0", "1"]}
    arguments = {k: v for k, v in QUICK.items() if method == "fedmd" or k != "local_epochs"} | {"settings": settings}
    arguments |= {"local_steps": 2} if method == "fedh2l" else {}
    sites = {i: Site(train=(x[k::2], y[k::2]), model=Words(words=50)) for k, i in enumerate("ab")}
    assert fedmutual.federate(sites, method, **arguments).finished
    assert match_inputs(torch.tensor([0.4]), torch.tensor([3])).tolist() == pytest.approx([0.4])


@pytest.mark.parametrize("kind", ["embedding", "packed"])
def test_ids_are_checked_on_the_rows_with_the_extreme_ids_and_on_no_made_row(kind, monkeypatch):
    tried, given = [], {row.tobytes() for k in (0, 1) for row in ids(k, n=900)[0]}
    monkeypatch.setattr(experiment, "forward_in_parts", lambda net, x: tried.append(len(x)) or forward_in_parts(net, x))
    monkeypatch.setattr(Words, "forward", lambda self, x, real=Words.forward: seen_rows.extend(x) or real(self, x))
    assert federate(lambda k: ids(k, n=900), Words(kind)).finished
    assert max(tried) <= 2 * 6
    assert {row.long().numpy().tobytes() for row in seen_rows} <= given


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
        (lambda k: several(k), "mlp", {}, "takes one input, but the examples have several (image [1, 6, 6], table [3], ids"),
        (lambda k: several(k), Fusion(), {"data.mean": [0.0], "data.std": [1.0]}, "give a table of an input's name"),
        (lambda k: several(k), Fusion(), {"data.mean": {"ids": [0.0]}, "data.std": {"ids": [1.0]}}, "changes numbers"),
        (lambda k: ({"a": np.zeros((3, 1)), "b": np.zeros((4, 1))}, np.zeros(3)), Fusion(), {}, "'a' 3, 'b' 4 rows"),
        (lambda k: numbers(k, (1, 4, 4, 4)), volumes(), {"data.augment": "crop-flip"}, "the examples are volumes"),
    ],
)
def test_inputs_that_no_network_can_take_are_refused(make, net, settings, words):
    assert words in refusal(make, net, settings=settings)


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


class Listed(torch.utils.data.Dataset):
    """Items in a list."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return self.rows[row]


def collate(batch):
    """Stack the inputs, as tensors."""
    x, y = zip(*batch, strict=True)
    return {k: torch.stack([torch.as_tensor(one[k]) for one in x]) for k in x[0]}, torch.tensor(y)


SEVERAL = {
    "arrays": lambda x, y: (x, y),
    "tensors": lambda x, y: ({k: torch.tensor(v) for k, v in x.items()}, torch.tensor(y)),
    "Dataset": lambda x, y: Listed(list_items(x, y)),
    "items as dictionaries": lambda x, y: Listed([{**one, "labels": label} for one, label in list_items(x, y)]),
    "DataLoader": lambda x, y: torch.utils.data.DataLoader(Listed(list_items(x, y)), batch_size=64),
    "own collate": lambda x, y: torch.utils.data.DataLoader(Listed(list_items(x, y)), batch_size=64, collate_fn=collate),
}


@pytest.mark.parametrize("container", SEVERAL)
def test_several_inputs_train_as_a_plain_loop_trains(container):
    """FedAvg by hand: one pass of one batch at each client, then the mean. Pixels are divided by 255, ids stay int64."""
    torch.manual_seed(0)
    data, net = {i: several(k) for k, i in enumerate("ab")}, InOne() if container == "tensors" else Fusion()
    start = {k: v.clone() for k, v in net.state_dict().items()}
    sites = {i: Site(train=SEVERAL[container](*rows), test=SEVERAL[container](*rows)) for i, rows in data.items()}
    arguments = QUICK | {
        "rounds": 1,
        "batch_size": 64,
        "lr": 0.5,
        "settings": {"optimizer.momentum": 0.0, "optimizer.weight_decay": 0.0},
    }
    seen.clear()
    run = fedmutual.federate(sites, "fedavg", net, **arguments)
    assert seen == {(torch.float32, torch.float32, torch.int64)}
    trained = []
    for x, y in data.values():
        plain = Fusion()
        plain.load_state_dict(start)
        inputs = {
            "image": torch.tensor(x["image"]) / 255,
            "table": torch.tensor(x["table"]).float(),
            "ids": torch.tensor(x["ids"]),
        }
        nn.functional.cross_entropy(plain(**inputs), torch.tensor(y)).backward()
        trained.append({k: p.detach() - 0.5 * p.grad for k, p in plain.named_parameters()})
    expected = {k: (trained[0][k] + trained[1][k]) / 2 for k in start}
    torch.testing.assert_close(dict(run.global_model().state_dict()), expected)
    about = json.loads((run.folder / "environment.json").read_text())["clients"]["a"]
    assert about["input"] == {"image": [1, 6, 6], "table": [3], "ids": [5]}
    answers = run.predict(data["a"][0])
    assert np.allclose(run.predict({k: v[:3] for k, v in data["a"][0].items()}), answers[:3])


@pytest.mark.parametrize(
    "more",
    [
        {"engine": "stacked"},
        {"settings": PRIVACY},
        {"settings": {"data.resident": False}},
        {"settings": {"data.augment": "crop-flip"}},
        {"settings": {"data.mean": {"table": [0, 0, 0]}, "data.std": {"table": [2, 2, 2]}}},
        {"settings": {"engine.precision": "bf16"}},
    ],
)
def test_several_inputs_train_in_every_way(more):
    run = federate(several, Fusion(), **more)
    assert run.history()["value"].notna().all()
    if "engine" in more or "data.resident" in more.get("settings", {}):  # as resident rows on the default engine
        torch.manual_seed(0)
        nets = [federate(several, Fusion(), **options).global_model() for options in ({}, more) if torch.manual_seed(0)]
        torch.testing.assert_close(*(dict(net.state_dict()) for net in nets))


@pytest.mark.parametrize("method", ["fedh2l", "fedmd"])
def test_several_inputs_in_the_public_set(method):
    x, y = several(0, n=240)
    settings = {"split.public": 0.3, "algorithm.public_batch": 8, "data.classes": ["0", "1"]}
    arguments = {k: v for k, v in QUICK.items() if method == "fedmd" or k != "local_epochs"} | {"settings": settings}
    arguments |= {"local_steps": 2} if method == "fedh2l" else {}
    sites = {i: Site(train=({name: v[k::2] for name, v in x.items()}, y[k::2]), model=Fusion()) for k, i in enumerate("ab")}
    assert fedmutual.federate(sites, method, **arguments).finished


def test_labels_above_2_24_are_compared_as_whole_numbers():
    rows = Listed([(np.zeros(3, np.float32), 2**24 + row % 2) for row in range(40)])
    rows.targets = [2**24 + row % 2 for row in range(40)]
    assert make_memory_source(rows, None, None, "site").train.labels.tolist() == rows.targets
    rows.targets = [2**24] * 40  # float32 holds no difference
    with pytest.raises(UserError, match="example 3 has the label 16777217"):
        make_memory_source(rows, None, None, "site")


class Steps(nn.Module):
    """Series [B, L, 2] with a mask [B, L] -> logits [B, 2]: the mean over the steps of each series."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x, mask):
        seen.add(tuple(mask.sum(1).tolist()[:1]))
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class WithoutMask(nn.Module):
    """The same, of the sum over all steps: zeros that fill up a series do not count."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, series):
        return self.head(series.sum(1))


def ragged(seed, n=40):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    return [rng.normal(size=(int(length), 2)) + label for length, label in zip(rng.integers(2, 9, n), y, strict=True)], y


@pytest.mark.parametrize("container", [lambda x, y: (x, y), lambda x, y: Listed([*zip(x, y.tolist(), strict=True)])])
@pytest.mark.parametrize("net", [Steps, WithoutMask])
def test_series_of_different_length_are_padded_with_a_mask_that_a_network_may_take(container, net):
    x, _ = ragged(0)
    run = fedmutual.federate({i: Site(train=container(*ragged(k))) for k, i in enumerate("ab")}, "fml", net(), **QUICK)
    model, answers = run.global_model(), run.predict(x)
    for row in range(3):
        one = torch.tensor(x[row])[None].float()
        more = (torch.ones(1, len(x[row]), dtype=torch.bool),) if net is Steps else ()
        assert answers.to_numpy()[row] == pytest.approx(model(one, *more).softmax(1)[0].detach().numpy(), abs=1e-5)


TEXT_NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 8), nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask, table=None, age=None):
        mask = attention_mask[..., None]
        return self.head((self.embed(input_ids) * mask).sum(1) / mask.sum(1))
"""


def notes(seed, n=80):
    """Short texts that say their class, and a number."""
    rng = np.random.default_rng(seed)
    y = rng.permutation(np.arange(n) % 2)
    texts = [
        " ".join(rng.permutation(["seen", "today", *(["fever", "Cough!"] if label else ["well", "rested"])])) for label in y
    ]
    return pd.DataFrame({"note": texts, "age": rng.normal(size=n).round(3), "y": y})


@pytest.mark.parametrize("kind", ["csv", "npz", "datasets", "DataFrame"])
def test_text_trains_and_new_texts_are_predicted(kind, tmp_path, in_tmp_path):
    (tmp_path / "text_net.py").write_text(TEXT_NET)
    table = notes(0)
    reading = {"length": 6, "words": 500}
    tables = {"model": {"shared": "text_net:Net"}, "training": {"batch_size": 8, "local_epochs": 4}, "rounds": 3}
    tables["optimizer"] = {"name": "adam", "lr": 0.05}
    if kind == "DataFrame":
        settings = {f"data.{k}": v for k, v in (reading | {"text": ["note"]}).items()}
        sites = {i: Site(train=table.iloc[k::2], label="y") for k, i in enumerate("ab")}
        arguments = QUICK | {"rounds": 3, "local_epochs": 4, "optimizer": "adam", "lr": 0.05, "settings": settings}
        run = fedmutual.federate(sites, "fml", runpy.run_path("text_net.py")["Net"](), **arguments)
        assert run.score(notes(5), label="y").values["accuracy"] == 1
        return
    if kind == "csv":
        table.to_csv("notes.csv", index=False)
        data = {"name": "csv", "root": "notes.csv", "label": "y", "text": ["note"]} | reading
    elif kind == "npz":
        data = npz(tmp_path / "notes.npz", x=table["note"].to_numpy(str), y=table["y"].to_numpy()) | reading
    else:
        saved = pytest.importorskip("datasets").Dataset.from_pandas(table)
        saved.save_to_disk(str(tmp_path / "notes"))
        data = {
            "name": "datasets",
            "root": str(tmp_path / "notes"),
            "label": "y",
            "text": ["note"],
            "inputs": ["age"],
        } | reading
    run = fedmutual.run(config(data=data, **tables), tmp_path / "run")
    assert last(run) == 1
    if kind != "datasets":
        file = Path(data["root"])
        assert [p.label for p in fedmutual.predict(run.folder, file)] == [str(label) for label in table["y"]]
        assert run.score(file).values["accuracy"] == 1


def last(run):
    history = run.history()
    return history[(history["metric"] == "accuracy") & (history["model"] == "global")]["value"].iloc[-1]


@pytest.mark.parametrize("library", ["tokenizers", "transformers"])
def test_a_tokenizer_from_disk_gives_its_ids(library, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "well": 2, "ill": 3}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if library == "tokenizers":
        path = tmp_path / "tokenizer.json"
        made.save(str(path))
    else:
        path = tmp_path / "saved"
        fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
        fast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(str(path))
    read = encode_texts(np.array(["ill well other", "", "well well well well"]), DataConfig(tokenizer=str(path), length=3))
    assert read["input_ids"].tolist() == [[3, 2, 1], [0, 0, 0], [2, 2, 2]]
    assert read["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 1]]
    with pytest.raises(UserError, match="there is no file"):
        encode_texts(np.array(["ill"]), DataConfig(tokenizer=str(tmp_path / "other")))


def test_hashed_words_have_fixed_ids():
    """blake2b of "ill", in 8 bytes, by hashlib: its remainder by 99, plus 1."""
    digest = int.from_bytes(hashlib.blake2b(b"ill", digest_size=8).digest(), "big")
    assert hash_tokens("Ill, ILL", 100)[::2] == [1 + digest % 99] * 2


def test_several_inputs_of_a_file_are_predicted_scored_and_exported(tmp_path, in_tmp_path):
    """As a user's own module, on worker processes."""
    (tmp_path / "fusion_net.py").write_text(FUSION)
    (x, y), path = several(0, n=120), tmp_path / "both.npz"
    data = npz(path, **x, y=y) | {"inputs": ["image", "table", "ids"]}
    tables = {"model": {"shared": "fusion_net:Net"}, "training": {"batch_size": 16, "local_epochs": 1}}
    runs = [
        fedmutual.run(config(rounds=2, data=data, engine={"name": engine}, **tables), tmp_path / engine)
        for engine in ("inprocess", "processes")
    ]
    torch.testing.assert_close(*(dict(run.global_model().state_dict()) for run in runs))
    predicted = fedmutual.predict(runs[0].folder, path)
    accuracy = np.mean([p.label == str(label) for p, label in zip(predicted, y, strict=True)])
    assert runs[0].score(path).values["accuracy"] == pytest.approx(accuracy)
    assert not runs[0].export(tmp_path / "exported").left_out
    program = torch.export.load(str(tmp_path / "exported" / "model.pt2")).module()
    answers = program({k: torch.tensor(v[:9]).to(torch.int64 if k == "ids" else torch.float32) for k, v in x.items()})
    np.testing.assert_allclose(answers.numpy().max(1), [p.ranked[0][1] for p in predicted[:9]], atol=1e-5)


def test_ids_of_a_file_are_predicted_scored_and_exported(tmp_path, in_tmp_path):
    """As a user's own module, with ids in the run's record, in both programs, and in the check of the data."""
    from fedmutual.data import find_problems

    (tmp_path / "word_net.py").write_text(NET)
    (x, y), tables = ids(0, n=120), {"model": {"shared": "word_net:Net"}, "training": {"batch_size": 16, "local_epochs": 1}}
    run_config = config(rounds=2, data=npz(tmp_path / "words.npz", x=x, y=y), **tables)
    run = fedmutual.run(run_config, tmp_path / "run")
    assert load(run_config).space.dtype == torch.int64
    assert not [sentence for sentence in find_problems(run_config) if "data.mean" in sentence]
    assert json.loads((run.folder / "environment.json").read_text())["clients"]["0"]["scaling"]["dtype"] == "int64"
    predicted = fedmutual.predict(run.folder, tmp_path / "words.npz")
    accuracy = np.mean([p.label == str(label) for p, label in zip(predicted, y, strict=True)])
    assert run.score(tmp_path / "words.npz").values["accuracy"] == pytest.approx(accuracy)
    assert not run.export(tmp_path / "exported").left_out
    about = json.loads((tmp_path / "exported" / "model.json").read_text())["input"]
    assert (about["dtype"], about["shape"]) == ("int64", [6])
    answers = torch.export.load(str(tmp_path / "exported" / "model.pt2")).module()(torch.tensor(x[:9]))
    onnxruntime = pytest.importorskip("onnxruntime")
    (same,) = onnxruntime.InferenceSession(str(tmp_path / "exported" / "model.onnx")).run(None, {"x": x[:9]})
    np.testing.assert_allclose(answers.numpy(), same, atol=1e-5)
    np.savez(tmp_path / "decimals.npz", x=x + 0.5, y=y)
    for use in (partial(fedmutual.predict, run.folder), run.score):
        with pytest.raises(UserError, match="whole number"):
            use(tmp_path / "decimals.npz")


@pytest.mark.sites
def test_the_server_and_the_sites_find_ids_by_the_shared_network(tmp_path, in_tmp_path):
    """The server has no data: it tries the network on made inputs of the agreed shape."""
    (x, y), path = ids(0, n=60), tmp_path / "words.npz"
    np.savez(path, x=x, y=y)
    (tmp_path / "north").mkdir()
    for folder in (tmp_path, tmp_path / "north"):
        (folder / "site_words.py").write_text(NET)
    common = {"name": "words", "data": {"classes": ["0", "1"]}, "model": {"shared": "site_words:Net"}}
    own = {"data": {"name": "npz", "root": str(path)}, "trust": {"modules": ["site_words"]}}
    file = contract(tmp_path, common, {"north": own, "south": own}, input=[6])
    site_settings = read_site_file(site(tmp_path, "north", own))
    with plugins.use_rule(site_settings.code):
        agreed = read_contract(file)
        joined = build_site(agreed, site_settings)
        served = build_server_experiment(agreed)
        assert joined.build_client("north").nets
        assert served.make_server_state().keys() == joined.nets.shared.state_dict().keys()
    assert (served.data.space.dtype, joined.data.space.dtype) == (torch.int64, torch.int64)


@pytest.mark.sites
def test_the_contract_declares_several_inputs(tmp_path, in_tmp_path):
    """The server has no data: it tries the network on inputs of the declared shapes and types; a site's must be the same."""
    (x, y), path = several(0, n=60), tmp_path / "both.npz"
    np.savez(path, **x, y=y)
    (tmp_path / "north").mkdir()
    for folder in (tmp_path, tmp_path / "north"):
        (folder / "site_fusion.py").write_text(FUSION)
    common = {"name": "both", "data": {"classes": ["0", "1"], "inputs": [*x]}, "model": {"shared": "site_fusion:Net"}}
    own = {"data": {"name": "npz", "root": str(path)}, "trust": {"modules": ["site_fusion"]}}
    declared = {"image": {"shape": [1, 6, 6]}, "table": {"shape": [3]}, "ids": {"shape": [5], "dtype": "int64"}}
    file = contract(tmp_path, common, {"north": own, "south": own}, input=declared)
    site_settings = read_site_file(site(tmp_path, "north", own))
    with plugins.use_rule(site_settings.code):
        agreed = read_contract(file)
        joined, served = build_site(agreed, site_settings), build_server_experiment(agreed)
        assert joined.build_client("north").nets
        assert served.make_server_state().keys() == joined.nets.shared.state_dict().keys()
    assert served.data.space.shape == joined.data.space.shape
    declared["table"]["shape"] = [4]
    agreed = read_contract(contract(tmp_path, common, {"north": own, "south": own}, input=declared))
    with plugins.use_rule(site_settings.code), pytest.raises(UserError, match=r"table \[3\].*agreed on.*table \[4\]"):
        build_site(agreed, site_settings)


def test_a_newcomer_adapts_a_model_of_ids(tmp_path, in_tmp_path):
    (tmp_path / "adapted_words.py").write_text(NET)
    for seed, name in enumerate(("first", "new")):
        x, y = ids(seed, n=120)
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    tables = {"model": {"shared": "adapted_words:Net"}, "training": {"batch_size": 16, "local_epochs": 1}}
    run_config = config(rounds=1, data={"name": "npz", "root": "first.npz"}, **tables)
    fedmutual.run(run_config, tmp_path / "run")
    (tmp_path / "new.toml").write_text(
        'rounds = 1\ndata = { name = "npz", root = "new.npz" }\ntraining = { batch_size = 16 }\n'
    )
    adapt(tmp_path / "run", tmp_path / "new.toml", tmp_path / "adapted", sizes=(None,), seeds=1)
    assert (tmp_path / "adapted" / "adapt.json").exists()
