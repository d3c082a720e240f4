"""Labels as their owner wrote them: missing labels are refused, and bytes become text."""

from dataclasses import replace
from numbers import Integral, Number
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmutual.config import DataConfig
from fedmutual.data.examples import Part
from fedmutual.errors import DataError, format_count

_MISSING = {"", "nan", "NaN", "NaT", "<NA>"}  # the text of missing values of numpy and pandas


def clean_labels(part: Part, config: DataConfig) -> Part:
    """Return the part with labels of text or numbers [n, ...], none of which is missing.

    None, NaN and empty text are missing labels. So is the text that numpy and pandas write for NaN, unless data.classes or
    data.labels names that text.

    Raises:
        DataError: labels are missing, are bytes that are no UTF-8 text, or are of several kinds, such as 1 and "1".
    """
    labels = part.labels
    if labels.dtype.kind == "f":
        _refuse_missing(part, np.isnan(labels))
    if labels.dtype.kind not in "SUTO":
        return part
    values = labels.astype(object)
    for place, value in np.ndenumerate(values):
        if isinstance(value, bytes):
            values[place] = _decode_label(value, part, place[0])
    text = _MISSING - {*(config.classes or ()), *config.labels}
    is_text = [isinstance(v, str) and v.strip() in text for v in values.flat]
    missing = np.array(is_text, dtype=bool).reshape(values.shape)
    if labels.dtype.kind in "OT":
        import pandas as pd  # takes 0.3 s: imported only for labels that may be objects of pandas

        missing |= pd.isna(values)
    _refuse_missing(part, missing)
    return replace(part, labels=_unify_types(values, part))


def _decode_label(value: bytes, part: Part, row: int) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise DataError(
            f"{part.where(row)}: its label {value!r} is not UTF-8 text; decode the labels, for example by "
            "[label.decode('latin-1') for label in y]"
        ) from None


def _refuse_missing(part: Part, missing: npt.NDArray[np.bool_]) -> None:
    """Raise DataError where labels are missing. missing: [n, ...]."""
    rows = np.flatnonzero(missing.any(tuple(range(1, missing.ndim))))
    if len(rows):
        raise DataError(
            f"{part.where(int(rows[0]))}: its label is missing ({len(rows):,} of {format_count(len(missing), 'label')}); "
            "fill in the labels, or drop these rows (of a DataFrame by dropna)"
        )


def _unify_types(values: npt.NDArray[Any], part: Part) -> npt.NDArray[Any]:
    """Return labels of Python objects [n, ...] as one array of numbers or text; whole numbers [n] are names, so text."""
    kinds = [_name_kind(value) for value in values.flat]
    other = next((k for k, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        row = other * len(values) // len(kinds)
        raise DataError(
            f"{part.where(row)}: its label {values.flat[other]!r} is {kinds[other]}, and the label {values.flat[0]!r} of "
            f"{part.where(0)} is {kinds[0]}; give all labels one type, for example by .astype(str)"
        )
    is_names = values.ndim == 1 and not (kinds[:1] == ["a number"] and not all(isinstance(v, Integral) for v in values))
    if is_names:
        return values.astype(str)
    cells = np.asarray(values.tolist())
    return cells.astype(float) if cells.dtype == object and kinds[:1] == ["a number"] else cells  # Decimal, Fraction


def _name_kind(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "a truth value"
    return "a number" if isinstance(value, Number) else "text" if isinstance(value, str) else type(value).__name__
