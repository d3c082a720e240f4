"""A setting of data.columns that fits the tables of all clients: what `data check` recommends."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedmutual.config import Config, DataConfig, has_own_data, make_client_config
from fedmutual.config.grid import format_toml_key
from fedmutual.data.cells import parse_dates
from fedmutual.data.examples import listed
from fedmutual.data.sources import TABLES
from fedmutual.data.table import has_identifiers, list_features
from fedmutual.data.table_file import make_text, read_frame

_MOST_VALUES = 30  # a column with more different texts is rather a name or a free text than a category


class _Column(NamedTuple):
    """One column of one table."""

    is_number: bool
    is_date: bool
    values: tuple[str, ...]  # its different cells, as text
    is_complete: bool
    is_identifier: bool


class Suggestion(NamedTuple):
    """Recommended settings."""

    columns: str  # a TOML table data.columns, for all clients
    left_out: tuple[str, ...]  # columns that are in no suggestion: one sentence for each reason


def suggest_columns(config: Config) -> Suggestion | None:
    """Return a setting of data.columns for all tables; None where these data are no tables, or need no such setting.

    Needed is the setting for a table with missing values, categories or dates, and for tables of several clients that are
    not standardised, or have their columns in different orders.

    Raises:
        DataError: a file is missing or is no table.
    """
    clients = list(config.clients) if has_own_data(config) else [""]
    settings = {i: (make_client_config(config, i) if i else config).data for i in clients}
    if any(data.name not in TABLES or data.columns or data.root is None for data in settings.values()):
        return None
    tables = {i: _read_features(data) for i, data in settings.items()}
    if not any(map(_needs_encoding, tables.values())) and not _differ(tables, settings):
        return None
    first, *others = tables.values()
    common = [name for name in first if all(name in table for table in others)]
    partial = sorted({name for table in tables.values() for name in table} - set(common))
    left_out = [f"columns {listed(partial)} are not in all files"] if partial else []
    lines = []
    for name in common:
        columns = [table[name] for table in tables.values()]
        specification = _specify(columns)
        if any(column.is_identifier for column in columns):
            left_out.append(f"column {name!r} has a different value in every row, as identifiers have")
        elif specification is None:
            count = len({v for column in columns for v in column.values})
            left_out.append(f"column {name!r} has {count} different texts, too many for a category")
        else:
            lines.append(f"{format_toml_key(name)} = {specification}")
    return Suggestion("\n".join(["[data.columns]", *lines]), tuple(left_out)) if lines else None


def _read_features(data: DataConfig) -> dict[str, _Column]:
    """Return what is in each feature column of a client's table, in the order of the training file."""
    paths: list[Path] = [path for path in (data.root, data.test) if path is not None]
    names = [c for c in (data.label, data.group_by, "domain") if c is not None]
    frames = [read_frame(path, names, parquet=data.name == "parquet") for path in paths]
    features = list_features(frames[0], data)
    cells = {name: pd.concat([frame[name] for frame in frames if name in frame]) for name in features}
    return {name: _describe_column(column) for name, column in cells.items()}


def _describe_column(cells: "pd.Series[Any]") -> _Column:
    text = make_text(cells)
    present = text.dropna()
    is_boolean = pd.api.types.is_bool_dtype(cells)
    numbers = pd.to_numeric(cells, errors="coerce")
    is_numeric = not is_boolean and not pd.api.types.is_datetime64_any_dtype(cells)
    is_number = is_numeric and bool(numbers[cells.notna()].notna().all())
    is_date = not is_number and len(present) > 0 and bool(parse_dates(present).notna().all())
    values = tuple(sorted(set(present)))
    is_identifier = is_number and len(present) == len(cells) and has_identifiers(numbers.to_numpy(np.float64))
    return _Column(is_number, is_date, values, len(present) == len(cells), is_identifier)


def _needs_encoding(table: Mapping[str, _Column]) -> bool:
    return any(not column.is_number or not column.is_complete for column in table.values())


def _differ(tables: Mapping[str, Mapping[str, _Column]], settings: Mapping[str, DataConfig]) -> bool:
    """Return whether several clients have other columns, another order, or no scaling."""
    orders = {tuple(table) for table in tables.values()}
    return len(tables) > 1 and (len(orders) > 1 or any(data.mean is None for data in settings.values()))


def _specify(columns: Sequence[_Column]) -> str | None:
    """Return the TOML value that describes one column of all clients; None where it is free text."""
    if all(column.is_number for column in columns):
        return '"number"'
    if all(column.is_date or not column.values for column in columns):
        return '"date"'
    values = sorted({v for column in columns for v in column.values})
    if len(values) > _MOST_VALUES or not values:
        return None
    return "[" + ", ".join(json.dumps(v, ensure_ascii=False) for v in values) + "]"


def describe_suggestion(config: Config) -> list[str]:
    """Return sentences that recommend data.columns, and the setting itself; none where `suggest_columns` has none.

    Raises:
        DataError: a file is missing or is no table.
    """
    suggestion = suggest_columns(config)
    if suggestion is None:
        return []
    return [
        *(f"{reason}: no feature of the recommendation below" for reason in suggestion.left_out),
        "recommended for the data of all clients (to fill in, encode and scale what each client's training rows teach):",
        suggestion.columns,
    ]
