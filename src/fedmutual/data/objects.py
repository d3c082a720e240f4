"""Data from a user's code: what "module:factory" returns, and the caller's Datasets, tensors, arrays and DataFrames."""

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from fedmutual.calling import list_tensors
from fedmutual.config import DataConfig
from fedmutual.data.arrays import check_test_classes, convert_names, fit_targets, list_roundings, make_source
from fedmutual.data.convert import BY_NAME, are_series, list_rows, name_inputs, pad_inputs
from fedmutual.data.examples import (
    WANTED_ITEMS,
    DatasetExamples,
    Part,
    Source,
    choose_evenly,
    describe_columns,
    list_names,
    split_item,
)
from fedmutual.errors import ConfigError, DataError, format_error
from fedmutual.user_code import plugins

_WANTED = (
    "a torch Dataset, a (train, test) pair of them, a pair of arrays (x, y), or a dictionary of arrays x, y, x_test, y_test"
)
_WANTED_IN_MEMORY = (
    "a torch Dataset or DataLoader, a pair (x, y) of arrays, tensors or DataFrames, x also as a dictionary of inputs or a "
    "list of series, or a DataFrame with the argument label"
)
Inputs = npt.NDArray[Any] | dict[str, npt.NDArray[Any]]
"""The inputs of all rows: an array [n, ...], or several by name."""
Label = str | Sequence[str] | None
"""The column of the targets, or a list of columns of 0 and 1, of DataFrames that hold features too."""


def read_from_factory(config: DataConfig) -> Source:
    """Call the factory, with `root` (data.root) if it has a parameter of that name, and return its data.

    Raises:
        ConfigError: the factory cannot be imported, fails, or returns something else.
        DataError: the returned data cannot be used.
    """
    factory = plugins.load(config.name, "data.name")
    try:
        arguments = {"root": config.root} if "root" in inspect.signature(factory).parameters else {}
        returned = factory(**arguments)
    except (ConfigError, DataError):
        raise
    except Exception as problem:  # a user's factory may fail in any way
        raise ConfigError(
            f"key 'data.name': {config.name!r} cannot be made ({format_error(problem)}); name a function or class that "
            f"makes {_WANTED}"
        ) from None
    source = returned if isinstance(returned, Source) else make_factory_source(returned, config, config.name)
    for key in ("columns", "replace", "date_format", "drop"):
        if getattr(config, key) and (source.columns if key == "drop" else source.plans) is None:
            fix = "give DataFrames and data.columns" if key != "columns" else "give DataFrames, or remove the key"
            raise ConfigError(f"key 'data.{key}' is for the columns of tables, and {source.place} has none; {fix}")
    return source


def make_factory_source(returned: Any, config: DataConfig, place: str) -> Source:
    """Return the result of a factory as a source. place: the name in messages.

    Raises:
        ConfigError: the factory returned something else than data.
        DataError: the returned data cannot be used.
    """
    items = tuple(returned) if isinstance(returned, tuple | list) and not _is_dataset(returned) else (returned,)
    if is_frame(items[0] if items else None) and len(items) < 3:  # a table, a pair (train, test) of tables, or (x, y)
        if len(items) == 2 and not is_frame(items[1]):
            return make_memory_source(items, None, None, place, config)
        return make_memory_source(items[0], items[1] if len(items) > 1 else None, config.label, place, config)
    is_pair = len(items) == 2 and all(isinstance(v, np.ndarray | Tensor | list | Mapping) for v in items)
    if is_pair or isinstance(returned, Mapping):
        by_name = returned if isinstance(returned, Mapping) else dict(zip(("x", "y"), items, strict=True))
        lengths = _find_lengths(config, *(by_name[name] for name in ("x", "x_test") if name in by_name))
        try:
            arrays = {
                str(name): convert_inputs(values, f"{place}: {name}", lengths if name in ("x", "x_test") else {})
                for name, values in by_name.items()
            }
        except DataError as problem:
            raise ConfigError(f"key 'data.name': {place!r} returned values that are no arrays: {problem}") from None
        return make_source(arrays, config, place)
    notes = [note for item in items for note in describe_loader(item, place)]
    items = tuple(map(unwrap_loader, items))
    if not 1 <= len(items) <= 2 or not all(map(_is_dataset, items)):
        kinds = ", ".join(type(v).__name__ for v in items) or "nothing"
        about = f"{type(returned).__name__} of {kinds}" if isinstance(returned, tuple | list) else kinds
        raise ConfigError(f"key 'data.name': {place!r} returned {about}, and {_WANTED} is expected")
    names, *of_test = (_read_attribute(item, "classes") for item in items)
    parts = []
    longest = [*map(_find_item_lengths, items)]
    lengths = {name: config.length or max(one.get(name, 0) for one in longest) for name in dict.fromkeys(chain(*longest))}
    for dataset, name in zip(items, (place, f"{place}'s test set"), strict=False):
        part = _make_part(dataset, config, name, lengths)
        parts.append(part)
        rows = choose_evenly(len(part.x), 16)
        notes += list_roundings(_read_raw(dataset, rows), name)
        if not all(map(torch.equal, *(list_tensors(part.x.take(rows)) for _ in range(2)))):
            notes.append(
                f"{name}: its items differ between two readings, so runs cannot be reproduced; return items without random "
                "changes, and use data.augment for augmentation"
            )
        if isinstance(item := dataset[0], tuple | list) and len(item) > 2:
            notes.append(f"{name}: items have {len(item)} entries: the first is x, the second is y, others have no effect")
    classes, test_classes = (None if one is None else tuple(str(c) for c in one) for one in (names, [*of_test, None][0]))
    source = Source(place, parts[0], parts[1] if len(parts) > 1 else None, classes, notes=tuple(notes))
    return check_test_classes(source, test_classes)


