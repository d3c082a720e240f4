"""How a CSV file is written: the delimiter, the decimal sign and the encoding of its text."""

import csv
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from fedmutual.errors import DataError

_DELIMITERS = (",", ";", "\t", "|")
_SAMPLED_LINES = 50
_WITH_COMMA = r"[+-]?(?:\d+,\d*|,\d+)(?:[eE][+-]?\d+)?"
_WITH_POINT = r"[+-]?(?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?"


class Dialect(NamedTuple):
    """How the text of a CSV file is written."""

    delimiter: str = ","
    encoding: str = "utf-8-sig"
    skipped_lines: int = 0  # before the header: Excel's line "sep=;"


def find_dialect(path: Path) -> Dialect:
    """Return how a CSV file is written.

    A first line "sep=;" states the delimiter. Otherwise the delimiter is the comma, ";", tab or "|": the one that divides
    the header and the first rows into equally many cells, and into the most; if none does, the first that the header
    holds. A byte order mark shows UTF-16. A file that cannot be read as text, such as a compressed file, is taken to have
    commas.
    """
    try:
        with path.open("rb") as file:
            encoding = "utf-16" if file.read(2) in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig"
        with path.open(newline="", encoding=encoding) as file:
            lines = list(islice(file, _SAMPLED_LINES))
        stated = re.fullmatch(r'"?sep=(.)"?', lines[0].strip("\r\n"), re.IGNORECASE) if lines else None
        if stated:
            return Dialect(stated[1], encoding, 1)
        is_cut = len(lines) == _SAMPLED_LINES  # the last row may go on below the sampled lines
        lines = [line for line in lines if line.strip()]
        widths = {sign: [len(cells) for cells in csv.reader(lines, delimiter=sign)] for sign in _DELIMITERS}
        widths = {sign: counts[:-1] if is_cut and len(counts) > 1 else counts for sign, counts in widths.items()}
    except (OSError, UnicodeError, csv.Error):
        return Dialect()
    candidates = [sign for sign, counts in widths.items() if counts and counts[0] > 1]
    fitting = [sign for sign in candidates if len({*widths[sign]}) == 1]
    return Dialect(max(fitting, key=lambda sign: widths[sign][0]) if fitting else (*candidates, ",")[0], encoding)


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
