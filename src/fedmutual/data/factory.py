"""Data from a user's own code: "module:factory" returns a torch Dataset, a pair of them, or arrays."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from fedmutual import plugins
from fedmutual.config import DataConfig
from fedmutual.data.arrays import from_arrays
from fedmutual.data.examples import FromDataset, Part, Source, spaced
from fedmutual.errors import ConfigError, DataError

_WANTED = (
    "a torch Dataset, a (train, test) pair of them, a pair of arrays (x, y), or a dictionary of arrays x, y, x_test, y_test"
)


def own(config: DataConfig) -> Source:
    """Call the factory, with `root` (data.root) where it has a parameter of that name.

    Raises:
        ConfigError: it does not import, fails, or returns something else.
        DataError: what it returns cannot be learned from.
    """
    factory = plugins.load(config.name, "data.name")
    if not callable(factory) or isinstance(factory, Dataset):
        raise ConfigError(
            f"key 'data.name': {config.name!r} is a ready {type(factory).__name__}; name a function or class that makes "
            f"{_WANTED}"
        )
    try:
        asked = {"root": config.root} if "root" in inspect.signature(factory).parameters else {}
        made = factory(**asked)
    except (ConfigError, DataError):
        raise
    except Exception as problem:  # a user's factory may fail in any way
        raise ConfigError(f"key 'data.name': {config.name!r} cannot be made: {type(problem).__name__}: {problem}") from None
    return _source(made, config)


def _source(made: Any, config: DataConfig) -> Source:
    place = config.name
    named = _arrays(made, place)
    if named is not None:
        return from_arrays(named, config, place)
    items = tuple(made) if isinstance(made, tuple | list) else (made,)
    if not 1 <= len(items) <= 2 or not all(isinstance(d, Dataset) for d in items):
        raise ConfigError(f"key 'data.name': {place!r} returned {_type(made)}, and {_WANTED} is wanted")
    parts = [_part(d, config, name) for d, name in zip(items, (place, f"{place}'s test set"), strict=False)]
    names = _attribute(items[0], "classes")
    classes = None if names is None else tuple(str(c) for c in names)
    notes = tuple(
        f"{part.x.place}: its items change from one reading to the next, so that no run of it can be had again; return "
        "them without random changes, and set data.augment for those"
        for part in parts
        if isinstance(part.x, FromDataset) and not part.x.steady()
    )
    return Source(place, parts[0], parts[1] if len(parts) > 1 else None, classes, notes=notes)


def _arrays(made: Any, place: str) -> dict[str, npt.NDArray[Any]] | None:
    """What was returned as arrays by name; None where it is something else."""
    if not isinstance(made, Mapping):
        pair = isinstance(made, tuple | list) and len(made) == 2
        if not pair or not all(isinstance(v, np.ndarray | Tensor | list) for v in made):
            return None
        made = dict(zip(("x", "y"), made, strict=True))
    try:
        return {str(name): np.asarray(values) for name, values in made.items()}
    except (TypeError, ValueError) as problem:  # ragged lists, tensors on a GPU
        raise ConfigError(f"key 'data.name': {place!r} returned what is no array: {str(problem).splitlines()[0]}") from None


def _part(dataset: "Dataset[Any]", config: DataConfig, place: str) -> Part:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(f"key 'data.name': {place} can only be iterated; return a Dataset with __len__ and __getitem__")
    if not len(dataset):
        raise DataError(f"{place} has no examples")
    groups = None
    if config.group_by is not None:
        groups = _attribute(dataset, config.group_by)
        if groups is None or len(groups) != len(dataset):
            raise DataError(
                f"{place}: data.group_by = {config.group_by!r} needs an attribute of that name, a value an example"
            )
    domains = _attribute(dataset, "domains")
    return Part(
        FromDataset(dataset, place),
        _labels(dataset, place),
        lambda i: f"example {i} of {place}",
        None if groups is None else np.asarray(groups).astype(str),
        None if domains is None else np.asarray(domains).astype(str),
    )


def _labels(dataset: Any, place: str) -> npt.NDArray[Any]:
    """Labels as the dataset tells them; where it does not, every item is read once."""
    for name in ("targets", "labels", "y"):
        found = _attribute(dataset, name)
        if found is not None and len(found) == len(dataset):
            _check_items(dataset, np.asarray(found), name, place)
            return np.asarray(found)
    try:
        return np.asarray([np.asarray(dataset[i][1]) for i in range(len(dataset))])
    except Exception as problem:  # a user's dataset may fail in any way
        raise DataError(
            f"{place}: the labels cannot be read from its items ({type(problem).__name__}: {problem}); items must be "
            "(x, y), or give the dataset an attribute 'targets'"
        ) from None


def _check_items(dataset: Any, told: npt.NDArray[Any], name: str, place: str) -> None:
    """Raise DataError where one of up to 16 items has another label than the dataset tells: which is meant?"""
    for i in spaced(len(dataset), 16):
        try:
            label = np.asarray(dataset[i][1])
        except Exception:  # a user's dataset may fail in any way; who reads the item for its x says so
            continue
        alike = all(v.dtype.kind in "biuf" for v in (label, told)) or label.dtype.kind == told.dtype.kind
        if alike and label.shape == told.shape[1:] and not _equal(label, told[i]):
            raise DataError(
                f"{place}: example {i} has the label {label.tolist()!r}, and the dataset's attribute {name!r} says "
                f"{told[i].tolist()!r}; make them agree, in a class of your own where a target_transform changes them"
            )


def _equal(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    """Whether two labels are; numbers as float32 holds them, which is how they are learned."""
    if "f" in one.dtype.kind + other.dtype.kind:
        return np.array_equal(np.float32(one), np.float32(other), equal_nan=True)
    return bool((one == other).all())


def _attribute(dataset: Any, name: str) -> Any:
    """An attribute by rows, also through Subset and TensorDataset; None where there is none."""
    if isinstance(dataset, Subset):
        whole = _attribute(dataset.dataset, name)
        if whole is None or name == "classes":
            return whole
        return np.asarray(whole)[np.asarray(dataset.indices)] if len(whole) == len(dataset.dataset) else None  # type: ignore[arg-type]
    if isinstance(dataset, TensorDataset) and name == "targets":
        return dataset.tensors[1] if len(dataset.tensors) > 1 else None
    found = getattr(dataset, name, None)
    return found if isinstance(found, list | tuple | np.ndarray | Tensor) else None


def _type(made: Any) -> str:
    if isinstance(made, tuple | list):
        return f"{type(made).__name__} of {', '.join(type(v).__name__ for v in made) or 'nothing'}"
    return type(made).__name__
