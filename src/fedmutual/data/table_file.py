"""Tables in files: CSV, whichever way it is written, and Parquet, as pandas frames; the names of rows in messages."""

import csv
import re
import warnings
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from fedmutual.config import DataConfig
from fedmutual.data.column_check import check_names
from fedmutual.data.examples import describe_columns
from fedmutual.errors import BadRows, DataError

DOMAIN = "domain"
SUFFIXES = (".csv", ".parquet")
"""The names of table files end so."""

# of features only: NA may be the name of a class
_MISSING = ["", "NA", "N/A", "n/a", "#N/A", "NaN", "nan", "null", "NULL", "None"]
_DELIMITERS = (",", ";", "\t", "|")
_SAMPLED_LINES = 50
_OTHER_KINDS = {  # endings of tables of other programs -> the call of pandas that reads them
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "read_excel({!r})"),
    ".json": "read_json({!r})",
    ".jsonl": "read_json({!r}, lines=True)",
    ".feather": "read_feather({!r})",
    ".dta": "read_stata({!r})",
    ".sav": "read_spss({!r})",
    ".sas7bdat": "read_sas({!r})",
}
_WITH_COMMA = r"[+-]?(?:\d+,\d*|,\d+)(?:[eE][+-]?\d+)?"
_WITH_POINT = r"[+-]?(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?"


class RowNamer:
    """Names the rows of a file by line number, as an editor shows it. Line numbers are read when a row is first named."""

    def __init__(self, path: Path | str, rows: int) -> None:
        """path: the file; or the name of a DataFrame, whose rows are counted from 0."""
        self._path, self._rows = path, rows

    def __call__(self, row: int) -> str:
        """Return "line 5", or "row 4 (without the header)" where line numbers are unknown; of a DataFrame "row 3"."""
        if isinstance(self._path, str):
            return f"row {row}"
        known = len(self._starts) == self._rows
        return f"line {self._starts[row]}" if known else f"row {row + 1} (without the header)"

    def with_file(self, row: int) -> str:
        """Return the name of a row with its file: "line 3 of rows.csv"."""
        return f"{self(row)} of {self._path}"

    @cached_property
    def _starts(self) -> list[int]:
        """The line number on which each row begins; empty if the file cannot be read as text: compressed, or Parquet.

        A quoted cell may span several lines; blank lines are no rows.
        """
        path = Path(self._path)
        dialect, starts = find_dialect(path), list[int]()
        line = first = 1 + dialect["skiprows"]
        try:
            with path.open(newline="", encoding=dialect["encoding"]) as file:
                reader = csv.reader(islice(file, first - 1, None), delimiter=dialect["sep"])
                for cells in reader:
                    if len(cells) > 1 or any(cell.strip() for cell in cells):
                        starts.append(line)
                    line = reader.line_num + first
        except (OSError, UnicodeDecodeError, csv.Error):
            return []
        return starts[1:]


