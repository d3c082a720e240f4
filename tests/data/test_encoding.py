"""Tables with missing values, categories and dates: what data.columns makes of them, against scikit-learn and by hand."""

import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from fedmutual import data
from fedmutual.config import ColumnConfig, dump_config, parse_config
from fedmutual.data import table
from fedmutual.data.encoding import learn_encoding, make_encoding
from fedmutual.data.examples import ColumnPlan, Part
from fedmutual.data.objects import make_factory_source, make_memory_source
from fedmutual.data.rows import Rows
from fedmutual.data.scaling import Scaling
from fedmutual.data.suggest import describe_suggestion
from fedmutual.errors import BadRows, UserError
from own_data import config, everything, refused

KINDS: dict[str, Any] = {"age": "number", "sex": ["f", "m"], "admitted": "date"}
CLASSES = ["well", "ill"]


def make_frame(rows: int = 60, seed: int = 0) -> pd.DataFrame:
    """A table with a number, a category and a date, each with missing cells."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 90, rows).astype(float),
            "sex": rng.choice(["f", "m"], rows),
            "admitted": (pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 900, rows), unit="D")).astype(str),
            "label": np.where(np.arange(rows) % 2, "ill", "well"),
        }
    )
    for column in KINDS:
        frame.loc[rng.random(rows) < 0.2, column] = np.nan
    return frame


def write(path: Path, frame: pd.DataFrame) -> dict[str, Any]:
    """Write a table; [data] that names it."""
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False)
    return {"name": path.suffix[1:], "root": str(path)}


def clients(tmp_path: Path, **frames: pd.DataFrame) -> dict[str, Any]:
    """[clients] with a CSV each."""
    return {i: {"data": write(tmp_path / f"{i}.csv", frame)} for i, frame in frames.items()}


@pytest.mark.parametrize("file", ["a.csv", "a.parquet"])
def test_encoded_rows_are_those_of_scikit_learns_transformers(tmp_path: Path, file: str) -> None:
    frame = make_frame()
    federation = data.load(config(data=write(tmp_path / file, frame) | {"columns": KINDS}))
    days = (pd.to_datetime(frame["admitted"]) - pd.Timestamp("1970-01-01")).dt.days
    table = pd.DataFrame({"age": frame["age"], "sex": frame["sex"], "days": days})
    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    categories = OneHotEncoder(categories=[["f", "m"]], handle_unknown="ignore", sparse_output=False)
    expected = ColumnTransformer([("age", numbers, ["age"]), ("sex", categories, ["sex"]), ("days", numbers, ["days"])])
    expected.fit(table.iloc[federation.pool_clients().private.index])
    assert federation.space.columns == ("age", "sex=f", "sex=m", "admitted")
    for rows in (federation.pool_clients().private, federation.pool_clients().validation, federation.test):
        assert rows is not None
        x, _ = everything(rows)
        wanted = np.asarray(expected.transform(table.iloc[rows.index]), dtype=np.float32)
        np.testing.assert_allclose(x.numpy(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["label", "pair", "factory", "factory's pair"])
def test_frames_are_read_as_their_files(tmp_path: Path, form: str) -> None:
    frame, new = make_frame().assign(ward=pd.Categorical(["I", "NA", "II"] * 20)), make_frame(10, seed=1).assign(ward="I")
    frame["admitted"], frame["crp"] = pd.to_datetime(frame["admitted"]), ["<5", "7.25"] * 30
    kinds = KINDS | {"ward": ["I", "II"], "crp": {"kind": "number", "fill": 1, "indicator": True}}
    reading = config(data={"columns": kinds, "replace": {"crp": {"<5": "2.5"}}}).data
    paths = {"root": tmp_path / "train.csv", "test": tmp_path / "test.csv"}
    write(paths["root"], frame), write(paths["test"], new)
    from_file = table.read_table(reading.model_copy(update={"name": "csv"} | paths))
    train, test = ((f.drop(columns="label"), f["label"]) if "pair" in form else f for f in (frame, new))
    source = (
        make_factory_source((train, test) if form == "factory" else train, reading, "a")
        if "factory" in form
        else make_memory_source(train, test, "label" if form == "label" else None, "a", reading)
    )
    assert (source.plans, source.columns) == (from_file.plans, from_file.columns)
    for one, other in zip(source.parts, from_file.parts, strict=False):
        assert torch.equal(everything_of(one).nan_to_num(-1), everything_of(other).nan_to_num(-1))
        assert one.labels.tolist() == other.labels.tolist()


def everything_of(part: Part) -> torch.Tensor:
    """The cells of a table [n, columns]."""
    return part.x.take_one(range(len(part.x)))


COLUMNS = {
    "usual": [3.5, math.nan, 1.25, 8.0, 2.0],
    "one value": [0.1, 0.1, math.nan, 0.1],
    "one value but for rounding": [1e9, 1e9 + 1e-7, 1e9],
    "one row": [7.0],
    "all missing": [math.nan, math.nan],
}


@pytest.mark.parametrize("cells", COLUMNS.values(), ids=COLUMNS)
def test_learned_numbers_are_those_of_scikit_learns_transformers(cells: list[float]) -> None:
    column = np.array(cells)[:, None]
    imputer = SimpleImputer(strategy="median", keep_empty_features=True).fit(column)
    scaler = StandardScaler().fit(imputer.transform(column))
    (learned,) = learn_encoding(column, [ColumnPlan("age", ColumnConfig(kind="number"))]).columns
    assert learned.fill == imputer.statistics_[0]
    assert (learned.mean, learned.std) == pytest.approx((scaler.mean_[0], scaler.scale_[0]), rel=1e-14)


def test_steps_by_hand(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "dose": [1.0, 3.0, np.nan, 8.0] * 4,
            "when": ["1970-01-02", "1970-01-04T12:00", "", "1970-01-11"] * 4,
            "ward": ["b", "a", "", "a "] * 4,
            "label": CLASSES * 8,
        }
    )
    given = {"dose": "number", "when": {"kind": "date", "fill": 5, "mean": 2, "std": 2}, "ward": "category"}
    about = write(tmp_path / "a.csv", frame) | {"columns": given, "test": str(tmp_path / "a.csv")}
    federation = data.load(config(data=about, partition={"clients": 1}))
    steps = {c.name: c.model_dump(mode="json", exclude_unset=True) for c in federation.space.scaling.columns or ()}
    assert steps["dose"]["fill"] == 3  # the median of 1, 3 and 8
    assert steps["dose"]["mean"] == 3.75  # of 1, 3, 3 and 8
    assert steps["dose"]["std"] == pytest.approx(np.sqrt((2.75**2 + 0.75**2 * 2 + 4.25**2) / 4))
    assert steps["when"] == {"name": "when", "kind": "date", "fill": 5, "mean": 2, "std": 2}
    assert steps["ward"]["values"] == ["a", "b"]
    assert isinstance(federation.test, Rows)
    x, _ = everything(federation.test)
    assert x[:4, 1:].tolist() == [[-0.5, 0, 1], [0.75, 1, 0], [1.5, 0, 0], [4, 1, 0]]
    assert x[2, 0] == x[1, 0] == pytest.approx((3 - 3.75) / steps["dose"]["std"])


def test_only_training_rows_teach(tmp_path: Path) -> None:
    frame, other = make_frame(), make_frame(seed=1)
    other["age"] *= 1000
    about = write(tmp_path / "a.csv", frame) | {"columns": KINDS}
    recorded = []
    for test in (frame, other):
        federation = data.load(config(data=about | {"test": write(tmp_path / "t.csv", test)["root"]}))
        recorded.append(federation.space.scaling.columns)
    assert recorded[0] == recorded[1]


def test_a_value_absent_from_training_rows_is_not_a_feature(tmp_path: Path) -> None:
    frame, test = make_frame(), make_frame(seed=1)
    test["sex"] = "x"
    about = write(tmp_path / "a.csv", frame) | {"columns": KINDS | {"sex": "category"}}
    federation = data.load(config(data=about | {"test": write(tmp_path / "t.csv", test)["root"]}))
    assert federation.space.columns == ("age", "sex=f", "sex=m", "admitted")
    assert isinstance(federation.test, Rows)
    assert not everything(federation.test)[0][:, 1:3].any()


def test_columns_are_matched_by_name(tmp_path: Path) -> None:
    frame = make_frame()
    files = clients(tmp_path, a=frame, b=frame[["label", "admitted", "age", "sex"]].assign(ward=1))
    federation = data.load(parse_config({"clients": files, "data": {"columns": KINDS, "classes": CLASSES}}))
    assert federation.spaces["a"] == federation.spaces["b"]
    batches = [everything(federation.clients[i].private)[0] for i in "ab"]
    assert torch.equal(*batches)
    assert any("columns 'ward' are not in data.columns" in note for note in federation.notes)


def test_each_client_learns_its_own_steps_and_public_rows_are_encoded(tmp_path: Path) -> None:
    old = make_frame(seed=1)
    old["age"] += 1000
    files = clients(tmp_path, a=make_frame(), b=old)
    tables = {"clients": files, "data": {"columns": KINDS, "classes": CLASSES}, "split": {"public": 0.2}}
    federation = data.load(parse_config(tables | {"algorithm": {"name": "fedh2l", "public_batch": 2}}))
    fills = [(federation.spaces[i].scaling.columns or ())[0].fill for i in "ab"]
    assert fills[1] - fills[0] > 900
    assert federation.public is not None
    assert federation.public.sizes["a"] == len(federation.public.owners["a"]) * 4 * 4  # four features of float32
    assert abs(everything(federation.clients["b"].private)[0][:, 0].mean()) < 1e-5


def test_a_client_may_lack_a_column_with_an_indicator(tmp_path: Path) -> None:
    frames = {"north": make_frame(), "south": make_frame(seed=1).drop(columns=["age", "sex"])}
    columns = KINDS | {
        "age": {"kind": "number", "fill": 60, "mean": 50, "std": 20, "indicator": True},
        "sex": {"kind": "category", "values": ["f", "m"], "indicator": True},
    }
    tables: dict[str, Any] = {"data": {"columns": columns, "classes": CLASSES}, "clients": clients(tmp_path, **frames)}
    about = parse_config(tables)
    federation = data.load(about)
    names = ("age", "age is missing", "sex=f", "sex=m", "sex is missing", "admitted")
    assert {space.columns for space in federation.spaces.values()} == {names}
    x, _ = everything(federation.clients["south"].private)
    assert x[:, :5].tolist() == [[0.5, 1, 0, 0, 1]] * len(x)
    north = federation.clients["north"].private
    x, _ = everything(north)
    missing = frames["north"]["age"].isna().to_numpy()[north.index]
    assert x[:, 1].tolist() == missing.astype(float).tolist()
    assert x[:, 4].tolist() == frames["north"]["sex"].isna().to_numpy()[north.index].astype(float).tolist()
    assert any("has no column 'age', so its cells are empty" in note for note in federation.notes)
    encoding = make_encoding(federation.spaces["north"].scaling.columns or ())
    assert encoding.features == names
    rows = table.read_rows(tmp_path / "south.csv", federation.spaces["north"], about.data)[0].x.take([0])
    assert encoding(rows)[0, :5].tolist() == [0.5, 1, 0, 0, 1]
    for setting, words in (
        ({"kind": "number", "indicator": True}, "has no column 'age'; state what replaces its cells: data.columns.age.fill"),
        ({"kind": "number"}, "there is no column 'age'"),
    ):
        columns["age"] = setting
        with pytest.raises(UserError, match=words):
            data.load(parse_config(tables))


def test_problems_of_all_files_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(BadRows) as caught:
        data.load(parse_config({"clients": clients(tmp_path, a=make_frame(), b=make_frame(seed=1))}))
    problems = data.list_problems(caught.value)
    assert [(Path(p.split(":")[0]).name, p.split("'")[1]) for p in problems] == [
        (f"{i}.csv", column) for i in "ab" for column in KINDS
    ]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "cell", "words"),
    [
        ("age", "old", "column 'age' holds 'old' in line 3, but data.columns.age is for numbers"),
        ("age", "inf", "column 'age' holds 'inf' in line 3, but numbers are finite"),
        ("sex", "x", "column 'sex' holds 'x' in line 3, but the values are 'f', 'm'"),
        ("admitted", "31.5.2024", "column 'admitted' holds '31.5.2024' in line 3, but dates must be written as 2026-05-31"),
    ],
)
def test_cells_that_cannot_be_read(tmp_path: Path, column: str, cell: str, words: str) -> None:
    frame = make_frame().astype(object)
    frame.loc[1, column] = cell
    refused(words, data=write(tmp_path / "a.csv", frame) | {"columns": KINDS})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"columns": {"agee": "number"}}, "there is no column 'agee', which data.columns names"),
        ({"columns": {"label": "category"}}, "key 'data.columns' has 'label', which data.label names"),
        ({"columns": KINDS, "mean": [1.0], "std": [1.0]}, "'data.mean' and 'data.std' have no effect with data.columns"),
        ({"name": "digits", "columns": KINDS}, "key 'data.columns' has no effect with data.name = 'digits'"),
    ],
)
def test_settings_that_contradict_the_columns(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    refused(words, data=write(tmp_path / "a.csv", make_frame()) | more)


def test_differential_privacy_needs_steps_that_are_not_learned(tmp_path: Path) -> None:
    private = {"nets": "both", "sigma": 1.0}
    about = write(tmp_path / "a.csv", make_frame())
    words = "the steps of columns 'age', 'admitted' would be learned from private rows"
    refused(words, data=about | {"columns": KINDS}, privacy=private)
    public = {"fill": 50.0, "mean": 50.0, "std": 20.0}
    columns = {"age": {"kind": "number", **public}, "sex": ["f", "m"]}
    assert data.load(config(data=about | {"columns": columns}, privacy=private)).space.shape == (3,)


def test_a_recommendation_serves_all_clients(tmp_path: Path) -> None:
    b = make_frame(seed=1)[["admitted", "label", "sex", "age"]].assign(note=[f"text {i}" for i in range(60)], sex="x")
    files = clients(tmp_path, a=make_frame().assign(note=[f"note {i}" for i in range(60)], ward=1), b=b)
    tables: dict[str, Any] = {"clients": files, "data": {"classes": CLASSES}}
    *sentences, suggested = describe_suggestion(parse_config(tables))
    columns = tomllib.loads(suggested)["data"]["columns"]
    assert columns == {"age": "number", "sex": ["f", "m", "x"], "admitted": "date"}
    assert [s.split("'")[1] for s in sentences if s.endswith("left out")] == ["ward", "note"]
    tables["data"]["columns"] = columns
    adopted = parse_config(tables)
    assert data.load(adopted).spaces["b"].shape == (5,)
    assert describe_suggestion(adopted) == []
    assert parse_config(tomllib.loads(dump_config(adopted))) == adopted


def test_a_clean_table_of_numbers_stays_as_it_is(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": np.arange(60) % 7 / 3, "b": np.arange(60) % 5, "label": CLASSES * 30})
    plain = config(data=write(tmp_path / "a.csv", frame))
    assert describe_suggestion(plain) == []
    federation = data.load(plain)
    rows = federation.pool_clients().private
    assert federation.space.scaling.columns is None
    assert torch.equal(everything(rows)[0], torch.tensor(frame[["a", "b"]].to_numpy(np.float32)[rows.index]))


def test_the_record_is_read_back(tmp_path: Path) -> None:
    federation = data.load(config(data=write(tmp_path / "a.csv", make_frame()) | {"columns": KINDS}))
    read = Scaling.model_validate_json(federation.space.scaling.model_dump_json(exclude_unset=True))
    assert (read, read.columns) == (federation.space.scaling, federation.space.scaling.columns)
    assert read.columns is not None
    cells = torch.tensor([[40.0, 1.0, 19000.0], [torch.nan, torch.nan, torch.nan]], dtype=torch.float64)
    encoded = make_encoding(read.columns)(cells)
    assert encoded[0, 1:3].tolist() == [0, 1]
    assert encoded[1, 1:3].tolist() == [0, 0]
    assert encoded[1, 0] == pytest.approx((read.columns[0].fill - read.columns[0].mean) / read.columns[0].std)


def test_cells_beyond_the_range_of_their_sum(tmp_path: Path) -> None:
    frame = make_frame().assign(age=np.where(np.arange(60) % 2, 1.7e308, -1.7e308))
    with np.errstate(all="ignore"):
        refused("line 2 of", "holds NaN or infinite values", data=write(tmp_path / "a.csv", frame) | {"columns": KINDS})


def test_parquet_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("age,label\n1,ill\n")
    refused("a.parquet: cannot be read as Parquet", data={"name": "parquet", "root": str(tmp_path / "a.parquet")})
