"""A folder that the library datasets of Hugging Face saved on disk (`save_to_disk`): its splits train and test."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedmutual.calling import Shape, Shapes
from fedmutual.config import DataConfig
from fedmutual.data.arrays import make_source, require_root
from fedmutual.data.convert import pad_series
from fedmutual.data.examples import TEXT, Source, describe_columns, list_names
from fedmutual.errors import ConfigError, DataError, format_error


def read_saved(config: DataConfig) -> Source:
    """Return the data of the folder data.root; the inputs are data.inputs, or all columns except data.label.

    Raises:
        ConfigError: data.root is not set, or the package datasets is missing.
        DataError: the folder is missing or damaged, or lacks a column.
    """
    path = require_root(config)
    splits = _load(path)
    if "train" not in splits:
        listed = describe_columns(list(splits), "train")
        raise DataError(f"{path}: there is no split 'train' ({listed}); save the training rows under this name")
    columns = _list_inputs(splits["train"], config, config.inputs)
    used = [splits[name] for name in ("train", "test") if name in splits]
    lengths = {name: config.length or max(_find_length(split, name) for split in used) for name in columns}
    arrays, *tests = (_read_split(split, config, str(path), lengths) for split in used)
    arrays |= {f"{key}_test": value for test in tests for key, value in test.items()}
    source = make_source(arrays, config.model_copy(update={"inputs": None}), str(path))
    unread = [name for name in splits if name not in ("train", "test")]
    notes = [f"{path}: splits {list_names(unread)} are not read; only 'train' and 'test' are"] if unread else []
    source = replace(source, notes=(*source.notes, *notes))
    return source if isinstance(config.label, str) else replace(source, classes=config.label, label_columns=config.label)


def read_rows(path: Path, config: DataConfig, shape: Shape, labelled: bool | None) -> dict[str, Any]:
    """Return the arrays of a folder with one split for a model that takes `shape`: x, and y if `labelled`.

    labelled: None: y if the folder has labels.

    Raises:
        ConfigError, DataError: as `read_saved`; or the folder has several splits.
    """
    splits = _load(path)
    if len(splits) > 1:
        raise DataError(f"{path}: has the splits {list_names(list(splits))}; name the folder of one: {path / [*splits][-1]}")
    (split,) = splits.values()
    of_text = TEXT if config.text else ()
    named = [n for n in shape if n not in of_text] if isinstance(shape, Shapes) else None
    columns = _list_inputs(split, config, named)
    shapes = shape if isinstance(shape, Shapes) else dict.fromkeys(columns, shape)
    lengths = {name: max(shapes[name][:1], default=0) if name in shapes else 0 for name in columns}
    labelled = {*config.label_columns} <= {*split.column_names} if labelled is None else labelled
    return _read_split(split, config, str(path), lengths, labelled)


def _load(path: Path) -> Mapping[str, Any]:
    """Return the splits of a folder; of a folder without splits one, called "train"."""
    try:
        load_from_disk: Any = import_module("datasets").load_from_disk  # the package has no types
    except ImportError:
        raise ConfigError("data.name = 'datasets' needs the package datasets: pip install 'fedmutual[datasets]'") from None
    try:
        loaded: Any = load_from_disk(str(path))
    except Exception as problem:  # the library raises many kinds of errors
        fix = "save it by dataset.save_to_disk(FOLDER)"
        raise DataError(f"{path}: is no folder that datasets saved ({format_error(problem)}); {fix}") from None
    return loaded if isinstance(loaded, Mapping) else {"train": loaded}


def _list_inputs(split: Any, config: DataConfig, named: Sequence[str] | None) -> list[str]:
    """Return the columns that are inputs beside the text. named: those that data.inputs or a model names; None: all."""
    rest = {*config.label_columns, config.group_by, "domain", *(config.text or ())}
    return [name for name in split.column_names if name not in rest] if named is None else [*named]


def _find_length(split: Any, name: str) -> int:
    """Return the longest series of a column; 0 if the column is missing, or its cells are no series of different length."""
    values: Any = np.asarray(split.with_format("numpy")[name][:]) if name in split.column_names else np.empty(0)
    are_series = values.dtype == object and not isinstance(values[0], str)
    return max(map(len, values)) if are_series else values.shape[1] if values.ndim > 1 else 0


def _read_split(
    split: Any, config: DataConfig, place: str, lengths: Mapping[str, int], labelled: bool = True
) -> dict[str, Any]:
    """Return the arrays x and y of one split, its classes, and those of groups and domains.

    y is [n, L] if data.label is a list. lengths: the columns of inputs, each with the steps of its series.
    """
    label, text = config.label, config.text or ()
    for name in (n for n in (*(config.label_columns if labelled else ()), *text, *lengths) if n not in split.column_names):
        raise DataError(f"{place}: there is no column {name!r}; {describe_columns(split.column_names, name)}")
    table = split.with_format("numpy")
    inputs = {name: _read_column(table[name][:], length) for name, length in lengths.items()}
    if text:
        inputs["text"] = np.array(
            [" ".join("" if v is None else str(v) for v in row) for row in zip(*(split[name] for name in text), strict=True)]
        )
    others: dict[str, Any] = {
        name: _read_cells(split, name, place) for name in (config.group_by, "domain") if name and name in split.column_names
    }
    if labelled and isinstance(label, str):
        names = getattr(split.features[label], "names", None)
        others |= {"y": _read_cells(split, label, place), **({} if names is None else {"classes": np.array(names)})}
    elif labelled:
        columns = {name: _read_cells(split, name, place) for name in config.label_columns}
        for name in (name for name, values in columns.items() if values.ndim > 1):
            raise DataError(
                f"{place}: column {name!r} holds lists; each column of several in data.label has one value a row"
            )
        others["y"] = np.stack([*columns.values()], 1)
    return {"x": inputs if len(inputs) != 1 else next(iter(inputs.values())), **others}


def _read_cells(split: Any, name: str, place: str) -> Any:
    """Return a column that is no input as an array [n, ...]; raise DataError where its cells are lists of unequal length."""
    try:
        return np.asarray(split[name])
    except ValueError:
        raise DataError(f"{place}: column {name!r} holds lists of unequal length; give each row as many values") from None


def _read_column(values: Any, length: int) -> Any:
    """Return a column as an array [n, ...]; series of different length, and shorter ids, are filled up with zeros."""
    values = np.asarray(values)
    if values.dtype == object and isinstance(values[0], str):
        return values.astype(str)
    are_ids = values.ndim == 2 and values.dtype.kind in "iu" and values.shape[1] != length
    return pad_series([np.asarray(one) for one in values], length)[0] if values.dtype == object or are_ids else values
