"""Keys that an algorithm does not look at are said."""

import pytest

from fedmutual import run
from fedmutual.config import parse_config
from fedmutual.config.checks import describe_unused_engine_keys, describe_unused_keys
from fedmutual.federation import build


def noted(**tables):
    config = {"rounds": 2, "data": {"name": "digits"}, "partition": {"clients": 2}, "model": {"shared": "mlp"}, **tables}
    return [n for n in build.build(parse_config(config)).make_plan({}).notes if "no effect" in n]


OWN = {"0": {"model": {"frozen": True, "personal": "cnn1"}, "optimizer": {"lr": 0.1}}}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, ""),
        ({"clients": OWN, "model": {"personal": "cnn1"}}, ""),
        (
            {"algorithm": {"name": "fedavg"}, "clients": OWN, "model": {"personal": "cnn1"}},
            "algorithm 'fedavg' trains no personal networks, so 'model.personal', 'clients.0.model.personal', "
            "'clients.0.model.frozen' have no effect",
        ),
        (
            {"algorithm": {"name": "independent"}, "model": {"part": "features"}, "records": {"copies": True}},
            "algorithm 'independent' shares no model, so 'model.part', 'records.copies' have no effect",
        ),
        (
            {"training": {"local_steps": 3, "local_epochs": 7}},
            "algorithm 'fml' counts a round in training.local_steps, so 'training.local_epochs' has no effect",
        ),
        ({"algorithm": {"name": "fedavg"}, "server": {"aggregate": "median"}}, ""),
        (
            {"algorithm": {"name": "fedavg", "weighting": "samples"}, "server": {"aggregate": "median"}},
            "server.aggregate = 'median' takes all clients alike, so 'algorithm.weighting' has no effect",
        ),
        (
            {"algorithm": {"name": "independent"}, "server": {"aggregate": "trimmed-mean", "trim": 0.1}},
            "algorithm 'independent' makes no mean of what clients send, so 'server.aggregate' has no effect",
        ),
        (
            {"algorithm": {"name": "proxyfl"}, "server": {"aggregate": "median"}},
            "algorithm 'proxyfl' makes no mean of what clients send, so 'server.aggregate' has no effect",
        ),
        (
            {"algorithm": {"name": "centralised"}, "server": {"sum": "fixed"}},
            "algorithm 'centralised' trains one network on all data, so 'server.sum' has no effect",
        ),
        ({"algorithm": {"name": "centralised"}, "clients": {"0": {"training": {"shuffled": 0.5}}}}, ""),
        (
            {"algorithm": {"name": "centralised"}, "clients": OWN, "engine": {"participation": 0.5}},
            "algorithm 'centralised' trains one network on all data, so 'engine.participation', "
            "'clients.0.model.personal', 'clients.0.model.frozen' and 1 more key have no effect",
        ),
    ],
)
def test_keys_without_effect_are_remarked(tables, message):
    assert noted(**tables) == ([message] if message else [])


@pytest.mark.parametrize(
    ("engine", "keys"),
    [
        ("inprocess", "'engine.workers', 'engine.gpus' have"),
        ("processes", "'data.workers', 'engine.gpus' have"),
        ("stacked", "'engine.workers', 'engine.gpus' have"),
        ("cluster", ""),
    ],
)
def test_keys_unused_by_the_engine_are_remarked(engine, keys):
    table = {"workers": 2, "gpus": 0.5, "compile": True, "name": engine}
    config = parse_config({"data": {"workers": 1}, "engine": table})
    by_engine = [f"engine {engine!r} does the work, so {keys} no effect"] if keys else []
    by_none = "torch.compile saved no time, so 'engine.compile' has no effect"
    assert list(describe_unused_engine_keys(config, engine)) == [*by_engine, by_none]
    chosen = parse_config({"engine": {"workers": 1}})  # workers that chose the engine are not idle
    assert list(describe_unused_engine_keys(chosen, "inprocess")) == []


def test_a_noised_proxy_is_no_key_without_effect():
    privacy = {"nets": "meme", "sigma": 1.0}
    config = parse_config({"algorithm": {"name": "proxyfl"}, "privacy": privacy, "model": {"shared": "mlp"}})
    assert list(describe_unused_keys(config, ("personal", "proxy"), False)) == []


SILENT = """
from dataclasses import dataclass
from fedmutual.algorithms.peers import Peering
from fedmutual.core import from_training

@dataclass(frozen=True)
class Steps(Peering):
    local_steps: int | None = from_training(None)

    def batches(self, client, inbox, at):
        return ()

    def loss(self, nets, batch, const):
        return {}
"""


def test_a_key_of_training_that_no_field_reads_is_remarked(tmp_path, in_tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "silent_steps.py").write_text(SILENT)
    training = {"local_steps": 2, "batch_size": 8, "task": "regression"}
    tables = {
        "algorithm": {"name": "silent_steps:Steps"},
        "clients": {"0": {"training": {"batch_size": 4, "shuffled": 0.5}}},
    }
    config = parse_config({"training": training, "model": {"shared": "mlp"}, **tables})
    (sentence,) = describe_unused_keys(config, ("personal",), False)
    assert sentence.endswith("has no such field, so 'training.batch_size', 'clients.0.training.batch_size' have no effect")


def test_a_run_says_them(tmp_path):
    tables = {"data": {"name": "digits"}, "engine": {"name": "inprocess", "workers": 2}, "training": {"local_steps": 1}}
    config = parse_config({"rounds": 1, "partition": {"clients": 2}, "model": {"shared": "mlp"}, **tables})
    run(config, tmp_path / "run")
    assert "'engine.workers' has no effect" in (tmp_path / "run" / "log.txt").read_text()
