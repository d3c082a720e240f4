"""The headline as a table for the terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from fedmutual.report import measures
from fedmutual.report.comparison import comparisons
from fedmutual.report.runs import read_runs
from fedmutual.report.statistics import Gains, Value
from fedmutual.report.text import percent, points


def headline(runs: Sequence[Path]) -> Table:
    """Every method of these run folders in a line; percent after the last round, with 95 % intervals over seeds.

    Raises:
        RunError: a folder is no run's, or damaged.
    """
    table = Table(
        caption="Last round; mean ± 95 % interval; gains in points. n/a: see the report.",
        caption_justify="left",
        box=box.SIMPLE_HEAD,  # without rules between the columns it fits 80 characters
        pad_edge=False,
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
        for m in comparison.methods:
            gains, decimals = measures.gains(comparison, m), 1
            cells = [_cell(v, decimals) for v in (measures.global_last(m), measures.own_last(m), measures.own_last(m, min))]
            if isinstance(gains, Gains):
                e = gains.estimate
                half = "" if e.half is None else f" ± {percent(e.half, decimals)}"
                cells += [f"{points(e.mean, decimals)}{half}", f"{len(gains.gained)}/{len(gains.harmed)}"]
            else:
                cells += ["n/a", "n/a"]
            unfinished = "" if all(r.finished for r in m.counted) and m.counted else " (unfinished)"
            table.add_row(escape(m.label) + unfinished, *cells)
    return table


def _cell(value: Value, decimals: int) -> str:
    e = measures.shown(value)
    if e is None:
        return "n/a"
    return percent(e.mean, decimals) + ("" if e.half is None else f" ± {percent(e.half, decimals)}")
