"""A table in a CSV or Parquet file: one row an example, one column for the label, others for the features."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import pandas as pd

from fedmutual.config import ColumnConfig, DataConfig
from fedmutual.data.arrays import require_root
from fedmutual.data.cells import parse_cells, parse_numbers
from fedmutual.data.column_check import describe_nameless, is_nameless, note_rounded_numbers
from fedmutual.data.encoding import Encoding, plan_columns
from fedmutual.data.examples import (
    ArrayExamples,
    BadRows,
    ColumnPlan,
    Part,
    Source,
    convert_array,
    describe_columns,
    list_names,
)
from fedmutual.data.table_file import RowNamer, make_row_namer, make_text, read_frame
from fedmutual.data.table_labels import get_names, read_labels
from fedmutual.errors import ConfigError, DataError

DOMAIN = "domain"
_ROUNDING_FIX = "subtract an offset, or set data.columns, which standardises numbers before they are rounded"


class _TableFile(NamedTuple):
    path: Path
    frame: pd.DataFrame
    name_row: Callable[[int], str]


def read_table(config: DataConfig, numbers: bool = False) -> Source:
    """Return the data of the file data.root, with the file data.test as test part if it is set.

    The features are the columns of data.columns in that order; without data.columns all columns, except the label,
    `domain`, the column of data.group_by and the columns of data.drop.
    numbers: targets are no classes; a label column stays text, and `targets.read_targets` parses it. A list of label
    columns is 0 and 1 [n, L].

    Raises:
        BadRows: a column is missing, or cells cannot be used; one sentence for each problem of the files.
        DataError: a file is missing or is no table.
        ConfigError: data.root is not set; or several label columns are named, and the task learns classes.
    """
    path = require_root(config)
    if not numbers and not isinstance(config.label, str):
        raise ConfigError(
            "key 'data.label' lists several columns, but the task learns one class of an example; name one column, or set "
            "training.task = 'multilabel'"
        )
    files = [_open_file(p, config) for p in (path, config.test) if p is not None]
    problems = [problem for file, is_test in zip(files, (False, True), strict=False)
                for problem in _find_missing_columns(file, config, is_test)]  # fmt: skip
    if problems:
        raise BadRows(*problems)
    plans = make_plans(config.columns, [file.frame for file in files])
    columns = tuple(config.columns) or list_features(files[0].frame, config)
    if not plans:
        problems += describe_nameless(columns, config, str(path))
        columns = tuple(c for c in columns if not is_nameless(c))
    problems += [problem for file in files[1:] if not plans for problem in _compare_columns(file, config, columns)]
    parts = []
    for file in files if not problems else files[:1]:
        part, part_problems = _read_part(file, config, columns, plans, numbers)
        parts.append(part)
        problems += part_problems
    if problems:
        raise BadRows(*problems)
    train = parts[0]
    notes = [
        *_note_decimal_commas(files),
        *_note_unused_columns(files[0], config),
        *_note_blanks(files, config),
        *([] if plans else note_rounded_numbers(files[0].frame[[*columns]], str(path), _ROUNDING_FIX)),
    ]
    return Source(
        str(path),
        train,
        parts[1] if len(parts) > 1 else None,
        classes=None if isinstance(config.label, str) else config.label,
        columns=columns,
        notes=tuple(notes),
        label_columns=config.label_columns,
        plans=plans or None,
    )


def list_features(frame: pd.DataFrame, config: DataConfig) -> tuple[str, ...]:
    """Return the columns of a table that may be features, without regard to data.columns."""
    excluded = {*config.label_columns, config.group_by, DOMAIN, *(config.drop or ())}
    return tuple(c for c in frame.columns if c not in excluded)


def make_plans(columns: Mapping[str, ColumnConfig], frames: Sequence[pd.DataFrame]) -> tuple[ColumnPlan, ...]:
    """Return how each column of data.columns is read; a category without values has those of the frames, sorted."""
    return tuple(ColumnPlan(name, settings, _list_values(name, settings, frames)) for name, settings in columns.items())


def read_labelled(
    path: Path, columns: Sequence[str], config: DataConfig, encoding: Encoding | None = None, numbers: bool = False
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], Callable[[int], str]]:
    """Return the named columns of a CSV or Parquet file as `read_features` has them, the labels, and the name of a row.

    config: `data.label` is the column of the labels [n], or a list of columns of 0 and 1, whose labels are [n, L].
    numbers: labels of one column are numbers; they stay text, which `targets.read_targets` parses.

    Raises:
        BadRows, DataError: as `read_features`; or a column of labels is missing, or a label is missing or no class.
    """
    x, name_row = read_features(path, columns, config, encoding)
    names = config.label_columns
    frame = read_frame(path, names, (), path.suffix.lower() == ".parquet", "name another")
    missing_columns = [c for c in names if c not in frame]
    if missing_columns:
        raise DataError(
            f"{path}: there is no column {missing_columns[0]!r} of labels; "
            f"{describe_columns(frame.columns, missing_columns[0])}"
        )
    labels, problems = read_labels(frame, config.label, path, RowNamer(path, len(frame)), numbers)
    if problems:
        raise BadRows(*problems)
    return x, labels, name_row


def read_features(
    path: Path, columns: Sequence[str], config: DataConfig, encoding: Encoding | None = None
) -> tuple[npt.NDArray[Any], Callable[[int], str]]:
    """Return the named columns of a CSV or Parquet file as x [n, columns], and a function that names a row in messages.

    Other columns are ignored, the order of columns in the file has no effect, and the file needs no labels.
    config: how the cells of the client's own files are read (`data.replace`, `data.date_format`).
    encoding: the encoding that the values [n, columns] are for, float64 with NaN for missing cells; None: they are features,
    float32.

    Raises:
        BadRows: a column is missing, or cells cannot be used.
        DataError: the file is missing or is no table.
    """
    plans = plan_columns(encoding) if encoding is not None else ()
    names = [plan.name for plan in plans] or list(columns)
    text_features = [p.name for p in plans if p.settings.kind != "number"]
    replace = {column: cells for column, cells in config.replace.items() if column in names}
    frame = read_frame(path, (), text_features, path.suffix.lower() == ".parquet", "name another", replace)
    missing_columns = [c for c in names if c not in frame]
    if missing_columns:
        raise DataError(
            f"{path}: there is no column {missing_columns[0]!r}, which the model learned from; "
            f"{describe_columns(frame.columns, missing_columns[0])}"
        )
    name_row = RowNamer(path, len(frame))
    x, problems = (
        parse_cells(frame, plans, path, name_row, config.date_format)
        if plans
        else parse_numbers(frame[names], path, name_row)
    )
    if problems:
        raise BadRows(*problems)
    return x, make_row_namer(path, len(frame))


def _open_file(path: Path, config: DataConfig) -> _TableFile:
    names = [c for c in (*config.label_columns, config.group_by, DOMAIN) if c is not None]
    text_features = [c for c, settings in config.columns.items() if settings.kind != "number"]
    frame = read_frame(path, names, text_features, config.name == "parquet", replace=config.replace)
    return _TableFile(path, frame, RowNamer(path, len(frame)))


def _find_missing_columns(file: _TableFile, config: DataConfig, is_test: bool) -> list[str]:
    """Return a sentence for each column that the configuration names and the file lacks."""
    named_columns = [*(("data.label", c) for c in config.label_columns), ("data.group_by", config.group_by)]
    named_columns += [("data.columns", column) for column in config.columns]
    named_columns += [("data.replace", column) for column in config.replace if column not in config.columns]
    dropped = [] if is_test else [("data.drop", c) for c in config.drop or ()]  # a test file may lack dropped columns
    return [
        f"{file.path}: there is no column {column!r}, which {key} names; {describe_columns(file.frame.columns, column)}"
        for key, column in (*named_columns, *dropped)
        if column is not None and column not in file.frame
    ]


def _compare_columns(file: _TableFile, config: DataConfig, columns: tuple[str, ...]) -> list[str]:
    """Return a sentence where a test file's features differ from the training file's."""
    different = sorted(set(list_features(file.frame, config)) ^ set(columns))
    if not different:
        return []
    return [
        f"{file.path}: its features differ from those of the training file in {list_names(different)}; give both files the "
        "same columns"
    ]


def _read_part(
    file: _TableFile, config: DataConfig, columns: tuple[str, ...], plans: Sequence[ColumnPlan], numbers: bool
) -> tuple[Part, list[str]]:
    """Return the examples and labels of a file, and a sentence for each problem; with problems the part is not usable."""
    path, frame, name_row = file
    x: npt.NDArray[Any]
    if plans:
        x, problems = parse_cells(frame, plans, path, name_row, config.date_format)
    else:
        values, problems = parse_numbers(frame[list(columns)], path, name_row)
        x = values if problems else convert_array(values, str(path)).numpy()
    groups, domains = (get_names(frame, c) for c in (config.group_by, DOMAIN))
    targets, label_problems = read_labels(frame, config.label, path, name_row, numbers)
    part = Part(ArrayExamples(x), targets, make_row_namer(path, len(frame)), groups, domains)
    return part, [*problems, *label_problems]


def _list_values(name: str, settings: ColumnConfig, frames: Sequence[pd.DataFrame]) -> tuple[str, ...]:
    if settings.kind != "category":
        return ()
    return settings.values or tuple(sorted({str(v) for frame in frames for v in make_text(frame[name]).dropna()}))


def _note_decimal_commas(files: Sequence[_TableFile]) -> list[str]:
    """Return a remark on each file whose commas were read as decimal signs, because a comma may also group thousands."""
    columns_by_file = {file.path: file.frame.attrs.get("decimal_commas") for file in files}
    return [f"{path}: commas in columns {list_names(c)} are decimal commas" for path, c in columns_by_file.items() if c]


def _note_blanks(files: Sequence[_TableFile], config: DataConfig) -> list[str]:
    """Return a remark on labels that are read as one label because they differ only in blanks at their ends."""
    if not isinstance(config.label, str):
        return []
    written = {str(label) for file in files for label in file.frame[config.label].unique()}
    merged = sorted(label for label in written if label != label.strip() and label.strip() in written)
    return [f"{files[0].path}: labels {list_names(merged)} are read without their blanks"] if merged else []


def _note_unused_columns(file: _TableFile, config: DataConfig) -> list[str]:
    """Return a remark on columns that data.columns leaves out."""
    unused = [c for c in list_features(file.frame, config) if c not in config.columns]
    if not config.columns or not unused:
        return []
    return [f"{file.path}: columns {list_names(unused)} are not in data.columns, so they are no features"]
