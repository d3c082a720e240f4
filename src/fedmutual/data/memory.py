"""Data in the caller's memory: torch Datasets, tensors, numpy arrays and pandas DataFrames as a source."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from torch import Tensor
from torch.utils.data import Dataset

from fedmutual.config import DataConfig
from fedmutual.data.arrays import make_source
from fedmutual.data.column_check import check_names, describe_nameless, note_rounded_numbers
from fedmutual.data.examples import Source, describe_columns, list_names
from fedmutual.data.factory import make_factory_source
from fedmutual.errors import DataError

WANTED = "a torch Dataset, a pair (x, y) of arrays, tensors or DataFrames, or a DataFrame with the argument label"


def make_memory_source(train: Any, test: Any, label: str | Sequence[str] | None, place: str) -> Source:
    """Return objects as a source: training rows, and test rows or None.

    label: the column of the targets, or a list of columns of 0 and 1, of DataFrames that hold features too.
    place: the name in messages.

    Raises:
        DataError: an object is no data, is empty, lacks a column, or has a feature that is missing or no number; or `label`
            is given, and the rows are no DataFrame.
        ConfigError: a torch Dataset has no length, so it can only be iterated.
    """
    if isinstance(train, Dataset):
        _check_label(train, label, f"train of {place}")
        if test is not None and not isinstance(test, Dataset):
            raise DataError(f"{place}: train is a torch Dataset, so test must be one too")
        return make_factory_source(train if test is None else (train, test), DataConfig(), place)
    x, y, columns = _split_table(train, label, f"train of {place}")
    arrays = {"x": x, "y": y}
    if test is not None:
        arrays["x_test"], arrays["y_test"], test_columns = _split_table(test, label, f"test of {place}", columns)
        if test_columns != columns:
            raise DataError(f"test of {place}: its columns are not those of train; give both the same columns")
    source = make_source(arrays, DataConfig(), place)
    classes = source.classes if label is None or isinstance(label, str) else tuple(label)
    names = (label,) if isinstance(label, str) else tuple(label or ())
    notes = []
    if columns is not None:
        table = (train if isinstance(train, pd.DataFrame) else train[0]).rename(columns=str)[[*columns]]
        notes = note_rounded_numbers(table, source.place, "subtract an offset in float64, or divide by a number")
    return Source(source.place, source.train, source.test, classes, columns, names, notes=tuple(notes))


def convert_features(features: Any, place: str, columns: tuple[str, ...] | None = None) -> npt.NDArray[Any]:
    """Return features as an array [n, ...]. columns: those of a DataFrame that are wanted, in this order; None: all.

    Raises:
        DataError: a column is missing, or a value is missing or no number.
    """
    if isinstance(features, pd.DataFrame):
        features = features.rename(columns=str)
        missing = [c for c in columns or () if c not in features]
        if missing:
            raise DataError(f"{place}: there is no column {missing[0]!r}; {describe_columns(features.columns, missing[0])}")
        table = features[list(columns)] if columns is not None else features
        text = [c for c in table if not pd.api.types.is_numeric_dtype(table[c])]
        if text:
            raise DataError(f"{place}: the columns {list_names(text)} are not numbers; encode them as numbers, or drop them")
        blank = [c for c in table if table[c].isna().any()]
        if blank:
            raise DataError(f"{place}: the columns {list_names(blank)} have missing values; fill them in, or drop the rows")
        are_whole = all(pd.api.types.is_integer_dtype(kind) for kind in table.dtypes)
        # whole numbers may be ids; as those of a file, which are float64 too, others are rounded to float32 with a remark
        numbers: npt.NDArray[Any] = table.to_numpy(np.float64 if are_whole else np.float32)
        return numbers
    if np.ma.is_masked(features):
        raise DataError(f"{place}: a masked array has masked values, which are missing; fill them in, or drop the rows")
    try:
        values: npt.NDArray[Any] = features.detach().cpu().numpy() if isinstance(features, Tensor) else np.asarray(features)
        return values
    except (TypeError, ValueError) as problem:
        raise DataError(f"{place}: {type(features).__name__} is no array ({str(problem).splitlines()[0]})") from None


def _check_label(rows: Any, label: str | Sequence[str] | None, place: str) -> None:
    """Raise DataError if the column of the targets is named, and the rows have no columns."""
    if label is not None and not isinstance(rows, pd.DataFrame):
        raise DataError(
            f"{place}: label = {label!r} names a column, and a {type(rows).__name__} has none; give a DataFrame, or remove "
            "label"
        )


def _split_table(
    arrays: Any, label: str | Sequence[str] | None, place: str, columns: tuple[str, ...] | None = None
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], tuple[str, ...] | None]:
    """Return x, y, and the names of the features, where they have any. columns: the order in which features are wanted."""
    _check_label(arrays, label, place)
    if isinstance(arrays, pd.DataFrame):
        check_names(arrays.columns, place)
        if label is None:
            raise DataError(f"{place} is a DataFrame; name the column of its targets: Site(..., label='COLUMN')")
        names = [label] if isinstance(label, str) else list(label)
        missing = [name for name in names if name not in arrays]
        if missing:
            raise DataError(
                f"{place}: there is no column {missing[0]!r}, which label names; "
                f"{describe_columns(arrays.columns, missing[0])}"
            )
        arrays = (arrays.drop(columns=names), arrays[label if isinstance(label, str) else names])
    if not isinstance(arrays, tuple | list) or len(arrays) != 2:
        raise DataError(f"{place} is {type(arrays).__name__}; give {WANTED}")
    features, targets = arrays
    if isinstance(features, pd.DataFrame):
        check_names(features.columns, place)
        columns = columns or tuple(map(str, features.columns))
        for problem in describe_nameless(columns, DataConfig(), place):
            raise DataError(problem)
        return convert_features(features, place, columns), _convert_targets(targets, place), columns
    return convert_features(features, place), _convert_targets(targets, place), None


def _convert_targets(targets: Any, place: str) -> npt.NDArray[Any]:
    """Return targets as an array [n, ...], with missing ones as they are."""
    if isinstance(targets, pd.DataFrame | pd.Series):
        targets = targets.to_numpy()
    values = convert_features(targets, place)
    if values.dtype.kind == "U" and isinstance(targets, list | tuple):  # of ["ill", nan], whose nan became text
        return np.array(targets, dtype=object)
    return values
