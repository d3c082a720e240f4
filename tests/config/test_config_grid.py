"""Values to choose among: how they are read, called and written."""

import re

import pytest

from fedmutual.config import parse_override
from fedmutual.config.grid import (
    draw_combinations,
    expand_grid,
    format_value,
    list_combinations,
    make_folder_name,
    make_label,
    read_grid,
)
from fedmutual.core import Schedule
from fedmutual.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("optimizer.lr=0.003,0.01, 0.03", "optimizer.lr", [0.003, 0.01, 0.03]),
        ("rounds=5", "rounds", [5]),
        ("model.shared=mlp,cnn1", "model.shared", ["mlp", "cnn1"]),
        ('model.personal=["mlp","lenet5"]', "model.personal", [["mlp", "lenet5"]]),
        ('model.personal=["mlp","lenet5"],["mlp", "mlp"]', "model.personal", [["mlp", "lenet5"], ["mlp", "mlp"]]),
        ("algorithm.alpha={start=0.9,end=0.3},0.5", "algorithm.alpha", [{"start": 0.9, "end": 0.3}, 0.5]),
        ('name="a,b",\'c,"d\'', "name", ["a,b", 'c,"d']),
        ('name="a\\",b",c', "name", ['a",b', "c"]),
        ("model.shared=my_models:Wide,mlp", "model.shared", ["my_models:Wide", "mlp"]),
        ("data.root=/data/a=b", "data.root", ["/data/a=b"]),
    ],
)
def test_values_are_read(text: str, key: str, values: list[object]) -> None:
    assert read_grid([text]) == {key: values}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["optimizer.lr="], "--set optimizer.lr=: the key has no value; write --set key=v1,v2"),
        (["optimizer.lr=0.1,,0.2"], "--set optimizer.lr=0.1,,0.2: the key has an empty value among its values"),
        (["optimizer.lr=0.1,"], "the key has an empty value among its values"),
        (["optimizer.lr"], "--set optimizer.lr: write key=value"),
        (["=1,2"], "--set =1: write key=value"),
        (["rounds=1", "rounds=2"], "--set names 'rounds' twice; name it once, with its values separated by commas"),
    ],
)
def test_invalid_grids_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_grid(texts)


def test_every_combination_the_last_key_fastest() -> None:
    assert list(list_combinations({"a": [1, 2], "b": [3], "c": [4, 5]})) == [
        {"a": 1, "b": 3, "c": 4},
        {"a": 1, "b": 3, "c": 5},
        {"a": 2, "b": 3, "c": 4},
        {"a": 2, "b": 3, "c": 5},
    ]


RATE = {"optimizer.lr": [{"log-uniform": [0.001, 0.1]}]}


def draw(grid: dict[str, list[object]], trials: int, seed: int = 0) -> list[dict[str, object]]:
    return draw_combinations(expand_grid(grid), trials, seed)


def test_draws_of_a_key_depend_on_the_seed_alone() -> None:
    rates = [one["optimizer.lr"] for one in draw(RATE, 6)]
    beside = draw({"algorithm.mu": [0.1, 1.0], **RATE}, 9)
    assert [one["optimizer.lr"] for one in beside][:6] == rates, "neither on other keys nor on the number of trials"
    assert draw(RATE, 6, seed=1) != draw(RATE, 6)
    integers = {"training.local_epochs": [{"integers": [1, 5]}]}
    assert draw(integers, 20)[:7] == draw(integers, 7)


