"""A CSV file: a row an example, a column for the label, the others its features."""

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
from fedmutual.data.arrays import given
from fedmutual.data.draws import Names
from fedmutual.data.examples import Arrays, Part, Source, listed, rows_first
from fedmutual.errors import DataError

DOMAIN = "domain"
_DIGITS = re.compile(r"[+-]?[0-9]+")
_ROWS = 50  # of fewer, whole numbers may all differ by chance
_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")  # no code like 01, and nothing that an int64 cannot hold
_MISSING = ["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"]  # of a feature; a class may well be called NA


def csv(config: DataConfig, numbers: bool = False) -> Source:
    """The file data.root, and data.test where there is one. A column `domain`, and that of data.group_by, are no features.

    numbers: the label column holds any numbers, and is left as text for whoever reads them.

    Raises:
        DataError: a file is missing or is no table, a column is missing, or a feature is missing or no number.
    """
    path = given(config)
    train, columns = _part(path, config, None, numbers)
    test = _part(config.test, config, columns, numbers)[0] if config.test is not None else None
    return Source(
        str(path), train, test, columns=columns, notes=_identifiers(train.x.take(range(len(train.x))), columns, path)
    )


def _part(path: Path, config: DataConfig, columns: tuple[str, ...] | None, numbers: bool) -> tuple[Part, tuple[str, ...]]:
    table = _read(path, [c for c in (config.label, config.group_by, DOMAIN) if c is not None])
    wanted = [("data.label", config.label), ("data.group_by", config.group_by)]
    dropped = [("data.drop", c) for c in config.drop or ()] if columns is None else []  # a test file may lack them already
    for key, column in (*wanted, *dropped):
        if column is not None and column not in table:
            raise DataError(
                f"{path}: there is no column {column!r}, which {key} names; it has {listed(list(table.columns))}"
                + _parted(list(table.columns))
            )
    apart = {config.label, config.group_by, DOMAIN, *(config.drop or ())}
    own = tuple(c for c in table.columns if c not in apart)
    if columns is not None and set(own) != set(columns):
        odd = sorted(set(own) ^ set(columns))
        raise DataError(f"{path}: its features are not those of the training file; they differ in {listed(odd)}")
    columns = columns or own
    at = _Lines(path, len(table))
    x = rows_first(_numbers(table[list(columns)], path, at), str(path)).numpy()
    labels = _text(table[config.label])
    groups = _text(table[config.group_by]) if config.group_by is not None else None
    domains = _text(table[DOMAIN]) if DOMAIN in table else None
    blank = np.flatnonzero(labels == "")
    if len(blank):
        raise DataError(f"{path}: the label in {at(blank[0])} is missing; fill it in or take the row out")
    targets = labels if numbers else _whole_or_names(labels, path, at)
    return Part(Arrays(x), targets, lambda i: f"{at(i)} of {path}", groups, domains), columns


def _parted(columns: list[str]) -> str:
    """What a single column tells of a file whose cells are parted by something else than commas."""
    other = next((mark for mark in (";", "\t", "|") if len(columns) == 1 and mark in columns[0]), None)
    return f"; its cells seem to be parted by {other!r}, and commas are wanted" if other else ""


def _identifiers(x: Tensor, columns: Sequence[str], path: Path) -> tuple[str, ...]:
    """What is worth saying about columns [n] that hold another whole number in every row, as no measurement does."""
    odd = [
        c
        for c, v in zip(columns, x.T, strict=True)
        if len(v) >= _ROWS and (v == v.round()).all() and len(v.unique()) == len(v)
    ]
    if not odd:
        return ()
    return (
        f"{path}: {listed(odd)} holds another whole number in every row, as identifiers do; if it is one, take it out by "
        "data.drop",
    )


