"""Data from a user's code: "module:factory" returns a torch Dataset, a pair of Datasets, or arrays."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from fedmutual.config import DataConfig
from fedmutual.data.arrays import make_source
from fedmutual.data.examples import DatasetExamples, Part, Source, choose_evenly
from fedmutual.errors import ConfigError, DataError
from fedmutual.user_code import plugins

_WANTED = (
    "a torch Dataset, a (train, test) pair of them, a pair of arrays (x, y), or a dictionary of arrays x, y, x_test, y_test"
)


def read_from_factory(config: DataConfig) -> Source:
    """Call the factory, with `root` (data.root) if it has a parameter of that name, and return its data.

    Raises:
        ConfigError: the factory cannot be imported, fails, or returns something else.
        DataError: the returned data cannot be used.
    """
    factory = plugins.load(config.name, "data.name")
    if not callable(factory) or isinstance(factory, Dataset):
        raise ConfigError(
            f"key 'data.name': {config.name!r} is an instance of {type(factory).__name__}; name a function or class that "
            "makes "
            f"{_WANTED}"
        )
    try:
        arguments = {"root": config.root} if "root" in inspect.signature(factory).parameters else {}
        returned = factory(**arguments)
    except (ConfigError, DataError):
        raise
    except Exception as problem:  # a user's factory may fail in any way
        raise ConfigError(f"key 'data.name': {config.name!r} cannot be made: {type(problem).__name__}: {problem}") from None
    return returned if isinstance(returned, Source) else make_factory_source(returned, config, config.name)


def make_factory_source(returned: Any, config: DataConfig, place: str) -> Source:
    """Return the result of a factory as a source. place: the name in messages.

    Raises:
        ConfigError: the factory returned something else than data.
        DataError: the returned data cannot be used.
    """
    arrays = _convert_arrays(returned, place)
    if arrays is not None:
        return make_source(arrays, config, place)
    items = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    if not 1 <= len(items) <= 2 or not all(isinstance(d, Dataset) for d in items):
        raise ConfigError(f"key 'data.name': {place!r} returned {_describe_type(returned)}, and {_WANTED} is expected")
    parts = [_make_part(d, config, name) for d, name in zip(items, (place, f"{place}'s test set"), strict=False)]
    names = _read_attribute(items[0], "classes")
    classes = None if names is None else tuple(str(c) for c in names)
    notes = tuple(
        f"{part.x.place}: its items differ between two readings, so runs cannot be reproduced; return "
        "items without random changes, and use data.augment for augmentation"
        for part in parts
        if isinstance(part.x, DatasetExamples) and not part.x.is_repeatable()
    )
    return Source(place, parts[0], parts[1] if len(parts) > 1 else None, classes, notes=notes)


def _convert_arrays(returned: Any, place: str) -> dict[str, npt.NDArray[Any]] | None:
    """Return a pair (x, y) or a mapping as arrays by name; None for other objects."""
    if not isinstance(returned, Mapping):
        is_pair = isinstance(returned, tuple | list) and len(returned) == 2
        if not is_pair or not all(isinstance(v, np.ndarray | Tensor | list) for v in returned):
            return None
        returned = dict(zip(("x", "y"), returned, strict=True))
    try:
        return {str(name): np.asarray(values) for name, values in returned.items()}
    except (TypeError, ValueError) as problem:  # ragged lists, tensors on a GPU
        raise ConfigError(
            f"key 'data.name': {place!r} returned values that are no arrays: {str(problem).splitlines()[0]}"
        ) from None


def _make_part(dataset: "Dataset[Any]", config: DataConfig, place: str) -> Part:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(f"{place} can only be iterated; use a Dataset with __len__ and __getitem__")
    if not len(dataset):
        raise DataError(f"{place} has no examples")
    groups = None
    if config.group_by is not None:
        groups = _read_attribute(dataset, config.group_by)
        if groups is None or len(groups) != len(dataset):
            raise DataError(
                f"{place}: data.group_by = {config.group_by!r} needs an attribute of that name, a value an example"
            )
    domains = _read_attribute(dataset, "domains")
    return Part(
        DatasetExamples(dataset, place),
        _read_labels(dataset, place),
        lambda i: f"example {i} of {place}",
        None if groups is None else np.asarray(groups).astype(str),
        None if domains is None else np.asarray(domains).astype(str),
    )


def _read_labels(dataset: Any, place: str) -> npt.NDArray[Any]:
    """Return the labels [n] from an attribute of the dataset; without one, from every item, read once."""
    for name in ("targets", "labels", "y"):
        labels = _read_attribute(dataset, name)
        if labels is not None and len(labels) == len(dataset):
            _check_labels(dataset, np.asarray(labels), name, place)
            return np.asarray(labels)
    try:
        return np.asarray([np.asarray(dataset[i][1]) for i in range(len(dataset))])
    except Exception as problem:  # a user's dataset may fail in any way
        raise DataError(
            f"{place}: the labels cannot be read from its items ({type(problem).__name__}: {problem}); items must be "
            "(x, y), or give the dataset an attribute 'targets'"
        ) from None


def _check_labels(dataset: Any, labels: npt.NDArray[Any], name: str, place: str) -> None:
    """Raise DataError where one of up to 16 items has another label than the dataset's attribute `name`."""
    for i in choose_evenly(len(dataset), 16):
        try:
            label = np.asarray(dataset[i][1])
        except Exception:  # a user's dataset may fail in any way; reading x reports the error
            continue
        has_same_kind = all(v.dtype.kind in "biuf" for v in (label, labels)) or label.dtype.kind == labels.dtype.kind
        if has_same_kind and label.shape == labels.shape[1:] and not _is_equal(label, labels[i]):
            raise DataError(
                f"{place}: example {i} has the label {label.tolist()!r}, and the dataset's attribute {name!r} says "
                f"{labels[i].tolist()!r}; make them agree, with a Dataset class of your own if a target_transform "
                "changes labels"
            )


def _is_equal(label: npt.NDArray[Any], other_label: npt.NDArray[Any]) -> bool:
    """Return whether two labels are equal; numbers are compared as float32, the type of numeric targets."""
    if "f" in label.dtype.kind + other_label.dtype.kind:
        return np.array_equal(np.float32(label), np.float32(other_label), equal_nan=True)
    return bool((label == other_label).all())


def _read_attribute(dataset: Any, name: str) -> Any:
    """Return an attribute with one value a row, also through Subset and TensorDataset; None if there is none."""
    if isinstance(dataset, Subset):
        values = _read_attribute(dataset.dataset, name)
        if values is None or name == "classes":
            return values
        return np.asarray(values)[np.asarray(dataset.indices)] if len(values) == len(dataset.dataset) else None  # type: ignore[arg-type]
    if isinstance(dataset, TensorDataset) and name == "targets":
        return dataset.tensors[1] if len(dataset.tensors) > 1 else None
    values = getattr(dataset, name, None)
    return values if isinstance(values, list | tuple | np.ndarray | Tensor) else None


def _describe_type(returned: Any) -> str:
    if isinstance(returned, tuple | list):
        return f"{type(returned).__name__} of {', '.join(type(v).__name__ for v in returned) or 'nothing'}"
    return type(returned).__name__
