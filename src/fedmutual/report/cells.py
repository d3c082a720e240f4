"""A table before it is drawn: cells, columns, footnotes, and the same numbers as CSV and JSON."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from fedmutual.results.estimate import ENOUGH, Estimate, Missing, Value
from fedmutual.results.scale import PERCENT, MetricScale

_FORMULA = ("=", "+", "-", "@", "\t", "\n", "\0", "＝", "＋", "－", "＠")  # the last four are of full width
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class TableCell:
    """What stands in a table's cell."""

    text: str
    spread: str = ""  # half the width of the interval, with its sign, beside the number
    sub: str = ""  # a second, smaller line
    note: str = ""  # a footnote
    shade: float | None = None  # 0 .. 1: how full the cell is coloured; its number stands in it
    tone: str = ""  # "gain" or "harm", beside the number's own sign


@dataclass(frozen=True)
class Column:
    """A column of a table: its heads, and how the value of a line is read, printed and listed.

    Neighbours with the same group stand under one common head. `read` takes what a line is of, for example a `Line`, and
    returns the value or `Missing`; `form` and `numbers` take a value that is not missing.
    """

    name: str  # "": the column is not on the page
    group: str = ""
    numeric: bool = True
    note: str = ""  # a footnote
    terminal: str = ""  # its name in the terminal and in the short table of the page; "": it is not there
    optional: bool = False  # whether the terminal leaves it out if no line has a value
    keys: tuple[str, ...] = ()  # the names of its numbers in CSV and JSON; none: it is not there
    read: Callable[[Any], Any] = field(default=lambda line: line, repr=False)
    form: Callable[[Any], TableCell] = field(default=lambda value: _make_cell(value), repr=False)
    numbers: Callable[[Any], Sequence[object]] = field(default=lambda value: list_numbers(value), repr=False)

    @property
    def title(self) -> str:
        """Group and name in one text, for the cards on a phone."""
        return f"{self.group}: {self.name}" if self.group else self.name

    def make_cell(self, value: Any) -> TableCell:
        """Return the cell with a value that `read` returned."""
        return make_missing_cell(value.why) if isinstance(value, Missing) else self.form(value)

    def list_values(self, value: Any) -> list[object]:
        """Return the numbers or texts of a value that `read` returned, one for each key; None where they are missing."""
        numbers: Sequence[object] = () if isinstance(value, Missing) else self.numbers(value)
        return [*numbers, *[None] * len(self.keys)][: len(self.keys)]


@dataclass(frozen=True)
class PageTable:
    """A table; its first column heads the rows. `csv`: its numbers unrounded, and more; "": no CSV."""

    id: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    csv: str
    cards: bool = False  # on a phone a row becomes a card, so that nothing is scrolled out of sight

    def shorten(self, caption: str) -> "PageTable":
        """Return a table of the first column and those of the terminal, without intervals, footnotes and CSV."""
        shown = [k for k, column in enumerate(self.columns) if k == 0 or column.terminal]
        columns = tuple(
            Column(join_head(c.terminal or c.name), numeric=c.numeric) for c in map(self.columns.__getitem__, shown)
        )
        rows = tuple(
            tuple(TableCell(row[k].text, sub="" if k else row[k].sub, shade=row[k].shade, tone=row[k].tone) for k in shown)
            for row in self.rows
        )
        return PageTable(f"{self.id}-brief", caption, columns, rows, "", self.cards)

    @property
    def footnotes(self) -> tuple[str, ...]:
        """The footnotes, each once, in the order of their marks."""
        cell_notes = [*(c.note for c in self.columns), *(c.note for row in self.rows for c in row)]
        return tuple(dict.fromkeys(note for note in cell_notes if note))

    @property
    def spreads(self) -> tuple[bool, ...]:
        """For each column whether any of its cells has a spread: then all leave room for one, and the numbers align."""
        return tuple(any(row[k].spread for row in self.rows) for k in range(len(self.columns)))

    @property
    def spread_width(self) -> int:
        """Characters of the longest spread."""
        return max((len(c.spread) for row in self.rows for c in row), default=0)

    @property
    def groups(self) -> list[tuple[str, int]]:
        """The upper row of heads: (group, its number of columns); empty where no column has a group."""
        spans: list[tuple[str, int]] = []
        for column in self.columns:
            if spans and spans[-1][0] == column.group:
                spans[-1] = (column.group, spans[-1][1] + 1)
            else:
                spans.append((column.group, 1))
        return spans if any(c.group for c in self.columns) else []

    @property
    def link(self) -> str:
        """The CSV as a data: address, so that a download needs no network."""
        return "data:text/csv;charset=utf-8," + quote(self.csv, safe=",.:;=()/+-_ ").replace(" ", "%20")


