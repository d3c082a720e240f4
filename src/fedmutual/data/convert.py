"""Arrays of any usual layout as tensors that networks take: their forms, their types, and series of different length."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmutual.calling import MASK, MASKS
from fedmutual.errors import BadRows, DataError

Form = Literal["images", "series", "ids"]
"""How networks get an array [n, ...]. An array of three axes is [n, H, W] as images of one channel, and [n, C, T] as series
of C channels; arrays of more or fewer axes are equal in both forms. Ids are whole numbers that stay int64."""

IMAGES: Form = "images"
SERIES: Form = "series"
IDS: Form = "ids"
Where = Callable[[int], str]
"""The name of a row in messages: "a.png", "row 7 of b.csv"."""

BY_NAME = "give several inputs by name, as a dictionary: {'image': ..., 'table': ...}"
_CHANNELS = (1, 3, 4)  # gray, RGB, RGBA
_LARGEST_EXACT = 2**24  # float32 holds every whole number up to this one
_LARGEST_FRACTION = 2.0**53  # from this number on, every float64 is a whole number
_FEW_STEPS = 100  # of float32 between the least and the greatest number of a column
_SMALLEST = 2.0**-149  # the least positive float32


def find_forms(x: npt.NDArray[Any], name: str) -> tuple[Form, ...]:
    """Return the forms that an array [n, ...] can have, judged by its shape, its type, and the first two rows.

    Raises:
        DataError: the values are not numbers, or networks take no array of this shape.
    """
    _check_numbers(x, name)
    if x.ndim < 2 or 0 in x.shape[1:]:
        fix = " if each row is one number, give x[:, None];" if x.ndim == 1 else ""
        raise DataError(
            f"{name} has the shape {list(x.shape)};{fix} tables are [examples, features], series [examples, channels, "
            "time], images [examples, height, width] and volumes [examples, channels, depth, height, width], with "
            "channels before or after"
        )
    are_whole = x.dtype.kind in "iu" or (x.dtype.kind == "f" and bool((x[:2] == np.trunc(x[:2])).all()))
    return (IMAGES, *((SERIES,) if x.ndim == 3 else ()), *((IDS,) if are_whole else ()))


def convert_array(x: npt.NDArray[Any], name: str, form: Form = IMAGES, where: Where | None = None) -> Tensor:
    """Return an array in any usual layout as a tensor [n, F], [n, C, T], [n, C, H, W] or [n, C, D, H, W].

    uint8 stays uint8, ids are int64, and the rest is float32. Images may be [n, H, W], unless the form is another one.
    Images and volumes have their channels first, or last: 1, 3 or 4 channels, fewer than the second axis has.
    `name` begins the messages; `where` names a row of the array in messages.

    Raises:
        DataError: the values are not numbers, or networks take no array of this shape.
        BadRows: float32 cannot hold a whole number; or the form is ids, and a value is no whole number.
    """
    find_forms(x, name)
    where = where or (lambda row: f"{name}: row {row}")
    if x.ndim == 3 and form == IMAGES:
        x = x[:, None]
    elif 3 < x.ndim < 6 and x.shape[-1] in _CHANNELS and x.shape[-1] < x.shape[1]:
        x = np.moveaxis(x, -1, 1)
    if form == IDS:
        values = _convert_exactly(x, np.int64, where, "is no whole number of 64 bits, but the network takes ids; correct it")
    elif x.dtype == np.uint8:
        values = x
    elif x.dtype.kind in "iu" and x.dtype.itemsize > 2:
        fix = "divide or standardise the numbers, or round them yourself: x.astype('float32')"
        values = _convert_exactly(x, np.float32, where, f"is a whole number above 2^24, which float32 would round; {fix}")
    else:
        values = convert_decimals(x, where)
    return view_array(values)


def convert_input(x: npt.NDArray[Any], name: str, where: Where | None = None) -> Tensor:
    """Return one of several inputs [n, ...] as a tensor of equal shape: bool, uint8 pixels [n, ...], int64 or float32.

    Raises:
        DataError, BadRows: as `convert_array`.
    """
    _check_numbers(x, name)
    where = where or (lambda row: f"{name}: row {row}")
    if x.dtype.kind in "iu" and not (x.dtype == np.uint8 and x.ndim > 2):
        x = _convert_exactly(x, np.int64, where, "is no whole number of 64 bits; correct it")
    elif x.dtype.kind == "f":
        x = convert_decimals(x, where)
    return view_array(x)


def view_array(x: npt.NDArray[Any]) -> Tensor:
    """Return an array as a tensor over the same memory, such as that of a mapped file, which torch warns of if read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing here writes to examples
        return torch.from_numpy(np.ascontiguousarray(x))


def convert_decimals(x: npt.NDArray[Any], where: Where) -> npt.NDArray[np.float32]:
    """Return numbers [n, ...] as float32. Raises BadRows where a finite number is beyond the greatest float32."""
    with np.errstate(over="ignore"):
        values = x.astype(np.float32, copy=False)
    if x.dtype.itemsize > values.itemsize:
        bad = np.flatnonzero((np.isinf(values) & np.isfinite(x)).reshape(len(x), -1).any(1))
        if len(bad):
            raise BadRows(
                *(f"{where(int(k))} holds a number above 3.4e38, the greatest float32; divide the numbers" for k in bad)
            )
    return values


