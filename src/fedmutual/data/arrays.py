"""Arrays from an npz file: x, y; x_test, y_test; group and domain for each row; classes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmutual.config import DataConfig
from fedmutual.data.convert import Where, convert_input
from fedmutual.data.draws import Names
from fedmutual.data.examples import (
    ArrayExamples,
    Examples,
    Part,
    Source,
    UserArrayExamples,
    list_names,
    merge_parts,
    note_rounding,
)
from fedmutual.data.text import encode_texts
from fedmutual.errors import ConfigError, DataError, format_error

ArraysByName = Mapping[str, Any]
"""Array by name; in memory, "x" may also hold several inputs by name."""
ROUNDING_FIX = "subtract an offset in float64, or leave these numbers out"
_SAVE = "save 'x' and 'y' with numpy.savez"


def require_root(config: DataConfig) -> Path:
    """Return data.root; raise ConfigError if the key is not set."""
    if config.root is None:
        raise ConfigError(f"data.name = {config.name!r} needs the key 'data.root': the path of the data")
    return config.root


def read_npz(config: DataConfig) -> Source:
    """Return the data of the file data.root; its test rows are x_test and y_test, or the file data.test.

    Raises:
        ConfigError: data.root is not set, or there are test rows both in x_test and in data.test.
        DataError: a file is missing, is no npz file of plain arrays, or its arrays do not fit each other.
    """
    path = require_root(config)
    arrays = read_arrays(path)
    if config.test is None:
        return _note_unread_arrays(make_source(arrays, config, str(path)), arrays, config)
    if "x_test" in arrays:
        raise ConfigError(f"key 'data.test': {path} already has test rows in 'x_test'; remove one of the two")
    of_test = read_arrays(config.test)
    test = _make_part(of_test, config, str(config.test), "x", "y")
    named = {"classes_test": of_test["classes"]} if "classes" in of_test else {}
    return _note_unread_arrays(make_source({**arrays, **named}, config, str(path), test), arrays, config)


def _note_unread_arrays(source: Source, arrays: ArraysByName, config: DataConfig) -> Source:
    """Return the source with a remark on the arrays of its file that are not read."""
    of_rows = [*(config.inputs or ("x",)), "y", "domain", *(("group", config.group_by) if config.group_by else ())]
    of_test = [f"{name}_test" for name in of_rows] if source.test is not None and config.test is None else []
    unread = [name for name in arrays if name not in (*of_rows, *of_test, "classes", "classes_test")]
    note = [f"{source.place}: arrays {list_names(unread)} are not read"] if unread else []
    return replace(source, notes=(*source.notes, *note))


def read_medmnist(config: DataConfig) -> Source:
    """Return a data set of MedMNIST (Yang et al. 2023, https://doi.org/10.1038/s41597-022-01721-8) from its npz file.

    The file's validation rows are training rows here, where each client holds out rows of its own.

    Raises:
        DataError: the file is missing, is no npz file of MedMNIST, or holds volumes.
        ConfigError: data.root is not set.
    """
    path = require_root(config)
    arrays = read_arrays(path, missing="key 'data.root' names the npz file that medmnist.com offers")
    train, extra, test = (
        _make_part(arrays, config, str(path), f"{kind}_images", f"{kind}_labels") for kind in ("train", "val", "test")
    )
    shape = arrays["train_images"].shape[1:]
    if len(shape) == 3 and shape[-1] not in (1, 3):  # [N, D, H, W]: D would be taken for channels
        raise DataError(
            f"{path}: holds volumes of {' x '.join(map(str, shape))}; fedmutual reads the 2D sets of MedMNIST only"
        )
    if not train.labels.shape[1:] == extra.labels.shape[1:] == test.labels.shape[1:]:
        raise DataError(f"{path}: its arrays of labels differ in width; give each row as many labels as the others")
    return Source(str(path), merge_parts(Source(str(path), train, extra)).train, test)


def make_source(arrays: ArraysByName, config: DataConfig, place: str, test: Part | None = None) -> Source:
    """Return arrays by name as a source. `place`: the name in messages. `test`: the test part from another file.

    Raises:
        DataError: an array is missing, or the arrays do not fit each other.
    """
    train = _make_part(arrays, config, place, "x", "y")
    if f"{config.inputs[0] if config.inputs else 'x'}_test" in arrays:
        test = _make_part(arrays, config, place, "x_test", "y_test", "_test")
    notes = list_roundings(read_inputs(arrays, config.inputs, "x", place), place)
    names, of_test = (
        tuple(convert_names(np.ravel(arrays[name]), name, place).tolist()) if arrays.get(name) is not None else None
        for name in ("classes", "classes_test")
    )
    return check_test_classes(Source(place, train, test, names, notes=tuple(notes)), of_test)


def check_test_classes(source: Source, classes: Sequence[str] | None) -> Source:
    """Return the source. classes: the names that its test part gives the class numbers, or None.

    Raises:
        DataError: a number has one name in the training part, and another in the test part.
    """
    if source.test is not None and source.test.labels.dtype.kind in "biu":
        for number, (one, other) in enumerate(zip(source.classes or (), classes or (), strict=False)):
            if one != other:
                raise DataError(
                    f"{source.place}: class {number} is {one!r} in the training data and {other!r} in the test data; give "
                    "each class one number in both"
                )
    return source


def list_roundings(values: Any, place: str) -> list[str]:
    """Return the remark of `note_rounding` on inputs of float64: an array [n, ...] or several by name."""
    columns = dict[str, npt.NDArray[Any]]()
    for name, x in (values if isinstance(values, Mapping) else {"": values}).items():
        if getattr(x, "dtype", None) != np.float64:  # other types are used exactly, or refused
            continue
        if x.ndim == 2:
            columns |= {f"feature {k}" + (f" of {name}" if name else ""): cells for k, cells in enumerate(x.T)}
        else:
            columns[name or "x"] = x.reshape(-1)
    return note_rounding(columns, place, ROUNDING_FIX)


def get_array(arrays: ArraysByName, name: str, place: str) -> npt.NDArray[Any]:
    """Return an array by name. Raises DataError where there is none."""
    if name not in arrays:
        raise DataError(f"{place}: there is no array {name!r}; it has {list_names(list(arrays)) or 'none'}")
    values: npt.NDArray[Any] = arrays[name]
    return values


def read_inputs(
    arrays: ArraysByName, inputs: Sequence[str] | None, x: str, place: str, suffix: str = ""
) -> npt.NDArray[Any] | dict[str, npt.NDArray[Any]]:
    """Return the array named `x`, or several arrays by name. inputs: the names of several. suffix: of their names."""
    if inputs:
        return {name: get_array(arrays, f"{name}{suffix}", place) for name in inputs}
    values: npt.NDArray[Any] | dict[str, npt.NDArray[Any]] = get_array(arrays, x, place)
    return values


def make_examples(values: npt.NDArray[Any] | Mapping[str, npt.NDArray[Any]], name: str, where: Where) -> Examples:
    """Return an array, or several inputs by name, as examples. name: of the array in messages.

    Raises:
        DataError: the inputs differ in their number of rows; or as `UserArrayExamples` and `convert_input`.
    """
    if not isinstance(values, Mapping):
        return UserArrayExamples(values, name, where)
    counts = {key: len(one) if np.ndim(one) else 0 for key, one in values.items()}
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{key!r} {count}" for key, count in counts.items()) or "none"
        raise DataError(f"{name}: all inputs must have one row for each example, and have {listed} rows")
    return ArrayExamples({k: convert_input(v, f"{name}: input {k!r}", where) for k, v in values.items()})


def _make_part(arrays: ArraysByName, config: DataConfig, place: str, x: str, y: str, suffix: str = "") -> Part:
    """Return the rows of the arrays named `x` and `y`. suffix: of the names of groups and domains."""

    def where(row: int) -> str:
        return f"row {row} of {x!r} in {place}"

    values, targets = read_inputs(arrays, config.inputs, x, place, suffix), get_array(arrays, y, place)
    examples = make_examples(encode_texts(values, config), f"{place}: array {x!r}", where)
    if not len(examples):
        raise DataError(f"{place}: array {x!r} has no rows")

    groups, group, domain = None, f"{config.group_by}{suffix}", f"domain{suffix}"
    if config.group_by is not None:
        group = group if group in arrays else f"group{suffix}"
        if group not in arrays:
            raise DataError(
                f"{place}: data.group_by needs an array '{config.group_by}{suffix}'; it has {list_names(list(arrays))}"
            )
        groups = convert_names(_fit_column(arrays[group], len(examples), group, place), group, place)
    domains = None
    if domain in arrays:
        domains = convert_names(_fit_column(arrays[domain], len(examples), domain, place), domain, place)
    return Part(examples, fit_targets(targets, len(examples), y, place), where, groups, domains)


def fit_targets(targets: npt.NDArray[Any], rows: int, name: str, place: str) -> npt.NDArray[Any]:
    """Return targets [n, ...] of this number of rows; [n, 1] as [n]. Whether a task can use them is checked later.

    Raises:
        DataError: there is not one for each row.
    """
    if targets.ndim < 2 or targets.shape[1:] == (1,) or len(targets) != rows:
        return _fit_column(targets, rows, name, place)
    return targets


def convert_names(values: npt.NDArray[Any], name: str, place: str) -> Names:
    """Return values [n] as text; bytes are UTF-8 text. name: of the array in messages. Raises DataError for other bytes."""
    try:
        return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values.astype(str)
    except UnicodeDecodeError:
        fix = f"decode them, for example by numpy.char.decode({name}, 'latin-1')"
        raise DataError(f"{place}: array {name!r} holds bytes that are not UTF-8 text; {fix}") from None


def _fit_column(values: npt.NDArray[Any], rows: int, name: str, place: str) -> npt.NDArray[Any]:
    values = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if values.shape != (rows,):
        raise DataError(
            f"{place}: array {name!r} has the shape {list(values.shape)}; give one value for each of the {rows} rows"
        )
    return values


def read_arrays(
    path: Path, missing: str = "key 'data.root' or 'data.test' names it", fix: str | None = None
) -> ArraysByName:
    """Return name -> array of an npz file, in the shapes and types of the file.

    Python objects are refused, because unpickling can run code.

    missing: the fix in the message about a missing file. fix: the fix for a file that is no npz file of plain arrays.

    Raises:
        DataError: the file is missing, or is no npz file of plain arrays.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise DataError(f"{path}: holds a single array without a name; {fix or _SAVE}")
        with loaded:
            return {name: _load_array(loaded, name, path, fix) for name in loaded.files}
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; {missing}") from None
    except DataError:
        raise
    except Exception as problem:  # numpy and zipfile raise many kinds of errors for a damaged file
        reason = format_error(problem)
        if "pickle" in reason:  # numpy takes every unknown file for a pickle
            with path.open("rb") as file:
                is_pickle = "Object" in reason or file.read(1) == b"\x80"
            reason = "it is a pickle, and pickles are never loaded" if is_pickle else "its first bytes are of no npz file"
        raise DataError(f"{path}: is not an npz file of arrays ({reason}); {fix or _SAVE}") from None


def _load_array(loaded: Any, name: str, path: Path, fix: str | None) -> npt.NDArray[Any]:
    try:
        values: npt.NDArray[Any] = loaded[name]
    except ValueError as problem:
        if "pickle" not in str(problem).lower():
            raise
        raise DataError(
            f"{path}: array {name!r} holds Python objects, which are refused, because unpickling can run code; "
            + (fix or "save it as numbers or as text, for example with .astype(str), and series of one length with a mask")
        ) from None
    return values
