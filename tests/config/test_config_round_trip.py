"""TOML to settings and back: nothing is lost, nothing changes its type."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmutual.config import Config, dump_config, load_config, parse_config
from fedmutual.core import Schedule

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
printable = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=8)
unit = st.floats(0, 1) | st.integers(0, 1)
rate = st.floats(0, 10) | st.integers(0, 3)
fraction = st.floats(0, 1, exclude_max=True)
positive = st.floats(0, 100, exclude_min=True)
count = st.integers(1, 10**6)


def scheduled(number: st.SearchStrategy[float]) -> st.SearchStrategy[Any]:
    shape = st.sampled_from(["linear", "cosine", "step"])
    return number | st.fixed_dictionaries({"start": number, "end": number}, optional={"shape": shape, "at": st.floats(0, 1)})


def table(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


def algorithm(named: bool) -> st.SearchStrategy[dict[str, Any]]:
    keys = {"alpha": scheduled(unit), "beta": scheduled(unit)}
    if not named:
        return table(**keys)
    return table(**keys, temperature=st.floats(0.01, 100)).map(lambda t: {"name": "fml", **t})


partition = table(clients=st.just(5), examples=count) | st.one_of(
    st.fixed_dictionaries({"kind": st.just("shards"), "classes_per_client": count}),
    st.fixed_dictionaries({"kind": st.just("dirichlet"), "alpha": positive}, optional={"min_size": count}),
    st.fixed_dictionaries({"kind": st.just("file"), "file": printable}),
)
tables = table(
    name=st.text("abc-.7é ", min_size=3, max_size=9),
    seed=st.integers(0, 2**62),
    rounds=count,
    data=table(
        name=text,
        root=printable.map("/".__add__),  # a control character is a mistyped path of Windows
        classes=st.lists(text, max_size=3),
        labels=st.dictionaries(text, text, max_size=3),
        size=st.lists(count, min_size=2, max_size=2),
        mean=st.lists(st.floats(-10, 10), max_size=3),
        std=st.lists(positive, max_size=3),
        augment=st.sampled_from(["none", "crop-flip"]),
        resident=st.booleans(),
        group_by=text,
    ),
    partition=partition,
    split=table(preset=st.sampled_from(["journal", "v1"]), validation=fraction, holdout=fraction, test=fraction),
    algorithm=algorithm(named=True),
    model=table(
        shared=text, personal=text | st.lists(text, min_size=5, max_size=5), start=st.sampled_from(["own", "server"])
    ),
    training=table(local_epochs=count, batch_size=count),
    optimizer=table(name=st.just("sgd"), lr=scheduled(rate), momentum=fraction, weight_decay=rate),
    engine=table(device=text, threads=st.integers(1, 4096), participation=positive.filter(lambda f: f <= 1)),
    records=table(evaluate_every=count, best_by=st.sampled_from(["validation", "test"]), tensorboard=st.booleans()),
    share=table(metrics=st.sampled_from(["all", "accuracy", "none"])),
    clients=st.dictionaries(
        text,
        table(
            algorithm=algorithm(named=False),
            model=table(personal=text),
            training=table(local_epochs=count, batch_size=count),
            optimizer=table(lr=scheduled(rate), momentum=fraction, weight_decay=rate),
            share=table(metrics=st.sampled_from(["all", "accuracy", "none"])),
        ),
        max_size=2,
    ),
)


@given(tables)
@settings(max_examples=60, deadline=None)
def test_dump_and_load(given: dict[str, Any]) -> None:
    config = parse_config(given)
    dumped = dump_config(config)
    again = parse_config(tomllib.loads(dumped))
    assert again == config
    assert dump_config(again) == dumped


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": {"name": "adam", "amsgrad": True}},
        {"optimizer": {"name": "adamw"}, "clients": {"0": {"optimizer": {"weight_decay": 0.1}}}},
        {"records": {"best_by": "holdout"}, "split": {"holdout": 0.1}},
    ],
)
def test_a_dump_holds_defaults_that_have_no_effect_and_loads(given: dict[str, Any]) -> None:
    config = parse_config(given)
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.toml"
    path.write_text("", encoding="utf-8")
    config = load_config(path)
    assert config == Config()
    assert config.algorithm == {"name": "fml"}
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.momentum) == ("sgd", 0.01, 0.9)
    assert (config.optimizer.weight_decay, config.training.batch_size, config.training.local_epochs) == (5e-4, 128, 5)
    dumped = tomllib.loads(dump_config(config))
    assert dumped["rounds"] == 20
    assert dumped["optimizer"]["weight_decay"] == 5e-4  # a default is written out
    assert "root" not in dumped["data"]  # what is unset has no word in TOML


@pytest.mark.parametrize(
    "change",
    [
        lambda: {"optimizer": {"lr": Schedule(0.1, 0.01, "cosine")}},
        lambda: {"algorithm": {"name": "fml", "alpha": Schedule(0.9, 0.1)}},
        lambda: {"clients": {"0": {"algorithm": {"beta": Schedule(0.9, 0.1, "step", 0.25)}}}},
        lambda: {"data": {"root": Path("/data"), "size": (8, 8)}},
        lambda: {"optimizer": {"momentum": None, "weight_decay": None}},  # None is unset: 0.9 and 5e-4
        lambda: {"optimizer": {"name": "rmsprop", "momentum": None, "centered": None}},
        lambda: {"optimizer": {"lr": np.float64(0.1)}, "algorithm": {"name": "fml", "alpha": np.float64(0.1)}},
    ],
)
def test_values_of_python(change: Callable[[], dict[str, Any]]) -> None:
    config = parse_config(change())
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_a_home_folder() -> None:
    assert parse_config({"data": {"root": "~/x"}}).data.root == Path.home() / "x"


def test_a_schedule_in_words() -> None:
    config = parse_config({"optimizer": {"lr": {"start": 1, "end": 0.5, "shape": "step", "at": 0.25}}})
    assert config.optimizer.lr == Schedule(1.0, 0.5, "step", 0.25)


def test_one_name_is_a_list_of_one() -> None:
    assert parse_config({"model": {"personal": "lenet5"}}).model.personal == ("lenet5",)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().rounds = 3  # type: ignore[misc]