class TableFile:
    """A CSV or Parquet file, or a DataFrame; `table` parses its cells, and adds a sentence to `problems` for each fault."""

    def __init__(
        self,
        path: Path | str,
        config: DataConfig,
        missing: str = "key 'data.root' or 'data.test' names it",
        frame: pd.DataFrame | None = None,
    ) -> None:
        """Read the whole table.

        Columns of names, such as the label's, stay text, and an empty cell is the text "". Other columns become numbers
        where all their cells are, unless `data.columns` gives them another kind. missing: the fix for a missing file.
        frame: a table in memory, and `path` is its name in messages.

        Raises:
            DataError: the file is missing or is no table, or pyarrow is missing for Parquet.
        """
        self.path, self.problems, self.decimal_commas = path, list[str](), list[str]()
        self.replaced: dict[str, set[str]] = {}  # column of data.replace -> the cells that were replaced
        self._config = config
        self._names = [c for c in (*config.label_columns, config.group_by, DOMAIN) if c is not None]
        self._text_features = [c for c, settings in config.columns.items() if settings.kind != "number"]
        self._text_features += config.text or ()  # as text, a number depends on no other row
        suffix = Path(path).suffix.lower()
        kind = "Parquet" if suffix == ".parquet" or (suffix != ".csv" and config.name == "parquet") else "CSV"
        if frame is None and suffix in _OTHER_KINDS and Path(path).is_file():
            target = str(Path(path).with_suffix(".csv"))
            call = _OTHER_KINDS[suffix].format(str(path))
            fix = f"save it as one: pandas.{call}.to_csv({target!r}, index=False)"
            raise DataError(f"{path}: is neither a CSV nor a Parquet file; {fix}")
        try:
            if frame is not None:
                self.frame = self._read_frame(frame)
            else:
                self.frame = self._read_parquet(Path(path)) if kind == "Parquet" else self._read_csv(Path(path))
        except FileNotFoundError:
            raise DataError(f"{path}: there is no such file; {missing}") from None
        except pd.errors.ParserWarning:
            raise DataError(
                f"{path}: a row has more fields than the header; is there a line above the header, a decimal comma, another "
                "delimiter than the comma, or a delimiter at the end of each row?"
            ) from None
        except DataError:
            raise
        except UnicodeDecodeError:
            raise DataError(f"{path}: {_describe_decoding_error(Path(path))}") from None
        except (OSError, ValueError) as problem:  # pandas' own errors are ValueErrors, and so are those of pyarrow
            is_ragged = isinstance(problem, pd.errors.ParserError)
            fix = "; fix that line: quote cells that hold the delimiter or a line break" if is_ragged else ""
            raise DataError(f"{path}: cannot be read as {kind} ({str(problem).strip().splitlines()[0]}){fix}") from None
        if self.frame.empty:
            raise DataError(f"{path}: the table has no rows")
        self.name_row = RowNamer(path, len(self.frame))

    def require_columns(self, columns: Iterable[tuple[str, str]]) -> None:
        """Add a problem for each missing column. columns: pairs of a name and of what names the column."""
        for name, why in columns:
            if name not in self.frame:
                self.problems.append(
                    f"{self.path}: there is no column {name!r}, which {why}; {describe_columns(self.frame.columns, name)}"
                )

    def _read_csv(self, path: Path) -> pd.DataFrame:
        dialect, replace = find_dialect(path), self._config.replace
        header = pd.read_csv(path, nrows=1, header=None, dtype=str, keep_default_na=False, **dialect)
        if any("\0" in name for name in header.iloc[0]):
            raise DataError(
                f"{path}: is UTF-16 text without a byte order mark; save the file as UTF-8, in Excel as 'CSV UTF-8'"
            )
        check_names(header.iloc[0], str(path))  # pandas would rename the second of two
        features = [c for c in pd.read_csv(path, nrows=0, **dialect).columns if c not in self._names]
        has_points = dialect["sep"] == ","  # other files may have decimal commas, so all their cells are read as text
        as_text: Any = dict.fromkeys((*self._names, *self._text_features, *replace), str) if has_points else str
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(
                path,
                **dialect,
                index_col=False,  # otherwise an extra field would make the first column an index and shift the others
                dtype=as_text,
                keep_default_na=False,
                na_values=dict.fromkeys(features, _MISSING),
            )
        written = table.copy(deep=False)
        if not has_points:
            self._convert_decimals(table)
        self._replace_cells(table, written, replace if has_points else features)
        return table

    def _read_parquet(self, path: Path) -> pd.DataFrame:
        if not path.is_file():
            raise FileNotFoundError(path)
        try:
            from pyarrow import parquet

            check_names(parquet.read_schema(path).names, str(path))  # pandas cannot read two columns of one name
            return self._read_frame(pd.read_parquet(path, engine="pyarrow"))
        except ImportError:
            raise DataError(
                f"{path}: reading Parquet needs pyarrow; install it by: pip install 'fedmutual[parquet]'"
            ) from None

    def _read_frame(self, frame: pd.DataFrame) -> pd.DataFrame:
        check_names(frame.columns, str(self.path))
        table, replace = frame.rename(columns=str).reset_index(drop=True), self._config.replace
        features = table.columns.difference(self._names)
        table[features] = table[features].where(~table[features].isin(_MISSING))
        text = {c: make_text(table[c]) for c in {*self._names, *self._text_features, *replace} if c in table}
        table = table.assign(**{c: cells.fillna("") if c in self._names else cells for c, cells in text.items()})
        self._replace_cells(table, table, replace)
        return table

    def _replace_cells(self, table: pd.DataFrame, written: pd.DataFrame, columns: Iterable[str]) -> None:
        """Replace cells by data.replace ("" is a missing cell); then convert those of `columns` that hold numbers alone.

        written: the cells as the file has them.
        """
        for name in (c for c in self._config.replace if c in table):
            cells = make_text(written[name])
            self.replaced[name] = {*self._config.replace[name]} & {*cells.dropna()}
            replacement = cells.map(self._config.replace[name])
            table[name] = make_text(make_text(table[name]).where(replacement.isna(), replacement))
        for name in (c for c in columns if c in table and c not in self._text_features):
            numbers = pd.to_numeric(table[name], errors="coerce")
            if numbers.notna().equals(table[name].notna()):
                table[name] = numbers

    def _convert_decimals(self, table: pd.DataFrame) -> None:
        """Write the numbers of a table of text with a decimal point.

        Only a file with another delimiter than the comma may have decimal commas. A column of names, such as the label's,
        changes where all its cells are numbers.

        Raises:
            DataError: some numbers have a decimal comma and others a decimal point: 1.234 may be a thousand.
        """
        with_point = None
        for name in (c for c in table if c not in self._text_features):
            cells = table[name].str.strip()
            has_comma = cells.str.fullmatch(_WITH_COMMA, na=False)
            points = cells[cells.str.fullmatch(_WITH_POINT, na=False)]
            if name in self._names:
                has_comma &= bool((has_comma | cells.str.fullmatch(r"[+-]?\d+", na=False)).all())
            elif len(points) and with_point is None:
                with_point = (name, points.iloc[0])
            if has_comma.any():
                table[name] = cells.where(~has_comma, cells.str.replace(",", "."))
                self.decimal_commas += [name] if name not in self._names else []
        if self.decimal_commas and with_point is not None:
            raise DataError(
                f"{self.path}: column {self.decimal_commas[0]!r} has decimal commas, and column {with_point[0]!r} holds "
                f"{with_point[1]!r}, which may be a decimal point or thousands; write all numbers of the file in one way"
            )


