"""The headline as tables for the terminal."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from fedmutual.metric import ACCURACY
from fedmutual.report import domains, guarantee, measures
from fedmutual.report.cells import format_spread
from fedmutual.report.comparison import Method, RunComparison, make_comparisons
from fedmutual.report.decision import COSTS, list_costs
from fedmutual.report.domains import ACC, TRANSFER_MEASURES
from fedmutual.report.findings import describe_finding, find_unequal_steps
from fedmutual.report.scale import PERCENT, MetricScale
from fedmutual.report.statistics import Gains, Missing, Value
from fedmutual.rundir.recorded_run import RecordedRun, read_runs

_CLIENTS_GAIN = ("gain over\nlocal-only", "gain/\nharmed")
_NODES = ("ACC, %\nall domains", "BWT, %\nown domain", "FWT, %\nthe others", "worst node\nACC, %")
_NODES_GAIN = ("gain in ACC\nover alone",)
Lines = Sequence[tuple[str, ...]]
_NONE = "n/a"


def make_headline_tables(runs: Sequence[Path | RecordedRun]) -> Group:
    """Return a table with a line for each model of each method: the main metric after the last round, with 95 % intervals.

    Gains have columns where there is one. Comparisons of nodes that are domains have a table of their own.

    Raises:
        RunError: a folder is no run folder or is damaged, or all runs are of a sweep.
    """
    compared = make_comparisons(read_runs(runs))
    tables = []
    for unit in dict.fromkeys(c.scale.head for c in compared if not c.domains):
        shown = {c: _list_client_cells(c) for c in compared if not c.domains and c.scale.head == unit}
        columns = (f"shared model\ntest set{unit}", f"own data{unit}\nclients' mean", f"own data{unit}\nworst client")
        tables.append(_make_table(shown, columns, _CLIENTS_GAIN, named=len(compared) > 1))
    if nodes := {c: _list_node_cells(c) for c in compared if c.domains}:
        tables.append(_make_table(nodes, _NODES, _NODES_GAIN, named=len(compared) > 1))
    return Group(*tables)


def make_cost_table(runs: Sequence[Path | RecordedRun]) -> Table:
    """Return a table with the costs of each method: all clients, whole run, means over seeds.

    Raises:
        RunError: as `make_headline_tables`.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, caption_justify="left")
    table.add_column("method", min_width=10, overflow="fold")
    for cost in COSTS:
        table.add_column(cost.name.lower(), justify="right", no_wrap=True)
    compared = make_comparisons(read_runs(runs))
    unequal = [describe_finding(f, c.scale) for c in compared for f in find_unequal_steps(c)]
    table.caption = escape("\n".join(unequal)) or None
    for comparison in compared:
        for method in comparison.methods:
            table.add_row(escape(method.label), *(text or _NONE for _, text, _ in list_costs(method)))
    return table


def _make_table(compared: Mapping[RunComparison, Lines], columns: Sequence[str], gains: Sequence[str], named: bool) -> Table:
    """A table of comparisons' lines; without the columns of gains where no line has one."""
    all_lines = [line for lines in compared.values() for line in lines]
    heads = len(columns) + 1
    gaining = any(cell != _NONE for line in all_lines for cell in line[heads:])
    shown = [cell for line in all_lines for cell in line[1 : None if gaining else heads]]
    table = Table(
        caption=_make_legend(compared, shown, gaining),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # two blanks between columns, not three: the widest intervals fit 80 characters
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("method", min_width=10, overflow="fold")
    for name in (*columns, *(gains if gaining else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for comparison, lines in compared.items():
        if named:
            table.add_section()
            table.add_row(f"[bold]{escape(comparison.name)}[/bold]")
        for line in lines:
            table.add_row(escape(line[0]), *line[1 : None if gaining else heads])
    return table


def _make_legend(compared: Collection[RunComparison], shown: Sequence[str], gaining: bool) -> str:
    """What the numbers are: only of those that are there."""
    words = ["Last round"]
    words += ["mean ± 95 % interval"] if any("±" in cell for cell in shown) else []
    scales = [c.scale for c in compared]
    words += [s.metric.title for s in scales[:1] if s.metric != ACCURACY]
    words += [f"gains in {s.difference_mark.strip()}" for s in scales[:1] if gaining and s.difference_mark]
    spent = {m.label: guarantee.format_epsilon(m) for c in compared if guarantee.is_stated(c) for m in c.methods}
    words += ["epsilon: " + ", ".join(f"{label} {value}" for label, value in spent.items())] if spent else []
    single = sum(len(c.runs) for c in compared) == 1
    why = "`fedmutual report` says why" if single else "see the report"
    return "; ".join(words) + "." + (f" n/a: {why}." if _NONE in shown else "")


def _list_client_cells(comparison: RunComparison) -> Lines:
    """Label, shared model, clients' mean, worst client, gain, gained/harmed: a line for each model of each method."""
    lines = []
    for u in comparison.uses:
        gains = measures.measure_gains(comparison, u)
        cells = [
            _format_cell(v, comparison.scale)
            for v in (
                measures.average_global_last(u),
                measures.average_own_last(u),
                measures.average_own_last(u, u.worst),
            )
        ]
        harmed = f"{len(gains.gained)}/{len(gains.harmed)}" if isinstance(gains, Gains) else _NONE
        lines.append((u.label + _describe_unfinished(u.method), *cells, _format_gain(gains, comparison.scale), harmed))
    return lines


def _list_node_cells(comparison: RunComparison) -> Lines:
    """Label, ACC, BWT, FWT, worst node's ACC, gain: a line a method."""
    lines = []
    for m in comparison.methods:
        values = [*(domains.average_last(m, measure) for measure in TRANSFER_MEASURES), domains.average_last(m, ACC, "min")]
        gains = measures.measure_gains(comparison, m.uses[0], ACC.data)
        lines.append((m.label + _describe_unfinished(m), *map(_format_cell, values), _format_gain(gains)))
    return lines


def _describe_unfinished(method: Method) -> str:
    unfinished = [r for r in method.counted or method.runs if not r.finished]
    states = {"unfinished" if r.diverged is None else "diverged" for r in unfinished}
    return f" ({' and '.join(sorted(states))})" if states else ""


def _format_gain(gains: Gains | Missing, scale: MetricScale = PERCENT) -> str:
    if isinstance(gains, Missing):
        return _NONE
    e = gains.estimate
    return f"{scale.format_gain(e.mean)} {format_spread(e, scale)}".rstrip()


def _format_cell(value: Value, scale: MetricScale = PERCENT) -> str:
    e = measures.get_estimate(value)
    if e is None:
        return _NONE
    return f"{scale.format_value(e.mean)} {format_spread(e, scale)}".rstrip()
