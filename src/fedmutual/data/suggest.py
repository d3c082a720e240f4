"""A setting of data.columns that fits the tables of all clients: what `data check` recommends."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedmutual.config import Config, DataConfig, has_own_data, make_client_config
from fedmutual.config.grid import format_toml_key
from fedmutual.data.cells import parse_dates
from fedmutual.data.column_check import identifies_rows, is_nameless
from fedmutual.data.examples import list_names
from fedmutual.data.sources import TABLES
from fedmutual.data.table import list_features
from fedmutual.data.table_file import make_text, read_frame
from fedmutual.errors import DataError

_MOST_VALUES = 30  # a column with more different texts is rather a name or a free text than a category


_DATE_FORMATS = ("%d.%m.%Y", "%d.%m.%Y %H:%M", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%Y/%m/%d")


class _Column(NamedTuple):
    """One column of one table."""

    is_number: bool  # at least half of its cells are numbers
    texts: tuple[str, ...]  # the other cells of a column of numbers
    is_date: bool
    date_formats: tuple[str, ...]  # those of _DATE_FORMATS that fit all its cells, if it is no date without one
    values: tuple[str, ...]  # its different cells, as text
    is_complete: bool
    is_identifier: bool


Table = Mapping[str, _Column]  # the columns of one client's table, in the order of the training file


class Suggestion(NamedTuple):
    """Recommended settings."""

    columns: str  # a TOML table data.columns, for all clients
    left_out: tuple[str, ...]  # columns that are in no suggestion: one sentence for each reason
    remarks: tuple[str, ...] = ()  # settings of single clients that the suggestion may need


def suggest_columns(config: Config) -> Suggestion | None:
    """Return a setting of data.columns for all tables; None where these data are no tables, or need no such setting.

    A file that cannot be read is left out, unless no file can be read.

    Needed is the setting for a table with missing values, categories or dates, and for tables of several clients that are
    not standardised, or have their columns in different orders.

    Raises:
        DataError: no file can be read.
    """
    clients = list(config.clients) if has_own_data(config) else [""]
    settings = {i: (make_client_config(config, i) if i else config).data for i in clients}
    if any(data.name not in TABLES or data.columns or data.root is None for data in settings.values()):
        return None
    tables, unread = _read_tables(settings)
    if not any(map(_has_text_columns, tables.values())) and not _differ(tables, settings):
        return None
    first, *others = tables.values()
    common = [name for name in first if all(name in table for table in others)]
    partial = sorted({name for table in tables.values() for name in table} - set(common))
    left_out = [f"columns {list_names(partial)} are not in all files"] if partial else []
    remarks = [f"client {client!r} is not part of the recommendation: its file cannot be read" for client in unread]
    for client, table in tables.items():
        remarks += [*_find_date_format(client, table, common), *_find_texts(client, table, common)]
    lines = []
    for name in common:
        columns = [table[name] for table in tables.values()]
        specification = _specify(columns)
        if any(column.is_identifier for column in columns):
            left_out.append(f"column {name!r} has no name, or identifies or counts rows")
        elif specification is None:
            count = len({v for column in columns for v in column.values})
            left_out.append(f"column {name!r} has {count} different texts, too many for a category")
        else:
            lines.append(f"{format_toml_key(name)} = {specification}")
            if specification.startswith("["):
                remarks += _compare_values(name, {client: table[name] for client, table in tables.items()})
    if not lines:
        return None
    return Suggestion("\n".join(["[data.columns]", *lines]), tuple(left_out), tuple(remarks))


def _read_tables(settings: Mapping[str, DataConfig]) -> tuple[dict[str, Table], dict[str, DataError]]:
    """Return the tables by client, and the errors of clients with a file that cannot be read.

    Raises:
        DataError: no file can be read.
    """
    tables: dict[str, Table] = {}
    unread: dict[str, DataError] = {}
    for client, data in settings.items():
        try:
            tables[client] = _read_features(data)
        except DataError as problem:
            unread[client] = problem
    if not tables:
        raise next(iter(unread.values()))
    return tables, unread


def _find_date_format(client: str, table: Table, names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on the setting by which the dates of a client's table can be read."""
    columns = {name: table[name].date_formats for name in names if table[name].date_formats}
    formats = [f for f in _DATE_FORMATS if columns and all(f in formats for formats in columns.values())]
    if formats:
        key = _name_key(client, "date_format")
        choice = " or ".join(f'{key} = "{f}"' for f in formats)
        yield f"the dates in columns {list_names(list(columns))} need {choice}" + (
            "; choose the format that the file was written in" if len(formats) > 1 else ""
        )