def raise_problems(files: Sequence[TableFile]) -> None:
    """Raise BadRows with the problems of all files, if there are any."""
    problems = [problem for file in files for problem in file.problems]
    if problems:
        raise BadRows(*problems)


def find_dialect(path: Path) -> dict[str, Any]:
    """Return how a CSV file is written, as pandas' arguments "sep", "encoding" and "skiprows".

    A first line "sep=;" states the delimiter. Otherwise the delimiter is the comma, ";", tab or "|": the one that divides
    the header and the first rows into equally many cells, and into the most; if none does, the first that the header
    holds. A byte order mark shows UTF-16. A file that cannot be read as text, such as a compressed file, is taken to have
    commas.
    """
    usual = {"sep": ",", "encoding": "utf-8-sig", "skiprows": 0}
    try:
        with path.open("rb") as file:
            encoding = "utf-16" if file.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig"
        with path.open(newline="", encoding=encoding) as text:
            lines = list(islice(text, _SAMPLED_LINES))
        stated = re.fullmatch(r'"?sep=(.)"?', lines[0].strip("\r\n"), re.IGNORECASE) if lines else None
        if stated:
            return {"sep": stated[1], "encoding": encoding, "skiprows": 1}
        is_cut = len(lines) == _SAMPLED_LINES  # the last row may go on below the sampled lines
        lines = [line for line in lines if line.strip()]
        widths = {sign: [len(cells) for cells in csv.reader(lines, delimiter=sign)] for sign in _DELIMITERS}
    except (OSError, UnicodeError, csv.Error):
        return usual
    widths = {sign: counts[:-1] if is_cut and len(counts) > 1 else counts for sign, counts in widths.items()}
    candidates = [sign for sign, counts in widths.items() if counts and counts[0] > 1]
    fitting = [sign for sign in candidates if len({*widths[sign]}) == 1]
    best = max(fitting, key=lambda sign: widths[sign][0]) if fitting else (*candidates, ",")[0]
    return usual | {"sep": best, "encoding": encoding}


def make_text(column: "pd.Series[str]") -> "pd.Series[str]":
    """Return the cells [n] as text [n] without blanks at either end; missing cells stay missing."""
    text = column.map(str, na_action="ignore").astype("str").str.strip()
    return text.where(column.notna() & (text != ""))


def _describe_decoding_error(path: Path) -> str:
    """Return a sentence on the first line of a file that is not UTF-8."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            line.decode()
        except UnicodeDecodeError as problem:
            return (
                f"line {number} is not UTF-8 text (byte {line[problem.start]:#04x}); save the file as UTF-8, in Excel as "
                "'CSV UTF-8', or convert it, for example by: iconv -f WINDOWS-1252 -t UTF-8"
            )
    return "cannot be read as text; save the file as UTF-8, in Excel as 'CSV UTF-8'"
