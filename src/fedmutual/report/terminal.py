"""The headline and the costs as tables for the terminal."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedmutual.metric import ACCURACY
from fedmutual.report.cells import Column, PageTable, TableCell, join_head, list_records
from fedmutual.report.columns import COSTS, has_guarantee, list_headline_columns, list_headline_lines
from fedmutual.report.measures import format_epsilon
from fedmutual.report.verdicts import find_unequal_steps
from fedmutual.results.comparison import Line, RunComparison

Rows = Sequence[tuple[str, ...]]  # the name, then a text for each column
_NONE = "n/a"
_NAME = 10  # characters of the column of names, at least
_LISTED = 40  # cells of a list, at most, where a table without intervals fits
_INTERVAL = re.compile(" ± [^ ]+")
_GAP = 2  # blanks between columns, not three: the widest intervals fit 80 characters


@dataclass(frozen=True)
class Sheet:
    """Lines below heads. If the columns are wider than the terminal, each line becomes a list.

    If the list would be long, and the table fits without intervals, the table is printed without them.
    """

    heads: Sequence[str]
    lines: Rows
    caption: str = ""
    name: str = "method"  # the head of the names
    texts: int = 0  # the first columns that hold texts
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield the table that fits the width of the terminal."""
        if self._measure_width() <= options.max_width:
            yield self._make_table()
            return
        lines = [tuple(_INTERVAL.sub("", text) for text in line) for line in self.lines]
        short = replace(self, lines=lines, caption=f"{self.caption} A wider terminal shows intervals.".strip())
        is_long = len(lines) * len(self.heads) > _LISTED
        yield short._make_table() if is_long and short._measure_width() <= options.max_width else self._make_list()

    def _measure_width(self) -> int:
        """Return the width of the table whose names and texts are broken between words only."""
        widths = []
        for number, texts in enumerate(zip(*[("", *self.heads), *self.lines], strict=True)):
            parts = (part for text in texts for part in (text.split() if number <= self.texts else text.splitlines()))
            widths.append(max(map(cell_len, parts), default=0))
        return max(_NAME, widths[0]) + sum(width + _GAP for width in widths[1:])

    def _make_table(self) -> Table:
        table = self._start_table()
        table.add_column(self.name, min_width=_NAME, overflow="fold")
        for number, head in enumerate(self.heads):
            is_text = number < self.texts
            table.add_column(head, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
        for line in self.lines:
            table.add_row(*map(escape, line))
        return table

    def _make_list(self) -> Table:
        table = self._start_table(show_header=False)
        table.add_column(overflow="fold")
        table.add_column(justify="right", overflow="fold")
        for name, *texts in self.lines:
            table.add_section()
            table.add_row(Text(name, "bold"))
            for head, text in zip(self.heads, texts, strict=True):
                table.add_row(Text("  " + join_head(head)), escape(text))
        return table

    def _start_table(self, show_header: bool = True) -> Table:
        return Table(
            title=escape(self.title) or None,
            title_justify="left",
            title_style="bold",
            caption=escape(self.caption) or None,
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            show_edge=False,
            show_header=show_header,
        )


def make_sheet(table: PageTable, notes: bool = False) -> Sheet:
    """Return a table of a page for the terminal. notes: with the smaller second lines and the marks of footnotes."""
    (name, *columns), footnotes = table.columns, table.footnotes

    def format_cell(cell: TableCell) -> str:
        mark = f" ({footnotes.index(cell.note) + 1})" if notes and cell.note else ""
        return f"{cell.text} {cell.spread}".strip() + mark + (f"\n{cell.sub}" if notes and cell.sub else "")

    heads = [column.terminal or column.title.replace(": ", "\n") for column in columns]
    lines = [tuple(map(format_cell, row)) for row in table.rows]
    return Sheet(heads, lines, table.caption, name.name, sum(not column.numeric for column in columns))


def make_headline_tables(compared: Sequence[RunComparison]) -> Group:
    """Return for each comparison the table of its models: the main metric after the last round, with 95 % intervals.

    An optional column, for example of gains, is left out if no line has a value.
    """
    return Group(*(_make_headline_table(c, c.name if len(compared) > 1 else "") for c in compared))


def _make_headline_table(comparison: RunComparison, title: str) -> Sheet:
    lines = list_headline_lines(comparison)
    cells = {c: [_format_cell(c, line) for line in lines] for c in list_headline_columns(comparison) if c.terminal}
    shown = {c: texts for c, texts in cells.items() if not c.optional or set(texts) != {_NONE}}
    rows = [*zip((_name_line(comparison, line) for line in lines), *shown.values(), strict=True)]
    legend = _make_legend(comparison, [text for texts in shown.values() for text in texts], any(c.optional for c in shown))
    return Sheet([c.terminal for c in shown], rows, legend, title=title)


def list_comparisons(compared: Sequence[RunComparison]) -> list[dict[str, object]]:
    """Return the unrounded numbers of headline and costs for JSON: of each comparison name, metric, a dict per line."""
    return [
        {
            "comparison": c.name,
            "metric": c.metric.name,
            "higher_is_better": c.metric.is_higher_better,
            "methods": list_records([*list_headline_columns(c), *COSTS], list_headline_lines(c)),
        }
        for c in compared
    ]


def make_cost_table(compared: Sequence[RunComparison]) -> Sheet:
    """Return a table with the costs of each method: all clients, whole run, means over seeds."""
    unequal = [sentence for c in compared for sentence in find_unequal_steps(c)]
    lines = [(m.method, *(_format_cell(cost, m) for cost in COSTS)) for c in compared for m in c.methods]
    return Sheet([cost.terminal for cost in COSTS], lines, "\n".join(unequal))


def _make_legend(comparison: RunComparison, shown: Sequence[str], gaining: bool) -> str:
    """What the numbers are: only of those that are there."""
    words, scale = ["Last round"], comparison.scale
    words += ["mean ± 95 % interval"] if any("±" in text for text in shown) else []
    words += [scale.metric.title] if scale.metric != ACCURACY else []
    words += [f"gains in {scale.difference_mark.strip()}"] if gaining and scale.difference_mark else []
    spent = [f"{m.method} {format_epsilon(m)}" for m in comparison.methods] if has_guarantee(comparison) else []
    words += ["epsilon: " + ", ".join(spent)] if spent else []
    why = "`fedmutual report` says why" if len(comparison.runs) == 1 else "see the report"
    return "; ".join(words) + "." + (f" n/a: {why}." if _NONE in shown else "")


def _name_line(comparison: RunComparison, line: Line) -> str:
    """Return the name of a line: the method, with its model where lines are of models, and its state if unfinished."""
    unfinished = [r for r in line.runs if not r.finished]
    state = " and ".join(sorted({"unfinished" if r.diverged is None else "diverged" for r in unfinished}))
    if len(unfinished) < len(line.runs):  # which are left out of the means
        state = f"{len(unfinished)} of {len(line.runs)} seeds {state}"
    return (line.method if comparison.domains else line.label) + (f" ({state})" if unfinished else "")


def _format_cell(column: Column, line: Line) -> str:
    cell = column.make_cell(column.read(line))
    return f"{cell.text} {cell.spread}".rstrip()
