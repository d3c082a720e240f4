"""The headline as tables for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from fedmutual.report import domains, measures
from fedmutual.report.cells import spread
from fedmutual.report.comparison import Comparison, Method, comparisons
from fedmutual.report.domains import ACC, MEASURES
from fedmutual.report.runs import Run, read_runs
from fedmutual.report.statistics import Gains, Missing, Value
from fedmutual.report.text import percent, points

_CLIENTS = ("shared model\ntest set, %", "own data, %\nclients' mean", "own data, %\nworst client", "gain over\nlocal-only")
_NODES = ("ACC, %\nall domains", "BWT, %\nown domain", "FWT, %\nthe others", "worst node\nACC, %", "gain in ACC\nover alone")


def headline(runs: Sequence[Path | Run]) -> Group:
    """Every method of these run folders in a line, or each of its models; percent after the last round, with 95 % intervals.

    Comparisons of nodes that are domains have a table of their own.

    Raises:
        RunError: a folder is no run's, or damaged.
    """
    found = comparisons(read_runs(runs))
    clients, nodes = [c for c in found if not c.domains], [c for c in found if c.domains]
    tables = []
    if clients:
        table = _table(_CLIENTS, "Last round; mean ± 95 % interval; gains in points. n/a: see the report.")
        table.add_column("gain/\nharmed", justify="right", no_wrap=True)
        for comparison in clients:
            _name(table, comparison, len(found))
            _add_clients(table, comparison)
        tables.append(table)
    if nodes:
        table = _table(_NODES, "Last round; means over nodes ± 95 % interval; gains in points. n/a: see the report.")
        for comparison in nodes:
            _name(table, comparison, len(found))
            _add_nodes(table, comparison)
        tables.append(table)
    return Group(*tables)


def _table(columns: Sequence[str], caption: str) -> Table:
    table = Table(
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # two blanks between columns, not three: the widest intervals fit 80 characters
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("method", min_width=10, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _name(table: Table, comparison: Comparison, several: int) -> None:
    if several > 1:
        table.add_section()
        table.add_row(f"[bold]{escape(comparison.name)}[/bold]")


def _add_clients(table: Table, comparison: Comparison) -> None:
    for u in comparison.uses:
        gains = measures.gains(comparison, u)
        cells = [_cell(v) for v in (measures.global_last(u), measures.own_last(u), measures.own_last(u, min))]
        harmed = f"{len(gains.gained)}/{len(gains.harmed)}" if isinstance(gains, Gains) else "n/a"
        table.add_row(escape(u.label) + _unfinished(u.method), *cells, _gain(gains), harmed)


def _add_nodes(table: Table, comparison: Comparison) -> None:
    for m in comparison.methods:
        cells = [_cell(domains.last(m, measure)) for measure in MEASURES]
        gains = measures.gains(comparison, m.uses[0], ACC.data)
        table.add_row(escape(m.label) + _unfinished(m), *cells, _cell(domains.last(m, ACC, min)), _gain(gains))


def _unfinished(method: Method) -> str:
    return "" if all(r.finished for r in method.counted) and method.counted else " (unfinished)"


def _gain(gains: Gains | Missing) -> str:
    if isinstance(gains, Missing):
        return "n/a"
    e = gains.estimate
    return f"{points(e.mean)} {spread(e)}".rstrip()


def _cell(value: Value) -> str:
    e = measures.shown(value)
    if e is None:
        return "n/a"
    return f"{percent(e.mean)} {spread(e)}".rstrip()