def test_draws_spread_over_their_range() -> None:
    rates = [one["optimizer.lr"] for one in draw(RATE, 400)]
    assert all(0.001 <= rate <= 0.1 for rate in rates)
    assert 160 < sum(rate < 0.01 for rate in rates) < 240, "half of a log-uniform range lies below its geometric mean"
    shares = [one["a"] for one in draw({"a": [{"uniform": [2, 4]}]}, 400)]
    assert 160 < sum(share < 3 for share in shares) < 240
    assert {one["a"] for one in draw({"a": [{"integers": [1, 4]}]}, 100)} == {1, 2, 3, 4}
    assert {one["a"] for one in draw({"a": ["x", "y"], "b": [1]}, 50)} == {"x", "y"}
    assert {one["a"] for one in draw({"a": [{"choices": ["x", "y"]}]}, 50)} == {"x", "y"}
    assert {len(str(rate)) for rate in shares} <= {1, 3, 4}, "three digits, for the names of folders"
    for ends in ([0.999, 0.9999], [-0.9999, -0.999]):
        assert len({one["a"] for one in draw({"a": [{"uniform": ends}]}, 50)}) > 40, "not only the ends of a narrow range"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"uniform": [0.5, 0.1]}], "write two numbers, the smaller one first: {uniform=[0.1,0.9]}"),
        ([{"uniform": [0.5, 0.5]}], "write two numbers, the smaller one first"),
        ([{"uniform": []}], "write two numbers"),
        ([{"uniform": [0.1, float("nan")]}], "write two numbers"),
        ([{"integers": [1, 2.5]}], "write two whole numbers, the smaller one first: {integers=[1,5]}"),
        ([{"log-uniform": [0, 1]}], "write two numbers above 0"),
        ([{"choices": []}], "there is nothing to choose from"),
        ([{"uniform": [0, 1]}, 0.5], "a range stands alone, and here are 2 values; give the range or a list"),
    ],
)
def test_invalid_ranges_are_refused(values: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^key 'a': .*{re.escape(message)}"):
        draw({"a": values}, 3)


@pytest.mark.parametrize("value", [{"bounds": [0, 1]}, {"uniform": [0, 1]}])
def test_a_table_of_two_numbers_can_be_a_value(value: dict[str, list[int]]) -> None:
    assert [c["a"] for c in draw({"a": [{"choices": [value]}]}, 2)] == [value, value]
    if "uniform" not in value:
        assert [c["a"] for c in draw({"a": [value]}, 2)] == [value, value]


def test_no_trials_are_refused() -> None:
    with pytest.raises(ConfigError, match="trials = 0: must be 1 or more"):
        draw(RATE, 0)


def test_a_label_has_as_much_of_a_key_as_tells_it_from_others() -> None:
    assert make_label({"optimizer.lr": 0.01, "algorithm.alpha": 0.3}) == "lr=0.01, alpha=0.3"
    assert (
        make_label({"clients.0.optimizer.lr": 0.01, "optimizer.lr": 0.1}) == "clients.0.optimizer.lr=0.01, optimizer.lr=0.1"
    )
    assert make_label({"partition.alpha": 1, "algorithm.alpha": 0.3}) == "partition.alpha=1, algorithm.alpha=0.3"
    assert make_label({"clients.0.algorithm.alpha": 1}) == "clients.0.algorithm.alpha=1"


def test_folders_of_unlike_labels_are_unlike_and_plain() -> None:
    assert make_folder_name("lr=0.01, alpha=0.3") == "lr=0.01,alpha=0.3"
    labels = ['personal=["a/b"]', 'personal=["a b"]', "personal=[a:b]", "x" * 300, "x" * 301, "shared=../../etc"]
    names = [make_folder_name(label) for label in labels]
    assert len(set(names)) == len(labels)
    assert all(re.fullmatch(r"[\w.=,+-]{1,110}", name, re.ASCII) for name in names)
    assert names == [make_folder_name(label) for label in labels]


@pytest.mark.parametrize(
    "value",
    [
        0.003,
        1e-05,
        5,
        True,
        "mlp",
        "a,b",
        "07",
        "true",
        'say "no"',
        ["mlp", "lenet5"],
        {"start": 0.9, "end": 0.3, "shape": "step"},
        {"own label": "ü", "b": [1, 2.5]},
    ],
)
def test_what_is_written_is_read_back(value: object) -> None:
    """As `run --set` reads it, and as `sweep --set` does: one value, not several."""
    text = f"key={format_value(value)}"
    assert parse_override(text) == ("key", value)
    assert read_grid([text]) == {"key": [value]}


def test_a_schedule_is_written_as_its_table() -> None:
    assert format_value(Schedule(0.9, 0.3, "cosine")) == '{start=0.9,end=0.3,shape="cosine",at=0.5}'


def test_a_grid_from_python_may_name_what_is_fixed_without_a_list() -> None:
    assert expand_grid(
        {"rounds": 5, "model.shared": "mlp", "optimizer.lr": (0.1, 0.2), "model.personal": [["mlp", "cnn1"]]}
    ) == {"rounds": [5], "model.shared": ["mlp"], "optimizer.lr": [0.1, 0.2], "model.personal": [["mlp", "cnn1"]]}
    with pytest.raises(ConfigError, match=r"^the key 'rounds' has no value to try; list some, or remove it$"):
        expand_grid({"rounds": []})