def features(path: Path, columns: Sequence[str]) -> tuple[npt.NDArray[np.float32], Callable[[int], str]]:
    """These columns of a CSV file, by their names -> (x [n, F], what messages call a row). Others are not looked at.

    Raises:
        DataError: as `csv`, but for labels, of which there need be none.
    """
    table = _read(path, [], missing="name another")
    lacking = [c for c in columns if c not in table]
    if lacking:
        raise DataError(
            f"{path}: there is no column {lacking[0]!r}, which the model learned from; it has {listed(list(table.columns))}"
        )
    at = _Lines(path, len(table))
    return _numbers(table[list(columns)], path, at), lambda i: f"{at(i)} of {path}"


class _Lines:
    """What messages call the rows of a file: by the line that an editor shows. Looked up when the first is asked for."""

    def __init__(self, path: Path, rows: int) -> None:
        self._path, self._rows = path, rows

    def __call__(self, row: int) -> str:
        """ "line 5"; where the lines cannot be told, "row 4 (without the header)"."""
        known = len(self._starts) == self._rows
        return f"line {self._starts[row]}" if known else f"row {row + 1} (without the header)"

    @cached_property
    def _starts(self) -> list[int]:
        """The line that each row begins on."""
        try:
            return list(self._read())[1:]
        except (OSError, UnicodeDecodeError, records.Error):  # compressed, for instance
            return []

    def _read(self) -> Iterator[int]:
        """Where the header and each row begin. A quoted cell may run over lines; blank lines are no rows."""
        with self._path.open(newline="", encoding="utf-8-sig") as file:
            line, reader = 1, records.reader(file)
            for cells in reader:
                if len(cells) > 1 or any(cell.strip() for cell in cells):
                    yield line
                line = reader.line_num + 1


def _read(path: Path, names: Sequence[str], missing: str = "key 'data.root' or 'data.test' names it") -> pd.DataFrame:
    """The whole file; columns of `names` hold text, whatever it looks like. missing: as `arrays.read`."""
    try:
        numbers = [c for c in pd.read_csv(path, nrows=0).columns if c not in names]
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(
                path,
                index_col=False,  # else a field too many makes the first column an index and shifts all others
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


def _numbers(features: pd.DataFrame, path: Path, at: Callable[[int], str]) -> npt.NDArray[np.float32]:
    if not len(features.columns):
        raise DataError(f"{path}: there is no column of features beside the label")
    for name in features.columns:
        column = pd.to_numeric(features[name], errors="coerce")
        odd = np.flatnonzero(column.isna() & features[name].notna())
        if len(odd):
            value = features[name].iloc[odd[0]]
            raise DataError(
                f"{path}: column {name!r} holds {value!r} in {at(odd[0])}, and features must be numbers; encode the "
                "column as numbers or take it out"
            )
        lacking = np.flatnonzero(~np.isfinite(column.to_numpy(float)))
        if len(lacking):
            raise DataError(
                f"{path}: column {name!r} is missing, NaN or infinite in {at(lacking[0])} ({len(lacking)} of "
                f"{len(column)} rows); fill the values in or take the column out"
            )
    return np.asarray(features.apply(pd.to_numeric), dtype=np.float32)


def _whole_or_names(labels: Names, path: Path, at: Callable[[int], str]) -> npt.NDArray[Any]:
    """Labels read as text: whole numbers if all are, else names, as 01 is. Numbers that are not whole are no labels."""
    different = set(labels.tolist())
    if all(_DIGITS.fullmatch(v) for v in different):
        return labels.astype(np.int64) if all(_WHOLE.fullmatch(v) for v in different) else labels
    try:
        numbers = [float(v.replace("_", "no number")) for v in labels]  # which Python would read over
    except ValueError:
        return labels
    odd = next(i for i, v in enumerate(numbers) if not v.is_integer() or not _DIGITS.fullmatch(labels[i]))
    raise DataError(
        f"{path}: the label in {at(odd)} is {labels[odd]}, and labels must be whole numbers or names; mend the "
        "column, name another in data.label, or set training.task = 'regression' to learn numbers"
    )
