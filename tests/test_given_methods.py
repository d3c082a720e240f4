"""Methods given to `federate` and `compare` as objects: which method is trained, and that no value is lost in silence."""

import re
from dataclasses import dataclass, make_dataclass

import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fedmutual
from fedmutual import ConfigError, Site, UserError
from fedmutual.aggregation import Aggregation
from fedmutual.algorithms import ALGORITHMS, FML, FedAvg, Independent, ProxyFL
from fedmutual.config import parse_config
from fedmutual.config.checks import describe_unused_keys
from fedmutual.core import Task, from_training
from fedmutual.errors import RemarkWarning
from fedmutual.in_memory import hold_objects
from fedmutual.losses import Classification, Regression
from fedmutual.studies.site_objects import make_config

QUICK = {"rounds": 1, "batch_size": 8, "device": "cpu", "progress": False}
TABLES = {"a": {"data": {"name": "digits"}}, "b": {"data": {"name": "digits"}}}


@dataclass(frozen=True, kw_only=True)
class Brief(FedAvg):
    """FedAvg with defaults of its own."""

    local_epochs: int = from_training(1)


@dataclass(frozen=True, kw_only=True)
class Numeric(FedAvg):
    """FedAvg with a task of its own."""

    task: Task = from_training(Regression())


@dataclass(frozen=True, kw_only=True)
class Failing(FedAvg):
    """FedAvg whose loss raises."""

    def loss(self, nets, batch, const):
        raise ValueError("no loss")


def make_sites(model=None):
    x, y = torch.rand(40, 3), torch.arange(40) % 2
    return {"a": Site(train=(x, y), model=model), "b": Site(train=(x + 1, y), model=model)}


def make_net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def describe(method, arguments=None, settings=None):
    with hold_objects({"method.Brief": Brief, "method.Numeric": Numeric}):
        return make_config(TABLES, method, "mlp", arguments or {}, settings)


@pytest.mark.parametrize("kind", sorted({*ALGORITHMS.values()}, key=lambda kind: kind.__name__))
def test_an_instance_is_the_method_of_its_class_without_keys_of_another_name(kind):
    name = describe(kind()).algorithm["name"]
    assert ALGORITHMS[name] is kind
    assert name not in ("fedper", "lg-fedavg", "fedbn", "centralised")


def test_an_instance_of_fedavg_averages_batchnorm_and_one_of_independent_keeps_data_apart():
    comparison = fedmutual.compare(make_sites(make_net()), [FedAvg(), Independent()], make_net(), seeds=1, **QUICK)
    run = comparison.runs["fedavg", 0]
    assert run.config.model.batchnorm == "average"
    assert run.complete
    assert comparison.runs["independent", 0].config.algorithm["name"] == "independent"


def test_the_value_of_an_instance_is_trained():
    assert describe(Brief()).training.local_epochs == 1
    assert describe(Brief(local_epochs=5)).training.local_epochs == 5
    assert describe(Brief(local_epochs=3), {"local_epochs": 3}).training.local_epochs == 3
    assert describe(Brief(), {"local_epochs": 4}).training.local_epochs == 4


@pytest.mark.parametrize(
    ("method", "arguments", "settings", "words"),
    [
        (FML(alpha=0.1), {}, {"algorithm.alpha": 0.9}, "'algorithm.alpha' has two values, 0.1 and 0.9"),
        (FML(alpha=0.1), {}, {"algorithm": {"alpha": 0.9}}, "'algorithm.alpha' has two values, 0.1 and 0.9"),
        (Brief(local_epochs=3), {"local_epochs": 4}, {}, "'training.local_epochs' has two values, 3 and 4"),
        ("fml", {"lr": 0.3}, {"optimizer.lr": {"start": 0.3, "end": 0.1}}, "'optimizer.lr' has two values"),
        ("fml", {}, {"algorithm.name": "fedavg"}, "'algorithm.name' has two values, 'fml' and 'fedavg'; give the method as"),
        ("fml", {}, {"model.shared": "cnn1"}, "'model.shared' has two values, 'mlp' and 'cnn1'"),
        ("fml", {}, {"clients.a.data.name": "mnist"}, "'clients.a.data.name' has two values, 'digits' and 'mnist'"),
        ("fml", {}, {"engine.name": "processes"}, "key 'engine.name': 'processes' cannot hold objects of this process"),
        ("fml", {"engine": "cluster"}, {}, "argument 'engine': 'cluster' cannot hold objects of this process"),
        (ProxyFL(aggregate=Aggregation("median")), {}, {}, "argument 'method': ProxyFL(aggregate=...) has no effect"),
        (FedAvg(task=Regression()), {}, {}, "FedAvg has a task; give the task as the argument 'task'"),
        (Numeric(), {}, {}, "Numeric has a task; give the task as the argument 'task'"),
    ],
)
def test_a_value_that_would_be_lost_is_refused(method, arguments, settings, words):
    with pytest.raises(ConfigError) as problem:
        describe(method, arguments, settings)
    assert words in str(problem.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"model.personal": "mlp"},
            "its argument 'model' already sets the key 'model.personal'; remove the key from its settings",
        ),
        ({"model": {"personal": "mlp"}}, "its argument 'model' already sets the key 'model.personal'"),
        ({"data.name": "digits"}, "its argument 'train' already sets the key 'data.name'"),
        ({"data.label": "z"}, "its argument 'label' already sets the key 'data.label'"),
    ],
)
def test_a_setting_that_an_argument_of_the_site_sets_is_refused(settings, words):
    frame = pd.DataFrame({"x": [0.0, 1.0] * 20, "y": [0, 1] * 20, "z": [1, 0] * 20})
    site = Site(train=frame, label="y", model=nn.Linear(1, 2), settings=settings)
    with pytest.raises(ConfigError, match=re.escape(words)):
        fedmutual.federate({"a": site}, "fml", "mlp", **QUICK)