def _is_dataset(rows: Any) -> bool:
    """Return whether an object is a torch Dataset or DataLoader, or acts as a Dataset, as a list of items does."""
    if isinstance(rows, list):
        return len(rows) > 2 and split_item(rows[0])[1] is not None and (isinstance(rows[0], Mapping) or len(rows[0]) == 2)
    if isinstance(rows, Dataset | DataLoader):
        return True
    is_other = isinstance(rows, tuple | Mapping | str) or is_frame(rows) or hasattr(rows, "dtype")  # of arrays
    return not is_other and hasattr(rows, "__getitem__") and hasattr(rows, "__len__")


def _make_part(dataset: "Dataset[Any]", config: DataConfig, place: str, lengths: Mapping[str, int]) -> Part:
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
    groups, domains = (
        None if values is None else convert_names(np.asarray(values), name, place)
        for values, name in ((groups, config.group_by or ""), (_read_attribute(dataset, "domains"), "domains"))
    )
    labels = _read_labels(dataset, place)
    examples = DatasetExamples(dataset, place, lengths=lengths)
    return Part(examples, labels, lambda i: f"example {i} of {place}", groups, domains)


def _read_raw(dataset: Any, rows: Sequence[int]) -> Inputs:
    """Return the inputs of items in the types that the items have; {} where they cannot be stacked, such as PIL images."""
    try:
        stacked = default_collate([split_item(dataset[row])[0] for row in rows])
    except Exception:  # a user's dataset may return anything; reading its examples reports the error
        return {}
    return tree_map(lambda one: one.numpy() if isinstance(one, Tensor) else one, stacked)  # type: ignore[no-any-return]


def _find_item_lengths(dataset: Any) -> dict[str, int]:
    """Return the inputs [L, ...] that differ in L between the items of a Dataset, judged by up to 16, with the longest L."""

    def read(rows: Iterable[int]) -> Iterator[Mapping[str, Any]]:
        return (name_inputs(split_item(dataset[row])[0]) for row in rows)

    try:
        some = [*read(choose_evenly(len(dataset), 16))]
        names = [name for name in some[0] if are_series([x[name] for x in some])]
        sizes = [[len(x[name]) for name in names] for x in read(range(len(dataset)))] if names else []
    except Exception:  # a user's dataset may fail in any way; reading its examples reports the error
        return {}
    return dict(zip(names, map(max, zip(*sizes, strict=True)), strict=False))