def _find_texts(client: str, table: Table, names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on each column of numbers with cells that are no numbers."""
    for name in (n for n in names if table[n].texts):
        replacement = f'{{ {format_toml_key(name)} = {{ {format_toml_key(table[name].texts[0])} = "..." }} }}'
        yield (
            f'column {name!r} has numbers and {list_names(table[name].texts)}; replace each text by a number, or by "" for '
            f"an empty cell: {_name_key(client, 'replace')} = {replacement}"
        )


def _compare_values(name: str, columns: Mapping[str, _Column]) -> Iterator[str]:
    """Yield a sentence on values of a category that only some clients have: they may be other spellings."""
    common = set.intersection(*(set(column.values) for column in columns.values()))
    partial = {client: [v for v in column.values if v not in common] for client, column in columns.items()}
    if len(columns) < 2 or not any(partial.values()):
        return
    clients = "; ".join(f"{client}: {', '.join(values)}" for client, values in partial.items() if values)
    client, values = next((c, v) for c, v in reversed(partial.items()) if v)
    column = f'{format_toml_key(name)} = {{ {format_toml_key(values[0])} = "..." }}'
    yield (
        f"column {name!r} has values that not all clients have ({clients}); if some mean the same, rename them, for example "
        f'{_name_key(client, "replace")} = {{ {column} }}, where "" is an empty cell'
    )


def _name_key(client: str, key: str) -> str:
    return f"clients.{format_toml_key(client)}.data.{key}" if client else f"data.{key}"


def _read_features(data: DataConfig) -> Table:
    """Return a description of each feature column of a client's table, in the order of the training file."""
    paths: list[Path] = [path for path in (data.root, data.test) if path is not None]
    names = [c for c in (*data.label_columns, data.group_by, "domain") if c is not None]
    frames = [read_frame(path, names, parquet=data.name == "parquet", replace=data.replace) for path in paths]
    features = list_features(frames[0], data)
    cells = {name: pd.concat([frame[name] for frame in frames if name in frame]) for name in features}
    return {name: _describe_column(column, data.date_format) for name, column in cells.items()}


def _describe_column(cells: "pd.Series[Any]", date_format: str | None) -> _Column:
    text = make_text(cells)
    present = text.dropna()
    is_boolean = pd.api.types.is_bool_dtype(cells)
    numbers = pd.to_numeric(cells, errors="coerce")
    is_numeric = not is_boolean and not pd.api.types.is_datetime64_any_dtype(cells)
    is_text = text.notna() & numbers.isna()
    is_number = is_numeric and 2 * int(is_text.sum()) <= len(present)
    texts = tuple(sorted(set(text[is_text]))) if is_number else ()
    may_be_date = not is_number and len(present) > 0
    is_date = may_be_date and bool(parse_dates(present, date_format).notna().all())
    is_other_date = may_be_date and not is_date and bool(present.str.fullmatch(r"\d+[./-]\d+[./-]\d+.*").all())
    date_formats = tuple(f for f in _DATE_FORMATS if is_other_date and parse_dates(present, f).notna().all())
    values = tuple(sorted(set(present)))
    is_complete = len(present) == len(cells)
    is_identifier = is_number and is_complete and identifies_rows(numbers.to_numpy(np.float64))
    is_identifier |= is_nameless(str(cells.name))
    return _Column(is_number, texts, is_date or bool(date_formats), date_formats, values, is_complete, is_identifier)


def _has_text_columns(table: Mapping[str, _Column]) -> bool:
    return any(not column.is_number or column.texts or not column.is_complete for column in table.values())


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
        DataError: no file can be read.
    """
    suggestion = suggest_columns(config)
    if suggestion is None:
        return []
    return [
        *(f"{reason}: no feature of the recommendation below" for reason in suggestion.left_out),
        *suggestion.remarks,
        "recommended for the data of all clients (to fill in, encode and scale what each client's training rows teach):",
        suggestion.columns,
    ]
