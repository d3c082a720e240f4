"""Statistics over all clients: against numpy and scikit-learn on the rows of all clients together, and what is refused."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedmutual
from fedmutual import data
from fedmutual.config import Config, parse_config
from fedmutual.data.statistics import (
    DIGITS,
    FRACTION_BITS,
    RANGE,
    Layout,
    add_sums,
    decode_total,
    encode_number,
    read_sums,
    sum_rows,
)
from fedmutual.errors import ConfigError, UserError
from fedmutual.files import read_json
from own_data import config, everything, npz

BY_SUMS: dict[str, Any] = {"mean": "federated", "std": "federated"}


def pool(federation: data.Federation) -> np.ndarray[Any, Any]:
    """Return the training rows of all clients as they are after scaling, in float64 [n, inputs, values]."""
    parts = [everything(shares.private)[0] for shares in federation.clients.values()]
    x = torch.cat(parts).double()
    return x.reshape(len(x), x.shape[1], -1).numpy()


def tables(tmp_path: Path) -> dict[str, Any]:
    """Return [clients] with a table each, of other sizes, magnitudes and classes."""
    clients = {}
    for k, (name, rows) in enumerate({"north": 40, "south": 25, "west": 33}.items()):
        rng = np.random.default_rng(k)
        x = np.stack([rng.normal(3e6 + k, 20, rows), rng.normal(0, 1e-5, rows), np.full(rows, 0.1)], 1)
        clients[name] = {"data": npz(tmp_path / f"{name}.npz", x=x, y=np.arange(rows) % (2 + k))}
    return clients


def make_config(tmp_path: Path, **scaling: Any) -> Config:
    return parse_config({"data": {"classes": list("0123"), **scaling}, "clients": tables(tmp_path)})


def test_statistics_are_those_of_numpy_over_all_rows(tmp_path: Path) -> None:
    federation = data.load(make_config(tmp_path, **BY_SUMS))
    statistics, raw = federation.statistics, pool(data.load(make_config(tmp_path)))
    assert statistics is not None
    assert statistics.rows == len(raw)
    np.testing.assert_allclose(statistics.mean, raw.mean((0, 2)), rtol=1e-14)  # type: ignore[arg-type]
    np.testing.assert_allclose(statistics.std[:2], raw.std((0, 2))[:2], rtol=1e-6)  # type: ignore[arg-type]
    assert statistics.std[2] == 0  # a constant, although its float64 sums are rounded
    labels = np.concatenate([shares.private.labels for shares in federation.clients.values()])
    assert statistics.classes == {str(k): int((labels == k).sum()) for k in range(4)}
    assert statistics.missing == (0, 0, 0)
    rows = federation.clients["north"].private
    assert rows.name_row(0) == rows.hide_labels([1]).name_row(0) == f"row {rows.index[0]} of 'x' in {tmp_path / 'north.npz'}"
    scaled = pool(federation)
    np.testing.assert_allclose(scaled.mean((0, 2))[:2], 0, atol=2e-2)  # float32 has steps of 0.25 near 3e6
    np.testing.assert_allclose(scaled.std((0, 2))[:2], 1, rtol=1e-3)
    assert (scaled[:, 2] == 0).all()


@pytest.mark.parametrize("resident", [True, False])
def test_images_have_a_mean_for_each_channel(tmp_path: Path, resident: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (50, 6, 5, 3), dtype=np.uint8)
    source = npz(tmp_path / "a.npz", x=x, y=np.arange(50) % 2) | {"size": [4, 4], "resident": resident}
    federation = data.load(config(data=source | BY_SUMS))
    raw = pool(data.load(config(data=source)))
    assert federation.statistics is not None
    np.testing.assert_allclose(federation.statistics.mean, raw.mean((0, 2)), rtol=1e-13)  # type: ignore[arg-type]
    np.testing.assert_allclose(federation.statistics.std, raw.std((0, 2)), rtol=1e-10)  # type: ignore[arg-type]
    assert federation.space.scaling.mean == federation.statistics.moments.mean
    numbers = {"mean": federation.space.scaling.mean, "std": federation.space.scaling.std}
    by_hand = data.load(config(data=source | numbers))
    for i, shares in by_hand.clients.items():
        assert torch.equal(everything(federation.clients[i].private)[0], everything(shares.private)[0])


def test_published_scaling_and_own_scaling_are_replaced() -> None:
    federation = data.load(parse_config({"data": {"name": "digits", **BY_SUMS}}))
    assert federation.statistics is not None
    scaled = pool(federation)
    np.testing.assert_allclose([scaled.mean(), scaled.std()], [0, 1], atol=1e-6)
    assert federation.space.scaling.divisor == 16


def make_frame(rows: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(50 + 9 * seed, 12, rows),
            "sex": rng.choice(["f", "m"], rows),
            "admitted": (pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 900, rows), unit="D")).astype(str),
            "label": np.where(np.arange(rows) % 2, "ill", "well"),
        }
    )
    for column in ("age", "sex", "admitted"):
        frame.loc[rng.random(rows) < 0.2, column] = np.nan
    return frame


def test_columns_count_missing_cells_and_are_standardised_alike(tmp_path: Path) -> None:
    """Of the present cells of all clients; a missing number becomes the mean, so that it is 0 after scaling."""
    frames = {"north": make_frame(60, 0), "south": make_frame(45, 1)}
    clients = {}
    for name, frame in frames.items():
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        clients[name] = {"data": {"name": "csv", "root": str(tmp_path / f"{name}.csv")}}
    columns = {"age": "number", "sex": ["f", "m"], "admitted": {"kind": "date", "mean": 19000.0, "std": 7.0}}
    federation = data.load(parse_config({"data": {"columns": columns, **BY_SUMS}, "clients": clients}))
    cells = pd.concat([frames[i].iloc[shares.private.index] for i, shares in federation.clients.items()])
    days = (pd.to_datetime(cells["admitted"]) - pd.Timestamp("1970-01-01")).dt.days
    statistics = federation.statistics
    assert statistics is not None
    assert statistics.inputs == ("age", "sex", "admitted")
    assert statistics.missing == tuple(cells[list(columns)].isna().sum())
    assert statistics.mean == (pytest.approx(cells["age"].mean(), rel=1e-13), None, pytest.approx(days.mean(), rel=1e-13))
    assert statistics.std[0] == pytest.approx(cells["age"].std(ddof=0), rel=1e-12)
    for i in clients:
        age, _, admitted = federation.spaces[i].scaling.columns or ()
        assert (age.fill, age.mean, age.std) == (statistics.mean[0], statistics.mean[0], statistics.std[0])
        assert (admitted.fill, admitted.mean, admitted.std) == (statistics.mean[2], 19000, 7)
        x, _ = everything(federation.clients[i].private)
        lacking = frames[i].iloc[federation.clients[i].private.index]["age"].isna().to_numpy().copy()
        assert lacking.any()
        assert (x[torch.from_numpy(lacking), 0] == 0).all()


def test_the_order_and_number_of_clients_change_no_bit() -> None:
    rng = np.random.default_rng(3)
    layout = Layout(("a", "b"), ("x", "y"))
    rows = torch.from_numpy(rng.normal(0, 1e6, (90, 2)))
    labels = rng.integers(0, 2, 90)
    parts = [sum_rows(layout, [rows[k : k + 9]], labels[k : k + 9].tolist()) for k in range(0, 90, 9)]
    hidden = [sum_rows(layout, [rows[k : k + 9]], labels[k : k + 9].tolist(), hide_carries=True) for k in range(0, 90, 9)]
    together = sum_rows(layout, torch.split(rows, 9), labels.tolist())
    first = read_sums(layout, add_sums(parts))
    assert first == read_sums(layout, add_sums(parts[::-1])) == read_sums(layout, together)
    assert first == read_sums(layout, add_sums(hidden))


def test_a_column_without_a_value_has_no_mean_and_is_left_as_it_is() -> None:
    layout = Layout(("a", "b"), ())
    statistics = read_sums(layout, sum_rows(layout, [torch.tensor([[1.0, torch.nan], [3.0, torch.nan]])], []))
    assert (statistics.mean, statistics.std, statistics.missing) == ((2.0, None), (1.0, None), (0, 2))
    assert statistics.moments == ((2.0, 0.0), (1.0, 1.0))


@pytest.mark.parametrize(
    ("place", "value", "word"),
    [
        (0, 0, "rows"),
        (0, 7, "rows"),
        (1, -1, "classes"),
        (3, -1, "lacks"),
        (3, 99, "lacks"),
        (4 + 6 + 3, 0, "squares"),
        (4 + 6 + 5, -5, "squares"),
    ],
)
def test_words_that_no_rows_have_are_refused(place: int, value: int, word: str) -> None:
    """The words: rows, two classes; missing values, six digits of the sum, six of the squares."""
    layout = Layout(("a",), ("x", "y"))
    words = sum_rows(layout, [torch.tensor([[4.0], [9.0]])], [0, 1])
    assert words.tolist() == [2, 1, 1, 0, 0, 0, 0, 13, 0, 0, 0, 0, 0, 97, 0, 0]
    words[place] = value
    with pytest.raises(ValueError, match=word):
        read_sums(layout, words)


FAR = [{"x": np.ones((30, 3)) * [1, value, 1]} for value in (1e30, -1e30, 3e38)]
OTHER = [({"x": np.ones((30, 4))}, "inputs"), ({"x": np.ones((30, 3, 8))}, "inputs"), ({"y": np.arange(30) % 6}, "'4'")]


@pytest.mark.parametrize(("changes", "word"), [*((arrays, "input '1': the values are too large") for arrays in FAR), *OTHER])
def test_values_beyond_the_range_and_other_columns_or_classes_are_refused(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    arrays = {"x": np.ones((30, 3)), "y": np.arange(30) % 2} | changes
    clients = tables(tmp_path) | {"south": {"data": npz(tmp_path / "s.npz", **arrays)}}
    with pytest.raises(UserError, match="client 'south'") as caught:
        data.load(parse_config({"data": {"classes": list("0123"), **BY_SUMS}, "clients": clients}))
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"data": {"mean": "federated"}}, ("'data.mean'", "both")),
        ({"data": {"mean": "federated", "std": [0.1]}}, ("'data.std'", "both")),
        ({"data": {"mean": "local", "std": "federated"}}, ("'data.mean'", "'federated'")),
        ({"data": BY_SUMS, "clients": {"0": {"data": {"mean": [0.1]}}}}, ("'clients.0.data.mean'",)),
        ({"clients": {"0": {"data": BY_SUMS}}}, ("'clients.0.data.mean'",)),
        (
            {"data": BY_SUMS, "privacy": {"nets": "both", "sigma": 1.0}, "training": {"local_steps": 1}},
            ("'data.mean'", "epsilon"),
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(tables: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tables)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_run_records_the_statistics_and_equals_a_run_by_numbers(tmp_path: Path) -> None:
    common = {"rounds": 1, "partition": {"clients": 3}, "training": {"local_epochs": 1}, "engine": {"name": "inprocess"}}
    federated = fedmutual.run(parse_config({**common, "data": BY_SUMS}), tmp_path / "sums")
    about = read_json(tmp_path / "sums" / "environment.json")
    assert about["statistics"]["rows"] == sum(about["statistics"]["classes"].values()) == 1438
    assert about["scaling"]["mean"] == about["statistics"]["mean"]
    numbers = {key: about["scaling"][key] for key in ("mean", "std")}
    by_hand = fedmutual.run(parse_config({**common, "data": numbers}), tmp_path / "numbers")
    one, other = federated.global_model().state_dict(), by_hand.global_model().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert "federated" in (tmp_path / "sums" / "config.toml").read_text()
    resumed = fedmutual.run(parse_config({**common, "data": BY_SUMS, "rounds": 2}), tmp_path / "sums", resume=True)
    assert resumed.summary["rounds"] == 2


def test_stats_prints_the_statistics(tmp_path: Path, cli: Any) -> None:
    about = npz(tmp_path / "a.npz", x=np.array([[1.0, 5.0], [3.0, 5.0]] * 20), y=["ill", "well"] * 20)
    file = tmp_path / "a.toml"
    file.write_text(f'data = {{ name = "npz", root = "{about["root"]}" }}\npartition = {{ clients = 2 }}\n')
    code, out, _ = cli("stats", file)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["0", "2", "1", "0"] in lines
    assert ["1", "5", "0", "0"] in lines
    assert ["ill", "16"] in lines
    assert "epsilon" in cli.fail("stats", file, "--set", "privacy.nets=both", "--set", "privacy.sigma=1")


@pytest.mark.parametrize("task", ["multilabel", "segmentation"])
def test_label_sets_and_masks_are_not_row_classes(tmp_path: Path, task: str) -> None:
    shape = {"multilabel": (40, 3), "segmentation": (40, 4, 6)}[task]
    about = npz(tmp_path / "a.npz", x=np.zeros((40, 4, 6), "float32"), y=np.arange(np.prod(shape)).reshape(shape) % 2)
    shared = {"multilabel": "mlp", "segmentation": "unet"}[task]
    common = {"partition": {"clients": 2}, "training": {"task": task}, "model": {"shared": shared}}
    statistics = data.load(parse_config({**common, "data": {**about, **BY_SUMS}})).statistics
    assert statistics is not None
    assert (statistics.rows, statistics.classes, statistics.mean) == (32, {}, (0.0,))


# Numbers of any size in fixed point: words that add up whatever their order, against Python's exact fractions.

UNIT = Fraction(1, 2**FRACTION_BITS)
Numbers = st.lists(st.floats(-4e27, 4e27).map(Fraction), min_size=1, max_size=20)


def add(numbers: list[list[int]]) -> list[int]:
    """Return the sums of the words modulo 2^64, as signed integers: what masked words leave of them."""
    return [(sum(words) + 2**63) % 2**64 - 2**63 for words in zip(*numbers, strict=True)]


def test_words_by_hand() -> None:
    assert encode_number(Fraction(3)) == [0, 0, 0, 3, 0, 0]
    assert encode_number(Fraction(1, 2**96)) == [1, 0, 0, 0, 0, 0]
    assert encode_number(Fraction(-1, 2**96)) == [2**32 - 1] * 5 + [-1]
    assert decode_total([0, 0, 0, 2**32 + 5, 1, 0]) == 2**32 + 5 + 2**32  # digits above the base carry


@given(Numbers, st.booleans())
def test_words_add_up_to_the_sum(numbers: list[Fraction], hide_carries: bool) -> None:
    words = [encode_number(number, hide_carries) for number in numbers]
    assert all(-(2**63) <= word < 2**63 for one in words for word in one)
    exact = sum((Fraction(round(n / UNIT)) * UNIT for n in numbers), Fraction())
    assert decode_total(add(words)) == decode_total(add(words[::-1])) == exact


def test_hidden_carries_hide_the_sign_of_each_number() -> None:
    """Without them the highest digit is -1 for each negative number; with them it is random."""
    assert {encode_number(Fraction(n))[-1] for n in (-3, -2, -1)} == {-1}
    highest = [encode_number(Fraction(-1), hide_carries=True)[-1] for _ in range(50)]
    assert len(set(highest)) > 40
    assert all(encode_number(Fraction(7), True) != encode_number(Fraction(7), True) for _ in range(5))


@pytest.mark.parametrize("number", [RANGE, -RANGE, 1e300])
def test_a_number_beyond_the_range_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="4e\\+28"):
        encode_number(Fraction(number))
    assert len(encode_number(Fraction(RANGE) - 1)) == DIGITS
