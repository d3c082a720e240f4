"""The cells of a table as numbers, with a sentence for each column that cannot be used."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedmutual.data.encoding import FloatArray
from fedmutual.data.examples import ColumnPlan, list_names
from fedmutual.data.table_file import make_text

_DAY = pd.Timedelta(days=1)
_EPOCH = pd.Timestamp("1970-01-01", tz="UTC")
_SUGGESTED = "or set data.columns (`fedmutual data check` recommends one)"
NameRow = Callable[[int], str]
Reader = Callable[["pd.Series[Any]", ColumnPlan, Path, NameRow], tuple[FloatArray, str | None]]


def parse_numbers(features: pd.DataFrame, path: Path, name_row: NameRow) -> tuple[npt.NDArray[np.float32], list[str]]:
    """Return features [n, F], all of which must be finite numbers, and a sentence for each column that holds others."""
    if not len(features.columns):
        return np.empty((len(features), 0), np.float32), [f"{path}: there is no feature column besides the label; add one"]
    parsed, problems = [], []
    for name in features.columns:
        column, problem = _parse_number(features[name], path, name_row)
        problem = (
            problem and f"{problem}, but features must be numbers; encode the column as numbers, remove it, {_SUGGESTED}"
        )
        missing_rows = np.flatnonzero(~np.isfinite(column))
        if problem is None and len(missing_rows):
            problem = (
                f"{path}: column {name!r} is missing, NaN or infinite in {name_row(missing_rows[0])} "
                f"({len(missing_rows)} of {len(column)} rows); fill in the values, remove the column, {_SUGGESTED}"
            )
        problems += [problem] if problem else []
        parsed.append(column)
    return np.stack(parsed, 1).astype(np.float32), problems


def parse_cells(
    table: pd.DataFrame, plans: Sequence[ColumnPlan], path: Path, name_row: NameRow, date_format: str | None = None
) -> tuple[FloatArray, list[str]]:
    """Return cells [n, columns] as their plans say, NaN where they are missing, and a sentence for each bad column."""
    readers: dict[str, Reader] = {
        "number": _read_number,
        "category": _read_category,
        "date": partial(_read_date, date_format=date_format),
    }
    columns, problems = [], []
    for plan in plans:
        column, problem = readers[plan.settings.kind](table[plan.name], plan, path, name_row)
        columns.append(column)
        problems += [problem] if problem else []
    return np.stack(columns, 1), problems


def _parse_number(cells: "pd.Series[Any]", path: Path, name_row: NameRow) -> tuple[FloatArray, str | None]:
    """Return the cells as numbers [n], and the beginning of a sentence on the first cell that is text."""
    column = pd.to_numeric(cells, errors="coerce")
    text_rows = np.flatnonzero(column.isna() & cells.notna())
    values = column.to_numpy(np.float64, na_value=np.nan)
    if not len(text_rows):
        return values, None
    return values, f"{path}: column {cells.name!r} holds {cells.iloc[text_rows[0]]!r} in {name_row(text_rows[0])}"


def _read_number(cells: "pd.Series[Any]", plan: ColumnPlan, path: Path, name_row: NameRow) -> tuple[FloatArray, str | None]:
    values, problem = _parse_number(cells, path, name_row)
    infinite_rows = np.flatnonzero(np.isinf(values))
    if problem is not None:
        return values, f"{problem}, but data.columns.{plan.name} is for numbers; fix the cell, or set another kind"
    if len(infinite_rows):
        return values, f"{path}: column {plan.name!r} is infinite in {name_row(infinite_rows[0])}; leave the cell empty"
    return values, None


def _read_category(
    cells: "pd.Series[Any]", plan: ColumnPlan, path: Path, name_row: NameRow
) -> tuple[FloatArray, str | None]:
    text = make_text(cells)
    codes = text.map({v: float(i) for i, v in enumerate(plan.vocabulary)}).to_numpy(np.float64, na_value=np.nan)
    unknown_rows = np.flatnonzero(np.isnan(codes) & text.notna())
    if not len(unknown_rows):
        return codes, None
    row = unknown_rows[0]
    return codes, (
        f"{path}: column {plan.name!r} holds {text.iloc[row]!r} in {name_row(row)} "
        f"({len(unknown_rows)} of {len(codes)} rows hold unknown values), but the values are {list_names(plan.vocabulary)}; "
        "fix the cell, leave it empty, or add the value to data.columns"
    )


def _read_date(
    cells: "pd.Series[Any]", plan: ColumnPlan, path: Path, name_row: NameRow, date_format: str | None
) -> tuple[FloatArray, str | None]:
    text = make_text(cells)
    dates = parse_dates(text, date_format)
    days = ((dates - _EPOCH) / _DAY).to_numpy(np.float64, na_value=np.nan)
    bad_rows = np.flatnonzero(dates.isna() & text.notna())
    if not len(bad_rows):
        return days, None
    return days, (
        f"{path}: column {plan.name!r} holds {text.iloc[bad_rows[0]]!r} in {name_row(bad_rows[0])}, but dates must be "
        f"written as 2026-05-31 or 2026-05-31T14:30{_describe_format(date_format)}; fix the cell or leave it empty"
    )


def _describe_format(date_format: str | None) -> str:
    return ", or data.date_format must say how" if date_format is None else f", or as data.date_format = {date_format!r}"


def parse_dates(text: "pd.Series[str]", date_format: str | None = None) -> "pd.Series[pd.Timestamp]":
    """Return the cells [n] as dates in UTC [n]; NaT where a cell is missing or is no date.

    date_format: the format of the cells that are not ISO 8601; None: only ISO 8601 is read.
    """
    dates = pd.to_datetime(text, errors="coerce", format="ISO8601", utc=True)
    if date_format is None:
        return dates
    return dates.fillna(pd.to_datetime(text, errors="coerce", format=date_format, utc=True))
