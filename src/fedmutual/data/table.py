"""A table in a CSV or Parquet file: one row an example, one column for the label, others for the features.

The functions that parse cells return usable values for usable cells, and add a sentence to `TableFile.problems` for each
column that cannot be used.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from pandas.api.types import is_complex_dtype, is_numeric_dtype

from fedmutual.config import ColumnConfig, DataConfig
from fedmutual.config.keys import FEDERATED
from fedmutual.data.arrays import make_examples, require_root
from fedmutual.data.column_check import describe_nameless, is_nameless, note_rounded_numbers
from fedmutual.data.convert import convert_array, find_fix
from fedmutual.data.draws import Names
from fedmutual.data.encoding import FloatArray, make_encoding
from fedmutual.data.examples import ArrayExamples, ColumnPlan, Examples, Part, Source, list_names
from fedmutual.data.space import Space
from fedmutual.data.table_file import DOMAIN, TableFile, make_text, raise_problems
from fedmutual.data.text import encode_texts, join_columns
from fedmutual.errors import ConfigError, DataError, format_count

_ROUNDING_FIX = "subtract an offset, or set data.columns, which standardises numbers before they are rounded"
_SUGGESTED = "or set data.columns (`fedmutual data check` recommends one)"
_DAY, _EPOCH = pd.Timedelta(days=1), pd.Timestamp("1970-01-01", tz="UTC")
_POINT_ZERO = re.compile(r"[+-]?[0-9]+\.0")
_DIGITS = re.compile(r"[+-]?[0-9]+")
_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")  # excludes codes such as 01, and numbers that do not fit int64


def read_table(config: DataConfig, numbers: bool = False) -> Source:
    """Return the data of the file data.root, with the file data.test as test part if it is set.

    The features are the columns of data.columns in that order; without data.columns all columns, except the label,
    `domain`, the column of data.group_by and the columns of data.drop.
    numbers: targets are no classes; label columns stay text, [n] or [n, L], and `targets.read_targets` parses them.

    Raises:
        BadRows: a column is missing, or cells cannot be used; one sentence for each problem of the files.
        DataError: a file is missing or is no table.
        ConfigError: data.root is not set; or keys of [data] exclude each other, or lack one for a missing column.
    """
    path = require_root(config)
    return _read_files([TableFile(p, config) for p in (path, config.test) if p is not None], config, numbers)


def read_frames(frames: Mapping[str, pd.DataFrame], config: DataConfig) -> Source:
    """Return the features of DataFrames as `read_table` reads a file: training rows, and test rows if there are two.

    The parts have no labels. frames: by their names in messages.

    Raises:
        BadRows, ConfigError: as `read_table`.
        DataError: without data.columns, a column is no numbers or has missing values.
    """
    config = config.model_copy(update={"label": ()})
    for place, frame in frames.items() if not config.columns else ():
        names = list_features(frame.rename(columns=str), config)
        if not any(map(is_nameless, names)):  # else the reader refuses them
            check_numbers(frame[[c for c in frame if str(c) in names]], place)
    return _read_files([TableFile(place, config, frame=frame) for place, frame in frames.items()], config, numbers=True)


def _read_files(files: Sequence[TableFile], config: DataConfig, numbers: bool) -> Source:
    """Return the data of one or two tables; see `read_table`."""
    path = files[0].path
    if config.text and config.columns:
        raise ConfigError(
            "keys 'data.text' and 'data.columns' exclude each other: scale the numbers beside a text by data.mean, and give "
            "each category columns of 0 and 1"
        )
    needed = [c for c, one in config.columns.items() if not one.indicator]
    named = [
        *((c, "data.label names") for c in config.label_columns),
        *((c, "data.columns names (a table may lack it if the column has indicator = true and fill)") for c in needed),
        *((c, "data.replace names") for c in config.replace if c not in config.columns),
        *((c, "data.text names") for c in config.text or ()),
        *((c, "data.group_by names") for c in (config.group_by,) if c is not None),
    ]
    for file in files:  # a test file may lack dropped columns
        dropped = config.drop or () if file is files[0] else ()
        file.require_columns([*named, *((c, "data.drop names") for c in dropped)])
    raise_problems(files)
    plans = make_plans(config.columns, [file.frame for file in files])
    notes = [
        f"{file.path}: has no column {name!r}, so its cells are empty (data.columns.{name}.indicator)"
        for file in files
        for name in config.columns
        if name not in file.frame
    ]
    for name in dict.fromkeys(name for file in files for name, one in config.columns.items() if name not in file.frame):
        if config.columns[name].kind != "category" and config.columns[name].fill is None and config.mean != FEDERATED:
            raise ConfigError(f"{path}: has no column {name!r}; state what replaces its cells: data.columns.{name}.fill")
    columns = tuple(config.columns) or list_features(files[0].frame, config)
    if not plans:
        files[0].problems += describe_nameless(columns, config, str(path))
        columns = tuple(c for c in columns if not is_nameless(c))
    for file in files[1:] if not plans else ():
        different = sorted(set(list_features(file.frame, config)) ^ set(columns))
        if different:
            fix = "give both files the same columns"
            file.problems.append(
                f"{file.path}: its features differ from those of the training file in {list_names(different)}; {fix}"
            )
    parts = [_read_part(file, config, columns, plans, numbers) for file in files if not file.problems or file is files[0]]
    raise_problems(files)
    unused = [c for c in list_features(files[0].frame, config) if plans and c not in config.columns]
    # labels that are read as one label because they differ only in blanks at their ends
    written = {str(v) for f in files for v in f.frame[config.label].unique()} if isinstance(config.label, str) else set()
    merged = sorted(v for v in written if v != v.strip() and v.strip() in written)
    notes += [
        *(
            f"{f.path}: commas in columns {list_names(f.decimal_commas)} are decimal commas"
            for f in files
            if f.decimal_commas
        ),
        *([f"{path}: columns {list_names(unused)} are not in data.columns, so they are no features"] if unused else []),
        *_describe_unused_keys(files, config),
        *([f"{path}: labels {list_names(merged)} are read without their blanks"] if merged else []),
        *([] if plans else note_rounded_numbers(files[0].frame[[*columns]], str(path), _ROUNDING_FIX)),
    ]
    return Source(
        str(path),
        parts[0],
        parts[1] if len(parts) > 1 else None,
        None if isinstance(config.label, str) else config.label,
        columns,
        config.label_columns,
        plans or None,
        notes=tuple(notes),
    )


def _describe_unused_keys(files: Sequence[TableFile], config: DataConfig) -> Iterator[str]:
    """Yield a sentence for each column of data.replace with entries that no cell has, and on an unused date_format."""
    if config.date_format is not None and all(one.kind != "date" for one in config.columns.values()):
        yield f"{files[0].path}: data.date_format has no effect, because no column of data.columns has the kind 'date'"
    for name, replacements in config.replace.items():
        replaced = set[str]().union(*(file.replaced.get(name, ()) for file in files))
        unused = [cell for cell in replacements if cell not in replaced]
        if unused:
            cells = "cells" if len(unused) > 1 else "a cell"
            yield f"{files[0].path}: data.replace names {cells} that column {name!r} does not have: {list_names(unused)}"


def check_numbers(table: pd.DataFrame, place: str) -> None:
    """Raise DataError, with ways to encode them, where columns of a DataFrame are no numbers or have missing values."""
    table = table.rename(columns=str)
    text = [c for c in table if not is_numeric_dtype(table[c]) or is_complex_dtype(table[c])]
    blank = [c for c in table if table[c].isna().any()]
    kinds = "train with the kind of each column: settings={{'data.columns': {{{!r}: {}, ...}}}}".format
    if text:
        fixes = dict[str, list[str]]()
        for name in text:
            fixes.setdefault(find_fix(table[name].to_numpy(), "table"), []).append(name)
        kind = "date" if parse_dates(make_text(table[text[0]])).notna().all() else "category"
        listed = ", and ".join(f"of {list_names(names)} {fix}" for fix, names in fixes.items())
        fix = f"drop them (data.drop), or encode them: {listed}; or {kinds(text[0], repr(kind))}"
        raise DataError(f"{place}: the columns {list_names(text)} are not numbers; {fix}")
    if blank:
        fix = f"fill them in, drop the rows, or {kinds(blank[0], {'kind': 'number', 'fill': 0})}"
        raise DataError(f"{place}: the columns {list_names(blank)} have missing values; {fix}")


def list_features(frame: pd.DataFrame, config: DataConfig) -> tuple[str, ...]:
    """Return the columns of a table that may be features, without regard to data.columns."""
    excluded = {*config.label_columns, config.group_by, DOMAIN, *(config.drop or ()), *(config.text or ())}
    return tuple(c for c in frame.columns if c not in excluded)


def make_plans(columns: Mapping[str, ColumnConfig], frames: Sequence[pd.DataFrame]) -> tuple[ColumnPlan, ...]:
    """Return how each column of data.columns is read; a category without values has those of the frames, sorted."""

    def list_values(name: str, settings: ColumnConfig) -> tuple[str, ...]:
        if settings.kind != "category" or settings.values:
            return settings.values or ()
        return tuple(sorted({str(v) for frame in frames for v in make_text(_get_cells(frame, name)).dropna()}))

    return tuple(ColumnPlan(name, settings, list_values(name, settings)) for name, settings in columns.items())


def _get_cells(frame: pd.DataFrame, name: str) -> "pd.Series[Any]":
    """Return the cells of a column [n]; those of a column that the table lacks are all missing."""
    return frame[name] if name in frame else pd.Series(np.nan, frame.index, dtype=float)


def read_rows(
    path: Path | str, space: Space, config: DataConfig, labelled: bool | None = False, frame: pd.DataFrame | None = None
) -> tuple[Part, bool]:
    """Return the columns of a CSV or Parquet file that a space takes as x [n, columns], and whether the rows have labels.

    Other columns are ignored, and the order of columns in the file has no effect. x is float64 with NaN for missing cells
    where the space encodes columns, else float32. Without labels the rows have placeholders, and no groups.

    config: how the cells of the client's own files are read (`data.replace`, `data.date_format`), and the columns of labels
    (`data.label`), as in `read_table`. labelled: whether to read labels; None: read them if the table has them. frame: a
    table in memory; `path` is then its name in messages.

    Raises:
        BadRows: a column is missing, or cells cannot be used.
        DataError: the file is missing or is no table.
    """
    file = TableFile(path, config, "name another", frame)
    plans = make_encoding(space.scaling.columns or ()).plans
    labelled = {*config.label_columns} <= {*file.frame} if labelled is None else labelled
    names = [plan.name for plan in plans] or [*(space.columns or ())]
    optional = {plan.name for plan in plans if plan.settings.indicator}
    file.require_columns((name, "the model learned from") for name in names if name not in optional)
    file.require_columns((name, "has the text that the model learned from") for name in config.text or ())
    file.require_columns((name, "has the labels") for name in config.label_columns if labelled)
    group_by = config.group_by if labelled else None
    file.require_columns((name, "names the groups") for name in [group_by] if name is not None)
    raise_problems([file])
    x: npt.NDArray[Any] = _parse_cells(file, plans, config.date_format) if plans else _parse_numbers(file, names, config)
    labels = _read_labels(file, config, space.targets != "classes") if labelled else np.zeros(len(x))
    raise_problems([file])
    groups = None if group_by is None else _get_names(file.frame, group_by)
    return Part(_make_examples(x, file, config), labels, file.name_row.with_file, groups), labelled


def read_metadata(
    path: Path, names: Sequence[str], config: DataConfig, labelled: bool, numbers: bool
) -> tuple[npt.NDArray[Any] | None, Names | None]:
    """Return the labels [n, ...] of files, and their groups [n] (`data.group_by`), from a table with the column file_name.

    names: the names of the files, as the column has them. labelled: whether to read labels. numbers: as in `read_table`.
    Labels or groups that are not read are None.

    Raises:
        BadRows: a column is missing, or cells cannot be used.
        DataError: the table is missing, or lacks a file.
    """
    group = config.group_by
    named = [(column, "data.label") for column in config.label_columns if labelled]
    named += [(group, "data.group_by")] if group is not None else []
    keys, columns = dict.fromkeys(key for _, key in named), ["file_name", *(column for column, _ in named)]
    need = "needs" if len(keys) == 1 else "need"
    need = f"{' and '.join(keys)} {need} it, with the columns {', '.join(columns)}"
    file = TableFile(path, config.model_copy(update={"label": ("file_name", *config.label_columns)}), need)  # 01 is a name
    file.require_columns([("file_name", "each row names a file by")])
    file.require_columns((column, f"{key} names") for column, key in named)
    raise_problems([file])
    labels = _read_labels(file, config, numbers) if labelled else None
    raise_problems([file])
    paths = [os.path.normpath(name.replace("\\", "/")) for name in _get_names(file.frame, "file_name")]
    rows = {name: row for row, name in enumerate(paths)}  # the table may have the backslashes of Windows
    first_rows = {name: len(paths) - 1 - row for row, name in enumerate(reversed(paths))}
    if missing := [name for name in names if name not in rows]:
        raise DataError(f"{path}: no row names the file {missing[0]} ({len(missing)} of {len(names)} files); add a row")
    repeated = {name for name, row in rows.items() if row != first_rows[name]} & {*names}
    if repeated:
        name = min(repeated)
        first, last = (file.name_row(of[name]) for of in (first_rows, rows))
        raise DataError(f"{path}: {first} and {last} both name the file {name}; remove one")
    order = [rows[name] for name in names]
    return None if labels is None else labels[order], None if group is None else _get_names(file.frame, group)[order]


def _read_part(
    file: TableFile, config: DataConfig, columns: tuple[str, ...], plans: Sequence[ColumnPlan], numbers: bool
) -> Part:
    """Return the examples and labels of a file; with problems the part is not usable."""
    x: npt.NDArray[Any]
    if plans:
        x = _parse_cells(file, plans, config.date_format)
    else:
        x = _parse_numbers(file, columns, config)
        x = x if file.problems or not columns else convert_array(x, str(file.path)).numpy()
    groups, domains = (_get_names(file.frame, c) if c and c in file.frame else None for c in (config.group_by, DOMAIN))
    examples = ArrayExamples(x) if file.problems else _make_examples(x, file, config)
    labels = _read_labels(file, config, numbers) if config.label else np.zeros(len(x))
    return Part(examples, labels, file.name_row.with_file, groups, domains)


def _make_examples(x: npt.NDArray[Any], file: TableFile, config: DataConfig) -> Examples:
    """Return the features [n, F] of a file as examples; with text (data.text) as the input "table" beside its token ids."""
    if not config.text:
        return ArrayExamples(x)
    inputs = {"table": x} if x.shape[1] else {}
    texts = {"text": join_columns(file.frame, config.text)}
    return make_examples(encode_texts(inputs | texts, config), str(file.path), file.name_row.with_file)


def _parse_numbers(file: TableFile, columns: Sequence[str], config: DataConfig) -> npt.NDArray[np.float32]:
    """Return features [n, F], all of which must be finite numbers; none beside text."""
    if not len(columns) and config.text:
        return np.empty((len(file.frame), 0), np.float32)
    if not len(columns):
        file.problems.append(f"{file.path}: there is no feature column besides the label; add one")
        return np.empty((len(file.frame), 0), np.float32)
    parsed = []
    fix = f"but features must be numbers; encode the column as numbers, remove it, {_SUGGESTED}"
    for name in columns:
        problems = len(file.problems)
        column = _parse_number(file, name, fix)
        missing_rows = np.flatnonzero(~np.isfinite(column))
        if len(file.problems) == problems and len(missing_rows):
            file.problems.append(
                f"{file.path}: column {name!r} is missing, NaN or infinite in {file.name_row(missing_rows[0])} "
                f"({len(missing_rows)} of {len(column)} rows); fill in the values, remove the column, {_SUGGESTED}"
            )
        parsed.append(column)
    return np.stack(parsed, 1).astype(np.float32)


def _parse_number(file: TableFile, name: str, fix: str) -> FloatArray:
    """Return the cells of a column as numbers [n]. fix: ends the sentence on the first cell that is text."""
    cells = _get_cells(file.frame, name)
    column = pd.to_numeric(cells, errors="coerce")
    _refuse(file, name, cells, column.isna() & cells.notna(), fix)
    values: FloatArray = column.to_numpy(np.float64, na_value=np.nan)
    return values


def _refuse(file: TableFile, name: str, cells: "pd.Series[Any]", is_bad: "pd.Series[bool]", fix: str) -> None:
    """Add a problem with the first bad cell of a column, and what to do."""
    rows = np.flatnonzero(is_bad)
    if len(rows):
        others = f" (and in {format_count(len(rows) - 1, 'other row')})" if len(rows) > 1 else ""
        fault = f"column {name!r} holds {cells.iloc[rows[0]]!r} in {file.name_row(rows[0])}{others}"
        file.problems.append(f"{file.path}: {fault}, {fix}")


def _parse_cells(file: TableFile, plans: Sequence[ColumnPlan], date_format: str | None) -> FloatArray:
    """Return cells [n, columns] as their plans say, NaN where they are missing."""
    columns = []
    for name, settings, vocabulary in plans:
        text = make_text(_get_cells(file.frame, name))
        if settings.kind == "number":
            column = _parse_number(file, name, f"but data.columns.{name} is for numbers; fix the cell, or set another kind")
            _refuse(file, name, text, pd.Series(np.isinf(column)), "but numbers are finite; leave the cell empty")
        elif settings.kind == "category":
            codes = text.map({v: float(i) for i, v in enumerate(vocabulary)})
            column = codes.to_numpy(np.float64, na_value=np.nan)
            fix = "fix the cell, leave it empty, or add the value to data.columns"
            _refuse(file, name, text, codes.isna() & text.notna(), f"but the values are {list_names(vocabulary)}; {fix}")
        else:
            dates = parse_dates(text, date_format)
            column = ((dates - _EPOCH) / _DAY).to_numpy(np.float64, na_value=np.nan)
            forms = (
                [] if date_format is not None and _conflicts_with_iso(date_format) else ["2026-05-31 or 2026-05-31T14:30"]
            )
            forms += [] if date_format is None else [f"data.date_format = {date_format!r}"]
            other = ", or data.date_format must say how" if date_format is None else ""
            form = f"but dates must be written as {', or as '.join(forms)}{other}; fix the cell or leave it empty"
            _refuse(file, name, text, dates.isna() & text.notna(), form)
        columns.append(column)
    return np.stack(columns, 1)


def parse_dates(text: "pd.Series[str]", date_format: str | None = None) -> "pd.Series[pd.Timestamp]":
    """Return the cells [n] as dates in UTC [n]; NaT where a cell is missing or is no date.

    date_format: the format of the cells; None: ISO 8601. Cells that do not have a format are read as ISO 8601, unless it
    is a format such as "%Y-%d-%m", by which a date in ISO 8601 is another day.
    """
    dates = pd.to_datetime(text, errors="coerce", format="ISO8601", utc=True)
    if date_format is None:
        return dates
    of_format = pd.to_datetime(text, errors="coerce", format=date_format, utc=True)
    return of_format if _conflicts_with_iso(date_format) else of_format.fillna(dates)


def _conflicts_with_iso(date_format: str) -> bool:
    """Return whether a date of this format can be read as another one in ISO 8601."""
    text = pd.Series([datetime(2026, 5, 6, 3, 4, tzinfo=UTC).strftime(date_format)])
    of_format, iso = (pd.to_datetime(text, errors="coerce", format=f, utc=True) for f in (date_format, "ISO8601"))
    return bool(iso.notna().all()) and not iso.equals(of_format)


def _get_names(frame: pd.DataFrame, column: str) -> Names:
    return np.asarray(frame[column].str.strip(), dtype=str)


def _read_labels(file: TableFile, config: DataConfig, numbers: bool) -> npt.NDArray[Any]:
    """Return the labels [n] of one column, or the cells [n, L] of a list of columns as text.

    Labels are whole numbers if all are; else names, for example 01. numbers: the labels are no classes, and stay text, which
    `targets.read_targets` parses.
    """
    label = config.label
    if not isinstance(label, str):
        return np.stack([_get_names(file.frame, name) for name in label], 1)
    labels = _get_names(file.frame, label)
    blank_rows = np.flatnonzero(labels == "")
    if len(blank_rows) and not config.unlabelled:
        file.problems.append(
            f"{file.path}: the label in {file.name_row(blank_rows[0])} is missing ({len(blank_rows)} of {len(labels)} "
            "rows); fill it in, remove the row, or set data.unlabelled = true to train on it without a label"
        )
    distinct = set(labels.tolist())
    if len(blank_rows) and all(_POINT_ZERO.fullmatch(v) for v in distinct - {""}):  # so pandas writes whole numbers and NaN
        labels = np.array([v.partition(".")[0] for v in labels])
    if len(blank_rows) or numbers:
        return labels
    if all(_DIGITS.fullmatch(v) for v in distinct):
        return labels.astype(np.int64) if all(_WHOLE.fullmatch(v) for v in distinct) else labels
    try:
        values = {v: float(v.replace("_", "no number")) for v in distinct}  # float() would ignore the underscore
    except ValueError:
        return labels
    row = next(i for i, v in enumerate(labels) if not values[v].is_integer() or not _DIGITS.fullmatch(v))
    file.problems.append(
        f"{file.path}: the label in {file.name_row(row)} is {labels[row]}, but labels must be whole numbers or names; fix "
        "the column, name another in data.label, or set training.task = 'regression' to learn numbers"
    )
    return labels