class _CollatedDataset(Dataset[Any]):
    """The items of a Dataset as the `collate_fn` of its DataLoader makes them, one by one."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.dataset, self._collate = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        return tree_map(lambda batch: batch[0], split_item(self._collate([self.dataset[row]])))


def unwrap_loader(item: Any) -> Any:
    """Return the Dataset of a torch DataLoader, with items as its `collate_fn` makes them; another object unchanged."""
    if not isinstance(item, DataLoader):
        return item
    return item.dataset if item.collate_fn in (default_collate, None) else _CollatedDataset(item.dataset, item.collate_fn)


def describe_loader(item: Any, place: str) -> list[str]:
    """Return a remark on what of a DataLoader has no effect: the order of rows, and how they are read."""
    if not isinstance(item, DataLoader):
        return []
    unused = {
        "its sampler": not isinstance(item.sampler, RandomSampler | SequentialSampler),
        "its batch_sampler": item.batch_sampler is not None and type(item.batch_sampler) is not BatchSampler,
        "drop_last": item.drop_last,
        "num_workers (set data.workers)": item.num_workers > 0,
    }
    names = [name for name, is_set in unused.items() if is_set]
    unread = f"{place}: of the DataLoader these have no effect: {', '.join(names)}; each round shuffles all rows"
    return [unread] if names else []


def _read_labels(dataset: Any, place: str) -> npt.NDArray[Any]:
    """Return the labels [n] from an attribute of the dataset; without one, from every item, read once."""
    for name in ("targets", "labels", "y"):
        labels = _read_attribute(dataset, name)
        if labels is not None and len(labels) == len(dataset):
            _check_labels(dataset, np.asarray(labels), name, place)
            return np.asarray(labels)
    try:
        return np.asarray([_get_label(dataset[i]) for i in range(len(dataset))])
    except Exception as problem:  # a user's dataset may fail in any way
        raise DataError(
            f"{place}: the labels cannot be read from its items ({type(problem).__name__}: {problem}); {WANTED_ITEMS}"
        ) from None


def _get_label(item: Any) -> npt.NDArray[Any]:
    """Return y of an item of a Dataset. Raises TypeError if the item has none."""
    _, label = split_item(item)
    if label is None:
        raise TypeError(f"an item is {type(item).__name__}")
    return np.asarray(label)


def _check_labels(dataset: Any, labels: npt.NDArray[Any], name: str, place: str) -> None:
    """Raise DataError where one of up to 16 items has another label than the dataset's attribute `name`."""
    for i in choose_evenly(len(dataset), 16):
        try:
            label = _get_label(dataset[i])
        except Exception:  # a user's dataset may fail in any way; reading x reports the error
            continue
        are_numbers = all(v.dtype.kind in "biuf" for v in (label, labels))
        if label.shape != labels.shape[1:] or not (are_numbers or label.dtype.kind == labels.dtype.kind):
            continue
        are_decimal = are_numbers and "f" in (label.dtype.kind, labels.dtype.kind)
        one, other = (np.float32(v) if are_decimal else v for v in (label, labels[i]))  # the type of numeric targets
        if not np.array_equal(one, other, equal_nan=are_numbers):
            raise DataError(
                f"{place}: example {i} has the label {label.tolist()!r}, and the dataset's attribute {name!r} says "
                f"{labels[i].tolist()!r}; make them agree, with a Dataset class of your own if a target_transform "
                "changes labels"
            )


def _read_attribute(dataset: Any, name: str) -> Any:
    """Return an attribute with one value a row, also through Subset and TensorDataset; None if there is none."""
    if isinstance(dataset, _CollatedDataset):
        return _read_attribute(dataset.dataset, name) if name == "classes" else None
    if isinstance(dataset, Subset):
        values = _read_attribute(dataset.dataset, name)
        if values is None or name == "classes":
            return values
        return np.asarray(values)[np.asarray(dataset.indices)] if len(values) == len(dataset.dataset) else None  # type: ignore[arg-type]
    if isinstance(dataset, TensorDataset) and name == "targets":
        return dataset.tensors[1] if len(dataset.tensors) > 1 else None
    values = getattr(dataset, name, None)
    return values if isinstance(values, list | tuple | np.ndarray | Tensor) else None


