"""Arrays of one's own, from an npz file: x, y; x_test, y_test; group and domain for each row; classes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmutual.config import DataConfig
from fedmutual.data.examples import Arrays, Part, Source, listed, rows_first
from fedmutual.errors import ConfigError, DataError, said

Named = Mapping[str, npt.NDArray[Any]]
_SAVE = "save 'x' and 'y' with numpy.savez"


def npz(config: DataConfig) -> Source:
    """The file data.root, with its test rows in x_test and y_test or in the file data.test.

    Raises:
        DataError: a file is missing, is no npz of plain arrays, or its arrays do not fit each other.
    """
    path = given(config)
    found = read(path)
    if config.test is None:
        return from_arrays(found, config, str(path))
    if "x_test" in found:
        raise ConfigError(f"key 'data.test': {path} has test rows of its own in 'x_test'; take one of them out")
    test = _part(read(config.test), "", config, str(config.test))
    return from_arrays(found, config, str(path), test)


def given(config: DataConfig) -> Path:
    """data.root, of data that have no place of their own."""
    if config.root is None:
        raise ConfigError(f"data.name = {config.name!r} needs the key 'data.root': the path of the data")
    return config.root


def from_arrays(found: Named, config: DataConfig, place: str, test: Part | None = None) -> Source:
    """Arrays by name as a source; `place` is what messages call them."""
    train = _part(found, "", config, place)
    if "x_test" in found:
        test = _part(found, "_test", config, place)
    classes = found.get("classes")
    return Source(place, train, test, None if classes is None else tuple(str(c) for c in classes.tolist()))


def only(path: Path, name: str) -> npt.NDArray[Any]:
    """One array of a file. Raises DataError where there is none, or the file is no npz of plain arrays."""
    found = read(path, missing="name another")
    if name not in found:
        raise DataError(f"{path}: there is no array {name!r}; it has {listed(list(found)) or 'none'}")
    return found[name]


def _part(found: Named, suffix: str, config: DataConfig, place: str) -> Part:
    for name in (f"x{suffix}", f"y{suffix}"):
        if name not in found:
            raise DataError(f"{place}: there is no array {name!r}; it has {listed(list(found)) or 'none'}")
    x = rows_first(found[f"x{suffix}"], f"{place}: array 'x{suffix}'").numpy()
    if not len(x):
        raise DataError(f"{place}: array 'x{suffix}' has no rows")
    groups = None
    if config.group_by is not None:
        name = f"{config.group_by}{suffix}" if f"{config.group_by}{suffix}" in found else f"group{suffix}"
        if name not in found:
            raise DataError(
                f"{place}: data.group_by needs an array '{config.group_by}{suffix}'; it has {listed(list(found))}"
            )
        groups = _column(found[name], name, len(x), place).astype(str)
    domain = f"domain{suffix}"
    domains = _column(found[domain], domain, len(x), place).astype(str) if domain in found else None
    labels = _column(found[f"y{suffix}"], f"y{suffix}", len(x), place)
    return Part(Arrays(x), labels, lambda i: f"row {i} of 'x{suffix}' in {place}", groups, domains)


def _column(values: npt.NDArray[Any], name: str, rows: int, place: str) -> npt.NDArray[Any]:
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (rows,):
        raise DataError(
            f"{place}: array {name!r} has the shape {list(values.shape)}, and one value for each of {rows} rows is wanted"
        )
    return values


def read(path: Path, missing: str = "key 'data.root' or 'data.test' names it", mend: str | None = None) -> Named:
    """The arrays of a file. Objects would have to be unpickled, which can run anything: they are refused.

    missing: what is said where there is no such file. mend: what to do about one that is no npz file of plain arrays.

    Raises:
        DataError: it is missing, or none.
    """
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            raise DataError(f"{path}: holds a single array; {mend or _SAVE}")
        with found:
            return {name: _array(found, name, path, mend) for name in found.files}
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; {missing}") from None
    except DataError:
        raise
    except Exception as problem:  # a damaged file makes numpy and zipfile fail in many ways
        raise DataError(f"{path}: no npz file of arrays ({_why(path, problem)}); {mend or _SAVE}") from None


def _why(path: Path, problem: Exception) -> str:
    """What is wrong with a file that numpy does not read, which takes whatever it does not know for a pickle."""
    if "pickle" not in str(problem):
        return said(problem)
    with path.open("rb") as file:
        pickled = "Object" in str(problem) or file.read(1) == b"\x80"
    return "it is a pickle, and pickles are never loaded" if pickled else "it begins as no such file does"


def _array(found: Any, name: str, path: Path, mend: str | None) -> npt.NDArray[Any]:
    try:
        values: npt.NDArray[Any] = found[name]
    except ValueError as problem:
        if "pickle" not in str(problem).lower():
            raise
        raise DataError(
            f"{path}: array {name!r} holds Python objects, which would have to be unpickled and are refused; "
            + (mend or "save it as numbers or as text, for example with .astype(str)")
        ) from None
    return values