def test_a_batch_size_that_a_loader_overrides_is_named():
    rows = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)
    remark = "site 'a': its DataLoader has batches of 1, and 'training.batch_size' is 8 for the other sites"
    sites = {"a": Site(train=DataLoader(rows)), "b": Site(train=DataLoader(rows, batch_size=8)), "c": Site(train=rows)}
    with pytest.warns(RemarkWarning, match=remark) as remarks:
        run = fedmutual.federate(sites, "fedavg", "mlp", **QUICK)
    assert sum("DataLoader" in str(remark.message) for remark in remarks) == 1
    assert [run.config.clients[i].training.batch_size for i in "abc"] == [1, 8, None]


def test_a_value_in_the_place_of_the_table_of_training_is_told():
    site = Site(train=DataLoader(TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)), settings={"training": 8})
    with pytest.raises(ConfigError, match=re.escape("key 'clients.a.training' must be a table")):
        fedmutual.federate({"a": site}, "fedavg", "mlp", **QUICK)


def test_equal_values_and_the_defaults_of_a_class_are_no_conflict():
    assert describe(FML(), {"lr": 0.3}, {"algorithm.alpha": 0.9, "optimizer.lr": 0.3}).algorithm["alpha"] == 0.9
    assert describe(FedAvg(), {"local_epochs": 2}).training.local_epochs == 2
    assert describe(FedAvg(task=Classification())).training.task == "classification"


@pytest.mark.parametrize(
    ("has_gpu", "settings", "engine"),
    [
        (False, {}, "inprocess"),
        (False, {"engine.name": "stacked"}, "stacked"),
        (True, {}, "stacked"),
        (True, {"engine.device": "cpu"}, "inprocess"),
        (True, {"engine.device": "cuda:0"}, "stacked"),
        (True, {"engine.name": "inprocess"}, "inprocess"),
        (True, {"privacy.nets": "both", "privacy.sigma": 1.0}, "inprocess"),
    ],
)
def test_the_engine_of_objects(monkeypatch, has_gpu, settings, engine):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert describe("fml", {}, settings).engine.name == engine


def test_two_classes_of_one_name_are_refused():
    other = make_dataclass("Brief", [], bases=(FML,), frozen=True, kw_only=True)
    with pytest.raises(ConfigError, match="two classes have the name 'Brief'; rename one"):
        fedmutual.compare(make_sites(), {"one": Brief(), "two": other()}, "mlp", seeds=1, **QUICK)


def test_two_sites_of_one_name_are_refused():
    (a, b) = make_sites().values()
    with pytest.raises(ConfigError, match="two sites have the name '1'; rename one"):
        fedmutual.federate({1: a, "1": b}, "fedavg", "mlp", **QUICK)


@pytest.mark.parametrize(
    ("kind", "training", "words"),
    [
        ("Brief", {}, "1 of 'local_epochs', but this run takes 5, the default of 'training.local_epochs'"),
        ("Brief", {"local_epochs": 2}, ""),
        ("Numeric", {}, "'Regression' of 'task', but this run takes 'classification', the default of 'training.task'"),
    ],
)
def test_a_file_says_that_a_key_counts_and_not_the_default_of_the_class(kind, training, words):
    config = parse_config({"algorithm": {"name": f"{__name__}:{kind}"}, "training": training})
    remark = next(describe_unused_keys(config, ("global",), pooled=False), "")
    assert remark.partition("has the default ")[2].partition(";")[0] == words


def test_an_error_of_a_hook_names_log_txt_only_where_the_folder_stays(tmp_path):
    for out, end in ((None, "py)"), (tmp_path / "kept", "; log.txt has the traceback")):
        with pytest.raises(UserError) as problem:
            fedmutual.federate(make_sites(), Failing(), make_net(), out=out, **QUICK)
        assert "loss at client 'a' raised ValueError: no loss" in str(problem.value)
        assert str(problem.value).endswith(end)
    assert "ValueError: no loss" in (tmp_path / "kept" / "log.txt").read_text()