def make_memory_source(train: Any, test: Any, label: Label, place: str, config: DataConfig | None = None) -> Source:
    """Return objects as a source: training rows, and test rows or None.

    label: see `Label`. place: the name in messages. config: how text is read, and the length of series.

    Raises:
        DataError: an object is no data, is empty, lacks a column, or has a feature that is missing or no number; or `label`
            is given, and the rows are no DataFrame.
        ConfigError: a torch Dataset has no length, so it can only be iterated.
    """
    config = config or DataConfig()
    if _is_dataset(train):
        _check_label(train, label, f"train of {place}")
        if test is not None and not _is_dataset(test):
            raise DataError(f"{place}: train is a torch Dataset, so test must be one too")
        return make_factory_source(train if test is None else (train, test), config, place)
    pairs = [rows[0] for rows in (train, test) if isinstance(rows, tuple | list) and len(rows) == 2]
    lengths = _find_lengths(config, *pairs)
    places = [f"train of {place}", f"test of {place}"][: 1 if test is None else 2]
    rows = [_split_table(one, label, name) for one, name in zip((train, test), places, strict=False)]
    if len({is_frame(x) for x, _ in rows}) > 1:
        raise DataError(f"{place}: only one of train and test is a DataFrame; give two DataFrames, or two pairs (x, y)")
    if is_frame(rows[0][0]):
        return _read_frames(rows, place, label, config)
    arrays: dict[str, Any] = {}
    for (x, y), name, end in zip(rows, places, ("", "_test"), strict=False):
        arrays[f"x{end}"], arrays[f"y{end}"] = convert_inputs(x, name, lengths), convert_targets(y, name)
    if config.group_by is not None:
        fix = f"give a DataFrame with the column, or a Dataset with an attribute {config.group_by!r}"
        raise DataError(f"{place}: data.group_by names groups of rows, and arrays have none; {fix}")
    return make_source(arrays, config, place)


def _read_frames(rows: Sequence[tuple[Any, Any]], place: str, label: Label, config: DataConfig) -> Source:
    """Return DataFrames as a source, by the reader of files. rows: x and y of the training rows, and of the test rows."""
    from fedmutual.data import table  # imports pandas, which takes 0.3 s

    train_frame = rows[0][0]
    frames = {place: train_frame} | {f"test of {place}": x[[c for c in x if c in train_frame]] for x, _ in rows[1:]}
    unused = [c for x, _ in rows[1:] for c in x if c not in train_frame]
    note = f"test of {place}: columns {list_names(unused)} are not in the training rows, so they are no features"
    names = (label,) if isinstance(label, str) else tuple(label or ())
    source = table.read_frames(frames, config)
    parts = [add_targets(part, y, name) for part, (_, y), name in zip(source.parts, rows, frames, strict=True)]
    classes = names if names and not isinstance(label, str) else None
    notes = (*source.notes, *([note] if unused else []))
    return replace(source, train=parts[0], test=[*parts, None][1], classes=classes, label_columns=names, notes=notes)


def _find_lengths(config: DataConfig, *values: Any) -> dict[str, int]:
    """Return the inputs that are series of different length, each with data.length, or the length of its longest series.

    values: the inputs of the training rows, and of the test rows.
    """
    named = [*map(name_inputs, values)]
    series = {name: [row for x in named for row in list_rows(x.get(name))] for name in (named[0] if named else ())}
    return {name: config.length or max(map(len, rows)) for name, rows in series.items() if are_series(rows)}


def convert_inputs(x: Any, place: str, lengths: Mapping[str, int]) -> Inputs:
    """Return inputs as an array [n, ...], also of a dictionary of one, or as several arrays by name.

    lengths: the inputs that are series [L, ...], each with the length to which they are filled up or cut.

    Raises:
        DataError: as `convert_features`.
    """
    if isinstance(x, Mapping) and len(x) == 1 and not lengths:
        (x,) = x.values()
    inputs = dict[str, Any]()
    for name, one in name_inputs(x).items():
        about = f"{place}: input {name!r}" if isinstance(x, Mapping) else place
        rows = list_rows(one) if name in lengths else []
        values: Any = [convert_features(row, about) for row in rows] or convert_features(one, about)
        if isinstance(values, np.ndarray) and values.dtype.kind == "O" and all(isinstance(v, str) for v in values.flat):
            values = values.astype(str)  # text of pandas
        inputs[name] = values
    return pad_inputs(inputs, lengths) if isinstance(x, Mapping) or lengths else inputs["x"]


