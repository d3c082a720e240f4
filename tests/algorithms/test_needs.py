"""What a method needs of networks and data, said in one sentence before the first round."""

import re

import numpy as np
import pytest

from fedmutual.config import parse_config
from fedmutual.errors import ConfigError
from fedmutual.federation.build import build

NETS = """
from torch import nn

def sigmoid(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], classes), nn.Sigmoid())

def convolution(shape, classes):
    return nn.Sequential(nn.Conv2d(shape[0], classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


def config(name, **tables):
    given = {"name": "x", "data": {"name": "digits"}, "partition": {"clients": 3}, "algorithm": {"name": name}}
    return parse_config({**given, **tables})


WRONG = [
    ("ditto", {"model": {"personal": ["mlp", "cnn1", "mlp"]}}, "client '1' has 'cnn1'; remove 'model.personal'"),
    ("apfl", {"model": {"shared": "cnn1", "personal": ["mlp"]}}, "and client '0' has 'mlp'; remove 'model.personal'"),
    ("fedavg-ft", {"clients": {"1": {"model": {"personal": "cnn1"}}}}, "and client '1' has 'cnn1'"),
    (
        "fedproto",
        {"model": {"personal": ["nets:sigmoid"]}},
        "key 'model.personal': network 'nets:sigmoid' does not end in a",
    ),
    (
        "fedtgp",
        {"model": {"personal": ["mlp", "nets:convolution", "mlp"]}},
        "'nets:convolution' does not end in a linear layer",
    ),
    (
        "fedkd",
        {"model": {"shared": "nets:sigmoid", "personal": ["mlp"]}},
        "key 'model.shared': network 'nets:sigmoid' does not",
    ),
    ("moon", {"model": {"shared": "nets:convolution"}}, "'nets:convolution' does not end in a linear layer"),
    ("fedproto", {"model": {"shared": "nets:convolution", "personal": ["mlp"]}}, "set algorithm.proto_size"),
    (
        "fedgh",
        {"model": {"shared": "mlp", "personal": ["mlp", "cnn1", "mlp"]}},
        "key 'model.personal': algorithm 'fedgh' shares the last layer, which is weight",
    ),
    (
        "fedgen",
        {"model": {"part": ["features"], "adaptor": "rest"}},
        "key 'algorithm.name': 'fedgen': the server learns from the clients' last layers; share them too (model.part)",
    ),
    ("fedgen", {"training": {"batch_size": 1}}, "cannot train on one row; set training.batch_size to 2 or more"),
    ("kt-pfl", {}, "algorithm 'kt-pfl' needs a public seed set; set split.public"),
    ("feddf", {}, "algorithm 'feddf' needs a public seed set; set split.public"),
    ("feddf", {"split": {"public": 0.2}, "model": {"part": ["features"], "adaptor": "rest"}}, "remove 'model.part'"),
    ("fedper", {"model": {"shared": "nets:sigmoid"}}, "'features' matches nothing in network 'nets:sigmoid'; it has '1'"),
]


@pytest.mark.parametrize(("name", "tables", "sentence"), WRONG)
def test_what_is_missing_is_one_sentence(name, tables, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        build(config(name, **tables))
    assert "\n" not in str(caught.value)


def test_prototypes_of_a_set_size_need_no_features_of_the_shared_network():
    tables = {"shared": "nets:convolution", "personal": ["mlp"]}
    built = build(config("fedproto", model=tables, algorithm={"name": "fedproto", "proto_size": 16}))
    assert built.make_server_state()["prototypes"].shape == (10, 16)


@pytest.mark.parametrize("name", ["fedproto", "fedtgp"])
def test_classes_that_differ_are_not_held_against_each_other(name, place):
    x = np.random.default_rng(0).random((60, 4))
    for client, classes in (("a", 3), ("b", 2)):
        np.savez(place / f"{client}.npz", x=x, y=np.arange(60) % classes)
    clients = {i: {"data": {"name": "npz", "root": str(place / f"{i}.npz")}} for i in ("a", "b")}
    with pytest.raises(ConfigError, match="needs equal classes at all clients, but client 'b' has"):
        build(parse_config({"name": "x", "algorithm": {"name": name}, "clients": clients}))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"name": "ditto", "lam": -1.0}, "key 'algorithm.lam' must be at least 0, not -1"),
        ({"name": "apfl", "mix": 1.5}, "key 'algorithm.mix' must be between 0 and 1, not 1.5"),
        ({"name": "fedavg-ft", "tune_every": 0}, "key 'algorithm.tune_every' must be at least 1, not 0"),
        ({"name": "fedrep", "head_epochs": 0}, "key 'algorithm.head_epochs' must be at least 1, not 0"),
        ({"name": "fedproto", "proto_size": 0}, "key 'algorithm.proto_size' must be at least 1, not 0"),
        ({"name": "fedtgp", "server_lr": 0.0}, "key 'algorithm.server_lr' must be above 0, not 0"),
        ({"name": "fedkd", "energy": 1.5}, "key 'algorithm.energy' must be between 0 and 1, not 1.5"),
        ({"name": "fedkd", "rank": 0.0}, "key 'algorithm.rank' must be above 0 and at most 1, not 0"),
        ({"name": "proxyfl", "own_share": 1.0}, "key 'algorithm.own_share' must be at least 0 and below 1, not 1"),
        ({"name": "fedopt", "tau": 0.0}, "key 'algorithm.tau' must be above 0, not 0"),
        ({"name": "scaffold", "server_step": 0.0}, "key 'algorithm.server_step' must be above 0, not 0"),
        ({"name": "moon", "contrast_temperature": 0.0}, "key 'algorithm.contrast_temperature' must be above 0, not 0"),
        ({"name": "fedala", "rows_share": 1.5}, "key 'algorithm.rows_share' must be between 0 and 1, not 1.5"),
        ({"name": "pfedme", "inner_steps": 0}, "key 'algorithm.inner_steps' must be at least 1, not 0"),
        ({"name": "fedgen", "gen_steps": 0}, "key 'algorithm.gen_steps' must be at least 1, not 0"),
        ({"name": "fedgen", "gen_lr": 0.0}, "key 'algorithm.gen_lr' must be above 0, not 0"),
        ({"name": "fedgh", "head_lr": 0.0}, "key 'algorithm.head_lr' must be above 0, not 0"),
        ({"name": "fedapen", "adapt_share": 1.0}, "key 'algorithm.adapt_share' must be between 0 and 0.99, not 1"),
        ({"name": "kt-pfl", "kt_penalty": -1.0}, "key 'algorithm.kt_penalty' must be at least 0, not -1"),
        ({"name": "feddf", "distill_lr": 0.0}, "key 'algorithm.distill_lr' must be above 0, not 0"),
        ({"name": "feddf", "bench": 1}, "unknown key 'algorithm.bench'"),
    ],
)
def test_a_setting_out_of_range(settings, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_config({"name": "x", "algorithm": settings})


@pytest.mark.parametrize("name", ["fedproto", "fedkd", "feddf", "fd", "fedgen", "fedapen", "kt-pfl"])
def test_a_method_of_classes_takes_no_numbers(name):
    with pytest.raises(ConfigError, match=r"training\.task must be a task with classes"):
        parse_config({"name": "x", "algorithm": {"name": name}, "training": {"task": "regression"}})


def test_a_network_without_batchnorm_is_remarked():
    notes = build(config("fedbn")).make_plan({}).notes
    assert "network 'mlp' has no BatchNorm layer, so 'model.batchnorm' has no effect" in notes
    assert not [n for n in build(config("fedavg")).make_plan({}).notes if "BatchNorm" in n]


@pytest.mark.parametrize(
    ("method", "part", "is_kept"), [("fedper", "features", False), ("fedavg", None, True), ("fml", "features", True)]
)
def test_keep_best_that_keeps_no_model_is_remarked(method, part, is_kept):
    settings = {"algorithm": {"name": method}, "records": {"keep_best": True}, "model": {"part": part}}
    notes = build(config(method, **settings)).make_plan({}).notes
    assert is_kept != any("'records.keep_best' has no effect" in n for n in notes)