def make_table(
    id: str,
    caption: str,
    columns: Sequence[Column],
    lines: Iterable[Any],
    csv_lines: Iterable[Any] | None = None,
    csv_columns: Sequence[Column] = (),
    cards: bool = False,
) -> PageTable:
    """Return the table of the columns that have a name, a row for each line; the CSV has the numbers of all columns, if any.

    csv_lines, csv_columns: those of the CSV, where they are others.
    """
    read = [[(column, column.read(line)) for column in columns] for line in lines]
    rows = tuple(tuple(column.make_cell(value) for column, value in row if column.name) for row in read)
    if csv_lines is not None:
        read = [[(column, column.read(line)) for column in csv_columns or columns] for line in csv_lines]
    numbers = [[n for column, value in row for n in column.list_values(value)] for row in read]
    keys = [key for column in csv_columns or columns for key in column.keys]
    csv = format_csv(keys, numbers) if keys else ""
    return PageTable(id, caption, tuple(column for column in columns if column.name), rows, csv, cards)


def join_head(head: str) -> str:
    """Return a head of several lines as one line."""
    return head.replace("/\n", "/").replace("\n", " ")


def list_records(columns: Sequence[Column], lines: Iterable[object]) -> list[dict[str, object]]:
    """Return for each line a dict of the numbers of its columns by key, unrounded, for JSON; None for a missing number."""
    return [{k: v for c in columns for k, v in zip(c.keys, c.list_values(c.read(line)), strict=True)} for line in lines]


def format_csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows as CSV. Floats have at most six decimals, None is empty, and text that is a formula is escaped."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_format_csv_cell(name) for name in header])
    writer.writerows([_format_csv_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _format_csv_cell(value: object) -> object:
    """A cell as CSV has it. Text that begins a formula gets an apostrophe before it, as OWASP advises ("CSV injection").

    Names of classes, sites, tensors and folders come from other people. A negative number begins with "-" and stays a
    number.
    """
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0").rstrip(".")
    if not isinstance(value, str):
        return value
    text = value.replace("\r", "\n")  # of the two, Python < 3.13 quotes only the one that ends lines here
    return f"'{text}" if text.startswith(_FORMULA) and not _NUMBER.fullmatch(text) else text


def make_share_cell(value: Value, scale: MetricScale, sub: str = "", note: str = "") -> TableCell:
    """Return a cell with a value of the main metric, a fraction in percent, and its interval; or the reason of `Missing`."""
    if isinstance(value, Missing):
        return make_missing_cell(value.why)
    return TableCell(scale.format_value(value.mean), format_spread(value, scale), sub, note)


def make_gain_cell(value: Estimate, scale: MetricScale) -> TableCell:
    """Return a cell with a difference (of fractions: in points), its interval, and the number of units."""
    tone = {1: "gain", -1: "harm"}.get(value.sign, "")
    return TableCell(
        scale.format_gain(value.mean), format_spread(value, scale), f"over {format_repetitions(value)}", tone=tone
    )


def _make_cell(value: object) -> TableCell:
    return value if isinstance(value, TableCell) else TableCell(str(value))


def make_missing_cell(why: str) -> TableCell:
    """Return a cell without number, with the reason as its footnote."""
    return TableCell("n/a", note=f"n/a: {why}")


def format_repetitions(value: Estimate) -> str:
    """Return what an estimate is a mean over: "3 seeds", "1 client"."""
    return f"{value.n} {value.unit if value.n != 1 else value.unit.removesuffix('s')}"


def list_numbers(value: object) -> Sequence[object]:
    """Return (mean, half width of the interval, n, unit) of an estimate, or another value alone."""
    return (value.mean, value.half, value.n, value.unit) if isinstance(value, Estimate) else (value,)


def format_spread(value: Estimate, scale: MetricScale = PERCENT) -> str:
    """Return half the width of an accuracy's interval, 100 points at most: "± 1.2".

    Without an interval, or for few equal values: "".
    """
    if value.half is None or (value.tied and value.n < ENOUGH):  # two equal values do not show how much a third one differs
        return ""
    return f"± {scale.format_spread(min(value.half, value.limit))}"
