"""Reads rows of a file in the form of a known space: tables, arrays, and folders that the library datasets saved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedmutual.calling import Shapes
from fedmutual.config import DataConfig
from fedmutual.data import arrays, saved, table
from fedmutual.data.examples import Source
from fedmutual.data.scaling import find_form
from fedmutual.data.space import Space
from fedmutual.data.table_file import SUFFIXES


def read_file(path: Path, space: Space, data: DataConfig, labelled: bool | None) -> tuple[Source, bool] | None:
    """Return the rows of a file, unscaled, and whether they have labels; without, they have placeholders and no groups.

    The result is None if the space takes no files of this kind. data: how the files of the training are read. labelled:
    whether to read labels; None: read them if the file has them.

    Raises:
        UserError: the file cannot be read, or its rows do not have the form of the space.
    """
    suffix = path.suffix.lower()
    if suffix in SUFFIXES and space.columns is not None:
        rows, has_labels = table.read_rows(path, space, data, labelled)
        return Source(str(path), rows), has_labels
    inputs, contents = None, dict[str, Any]()
    if suffix == ".npz" and not space.scaling.columns:
        contents = {**arrays.read_arrays(path, missing="name another")}
        inputs = data.inputs or (tuple(space.shape) if isinstance(space.shape, Shapes) and "x" not in contents else None)
    elif data.name == "datasets" and path.is_dir():
        contents = saved.read_rows(path, data, space.shape, labelled)
    else:
        return None
    if labelled is None:
        labelled = "y" in contents
    if not labelled:  # groups, domains and test rows are not needed then
        x = arrays.read_inputs(contents, inputs, "x", str(path))
        count = len(np.atleast_1d(next(iter(x.values())) if isinstance(x, dict) else x))
        contents = {**{name: contents[name] for name in inputs or ("x",)}, "y": np.zeros(count, np.int64)}
        data = data.model_copy(update={"group_by": None})
    source = arrays.make_source(contents, data.model_copy(update={"inputs": inputs}), str(path))
    return fit_form(replace(source, test=None), space), labelled


def fit_form(source: Source, space: Space) -> Source:
    """Return rows in the form that the space takes. Raises DataError where they cannot have it."""
    return source if isinstance(space.shape, Shapes) else source.with_form(find_form(space.scaling, space.shape))
