"""Tables in files: CSV and Parquet as pandas frames, and the names of rows in messages."""

import csv as records
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from fedmutual.data.column_check import check_names
from fedmutual.data.csv_dialect import convert_decimals, convert_numbers, describe_decoding_error, find_dialect
from fedmutual.errors import DataError

SUFFIXES = (".csv", ".parquet")
"""The names of table files end so."""

# of features only: NA may be the name of a class
_MISSING = ["", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "null", "NULL", "None"]
_NAMED = "key 'data.root' or 'data.test' names it"


Replacements = Mapping[str, Mapping[str, str]]  # column -> cell -> the text that replaces it


class RowNamer:
    """Names the rows of a file by line number, as an editor shows it. Line numbers are read at the first call."""

    def __init__(self, path: Path, rows: int) -> None:
        self._path, self._rows = path, rows

    def __call__(self, row: int) -> str:
        """Return "line 5", or "row 4 (without the header)" where line numbers are unknown."""
        known = len(self._starts) == self._rows
        return f"line {self._starts[row]}" if known else f"row {row + 1} (without the header)"

    @cached_property
    def _starts(self) -> list[int]:
        """The line number on which each row begins; empty if the file cannot be read as text."""
        try:
            return list(self._read_starts())[1:]
        except (OSError, UnicodeDecodeError, records.Error):  # compressed, or Parquet
            return []

    def _read_starts(self) -> Iterator[int]:
        """Yield the line number on which the header and each row begin.

        A quoted cell may span several lines; blank lines are no rows.
        """
        dialect = find_dialect(self._path)
        with self._path.open(newline="", encoding=dialect.encoding) as file:
            lines = islice(file, dialect.skipped_lines, None)
            line, reader = 1 + dialect.skipped_lines, records.reader(lines, delimiter=dialect.delimiter)
            for cells in reader:
                if len(cells) > 1 or any(cell.strip() for cell in cells):
                    yield line
                line = reader.line_num + 1 + dialect.skipped_lines


def read_frame(
    path: Path,
    names: Sequence[str] = (),
    text_features: Sequence[str] = (),
    parquet: bool = False,
    missing: str = _NAMED,
    replace: Replacements | None = None,
) -> pd.DataFrame:
    """Return a file's whole table. `attrs["decimal_commas"]` lists the columns that had decimal commas, if any.

    Args:
        path: the file.
        names: columns of names, such as the label's: they stay text, and an empty cell is the text "".
        text_features: features that stay text, with NaN for missing cells.
        parquet: whether the file is Parquet, not CSV.
        missing: the fix in the message about a missing file.
        replace: the replacements of cells of features; "" is a missing cell.

    Raises:
        DataError: the file is missing or is no table, or pyarrow is missing for Parquet.
    """
    read = _read_parquet if parquet else _read_csv
    try:
        table = read(path, names, text_features, replace or {})
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; {missing}") from None
    except pd.errors.ParserWarning:
        raise DataError(
            f"{path}: a row has more fields than the header; is there a decimal comma, another delimiter than the comma, or "
            "a delimiter at the end of each row?"
        ) from None
    except DataError:
        raise
    except UnicodeDecodeError as problem:
        sentence = describe_decoding_error(path) or f"{path}: cannot be read as CSV ({problem})"
        raise DataError(sentence) from None
    except (OSError, ValueError) as problem:  # pandas' own errors are ValueErrors, and so are those of pyarrow
        kind = "Parquet" if parquet else "CSV"
        is_ragged = isinstance(problem, pd.errors.ParserError)
        fix = "; fix that line: a cell that holds the delimiter or a line break must stand in quotes" if is_ragged else ""
        raise DataError(f"{path}: cannot be read as {kind} ({str(problem).strip().splitlines()[0]}){fix}") from None
    if table.empty:
        raise DataError(f"{path}: the table has no rows")
    return table


def _replace_cells(table: pd.DataFrame, written: pd.DataFrame, replace: Replacements) -> None:
    """Replace cells of columns of text in place; "" becomes a missing cell. written: the cells as the file has them."""
    for name in (c for c in replace if c in table):
        cells = make_text(table[name])
        replacement = make_text(written[name]).map(replace[name])
        table[name] = make_text(cells.where(replacement.isna(), replacement))


def _read_csv(path: Path, names: Sequence[str], text_features: Sequence[str], replace: Replacements) -> pd.DataFrame:
    dialect = find_dialect(path)
    written_as: Any = {"sep": dialect.delimiter, "encoding": dialect.encoding, "skiprows": dialect.skipped_lines}
    header = pd.read_csv(path, nrows=1, header=None, dtype=str, keep_default_na=False, **written_as)
    if any("\0" in name for name in header.iloc[0]):
        raise DataError(f"{path}: is UTF-16 text without a byte order mark; save the file as UTF-8, in Excel as 'CSV UTF-8'")
    check_names(header.iloc[0], str(path))  # pandas would rename the second of two
    features = [c for c in pd.read_csv(path, nrows=0, **written_as).columns if c not in names]
    has_points = dialect.delimiter == ","  # other files may have decimal commas, so all their cells are read as text
    as_text: Any = dict.fromkeys((*names, *text_features, *replace), str) if has_points else str
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        table = pd.read_csv(
            path,
            **written_as,
            index_col=False,  # otherwise an extra field would make the first column an index and shift the others
            dtype=as_text,
            keep_default_na=False,
            na_values=dict.fromkeys(features, _MISSING),
        )
    written = table.copy(deep=False)
    if not has_points:
        table.attrs["decimal_commas"] = convert_decimals(table, names, text_features, path)
    _replace_cells(table, written, replace)
    convert_numbers(table, replace if has_points else features, text_features)
    return table


def _read_parquet(path: Path, names: Sequence[str], text_features: Sequence[str], replace: Replacements) -> pd.DataFrame:
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        from pyarrow import parquet

        check_names(parquet.read_schema(path).names, str(path))  # pandas cannot read two columns of one name
        table = pd.read_parquet(path, engine="pyarrow")
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow; install it by: pip install 'fedmutual[parquet]'") from None
    table = table.rename(columns=str)
    check_names(table.columns, str(path))
    text = {c: make_text(table[c]) for c in {*names, *text_features, *replace} if c in table}
    table = table.assign(**{c: cells.fillna("") if c in names else cells for c, cells in text.items()})
    _replace_cells(table, table, replace)
    convert_numbers(table, replace, text_features)
    return table


def make_text(column: "pd.Series[str]") -> "pd.Series[str]":
    """Return the cells [n] as text [n] without blanks at either end; missing cells stay missing."""
    text = column.map(str, na_action="ignore").astype("str").str.strip()
    return text.where(column.notna() & (text != ""))


def make_row_namer(path: Path, rows: int) -> Callable[[int], str]:
    """Return the function that names a row of a file: "line 3 of rows.csv"."""
    name_row = RowNamer(path, rows)
    return lambda row: f"{name_row(row)} of {path}"
