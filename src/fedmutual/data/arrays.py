"""Arrays from an npz file: x, y; x_test, y_test; group and domain for each row; classes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmutual.config import DataConfig
from fedmutual.data.examples import Part, Source, UserArrayExamples, list_names, merge_parts
from fedmutual.errors import ConfigError, DataError, format_error

ArraysByName = Mapping[str, npt.NDArray[Any]]
_SAVE = "save 'x' and 'y' with numpy.savez"


def read_npz(config: DataConfig) -> Source:
    """Return the data of the file data.root; its test rows are x_test and y_test, or the file data.test.

    Raises:
        ConfigError: data.root is not set, or there are test rows both in x_test and in data.test.
        DataError: a file is missing, is no npz file of plain arrays, or its arrays do not fit each other.
    """
    path = require_root(config)
    arrays = read_arrays(path)
    if config.test is None:
        return make_source(arrays, config, str(path))
    if "x_test" in arrays:
        raise ConfigError(f"key 'data.test': {path} already has test rows in 'x_test'; remove one of the two")
    test = _make_part(read_arrays(config.test), "", config, str(config.test))
    return make_source(arrays, config, str(path), test)


def read_medmnist(config: DataConfig) -> Source:
    """Return a data set of MedMNIST (Yang et al. 2023, https://doi.org/10.1038/s41597-022-01721-8) from its npz file.

    The file's validation rows are training rows here, where each client holds out rows of its own.

    Raises:
        DataError: the file is missing, is no npz file of plain arrays, its arrays do not fit each other, or it holds
            volumes.
        ConfigError: data.root is not set.
    """
    path = require_root(config)
    arrays = read_arrays(path, missing="key 'data.root' names the npz file that medmnist.com offers")
    train, extra, test = (
        _make_part(
            {f"x_{kind}": arrays[f"{kind}_images"], f"y_{kind}": arrays[f"{kind}_labels"]}, f"_{kind}", config, str(path)
        )
        for kind in _require_kinds(arrays, path)
    )
    shape = arrays["train_images"].shape[1:]
    if len(shape) == 3 and shape[-1] not in (1, 3):  # [N, D, H, W]: D would be taken for channels
        raise DataError(
            f"{path}: holds volumes of {' x '.join(map(str, shape))}; fedmutual reads the 2D sets of MedMNIST only"
        )
    if not train.labels.shape[1:] == extra.labels.shape[1:] == test.labels.shape[1:]:
        raise DataError(
            f"{path}: its three arrays of labels have {list(train.labels.shape)}, {list(extra.labels.shape)} and "
            f"{list(test.labels.shape)} values; give each row as many labels as the others"
        )
    return Source(str(path), merge_parts(train, extra), test)


def _require_kinds(arrays: ArraysByName, path: Path) -> tuple[str, ...]:
    """Return the kinds of rows of MedMNIST. Raises DataError where an array of a kind is missing."""
    kinds = ("train", "val", "test")
    for name in (f"{kind}_{what}" for kind in kinds for what in ("images", "labels")):
        if name not in arrays:
            raise DataError(f"{path}: is no file of MedMNIST: there is no array {name!r}; it has {list_names(list(arrays))}")
    return kinds


def require_root(config: DataConfig) -> Path:
    """Return data.root; raise ConfigError if the key is not set."""
    if config.root is None:
        raise ConfigError(f"data.name = {config.name!r} needs the key 'data.root': the path of the data")
    return config.root


def make_source(arrays: ArraysByName, config: DataConfig, place: str, test: Part | None = None) -> Source:
    """Return arrays by name as a source. `place`: the name in messages. `test`: the test part from another file.

    Raises:
        DataError: an array is missing, or the arrays do not fit each other.
    """
    train = _make_part(arrays, "", config, place)
    if "x_test" in arrays:
        test = _make_part(arrays, "_test", config, place)
    classes = arrays.get("classes")
    return Source(place, train, test, None if classes is None else tuple(str(c) for c in classes.tolist()))


def read_array(path: Path, name: str) -> npt.NDArray[Any]:
    """Return one array of an npz file, in the shape and type of the file.

    Raises:
        DataError: there is no such array, or the file is no npz file of plain arrays.
    """
    arrays = read_arrays(path, missing="name another")
    if name not in arrays:
        raise DataError(f"{path}: there is no array {name!r}; it has {list_names(list(arrays)) or 'none'}")
    return arrays[name]


def _make_part(arrays: ArraysByName, suffix: str, config: DataConfig, place: str) -> Part:
    for name in (f"x{suffix}", f"y{suffix}"):
        if name not in arrays:
            raise DataError(f"{place}: there is no array {name!r}; it has {list_names(list(arrays)) or 'none'}")

    def where(row: int) -> str:
        return f"row {row} of 'x{suffix}' in {place}"

    x = UserArrayExamples(arrays[f"x{suffix}"], f"{place}: array 'x{suffix}'", where)
    if not len(x):
        raise DataError(f"{place}: array 'x{suffix}' has no rows")
    groups = None
    if config.group_by is not None:
        name = f"{config.group_by}{suffix}" if f"{config.group_by}{suffix}" in arrays else f"group{suffix}"
        if name not in arrays:
            raise DataError(
                f"{place}: data.group_by needs an array '{config.group_by}{suffix}'; it has {list_names(list(arrays))}"
            )
        groups = _convert_column(arrays[name], name, len(x), place).astype(str)
    domain = f"domain{suffix}"
    domains = _convert_column(arrays[domain], domain, len(x), place).astype(str) if domain in arrays else None
    labels = _convert_targets(arrays[f"y{suffix}"], f"y{suffix}", len(x), place)
    return Part(x, labels, where, groups, domains)


def _convert_column(values: npt.NDArray[Any], name: str, rows: int, place: str) -> npt.NDArray[Any]:
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (rows,):
        raise DataError(
            f"{place}: array {name!r} has the shape {list(values.shape)}; give one value for each of the {rows} rows"
        )
    return values


def _convert_targets(values: npt.NDArray[Any], name: str, rows: int, place: str) -> npt.NDArray[Any]:
    """Return targets [n, ...]; whether a task can use their shape is checked where they are read."""
    if values.ndim < 2 or values.shape[1:] == (1,) or len(values) != rows:
        return _convert_column(values, name, rows, place)
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
        raise DataError(
            f"{path}: is not an npz file of arrays ({_describe_problem(path, problem)}); {fix or _SAVE}"
        ) from None


def _describe_problem(path: Path, problem: Exception) -> str:
    """Return why numpy cannot read a file; numpy takes every unknown file for a pickle."""
    if "pickle" not in str(problem):
        return format_error(problem)
    with path.open("rb") as file:
        is_pickle = "Object" in str(problem) or file.read(1) == b"\x80"
    return "it is a pickle, and pickles are never loaded" if is_pickle else "its first bytes are not those of an npz file"


def _load_array(loaded: Any, name: str, path: Path, fix: str | None) -> npt.NDArray[Any]:
    try:
        values: npt.NDArray[Any] = loaded[name]
    except ValueError as problem:
        if "pickle" not in str(problem).lower():
            raise
        raise DataError(
            f"{path}: array {name!r} holds Python objects, which are refused, because unpickling can run code; "
            + (fix or "save it as numbers or as text, for example with .astype(str)")
        ) from None
    return values