def convert_targets(y: Any, place: str) -> npt.NDArray[Any]:
    """Return targets of any kind as an array [n, ...]; missing ones stay as they are."""
    values = convert_features(y.to_numpy() if hasattr(y, "iloc") else y, place)  # of a DataFrame or Series
    if values.dtype.names:  # of scikit-survival: the event, a truth value, and the time
        fields = sorted(values.dtype.names, key=lambda name: values.dtype[name].kind == "b")
        return np.stack([values[name].astype(float) for name in fields], 1)
    if values.dtype.kind == "U" and isinstance(y, list | tuple):  # of ["ill", nan], whose nan became text
        return np.array(y, dtype=object)
    return values


def add_targets(part: Part, y: Any, place: str) -> Part:
    """Return the rows of a table with their targets. Raises DataError unless there is one for each row."""
    return replace(part, labels=fit_targets(convert_targets(y, place), len(part.x), "y", place))


def convert_features(features: Any, place: str) -> npt.NDArray[Any]:
    """Return features as an array [n, ...].

    Raises:
        DataError: a value is missing or no number.
    """
    if is_frame(features):
        from fedmutual.data.table import check_numbers  # imports pandas, which takes 0.3 s

        check_numbers(features, place)
        features = features.to_numpy(np.float64)
    if rows := list_rows(features):
        features = [convert_features(row, place) for row in rows]
    if np.ma.is_masked(features):
        fix = "fill them in with x.filled(NUMBER), or drop the rows"
        raise DataError(f"{place}: a masked array has masked values, which are missing; {fix}")
    if isinstance(features, Tensor):
        if features.layout != torch.strided:
            raise DataError(f"{place}: a sparse tensor cannot be divided into batches; give x.to_dense()")
        if features.is_quantized:
            features = features.dequantize()
        elif features.is_floating_point() and features.dtype not in (torch.float16, torch.float32, torch.float64):
            features = features.float()  # numpy has no such type
    try:
        values: npt.NDArray[Any] = features.detach().cpu().numpy() if isinstance(features, Tensor) else np.asarray(features)
        return values
    except (TypeError, ValueError) as problem:
        several = isinstance(features, tuple | list) and any(np.ndim(one) > 1 for one in features)
        fix = f"; give rows of one shape, or {BY_NAME}" if several else ""
        raise DataError(f"{place}: {type(features).__name__} is no array ({str(problem).splitlines()[0]}){fix}") from None


def is_frame(rows: Any) -> bool:
    """Return whether an object is a DataFrame of pandas."""
    pandas = sys.modules.get("pandas")  # takes 0.3 s to import, and without it there is no DataFrame
    return pandas is not None and isinstance(rows, pandas.DataFrame)


def _check_columns(frame: Any, names: Sequence[str], place: str, reason: str = "") -> None:
    """Raise DataError where a DataFrame lacks one of these columns. reason: why the column is wanted."""
    for name in names:
        if name not in frame:
            raise DataError(f"{place}: there is no column {name!r}{reason}; {describe_columns(frame.columns, name)}")


def _check_label(rows: Any, label: Label, place: str) -> None:
    """Raise DataError if the column of the targets is named, and the rows have no columns."""
    if label is not None and not is_frame(rows):
        raise DataError(
            f"{place}: label = {label!r} names a column, and a {type(rows).__name__} has none; give a DataFrame, or remove "
            "label"
        )


def name_columns(label: Any) -> Label:
    """Return a label as the name of a column, or as names: of pandas' columns, which may be whole numbers, too."""
    names = label.tolist() if hasattr(label, "tolist") else label
    return [str(name) for name in names] if isinstance(names, list | tuple) else None if names is None else str(names)


def _split_table(rows: Any, label: Label, place: str) -> tuple[Any, Any]:
    """Return x and y of a pair, or of a DataFrame with the columns of the targets."""
    from fedmutual.data.column_check import check_names

    _check_label(rows, label, place)
    if is_frame(rows):
        check_names(rows.columns, place)
        rows = rows.rename(columns=str)
        if label is None:
            raise DataError(f"{place} is a DataFrame; name the column of its targets: Site(..., label='COLUMN')")
        names = [label] if isinstance(label, str) else list(label)
        _check_columns(rows, names, place, ", which label names")
        return rows.drop(columns=names), rows[label if isinstance(label, str) else names]
    if not isinstance(rows, tuple | list) or len(rows) != 2:
        raise DataError(f"{place} is {type(rows).__name__}; give {_WANTED_IN_MEMORY}")
    return rows[0], rows[1]
