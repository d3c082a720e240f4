"""A CSV file: one row an example, one column for the label, the other columns for the features."""

import csv as records
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from torch import Tensor

from fedmutual.config import DataConfig
from fedmutual.data.arrays import require_root
from fedmutual.data.draws import Names
from fedmutual.data.examples import ArrayExamples, Part, Source, convert_array, listed
from fedmutual.errors import DataError

DOMAIN = "domain"
_DIGITS = re.compile(r"[+-]?[0-9]+")
_MIN_ROWS = 50  # in fewer rows, whole numbers may all differ by chance
_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")  # excludes codes such as 01, and numbers that do not fit int64
_MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"]  # for features only: NA may be the name of a class


def read_csv(config: DataConfig, numbers: bool = False) -> Source:
    """Return the data of the file data.root, with the file data.test as test part if it is set.

    The column `domain`, the column of data.group_by and the columns of data.drop are no features.
    numbers: targets are numbers; the label column stays text, and `labels.read_targets` parses it.

    Raises:
        DataError: a file is missing or is no table, a column is missing, or a feature is missing or not a number.
    """
    path = require_root(config)
    train, columns = _read_part(path, config, None, numbers)
    test = _read_part(config.test, config, columns, numbers)[0] if config.test is not None else None
    return Source(
        str(path), train, test, columns=columns, notes=_note_identifiers(train.x.take(range(len(train.x))), columns, path)
    )


def _read_part(
    path: Path, config: DataConfig, columns: tuple[str, ...] | None, numbers: bool
) -> tuple[Part, tuple[str, ...]]:
    table = _read_table(path, [c for c in (config.label, config.group_by, DOMAIN) if c is not None])
    named_columns = [("data.label", config.label), ("data.group_by", config.group_by)]
    dropped = (
        [("data.drop", c) for c in config.drop or ()] if columns is None else []
    )  # a test file may lack dropped columns
    for key, column in (*named_columns, *dropped):
        if column is not None and column not in table:
            raise DataError(
                f"{path}: there is no column {column!r}, which {key} names; it has {listed(list(table.columns))}"
                + _describe_delimiter(list(table.columns))
            )
    excluded = {config.label, config.group_by, DOMAIN, *(config.drop or ())}
    feature_names = tuple(c for c in table.columns if c not in excluded)
    if columns is not None and set(feature_names) != set(columns):
        different = sorted(set(feature_names) ^ set(columns))
        raise DataError(
            f"{path}: its features differ from those of the training file in {listed(different)}; give both files the "
            "same columns"
        )
    columns = columns or feature_names
    name_row = _RowNamer(path, len(table))
    x = convert_array(_parse_features(table[list(columns)], path, name_row), str(path)).numpy()
    labels = _text(table[config.label])
    groups = _text(table[config.group_by]) if config.group_by is not None else None
    domains = _text(table[DOMAIN]) if DOMAIN in table else None
    _check_no_blank_label(labels, path, name_row)
    targets = labels if numbers else _parse_labels(labels, path, name_row)
    return Part(ArrayExamples(x), targets, lambda i: f"{name_row(i)} of {path}", groups, domains), columns


def _describe_delimiter(columns: list[str]) -> str:
    """Return the end of a message where a single column suggests another delimiter than the comma; else ""."""
    delimiter = next((candidate for candidate in (";", "\t", "|") if len(columns) == 1 and candidate in columns[0]), None)
    return f"; its cells seem to be separated by {delimiter!r}; separate them by commas" if delimiter else ""


def _note_identifiers(x: Tensor, columns: Sequence[str], path: Path) -> tuple[str, ...]:
    """Return a remark on columns of x [n, F] with a different whole number in every row, as identifiers have."""
    identifiers = [
        c
        for c, v in zip(columns, x.T, strict=True)
        if len(v) >= _MIN_ROWS and (v == v.round()).all() and len(v.unique()) == len(v)
    ]
    if not identifiers:
        return ()
    return (
        f"{path}: {listed(identifiers)} holds a different whole number in every row, as identifiers do; exclude "
        "identifiers by "
        "data.drop",
    )


def read_features(path: Path, columns: Sequence[str]) -> tuple[npt.NDArray[np.float32], Callable[[int], str]]:
    """Return the named columns of a CSV file as x [n, F], and a function that names a row in messages.

    Other columns are ignored, and the file needs no labels.

    Raises:
        DataError: the file is missing or is no table, or a feature is missing or not a number.
    """
    table = _read_table(path, [], missing="name another")
    name_row = _RowNamer(path, len(table))
    return _select_features(table, columns, path, name_row), lambda i: f"{name_row(i)} of {path}"


def read_labelled(
    path: Path, columns: Sequence[str], label: str
) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any], Callable[[int], str]]:
    """Return the named columns of a CSV file as x [n, F], the labels [n], and a function that names a row in messages.

    Raises:
        DataError: as `read_features`; or the column of labels is missing, or a label is missing or no class.
    """
    table = _read_table(path, [label], missing="name another")
    if label not in table:
        raise DataError(f"{path}: there is no column {label!r} of labels; it has {listed(list(table.columns))}")
    name_row = _RowNamer(path, len(table))
    names = _text(table[label])
    _check_no_blank_label(names, path, name_row)
    x = _select_features(table, columns, path, name_row)
    return x, _parse_labels(names, path, name_row), lambda i: f"{name_row(i)} of {path}"


