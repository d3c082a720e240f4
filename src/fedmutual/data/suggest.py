"""A setting of data.columns that fits the tables of all clients: what `data check` recommends."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedmutual.config import Config, DataConfig, has_own_data, make_client_config
from fedmutual.config.grid import format_toml_key
from fedmutual.data.column_check import identifies_rows, is_nameless
from fedmutual.data.examples import list_names
from fedmutual.data.sources import TABLES
from fedmutual.data.table import list_features, parse_dates
from fedmutual.data.table_file import TableFile, make_text
from fedmutual.errors import DataError

_MOST_VALUES = 30  # a column with more different texts is rather a name or a free text than a category
_DATE_FORMATS = ("%d.%m.%Y", "%d.%m.%Y %H:%M", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%Y/%m/%d")


class _Column(NamedTuple):
    """One column of one client's table."""

    is_number: bool  # at least half of its cells are numbers
    texts: tuple[str, ...]  # the other cells of a column of numbers
    is_date: bool
    date_formats: tuple[str, ...]  # those of _DATE_FORMATS that fit all its cells, if it is no date without one
    values: tuple[str, ...]  # its different cells, as text
    is_complete: bool
    is_identifier: bool


def describe_suggestion(config: Config) -> list[str]:
    """Return sentences on a setting of data.columns for all clients, and last the setting itself, a TOML table.

    [] where these data are no tables, or need no such setting. A file that cannot be read is left out, unless no file can be
    read. Needed is the setting for a table with missing values, categories or dates, and for tables of several clients that
    are not standardised, or have their columns in different orders.

    Raises:
        DataError: no file can be read.
    """
    clients = list(config.clients) if has_own_data(config) else [""]
    settings = {i: (make_client_config(config, i) if i else config).data for i in clients}
    if any(data.name not in TABLES or data.columns or data.root is None for data in settings.values()):
        return []
    tables, sentences, problems = dict[str, dict[str, _Column]](), list[str](), list[DataError]()
    for client, data in settings.items():
        try:
            tables[client] = _describe_table(data)
        except DataError as problem:
            problems.append(problem)
            sentences.append(f"client {client!r} is not part of the recommendation: its file cannot be read")
    if not tables:
        raise problems[0]
    cells = [column for table in tables.values() for column in table.values()]
    is_alike = len({tuple(table) for table in tables.values()}) == 1 and all(d.mean is not None for d in settings.values())
    if all(c.is_number and not c.texts and c.is_complete for c in cells) and (len(tables) == 1 or is_alike):
        return []
    common = [name for name in next(iter(tables.values())) if all(name in table for table in tables.values())]
    partial = sorted({name for table in tables.values() for name in table} - set(common))
    if partial:
        example = f'{format_toml_key(partial[0])} = {{ kind = "number", fill = 0, indicator = true }}'
        listed = f"columns {list_names(partial)} are not in all files"
        sentences.append(f"{listed}: state what replaces a cell where it is missing, {example}, or they are left out")
    for client, table in tables.items():
        sentences += _describe_needs(client, {name: table[name] for name in common})
    lines = ["[data.columns]"]
    for name in common:
        columns = {client: table[name] for client, table in tables.items()}
        specification = _specify(list(columns.values()))
        values = {v for column in columns.values() for v in column.values}
        if any(column.is_identifier for column in columns.values()):
            sentences.append(f"column {name!r} has no name, or identifies or counts rows: it is left out")
        elif specification is None:
            sentences.append(f"column {name!r} has {len(values)} different texts, too many for a category: it is left out")
        else:
            lines.append(f"{format_toml_key(name)} = {specification}")
            sentences += _compare_values(name, columns) if specification.startswith("[") else ()
    heading = "recommended for the data of all clients (each client's training rows teach what is unset):"
    return [*sentences, heading, "\n".join(lines)] if len(lines) > 1 else []


def _describe_needs(client: str, table: Mapping[str, _Column]) -> Iterator[str]:
    """Yield sentences on the settings by which the dates, and the texts among numbers, of a client's table can be read."""
    dates = {name: column.date_formats for name, column in table.items() if column.date_formats}
    formats = [f for f in _DATE_FORMATS if dates and all(f in formats for formats in dates.values())]
    if formats:
        choice = " or ".join(f'{_name_key(client, "date_format")} = "{f}"' for f in formats)
        fix = "; choose the format that the file was written in" if len(formats) > 1 else ""
        yield f"the dates in columns {list_names(list(dates))} need {choice}{fix}"
    for name, texts in ((name, column.texts) for name, column in table.items() if column.texts):
        yield (
            f'column {name!r} has numbers and {list_names(texts)}; replace each text by a number, or by "" for an empty '
            f"cell: {_name_key(client, 'replace')} = {_format_replacement(name, texts[0])}"
        )


def _compare_values(name: str, columns: Mapping[str, _Column]) -> Iterator[str]:
    """Yield a sentence on values of a category that only some clients have: they may be other spellings."""
    common = set.intersection(*(set(column.values) for column in columns.values()))
    partial = {client: [v for v in column.values if v not in common] for client, column in columns.items()}
    listed = [(client, values) for client, values in partial.items() if values]
    if len(columns) > 1 and listed:
        client, values = listed[-1]
        clients = "; ".join(f"{client}: {', '.join(values)}" for client, values in listed)
        yield (
            f"column {name!r} has values that not all clients have ({clients}); if some mean the same, rename them, for "
            f'example {_name_key(client, "replace")} = {_format_replacement(name, values[0])}, where "" is an empty cell'
        )


def _format_replacement(column: str, cell: str) -> str:
    return f'{{ {format_toml_key(column)} = {{ {format_toml_key(cell)} = "..." }} }}'


def _name_key(client: str, key: str) -> str:
    return f"clients.{format_toml_key(client)}.data.{key}" if client else f"data.{key}"


def _describe_table(data: DataConfig) -> dict[str, _Column]:
    """Return a description of each feature column of a client's table, in the order of the training file."""
    frames = [TableFile(path, data).frame for path in (data.root, data.test) if path is not None]
    return {
        name: _describe_column(pd.concat([frame[name] for frame in frames if name in frame]), data.date_format)
        for name in list_features(frames[0], data)
    }


def _describe_column(cells: "pd.Series[Any]", date_format: str | None) -> _Column:
    text = make_text(cells)
    present = text.dropna()
    numbers = pd.to_numeric(cells, errors="coerce")
    is_numeric = not pd.api.types.is_bool_dtype(cells) and not pd.api.types.is_datetime64_any_dtype(cells)
    is_text = text.notna() & numbers.isna()
    is_number = is_numeric and 2 * int(is_text.sum()) <= len(present)
    texts = tuple(sorted(set(text[is_text]))) if is_number else ()
    may_be_date = not is_number and len(present) > 0
    is_date = may_be_date and bool(parse_dates(present, date_format).notna().all())
    is_other_date = may_be_date and not is_date and bool(present.str.fullmatch(r"\d+[./-]\d+[./-]\d+.*").all())
    date_formats = tuple(f for f in _DATE_FORMATS if is_other_date and parse_dates(present, f).notna().all())
    is_complete = len(present) == len(cells)
    is_identifier = is_number and is_complete and identifies_rows(numbers.to_numpy(np.float64))
    is_identifier |= is_nameless(str(cells.name))
    values = tuple(sorted(set(present)))
    return _Column(is_number, texts, is_date or bool(date_formats), date_formats, values, is_complete, is_identifier)


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
