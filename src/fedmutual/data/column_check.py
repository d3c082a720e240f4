"""Columns of a table that are no features: columns without a name, columns of equal names, label copies, row numbers."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from fedmutual.config import DataConfig
from fedmutual.data.examples import Source, choose_evenly, list_names, note_rounding
from fedmutual.errors import DataError, join_words

Values = npt.NDArray[Any]

_NAMELESS = re.compile(r"\s*|Unnamed: \d+(\.\d+)?")
_RENAMED = re.compile(r"(.+)\.\d+")  # pandas names a second column "age" as "age.1"
_MIN_DIFFERENT = 50  # in fewer rows, whole numbers may all differ by chance
_MIN_COUNTED = 10  # in fewer rows, whole numbers may count the rows by chance, unless they do so from 0 or 1
_MIN_CYCLE = 50  # counts that begin again more than twice after fewer rows are hours, days or months
_MIN_LABELLED = 20  # in fewer rows, a feature may determine the label by chance


def is_nameless(name: str) -> bool:
    """Return whether a column has no name in the header; pandas then calls the column "Unnamed: 0"."""
    return _NAMELESS.fullmatch(name) is not None


def check_names(names: Sequence[Any], place: str) -> None:
    """Raise DataError where two columns of a table have equal names, apart from blanks at either end, or several names."""
    if isinstance(names, pd.MultiIndex):
        fix = 'join the names: frame.columns = [" ".join(map(str, names)) for names in frame.columns]'
        raise DataError(f"{place}: each column has {names.nlevels} names (a MultiIndex of pandas); {fix}")
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(map(str, names)):
        if not is_nameless(name):
            positions.setdefault(name.strip(), []).append(position)
    for name, same in positions.items():
        if len(same) > 1:
            numbers, letters = (join_words([form(k) for k in same]) for form in (lambda k: str(k + 1), _format_letter))
            raise DataError(
                f"{place}: columns {numbers} ({letters} in a spreadsheet) have one name, {name!r}, so one may be a copy of "
                "another; rename or remove all but one"
            )


def _format_letter(position: int) -> str:
    """Return the letters by which a spreadsheet calls a column: A, ..., Z, AA, ..."""
    head, last = divmod(position, 26)
    return (_format_letter(head - 1) if head else "") + chr(ord("A") + last)


def describe_nameless(columns: Sequence[str], config: DataConfig, place: str) -> list[str]:
    """Return a sentence on features without a name, such as the index that pandas writes into a file; [] without them."""
    nameless = [name for name in columns if is_nameless(name)]
    if not nameless:
        return []
    return [
        f"{place}: columns without a name in the header, as the row numbers of pandas are, cannot be features: "
        f"{list_names(nameless)}; name these columns, or leave them out: {_describe_drop(nameless, config)}"
    ]


def check_columns(source: Source, targets: Values, config: DataConfig) -> list[str]:
    """Return remarks on columns of a table that determine the label of every row, and that identify or count the rows.

    targets: of all rows [n] or [n, L]; those of the training part come first.

    Raises:
        DataError: a column is a copy of another column or of the label, and its name shows that both had one name.
    """
    if not source.columns:  # none beside text
        return []
    cells = source.train.x.take_one(range(len(source.train.x))).numpy()
    values = dict(zip(source.columns, cells.T, strict=True))
    labels = [*targets[: len(cells)].reshape(len(cells), -1).T]
    determining = [name for name, column in values.items() if any(_determines(column, label) for label in labels)]
    for name, column in values.items():
        renamed = _RENAMED.fullmatch(name)
        first = renamed[1] if renamed else None
        is_copy = first in values and np.array_equal(column, values[first], equal_nan=True) and len(np.unique(column)) > 1
        if is_copy or (name in determining and first in source.label_columns):
            copied = f"column {first!r}" if is_copy else "the label"
            raise DataError(
                f"{source.place}: column {name!r} is a copy of {copied}: pandas adds .1 to the name of a second column "
                f"{first!r}; rename it, or leave it out: {_describe_drop([name], config)}"
            )
    not_numbers = {plan.name for plan in source.plans or () if plan.settings.kind != "number"}
    identifying = [name for name, column in values.items() if name not in not_numbers and identifies_rows(column)]
    different = [name for name in identifying if len(np.unique(values[name])) == len(cells)]
    return [
        f"{source.place}: {list_names(names)} {verb}{'' if len(names) > 1 else 's'} {what}; unless a model may know this, "
        f"leave these columns out: {_describe_drop(names, config)}"
        for names, verb, what in (
            (determining, "determine", "the label of every training row: each value belongs to one label"),
            (different, "hold", "a different whole number in every row, as identifiers do"),
            ([name for name in identifying if name not in different], "count", "the rows, as an index does"),
        )
        if names
    ]


def _describe_drop(names: Sequence[str], config: DataConfig) -> str:
    """Return how to leave columns out of a file or of a DataFrame."""
    if config.columns:
        return "do not list them in data.columns"
    if config.root is None:
        return f"DataFrame.drop(columns={[*names]})"
    return f"data.drop = {json.dumps([*(config.drop or ()), *names], ensure_ascii=False)}"


def _determines(column: Values, label: Values) -> bool:
    """Return whether a feature [n] equals the label [n], or has one value for each label and one label for each value."""
    if len(column) < _MIN_LABELLED:
        return False
    if np.array_equal(column.astype(np.float32), label.astype(np.float32)):
        return len(np.unique(label)) > 1
    for rows in (choose_evenly(len(column), 10 * _MIN_LABELLED), slice(None)):  # a sample first, which is fast
        (values, codes), (labels, label_codes) = (np.unique(a[rows], return_inverse=True) for a in (column, label))
        pairs = np.unique(codes * len(labels) + label_codes)
        if not 1 < len(values) == len(labels) == len(pairs) <= len(codes) / 2:
            return False
    return True


def identifies_rows(values: Values) -> bool:
    """Return whether values [n] are a different whole number in every row, or count the rows.

    A count may begin again at its first number, as it does where the rows of several files follow each other. A short count
    that begins again and again is a feature, such as the hour of a day or the month of a year.
    """
    if len(values) < 3 or not (values == values.round()).all():
        return False
    if len(values) < _MIN_COUNTED:
        return values[0] in (0, 1) and bool((np.diff(values) == 1).all())
    if len(values) >= _MIN_DIFFERENT and len(np.unique(values)) == len(values):
        return True
    steps, restarts = np.diff(values), np.flatnonzero(values[1:] == values[0])
    is_cycle = len(restarts) > 2 and restarts[0] + 1 < _MIN_CYCLE
    counts = steps[0] and np.delete(steps == steps[0], restarts).all() and len(restarts) * _MIN_COUNTED < len(values)
    return bool(counts and not is_cycle)


def note_rounded_numbers(table: Mapping[str, Any] | pd.DataFrame, place: str, fix: str = "subtract an offset") -> list[str]:
    """Return the remark of `note_rounding` on columns of a table, of which cells that are no numbers are left out."""
    numbers = {str(k): pd.to_numeric(pd.Series(c), errors="coerce").dropna().to_numpy() for k, c in table.items()}
    return note_rounding(numbers, place, fix)