def _select_features(
    table: pd.DataFrame, columns: Sequence[str], path: Path, name_row: Callable[[int], str]
) -> npt.NDArray[np.float32]:
    """Return the columns that a model learned from as x [n, F]; raise DataError where one is missing."""
    missing_columns = [c for c in columns if c not in table]
    if missing_columns:
        raise DataError(
            f"{path}: there is no column {missing_columns[0]!r}, which the model learned from; it has "
            f"{listed(list(table.columns))}"
        )
    return _parse_features(table[list(columns)], path, name_row)


def _check_no_blank_label(labels: Names, path: Path, name_row: Callable[[int], str]) -> None:
    blank_rows = np.flatnonzero(labels == "")
    if len(blank_rows):
        raise DataError(f"{path}: the label in {name_row(blank_rows[0])} is missing; fill it in or remove the row")


class _RowNamer:
    """Names the rows of a file by line number, as an editor shows it. Line numbers are read at the first call."""

    def __init__(self, path: Path, rows: int) -> None:
        self._path, self._rows = path, rows

    def __call__(self, row: int) -> str:
        """Return "line 5", or "row 4 (without the header)" where line numbers are unknown."""
        known = len(self._starts) == self._rows
        return f"line {self._starts[row]}" if known else f"row {row + 1} (without the header)"

    @cached_property
    def _starts(self) -> list[int]:
        """The line number on which each row begins; empty if the file cannot be read as text."""
        try:
            return list(self._read_starts())[1:]
        except (OSError, UnicodeDecodeError, records.Error):  # compressed, for instance
            return []

    def _read_starts(self) -> Iterator[int]:
        """Yield the line number on which the header and each row begin.

        A quoted cell may span several lines; blank lines are no rows.
        """
        with self._path.open(newline="", encoding="utf-8-sig") as file:
            line, reader = 1, records.reader(file)
            for cells in reader:
                if len(cells) > 1 or any(cell.strip() for cell in cells):
                    yield line
                line = reader.line_num + 1


def _read_table(path: Path, names: Sequence[str], missing: str = "key 'data.root' or 'data.test' names it") -> pd.DataFrame:
    """Return the whole file. The columns in `names` stay text.

    missing: the fix in the message about a missing file.
    """
    try:
        numbers = [c for c in pd.read_csv(path, nrows=0).columns if c not in names]
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(
                path,
                index_col=False,  # otherwise an extra field would make the first column an index and shift the others
                dtype=dict.fromkeys(names, str),
                keep_default_na=False,
                na_values=dict.fromkeys(numbers, _MISSING),
            )
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; {missing}") from None
    except pd.errors.ParserWarning:
        raise DataError(
            f"{path}: a row has more fields than the header; is there a decimal comma, or another delimiter than the comma?"
        ) from None
    except (OSError, ValueError) as problem:  # pandas' own errors are ValueErrors
        raise DataError(f"{path}: cannot be read as CSV ({str(problem).strip().splitlines()[0]})") from None
    if table.empty:
        raise DataError(f"{path}: the table has no rows")
    return table


def _text(column: "pd.Series[str]") -> Names:
    return np.asarray(column.str.strip(), dtype=str)


def _parse_features(features: pd.DataFrame, path: Path, name_row: Callable[[int], str]) -> npt.NDArray[np.float32]:
    if not len(features.columns):
        raise DataError(f"{path}: there is no feature column besides the label; add one")
    for name in features.columns:
        column = pd.to_numeric(features[name], errors="coerce")
        text_rows = np.flatnonzero(column.isna() & features[name].notna())
        if len(text_rows):
            value = features[name].iloc[text_rows[0]]
            raise DataError(
                f"{path}: column {name!r} holds {value!r} in {name_row(text_rows[0])}, but features must be numbers; "
                "encode the "
                "column as numbers or remove it"
            )
        missing_rows = np.flatnonzero(~np.isfinite(column.to_numpy(float)))
        if len(missing_rows):
            raise DataError(
                f"{path}: column {name!r} is missing, NaN or infinite in {name_row(missing_rows[0])} "
                f"({len(missing_rows)} of "
                f"{len(column)} rows); fill in the values or remove the column"
            )
    return np.asarray(features.apply(pd.to_numeric), dtype=np.float32)


def _parse_labels(labels: Names, path: Path, name_row: Callable[[int], str]) -> npt.NDArray[Any]:
    """Return labels as whole numbers if all are whole numbers; else as names, for example 01.

    Raises:
        DataError: all labels are numbers, but some are not whole.
    """
    distinct = set(labels.tolist())
    if all(_DIGITS.fullmatch(v) for v in distinct):
        return labels.astype(np.int64) if all(_WHOLE.fullmatch(v) for v in distinct) else labels
    try:
        numbers = [float(v.replace("_", "no number")) for v in labels]  # float() would ignore the underscore
    except ValueError:
        return labels
    bad_row = next(i for i, v in enumerate(numbers) if not v.is_integer() or not _DIGITS.fullmatch(labels[i]))
    raise DataError(
        f"{path}: the label in {name_row(bad_row)} is {labels[bad_row]}, but labels must be whole numbers or names; fix the "
        "column, name another in data.label, or set training.task = 'regression' to learn numbers"
    )
