"""How a CSV file is written: the delimiter, the decimal sign and the encoding of its text."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from fedmutual.errors import DataError

_OTHERS = (";", "\t", "|")  # tried where the header has no comma
_WITH_COMMA = r"[+-]?(?:\d+,\d*|,\d+)(?:[eE][+-]?\d+)?"
_WITH_POINT = r"[+-]?(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?"


def find_delimiter(path: Path) -> str:
    """Return the delimiter of a CSV file: the comma, or else ";", tab or "|" where the header has no comma.

    A file whose header cannot be read as text, for example a compressed file, is taken to have commas.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header = next((line for line in file if line.strip()), "").strip("\r\n")
        candidates = [sign for sign in (",", *_OTHERS) if len(next(csv.reader([header], delimiter=sign), [])) > 1]
    except (OSError, UnicodeDecodeError, csv.Error):
        return ","
    return candidates[0] if candidates else ","


def convert_decimals(table: pd.DataFrame, names: Sequence[str], text_features: Sequence[str], path: Path) -> list[str]:
    """Write the numbers of a table of text with a decimal point, and return the features with decimal commas.

    Only a file with another delimiter than the comma may have decimal commas. A column of names, such as the label's,
    changes where all its cells are numbers.

    Raises:
        DataError: some numbers have a decimal comma and others a decimal point: 1.234 may be a thousand.
    """
    changed, with_point = [], None
    for name in (c for c in table if c not in text_features):
        cells = table[name].str.strip()
        has_comma = cells.str.fullmatch(_WITH_COMMA, na=False)
        points = cells[cells.str.fullmatch(_WITH_POINT, na=False)]
        if name in names:
            has_comma &= bool((has_comma | cells.str.fullmatch(r"[+-]?\d+", na=False)).all())
        elif len(points) and with_point is None:
            with_point = (name, points.iloc[0])
        if has_comma.any():
            table[name] = cells.where(~has_comma, cells.str.replace(",", "."))
            changed += [name] if name not in names else []
    if changed and with_point is not None:
        raise DataError(
            f"{path}: column {changed[0]!r} has decimal commas, and column {with_point[0]!r} holds {with_point[1]!r}, which "
            "may be a decimal point or thousands; write all numbers of the file in one way"
        )
    return changed


def convert_numbers(table: pd.DataFrame, columns: Iterable[str], text_features: Sequence[str]) -> None:
    """Convert those of these columns of text in place whose cells are all numbers or missing, except `text_features`."""
    for name in (c for c in columns if c in table and c not in text_features):
        numbers = pd.to_numeric(table[name], errors="coerce")
        if numbers.notna().equals(table[name].notna()):
            table[name] = numbers


def describe_decoding_error(path: Path) -> str | None:
    """Return a sentence on the first line of a file that is not UTF-8; None if there is none."""
    for number, line in enumerate(_read_lines(path), 1):
        try:
            line.decode()
        except UnicodeDecodeError as problem:
            return (
                f"{path}: line {number} is not UTF-8 text (byte {line[problem.start]:#04x}); save the file as UTF-8, "
                "in Excel as 'CSV UTF-8', or convert it, for example by: iconv -f WINDOWS-1252 -t UTF-8"
            )
    return None


def _read_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file
