"""CSV files as hospitals write them (delimiters, decimal commas, dates, spellings) are read as a plain table is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedmutual import data
from fedmutual.config import parse_config
from fedmutual.data.scaling import UNSCALED
from fedmutual.data.space import Space
from fedmutual.data.suggest import describe_suggestion
from fedmutual.data.table import parse_dates, read_rows
from fedmutual.data.table_file import find_dialect
from fedmutual.errors import ConfigError, DataError
from own_data import config, everything, refused

COLUMNS = {"age": "number", "crp": "number", "sex": ["f", "m"], "admitted": "date"}
REPLACE = {"sex": {"Female": "f", "male": "m", "?": ""}, "crp": {"<5": "2.5", "999": ""}}


def make_frame() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 90, 60),
            "crp": (rng.gamma(2, 20, 60) + 5).round(2),
            "sex": rng.choice(["f", "m"], 60),
            "admitted": pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 900, 60), unit="D"),
            "label": np.where(np.arange(60) % 2, "ill", "well"),
        }
    )
    frame["sex"] = frame["sex"].astype(object)
    frame.loc[[3, 9], "sex"] = None
    frame.loc[[4], "crp"] = None
    frame.loc[[5, 6], "crp"] = 2.5
    return frame


def write_plain(path: Path) -> dict[str, Any]:
    make_frame().assign(admitted=make_frame()["admitted"].dt.strftime("%Y-%m-%d")).to_csv(path, index=False)
    return {"name": "csv", "root": str(path), "columns": COLUMNS}


def write_messy(path: Path, delimiter: str = ";", encoding: str = "utf-8-sig") -> dict[str, Any]:
    """Write the same table as another hospital would."""
    frame = make_frame()
    frame["sex"] = frame["sex"].map({"f": "Female", "m": "male"}).fillna("?")
    frame["admitted"] = frame["admitted"].dt.strftime("%d.%m.%Y")
    crp = frame["crp"].map(lambda value: f"{value:.2f}".replace(".", "," if delimiter != "," else "."))
    frame["crp"] = crp.mask(frame["crp"].isna(), "999").mask(frame["crp"] == 2.5, "<5")
    frame = frame[["label", "admitted", "crp", "sex", "age"]]
    frame.to_csv(path, index=False, sep=delimiter, encoding=encoding)
    return {"name": "csv", "root": str(path), "columns": COLUMNS, "replace": REPLACE, "date_format": "%d.%m.%Y"}


@pytest.mark.parametrize("delimiter", [";", "\t", "|", ","])
def test_a_messy_file_is_read_as_the_plain_one(tmp_path: Path, delimiter: str) -> None:
    plain = data.load(config(data=write_plain(tmp_path / "plain.csv")))
    messy_settings = write_messy(tmp_path / "messy.csv", delimiter)
    messy = data.load(config(data=messy_settings))
    x, y = everything(plain.pool_clients().private)
    messy_x, messy_y = everything(messy.pool_clients().private)
    torch.testing.assert_close(messy_x, x)
    assert torch.equal(messy_y, y)
    assert [note.partition(": ")[2] for note in messy.notes if "comma" in note] == (
        ["commas in columns 'crp' are decimal commas"] if delimiter != "," else []
    )
    settings = config(data=messy_settings).data
    space = Space((2,), ("well", "ill"), 2, "classification", UNSCALED, ("age", "crp"))
    features, _ = read_rows(Path(messy_settings["root"]), space, settings.model_copy(update={"replace": {
        "crp": {"<5": "2.5", "999": "0"}
    }}))  # fmt: skip
    np.testing.assert_allclose(features.x.take(range(60)), make_frame()[["age", "crp"]].fillna(0).to_numpy(), rtol=1e-6)
    assert features.where(7).startswith("line 9 of ")
    part, _ = read_rows(Path(messy_settings["root"]), replace(space, columns=("age",)), settings, labelled=True)
    assert part.labels.tolist() == make_frame()["label"].tolist()


def test_numbers_to_learn_may_have_decimal_commas(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("stay;age\n" + "".join(f"{k},5;{k}\n" for k in range(40)))
    about = {"name": "csv", "root": str(tmp_path / "a.csv"), "label": "stay"}
    federation = data.load(config(data=about, training={"task": "regression"}))
    x, y = everything(federation.pool_clients().private)
    assert torch.equal(y, x[:, 0] + 0.5)


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        (b"a;b;label\n1,5;1.234;x\n2,5;2;y\n", {}, "column 'a' has decimal commas, and column 'b' holds '1.234'"),
        (b"a;label\n1,5;x\n2.5;y\n", {}, "column 'a' has decimal commas, and column 'a' holds '2.5'"),
        ("a,label\n1,x\n".encode("utf-16-le"), {}, "is UTF-16 text without a byte order mark; save the file as UTF-8"),
        (b"a,label\n1,x\n1,2,3\n", {}, "saw 3); fix that line: quote cells that hold the delimiter"),
        (b"a,label\n1,x,\n2,y,\n", {}, "or a delimiter at the end of each row?"),
        (b"a,Label\n1,x\n2,y\n", {}, "it has 'a', 'Label'; did you mean 'Label'?"),
        (b"a, label\n1,x\n2,y\n", {}, "it has 'a', ' label'; did you mean ' label'?"),
        (b"a,label\n1,x\n2,\n3,\n", {}, "the label in line 3 is missing (2 of 3 rows)"),
        (b"a,label\n1,x\n2,\xfc\n", {}, "line 3 is not UTF-8 text (byte 0xfc); save the file as UTF-8"),
        (b"a,label\n1,x\n", {"replace": {"b": {"1": "2"}}}, "there is no column 'b', which data.replace names"),
        (b"a,label\n1,x\n", {"replace": {"label": {"x": "y"}}}, "which data.label names; rename labels by data.labels"),
        (b"a,label\n1,x\n", {"date_format": "%d.%m."}, "a date format has the year, the month and the day"),
        (b"a,label\n1,x\n", {"date_format": "%Q"}, "a date format has the year, the month and the day"),
        (b"a,label\n31/05/2026,x\n", {"columns": {"a": "date"}}, "or data.date_format must say how"),
        (b"a,label\n31/05/2026,x\n", {"columns": {"a": "date"}, "date_format": "%m/%d/%Y"}, "or as data.date_format = '%m"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: bytes, settings: dict[str, Any], words: str) -> None:
    (tmp_path / "a.csv").write_bytes(text)
    refused(words, data={"name": "csv", "root": str(tmp_path / "a.csv"), **settings})


@pytest.mark.parametrize("rows", [10, 17, 60])
def test_cells_of_several_lines_do_not_hide_the_delimiter(tmp_path: Path, rows: int) -> None:
    cells = "".join(f'{k};"a\nb\nc";{k % 2}\n' for k in range(rows))
    (tmp_path / "a.csv").write_text(f'"dose, mg";note;label\n{cells}')
    assert find_dialect(tmp_path / "a.csv")["sep"] == ";"


ROWS = "".join(f"{k},5;{20 + k % 7};{k % 2}\n" for k in range(40))
BAD_ROW = "x;1;1\n"


@pytest.mark.parametrize(
    ("head", "encoding", "header_lines"),
    [
        ("crp, mg/l;age;y\n", "utf-8", 1),
        ("sep=;\ncrp, mg/l;age;y\n", "utf-8-sig", 2),
        ('"sep=;"\r\n\ncrp, mg/l;age;y\n', "utf-8", 3),
        ("SEP=;\ncrp, mg/l;age;y\n", "utf-8", 2),
        ("crp, mg/l;age;y\n", "utf-16", 1),
        ('"crp,\nmg/l";age;y\n', "utf-8", 2),
    ],
)
def test_the_dialect_of_a_file_is_recognised(tmp_path: Path, head: str, encoding: str, header_lines: int) -> None:
    about = {"name": "csv", "root": str(tmp_path / "a.csv"), "label": "y"}
    (tmp_path / "a.csv").write_bytes((head + ROWS).encode(encoding))
    federation = data.load(config(data=about))
    assert federation.space.columns is not None
    assert [name.replace("\n", " ") for name in federation.space.columns] == ["crp, mg/l", "age"]
    x, y = everything(federation.pool_clients().private)
    assert torch.equal((x[:, 0] - 0.5) % 2, y.float())
    (tmp_path / "a.csv").write_bytes((head + ROWS + BAD_ROW).encode(encoding))
    with pytest.raises(DataError, match=rf"holds 'x' in line {header_lines + 41},"):
        data.load(config(data=about))


def test_labels_with_blanks_are_reported(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,label\n" + "1,ill\n2,ill \n3,well\n4, well\n" * 9)
    federation = data.load(config(data={"name": "csv", "root": str(tmp_path / "a.csv")}))
    assert federation.space.classes == ("ill", "well")
    assert any("labels ' well', 'ill ' are read without their blanks" in note for note in federation.notes)


def test_thousands_separators_are_not_decimal_commas(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('a,label\n"1,234",x\n5,y\n')
    refused("column 'a' holds '1,234' in line 2", data={"name": "csv", "root": str(tmp_path / "a.csv")})


def test_keys_of_tables_have_no_effect_elsewhere() -> None:
    for key, value in (("replace", {"a": {"x": "y"}}), ("date_format", "%d.%m.%Y")):
        with pytest.raises(ConfigError, match=rf"key 'data\.{key}' has no effect with data\.name = 'digits'"):
            data.load(config(data={"name": "digits", key: value}))


def test_a_recommendation_names_what_single_clients_need(tmp_path: Path) -> None:
    plain, messy = write_plain(tmp_path / "plain.csv"), write_messy(tmp_path / "messy.csv")
    (tmp_path / "broken.csv").write_bytes(b"age,label\n1,\xfc\n")
    roots = {"a": plain["root"], "b": messy["root"], "c": str(tmp_path / "broken.csv")}
    clients = {client: {"data": {"name": "csv", "root": root}} for client, root in roots.items()}
    *sentences, suggested = describe_suggestion(parse_config({"clients": clients}))
    assert 'crp = "number"' in suggested
    assert 'admitted = "date"' in suggested
    remarks = "\n".join(sentences)
    assert "client 'c' is not part" in remarks
    assert 'need clients.b.data.date_format = "%d.%m.%Y"' in remarks
    assert "column 'crp' has numbers and '<5'" in remarks
    assert "column 'sex' has values that not all clients have (a: f, m; b: ?, Female, male)" in remarks


def test_an_ambiguous_date_is_left_to_the_user(tmp_path: Path) -> None:
    rows = "".join(f"0{k}/0{k}/2026,x\n" for k in range(1, 9))
    (tmp_path / "a.csv").write_text("seen,label\n" + rows)
    remark, *_ = describe_suggestion(config(data={"name": "csv", "root": str(tmp_path / "a.csv")}))
    assert '"%d/%m/%Y" or data.date_format = "%m/%d/%Y"; choose' in remark


@pytest.mark.parametrize(("form", "day"), [("%Y-%d-%m", "2026-05-06"), ("%Y/%d/%m", "2026/05/06"), ("%Y%d%m", "20260506")])
def test_a_date_that_has_the_given_form_is_read_by_it(form: str, day: str) -> None:
    """The fifth of June, as pandas reads it by the form; no date of the column is read in ISO 8601 as one in May."""
    dates = parse_dates(pd.Series([day, "2026-05-31"]), form)
    assert dates.dt.strftime("%d.%m.%Y").fillna("").tolist() == ["05.06.2026", ""]


@pytest.mark.parametrize(
    ("form", "day"), [("%d.%m.%Y", "05.06.2026"), ("%m/%d/%Y", "06/05/2026"), ("%d%m%Y", "05062026"), ("%Y%m%d", "20260605")]
)
def test_beside_a_form_that_no_other_date_has_dates_are_iso_8601(form: str, day: str) -> None:
    dates = parse_dates(pd.Series([day, "2026-05-31"]), form)
    assert dates.dt.strftime("%d.%m.%Y").tolist() == ["05.06.2026", "31.05.2026"]


def test_a_date_in_iso_8601_is_refused_where_the_form_would_read_others_otherwise(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("seen,label\n2026-05-06,x\n2026-05-31,y\n")
    about = {"name": "csv", "root": str(tmp_path / "a.csv"), "columns": {"seen": "date"}, "date_format": "%Y-%d-%m"}
    refused("'2026-05-31' in line 3, but dates must be written as data.date_format = '%Y-%d-%m'; fix the cell", data=about)


def test_entries_that_change_no_cell_are_named(tmp_path: Path) -> None:
    make_frame().to_csv(tmp_path / "rows.csv", index=False)
    about = {"name": "csv", "root": str(tmp_path / "rows.csv"), "columns": {"sex": ["f", "m"]}}
    changes = {"sex": {"f": "f", "Female": "f", "?": ""}, "crp": {"2.5": "3"}}  # crp is no feature, but has this cell
    remarks = data.load(config(data=about | {"replace": changes, "date_format": "%d.%m.%Y"})).notes
    place = tmp_path / "rows.csv"
    assert f"{place}: data.replace names cells that column 'sex' does not have: 'Female', '?'" in remarks
    assert sum("data.replace" in note for note in remarks) == 1
    assert f"{place}: data.date_format has no effect, because no column of data.columns has the kind 'date'" in remarks
