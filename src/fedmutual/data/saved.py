"""A folder that the library datasets of Hugging Face saved on disk (`save_to_disk`): its splits train and test."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import numpy as np

from fedmutual.config import DataConfig
from fedmutual.data.arrays import make_source, require_root
from fedmutual.data.convert import pad_series
from fedmutual.data.examples import Source, describe_columns
from fedmutual.errors import ConfigError, DataError, format_error


def read_saved(config: DataConfig) -> Source:
    """Return the data of the folder data.root; all columns but those of the label are inputs, unless data.inputs names them.

    Raises:
        ConfigError: data.root is not set, or the package datasets is missing.
        DataError: the folder is missing or damaged, or lacks a column.
    """
    path = require_root(config)
    try:
        load_from_disk: Any = import_module("datasets").load_from_disk  # the package has no types
    except ImportError:
        raise ConfigError("data.name = 'datasets' needs the package datasets: pip install 'fedmutual[datasets]'") from None
    try:
        loaded: Any = load_from_disk(str(path))
    except Exception as problem:  # the library raises many kinds of errors
        fix = "save it by dataset.save_to_disk(FOLDER)"
        raise DataError(f"{path}: is no folder that datasets saved ({format_error(problem)}); {fix}") from None
    splits = loaded if isinstance(loaded, Mapping) else {"train": loaded}
    if "train" not in splits:
        listed = describe_columns(list(splits), "train")
        raise DataError(f"{path}: there is no split 'train' ({listed}); save the training rows under this name")
    arrays: dict[str, Any] = {}
    for name in (name for name in ("train", "test") if name in splits):
        suffix = "" if name == "train" else "_test"
        arrays |= {f"{key}{suffix}": value for key, value in _read_split(splits[name], config, str(path)).items()}
    names = getattr(splits["train"].features[config.label_columns[0]], "names", None)
    arrays |= {} if names is None else {"classes": np.array(names)}
    return make_source(arrays, config.model_copy(update={"inputs": None}), str(path))


def _read_split(split: Any, config: DataConfig, place: str) -> dict[str, Any]:
    """Return the arrays x, y and those of groups and domains of one split."""
    label, text = config.label_columns[0], config.text or ()
    rest = {label, config.group_by, "domain", *text}
    columns = [name for name in config.inputs or split.column_names if name not in rest or name in (config.inputs or ())]
    for name in (name for name in (label, *text, *columns) if name not in split.column_names):
        raise DataError(f"{place}: there is no column {name!r}; {describe_columns(split.column_names, name)}")
    table = split.with_format("numpy")
    inputs = {name: _read_column(table[:][name], config.length) for name in columns}
    if text:
        inputs["text"] = np.array([" ".join(map(str, row)) for row in zip(*(split[name] for name in text), strict=True)])
    others: dict[str, Any] = {
        name: np.asarray(split[name]) for name in (config.group_by, "domain") if name and name in split.column_names
    }
    return {"x": inputs if len(inputs) != 1 else next(iter(inputs.values())), "y": np.asarray(split[label]), **others}


def _read_column(values: Any, length: int | None) -> Any:
    """Return a column as an array [n, ...]; series of different length are filled up with zeros."""
    values = np.asarray(values)
    if values.dtype != object or isinstance(values[0], str):
        return values.astype(str) if values.dtype == object else values
    return pad_series([np.asarray(one) for one in values], length)["x"]
