"""The labels in the columns of a table: class names, class numbers, numbers as text, or 0 and 1 of several labels."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedmutual.data.draws import Names
from fedmutual.errors import DataError

_DIGITS = re.compile(r"[+-]?[0-9]+")
_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]{0,17})")  # excludes codes such as 01, and numbers that do not fit int64
_BINARY = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}  # cells of a column of several labels


def read_labels(
    frame: pd.DataFrame, label: str | tuple[str, ...], path: Path, name_row: Callable[[int], str], numbers: bool
) -> tuple[npt.NDArray[Any], list[str]]:
    """Return the labels [n] of one column, or 0 and 1 [n, L] of a list of columns, and a sentence for each problem.

    numbers: the labels of one column are numbers; they stay text, which `targets.read_targets` parses.
    """
    if not isinstance(label, str):
        columns = [_read_binary(frame, name, path, name_row) for name in label]
        return np.stack([values for values, _ in columns], 1), [problem for _, problem in columns if problem]
    labels = get_names(frame, label)
    assert labels is not None  # `_find_missing_columns` has looked
    blank_rows = np.flatnonzero(labels == "")
    if len(blank_rows):
        return labels, [
            f"{path}: the label in {name_row(blank_rows[0])} is missing ({len(blank_rows)} of {len(labels)} rows); fill it "
            "in or remove the row"
        ]
    if numbers:
        return labels, []
    try:
        return _parse_labels(labels, path, name_row), []
    except DataError as problem:
        return labels, [str(problem)]


def _read_binary(
    frame: pd.DataFrame, name: str, path: Path, name_row: Callable[[int], str]
) -> tuple[npt.NDArray[np.float32], str | None]:
    """Return a column of 0 and 1 [n], and a sentence on its first cell that is neither."""
    cells = frame[name].str.strip()
    values = cells.str.casefold().map(_BINARY).to_numpy(np.float32, na_value=np.nan)
    bad_rows = np.flatnonzero(np.isnan(values))
    if not len(bad_rows):
        return values, None
    return values, (
        f"{path}: the label {name!r} is {cells.iloc[bad_rows[0]]!r} in {name_row(bad_rows[0])}; each of several labels must "
        "be 0 or 1; fix the cell"
    )


def get_names(frame: pd.DataFrame, column: str | None) -> Names | None:
    """Return a column of names [n] without blanks at either end; None where there is no such column."""
    if column is None or column not in frame:
        return None
    return np.asarray(frame[column].str.strip(), dtype=str)


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