def find_rounded(cells: npt.NDArray[Any]) -> tuple[Any, Any] | None:
    """Return a number of a column [n] that float32 does not keep apart from others, and what it becomes; else None."""
    cells = cells[np.isfinite(cells)] if cells.dtype.kind == "f" else cells
    if cells.dtype.kind not in "iuf" or cells.dtype.itemsize <= 2 or not cells.size:
        return None
    with np.errstate(all="ignore"):
        rounded = cells.astype(np.float32)
        is_whole = (cells == np.round(cells)) & ((cells.dtype.kind != "f") | (np.abs(cells) < _LARGEST_FRACTION))
        changed = is_whole & (np.abs(cells) > _LARGEST_EXACT) & (rounded.astype(cells.dtype) != cells)
        steps = float(cells.max() - cells.min()) / max(float(np.spacing(np.abs(rounded).max())), _SMALLEST)
    are_close = cells.dtype == np.float64 and steps < _FEW_STEPS
    if not changed.any() and are_close and len(np.unique(rounded)) < len(np.unique(cells)):
        changed = rounded != cells
    return (cells[changed][0], rounded[changed][0]) if changed.any() else None


def _check_numbers(x: npt.NDArray[Any], name: str) -> None:
    """Raise DataError unless the values are numbers or truth values."""
    if x.dtype.kind not in "biuf":
        raise DataError(f"{name} holds {x.dtype.name} values; examples must be numbers: {find_fix(x)}")


_DAYS = "numpy.timedelta64(1, 'D')"
_FIXES = {
    "M": f"count days, (x - numpy.datetime64('2000-01-01')) / {_DAYS}",
    "m": f"count days, x / {_DAYS}",
    "c": "give numpy.real(x) and numpy.imag(x) as features of their own",
    "V": "give pandas.DataFrame(x), which has a column for each field",
}


def find_fix(x: npt.NDArray[Any], table: str = "pandas.DataFrame(x)") -> str:
    """Return how a user makes numbers of values that are none, which the fix calls x. table: their table, in code."""
    if x.dtype.kind in _FIXES:
        return _FIXES[x.dtype.kind]
    if not x.ndim and hasattr(x.item(), "toarray"):  # of scipy.sparse
        return "give x.toarray()"
    try:
        x.astype(np.float64)
    except (TypeError, ValueError):
        return f"give each category a column, pandas.get_dummies({table}, dtype=float), or name text in data.text"
    return "give x.astype('float64')"


def _convert_exactly(
    x: npt.NDArray[Any], dtype: type[np.float32] | type[np.int64], where: Where, fault: str
) -> npt.NDArray[Any]:
    """Return x [n, ...] in another type. Raises BadRows where a value changes; `fault`: what is wrong, and the fix."""
    with np.errstate(invalid="ignore"):
        values = x.astype(dtype)
        if dtype is np.float32 and -_LARGEST_EXACT <= x.min(initial=0) <= x.max(initial=0) <= _LARGEST_EXACT:
            return values
        changed = (values.astype(x.dtype) != x) | (np.sign(values) != np.sign(x))  # a number out of range may come back
    bad = np.flatnonzero(changed.reshape(len(x), -1).any(1))
    if len(bad):
        raise BadRows(*(f"{where(int(k))} holds {x[k][changed[k]].flat[0]}, which {fault}" for k in bad))
    return values


def pad_series(series: Sequence[npt.NDArray[Any]], length: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """Return arrays [L, ...] of different length L as one, [n, length, ...], filled up with zeros or cut, and its mask.

    The mask [n, length] is true for steps of the series.
    """
    kind = np.result_type(*{one.dtype for one in series})
    x = np.zeros((len(series), length, *series[0].shape[1:]), kind)
    mask = np.zeros((len(series), length), bool)
    for row, one in enumerate(series):
        x[row, : len(one)], mask[row, : len(one)] = one[:length], True
    return x, mask


def pad_inputs(inputs: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, Any]:
    """Return inputs with series filled up to their lengths, by name, and the mask of the first, unless there is a mask."""
    padded = dict(inputs)
    for name, length in lengths.items():
        if name in inputs and all(map(np.ndim, inputs[name])):  # else test rows do not fit those of the training
            padded[name], mask = pad_series(inputs[name], length)
            padded |= {MASK: mask} if not padded.keys() & {*MASKS} else {}
    return padded


def name_inputs(x: Any) -> Mapping[str, Any]:
    """Return the inputs by name; of one input the name is "x"."""
    return {str(name): one for name, one in x.items()} if isinstance(x, Mapping) else {"x": x}


def list_rows(x: Any) -> list[Any]:
    """Return the rows of inputs that may be series of different length; [] of an array, or if a row is no array.

    x: a list, a nested tensor, or an array or a Series of pandas of Python objects.
    """

    def is_array(row: Any) -> bool:
        array = row if isinstance(row, Tensor) else np.asarray(row)
        return array.ndim > 0 and array.dtype != object

    x = x.to_numpy() if hasattr(x, "to_numpy") and hasattr(x, "dtype") else x
    x = x.unbind() if isinstance(x, Tensor) and x.is_nested else x
    if not isinstance(x, tuple | list) and not (isinstance(x, np.ndarray) and x.dtype == object):
        return []
    try:
        return [*x] if all(map(is_array, x)) else []
    except (TypeError, ValueError, RuntimeError):
        return []


def are_series(values: Sequence[Any]) -> bool:
    """Return whether values are arrays or lists [L, ...] that differ in L alone."""
    shapes = [np.shape(one) if not isinstance(one, list | tuple) else np.asarray(one).shape for one in values]
    return len({s[1:] for s in shapes}) == 1 < len(set(shapes)) and all(shapes)
