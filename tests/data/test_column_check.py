"""Columns of tables that are no features: copies, row numbers, columns without a name; whole numbers that are rounded."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import TensorDataset

import fedmutual
from fedmutual import data
from fedmutual.config import DataConfig, parse_config
from fedmutual.data.column_check import check_columns
from fedmutual.data.objects import make_memory_source
from fedmutual.data.suggest import describe_suggestion
from fedmutual.errors import ConfigError, DataError
from fedmutual.federation import build
from fedmutual.federation.experiment import Experiment
from fedmutual.studies.site_objects import hold_sites
from own_data import config, refused

ROWS = 40
A = np.random.default_rng(0).normal(size=ROWS).round(3)
Y = np.arange(ROWS) % 2


def write(path, table, **settings):
    """Write a table of columns [(name, cells), ...] as CSV, and return the configuration of data with the label y."""
    names, cells = zip(*table, strict=True)
    rows = [",".join(map(str, row)) for row in zip(*cells, strict=True)]
    path.write_text("\n".join([",".join(names), *rows]) + "\n")
    return config(data={"name": "csv", "root": str(path), "label": "y", **settings})


def make_frame(columns):
    return pd.concat([pd.Series(cells, name=name) for name, cells in columns], axis=1)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([("y", Y), ("a", A), ("y", Y)], "columns 1 and 3 (A and C in a spreadsheet) have one name, 'y'"),
        ([("age", A), ("age", A), ("y", Y), ("age", Y)], "columns 1, 2 and 4 (A, B and D in a spreadsheet) have one name,"),
        ([("age", A), (" age", Y), ("y", Y)], "columns 1 and 2 (A and B in a spreadsheet) have one name, 'age'"),
        ([("a", A), ("y", Y), ("y.1", Y)], "column 'y.1' is a copy of the label"),
        ([("a", A), ("a.1", A), ("y", Y)], "column 'a.1' is a copy of column 'a'"),
    ],
)
def test_columns_of_one_name_are_refused(tmp_path, columns, words):
    with pytest.raises(fedmutual.UserError) as of_file:
        data.load(write(tmp_path / "a.csv", columns))
    site = fedmutual.Site(train=make_frame(columns), label="y")
    with pytest.raises(fedmutual.UserError) as of_frame:
        fedmutual.federate({"a": site, "b": site}, "fml", "mlp", rounds=1, progress=False)
    assert words in str(of_file.value)
    assert words in str(of_frame.value)


def test_columns_of_one_name_are_refused_in_parquet(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table([A, A, Y], names=["a", "a", "y"]), tmp_path / "a.parquet")
    with pytest.raises(fedmutual.UserError, match="have one name, 'a'"):
        data.load(config(data={"name": "parquet", "root": str(tmp_path / "a.parquet"), "label": "y"}))


def test_a_spreadsheet_has_letters_after_z(tmp_path):
    columns = [*((f"c{k}", A) for k in range(26)), ("c0", A), ("y", Y)]
    with pytest.raises(fedmutual.UserError, match=r"columns 1 and 27 \(A and AA in a spreadsheet\)"):
        data.load(write(tmp_path / "a.csv", columns))


@pytest.mark.parametrize(
    ("indexes", "dropped"), [([""], ["Unnamed: 0"]), (["", "Unnamed: 0"], ["Unnamed: 0.1", "Unnamed: 0"])]
)
@pytest.mark.parametrize("repeats", [1, 8])
def test_row_numbers_of_pandas_are_refused(tmp_path, indexes, dropped, repeats):
    columns = [*((name, np.tile(np.arange(ROWS), repeats)) for name in indexes),
               ("a", np.tile(A, repeats)), ("y", np.tile(Y, repeats)), ("note", np.full(ROWS * repeats, "x"))]  # fmt: skip
    fix = "data.drop = " + str(["note", *dropped]).replace("'", '"')
    with pytest.raises(fedmutual.UserError, match=re.escape(fix)):
        data.load(write(tmp_path / "a.csv", columns, drop=["note"]))
    assert data.load(write(tmp_path / "a.csv", columns, drop=["note", *dropped])).space.columns == ("a",)
    assert data.load(write(tmp_path / "a.csv", columns, columns={"a": "number"})).space.columns == ("a",)
    *_, suggested = describe_suggestion(
        write(tmp_path / "a.csv", [*columns[:-1], ("sex", ["f", "m"] * (ROWS // 2) * repeats)])
    )
    assert "Unnamed" not in suggested
    frame = pd.read_csv(tmp_path / "a.csv")
    with pytest.raises(fedmutual.UserError, match=re.escape(f"DataFrame.drop(columns={dropped})")):
        make_memory_source(frame.drop(columns=["note"], errors="ignore"), None, "y", "site 'a'")


def test_a_delimiter_at_the_end_of_each_line_is_a_column_without_a_name(tmp_path):
    columns = [("a", A), ("y", Y), ("", [""] * ROWS)]
    with pytest.raises(fedmutual.UserError) as problem:
        data.load(write(tmp_path / "a.csv", columns))
    assert str(problem.value).count("Unnamed: 2") == 2  # one sentence, with its fix
    assert data.load(write(tmp_path / "a.csv", columns, drop=["Unnamed: 2"])).space.columns == ("a",)


COPIES = [Y, Y * 3.5 - 1, 1 - Y]
NO_COPIES = [A, np.where(np.arange(ROWS) == 7, 1 - Y, Y), np.zeros(ROWS), np.arange(ROWS) % 4]


@pytest.mark.parametrize(("cells", "is_reported"), [*((c, True) for c in COPIES), *((c, False) for c in NO_COPIES)])
def test_a_feature_that_determines_the_label_is_reported(tmp_path, cells, is_reported):
    columns = [("a", A), ("copy", cells), ("y", np.where(Y, "ill", "well"))]
    for settings in ({}, {"columns": {"a": "number", "copy": "number"}}):
        notes = data.load(write(tmp_path / "a.csv", columns, **settings)).notes
        assert any("'copy' determines the label of every training row" in note for note in notes) == is_reported
    frame = config(data={"name": "csv", "root": str(tmp_path / "a.csv"), "label": "y", "drop": ["copy"]})
    assert not any("determines" in note for note in data.load(frame).notes)


@pytest.mark.parametrize("others", [[], [("il", A)], [("400", 0 * A), ("400.1", 0 * A)]])
def test_a_name_with_a_dot_is_no_copy(tmp_path, others):
    columns = [("il.6", 3.5 * Y + 1), *others, ("y", Y)]
    notes = data.load(write(tmp_path / "a.csv", columns)).notes
    assert any("'il.6' determines the label of every training row" in note for note in notes)
    frame = make_frame(columns)
    for train, label in ((frame, "y"), ((frame.drop(columns="y"), frame["y"]), None)):
        site = fedmutual.Site(train=train, label=label)
        with hold_sites({"a": site, "b": site}, "mlp") as (objects, _):
            source = objects["data.a"]()
        assert any("'il.6' determines" in note for note in check_columns(source, Y, DataConfig()))


def test_a_feature_that_equals_the_numbers_to_learn_is_reported(tmp_path):
    settings = write(tmp_path / "a.csv", [("copy", A), ("b", Y), ("y", A)]).model_dump()
    notes = data.load(config(data=settings["data"], training={"task": "regression"})).notes
    assert [note for note in notes if "'copy' determines the label" in note]


COUNTS = {
    "counts": (np.arange(12), True),
    "in twos": (np.arange(5, 45, 2), True),
    "downwards": (np.arange(60)[::-1], True),
    "begins again": (np.tile(np.arange(20), 3), True),
    "short and shuffled": (np.random.default_rng(0).permutation(40), False),
    "long and shuffled": (np.random.default_rng(0).permutation(60), True),
    "begins again often": (np.tile(np.arange(60), 4), True),
    "hours": (np.tile(np.arange(24), 4), False),
    "months": (np.tile(np.arange(1, 13), 8), False),
    "few rows": (np.arange(8), True),
    "few rows from another number": (np.arange(5, 13), False),
    "alternates": (Y, False),
    "constant": (np.full(40, 3), False),
    "of decimals": (np.arange(60) / 2, False),
}


@pytest.mark.parametrize(("cells", "is_reported"), COUNTS.values(), ids=COUNTS)
def test_columns_that_identify_or_count_the_rows_are_reported(tmp_path, cells, is_reported):
    rng = np.random.default_rng(1)
    columns = [("id", cells), ("a", rng.normal(size=len(cells)).round(3)), ("y", rng.permutation(np.arange(len(cells)) % 2))]
    notes = data.load(write(tmp_path / "a.csv", columns)).notes
    assert any("'id'" in note and 'data.drop = ["id"]' in note for note in notes) == is_reported


@pytest.mark.parametrize(
    ("cells", "is_reported"),
    [
        (1_700_000_001 + Y, True),
        (2**60 + 1 + Y, True),
        (2**24 + Y * 2, False),
        (Y * 1e20, False),
        (A * 1e9 + 0.25, False),
        (1e6 + np.arange(ROWS) / 100, True),
        (1e6 + np.arange(ROWS) / 16, False),
        (A * 1e-50, True),
        (A / 3, False),
    ],
)
@pytest.mark.parametrize("others", [A, Y])
def test_numbers_that_float32_does_not_keep_apart_are_reported(tmp_path, cells, is_reported, others):
    columns = [("t", cells), ("a", others), ("y", np.random.default_rng(1).permutation(Y))]
    of_file = data.load(write(tmp_path / "a.csv", columns)).notes
    source = make_memory_source(make_frame(columns), None, "y", "site 'a'")
    assert source.train.x.take(range(ROWS))[:, 0].tolist() == cells.astype(np.float32).tolist()
    x, y = np.stack([cells.astype(float), others], 1), columns[2][1]
    rows = TensorDataset(torch.tensor(x), torch.tensor(y))
    inputs = () if cells.max() > 2**53 else ((x, y), ({"t": x[:, 0], "u": x[:, 1]}, y), rows)
    held = [make_memory_source(one, None, None, "site 'a'").notes for one in inputs]
    for name, notes in zip(("t", "t", "feature 0", "t", "feature 0"), (of_file, source.notes, *held), strict=False):
        assert any(f"'{name}' holds numbers that float32" in note for note in notes) == is_reported
    standardised = data.load(write(tmp_path / "a.csv", columns, columns={"t": "number", "a": "number"}))
    assert not any("float32" in note for note in standardised.notes)


def test_bfloat16_tensors_are_taken_and_complex_columns_are_refused():
    x = torch.tensor([[0.5], [1.5]], dtype=torch.bfloat16)
    assert make_memory_source((x, np.arange(2)), None, None, "a").train.x.take([0, 1]).tolist() == [[0.5], [1.5]]
    with pytest.raises(DataError, match="the columns 'c' are not numbers"):
        make_memory_source(pd.DataFrame({"c": [1j, 2], "y": [0, 1]}), None, "y", "a")


def test_a_number_above_the_greatest_float32_is_refused():
    with pytest.raises(fedmutual.DataError, match="row 1 of 'x' in site 'a' holds a number above 3"):
        make_memory_source((np.array([[0.5], [1e39]]), np.arange(2)), None, None, "site 'a'").train.x.take([0])


# Tables of several clients: a network takes columns by position, so they are held to one order by name.

NAMES = ["age", "pulse", "heat"]
LATER = {"shared": "mlp", "part": "features.fc2", "adaptor": "rest"}


def table(path: Path, columns: list[str], seed: int) -> str:
    x = np.random.default_rng(seed).normal(size=(30, len(columns)))
    rows = "".join(",".join(f"{v:.3f}" for v in row) + f",{'ill' if row[0] > 0 else 'well'}\n" for row in x)
    path.write_text(",".join([*columns, "label"]) + "\n" + rows)
    return str(path)


@pytest.fixture
def make_pair(tmp_path: Path) -> Callable[..., Experiment]:
    """The experiment of two clients, the second with these columns."""

    def make_experiment(columns: list[str], **further_tables: Any) -> Experiment:
        files = {"a": table(tmp_path / "a.csv", NAMES, 0), "b": table(tmp_path / "b.csv", columns, 1)}
        clients = {i: {"data": {"name": "csv", "root": file}} for i, file in files.items()}
        tables = {"rounds": 1, "model": {"shared": "mlp"}, "clients": clients, "data": {"classes": ["well", "ill"]}}
        return build.build(parse_config(tables | further_tables))

    return make_experiment


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (NAMES[::-1], "client 'b' has the same columns in another order ('heat', 'pulse', 'age'), and client 'a' 'age',"),
        (["age", "pulse", "salt"], "client 'b' has other columns ('salt'), and client 'a' 'age', 'pulse', 'heat'; the"),
    ],
)
def test_columns_that_differ_are_refused_where_what_is_shared_takes_them(
    make_pair: Any, columns: list[str], words: str
) -> None:
    for model in ({"shared": "mlp"}, {"shared": "mlp", "part": "features"}):
        with pytest.raises(ConfigError) as caught:
            make_pair(columns, model=model)
        assert str(caught.value).startswith(words)
        assert "model.part = 'features.fc2', with model.adaptor = 'rest'" in str(caught.value)
    with pytest.raises(ConfigError, match=r"^the public set \(split.public\) is for all clients, but client 'b' has "):
        make_pair(columns, algorithm={"name": "fedh2l", "public_batch": 2}, split={"public": 0.2})


def test_columns_may_differ_if_no_client_uses_a_shared_first_layer(make_pair: Any) -> None:
    assert make_pair(NAMES, model={"shared": "mlp"}).nets.complete
    for columns in (NAMES[::-1], ["salt", "height"]):
        make_pair(columns, model=LATER)
        make_pair(columns, algorithm={"name": "independent"})


def test_more_columns_are_refused_with_what_helps(make_pair: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"differs in shape .* share another part \(of network 'mlp': model.part = 'features"
    ):
        make_pair([*NAMES, "salt"])


def test_columns_that_are_not_features_are_left_out_by_name(tmp_path: Path) -> None:
    rows = "".join(f"{900 + i},x{i},{i % 9},{'ill' if i % 2 else 'well'}\n" for i in range(60))
    (tmp_path / "a.csv").write_text(f"id,name,age,label\n{rows}")
    about = {"name": "csv", "root": str(tmp_path / "a.csv")}
    refused("column 'name' holds 'x0' in line 2", data=about)
    loaded = data.load(config(data=about | {"drop": ["name"]}))
    assert loaded.space.columns == ("id", "age")
    assert any("a.csv: 'id' holds a different whole number in every row, as identifiers do" in note for note in loaded.notes)
    assert any("some of them large (column 'id' is about 93" in note for note in loaded.notes)
    loaded = data.load(config(data=about | {"drop": ["name", "id"]}))
    assert loaded.space.columns == ("age",)
    assert not any("identifiers" in note or "large" in note for note in loaded.notes)
    (tmp_path / "t.csv").write_text("age,label\n3,ill\n5,well\n")  # of a test file they may be gone already
    data.load(config(data=about | {"drop": ["name", "id"], "test": str(tmp_path / "t.csv")}))
    with pytest.raises(ConfigError, match=r"key 'data.drop' has no effect with data.name = 'digits'"):
        data.load(config(data={"name": "digits", "drop": ["id"]}))
    with pytest.raises(
        DataError, match=r"there is no column 'nam', which data.drop names; it has 'id', 'name', 'age', 'label'"
    ):
        data.load(config(data=about | {"drop": ["nam"]}))
