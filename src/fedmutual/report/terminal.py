"""The headline as a table for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.report import measures
from fedmutual.report.comparison import comparisons
from fedmutual.report.runs import Run, read_runs
from fedmutual.report.statistics import Gains, Value
from fedmutual.report.text import percent, points


def headline(runs: Sequence[Path | Run]) -> Table:
    """Every method of these run folders in a line, or each of its models; percent after the last round, with 95 % intervals.

    Raises:
        RunError: a folder is no run's, or damaged.
    """
    table = Table(
        caption="Last round; mean ± 95 % interval; gains in points. n/a: see the report.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # two blanks between columns, not three: the widest intervals fit 80 characters
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("method", min_width=10, overflow="fold")
    for name in (
        "shared model\ntest set, %",
        "own data, %\nclients' mean",
        "own data, %\nworst client",
        "gain over\nlocal-only",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("gain/\nharmed", justify="right", no_wrap=True)
    found = comparisons(read_runs(runs))
    for comparison in found:
        if len(found) > 1:
            table.add_section()
            table.add_row(f"[bold]{escape(comparison.name)}[/bold]")
        for u in comparison.uses:
            gains, decimals = measures.gains(comparison, u), 1
            cells = [_cell(v, decimals) for v in (measures.global_last(u), measures.own_last(u), measures.own_last(u, min))]
            if isinstance(gains, Gains):
                e = gains.estimate
                half = "" if e.half is None else f" ± {percent(e.half, decimals)}"
                cells += [f"{points(e.mean, decimals)}{half}", f"{len(gains.gained)}/{len(gains.harmed)}"]
            else:
                cells += ["n/a", "n/a"]
            counted = u.method.counted
            unfinished = "" if all(r.finished for r in counted) and counted else " (unfinished)"
            table.add_row(escape(u.label) + unfinished, *cells)
    return table


def _cell(value: Value, decimals: int) -> str:
    e = measures.shown(value)
    if e is None:
        return "n/a"
    return percent(e.mean, decimals) + ("" if e.half is None else f" ± {percent(e.half, decimals)}")
