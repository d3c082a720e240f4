"""Accuracy against the bytes that the nodes of a method sent. One line for each method, over the whole run."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from fedmutual.report.cells import Column, PageTable, TableCell, make_table
from fedmutual.report.curves import DRAWN, assign_slots, make_points, thin_out
from fedmutual.report.measures import average_by_round
from fedmutual.report.plots import (
    HEIGHT,
    MARKS,
    TEXT,
    WIDTH,
    Hit,
    Styles,
    draw_end_labels,
    fit_label,
    make_axes,
    make_colour,
    make_inline_svg,
    measure_label_room,
)
from fedmutual.results.comparison import Line, RunComparison
from fedmutual.results.frame import RunFacts
from fedmutual.results.scale import MetricScale, format_size
from fedmutual.rundir.schema import TRANSFER_DATA

LISTED = 8  # points of a method in the table; the CSV has all
TITLE = "Accuracy against bytes: mean ACC, %, by what a node has sent"


class CostCurve(NamedTuple):
    """A method's line in the picture of accuracy against bytes.

    `label` names the method, `slot` (1 .. SLOTS) is its colour and its mark, and `seeds` is the number of its runs. `costs`
    has a row for each scored round: round, sent, seed, total (bytes of a node, mean over nodes and seeds: of messages, of
    its public data, of both), mean, low, high (the accuracy as a fraction: mean, lowest and highest seed).
    """

    label: str
    slot: int
    seeds: int
    costs: tuple[Any, ...]

    @property
    def free(self) -> bool:
        """Whether nothing is ever sent: no place on an axis of bytes, and a line across it."""
        return bool(self.costs[-1].total == 0)

    @property
    def once(self) -> bool:
        """Whether all is sent before the first round that was scored: a line straight up."""
        return not self.free and bool(self.costs[0].total == self.costs[-1].total)


def make_courses(comparison: RunComparison) -> list[CostCurve]:
    """Return for each method its accuracies and bytes, round by round; methods without scores or ledger are left out."""
    slots = assign_slots(comparison.methods)
    courses = [CostCurve(m.method, slots[m.method], len(m.counted), _make_course(m)) for m in comparison.methods]
    return [c for c in courses if c.costs]


def _make_course(method: Line) -> tuple[Any, ...]:
    runs = [r for r in method.counted if r.evaluations]
    values = average_by_round(method.select(TRANSFER_DATA["acc"]))
    points = pd.DataFrame(make_points(values.reindex(columns=[r.seed for r in runs])))
    if points.empty:
        return ()
    nodes = [len(r.partition.clients or set(r.work["client"])) or 1 for r in runs]  # a server knows no partition
    seed = fmean(r.seed_bytes / n for r, n in zip(runs, nodes, strict=True))
    sent = np.mean([_sum_until(r, points["round"]) / n for r, n in zip(runs, nodes, strict=True)], axis=0)
    return tuple(points.assign(sent=sent, seed=seed, total=sent + seed).itertuples())


def _sum_until(run: RunFacts, rounds: "pd.Series[int]") -> np.ndarray[Any, Any]:
    """Return the bytes that all clients have sent up to the end of each of these rounds, the start among them."""
    sums = pd.Series(run.messages["up"]).groupby(run.messages["round"]).sum().cumsum()
    return np.asarray(sums.reindex(range(max(rounds) + 1)).ffill().fillna(0).loc[rounds], dtype=float)


def has_seed_set(drawn: Sequence[CostCurve]) -> bool:
    """Return whether a client of any method sends public data."""
    return any(cost.seed for course in drawn for cost in course.costs)


def make_page_cost_table(drawn: Sequence[CostCurve], scale: MetricScale) -> PageTable:
    """Return the table of the picture's numbers; where there is a public seed set, bytes with it and without it."""
    public = has_seed_set(drawn)

    def form_size(size: float) -> TableCell:
        return TableCell(format_size(size))

    columns = [
        Column("Method", numeric=False, keys=("method",), read=lambda line: line[0].label),
        Column("Round", keys=("round",), read=lambda line: line[1].round, form=lambda round: TableCell(f"{round:,}")),
        Column(
            "sent, with the seed set" if public else "",
            "A node",
            keys=("sent_with_seed_set",),
            read=lambda line: line[1].total,
            form=form_size,
        ),
        Column("without" if public else "sent", "A node", keys=("sent",), read=lambda line: line[1].sent, form=form_size),
        Column(
            "ACC, %",
            keys=("acc", "acc_lowest_seed", "acc_highest_seed"),
            read=lambda line: line[1],
            form=lambda cost: TableCell(scale.format_value(cost.mean)),
            numbers=lambda cost: (cost.mean, cost.low, cost.high),
        ),
    ]
    some = "" if all(len(c.costs) <= LISTED for c in drawn) else f"; {LISTED} evaluations of each method, the CSV has all"
    caption = f"Bytes that a node has sent, and mean ACC; means over seeds{some}"
    listed, all_costs = ([(c, cost) for c in drawn for cost in thin_out(c.costs, n)] for n in (LISTED, 10**9))
    return make_table("costs", caption, columns, listed, all_costs)


def draw_costs(drawn: Sequence[CostCurve], scale: MetricScale, prefix: str, styles: Styles) -> str:
    """Return the picture as SVG: bytes on a log scale, with the seed set's; a method that sends nothing is a level line."""
    figure, axes = make_axes(WIDTH, HEIGHT, left=34, right=measure_label_room(c.label for c in drawn), bottom=38, top=8)
    paid = [c for c in drawn if not c.free]
    if paid:
        axes.set_xscale("log")
    for course in paid:
        _draw(axes, course)
    for course in (c for c in drawn if c.free):
        tone, reached = make_colour(f"s{course.slot}"), 100 * course.costs[-1].mean
        axes.axhline(reached, color=tone, linewidth=1.4, linestyle=(0, (1, 1.6)), clip_on=False)
    axes.grid(axis="x", color=make_colour("rule"), linewidth=0.8, clip_on=False)
    among = ", its public data among them" if has_seed_set(drawn) else ""
    axes.set_xlabel(f"bytes that a node has sent{among}", color=make_colour("muted"), fontsize=TEXT)
    axes.set_xticks(_list_ticks(axes) if paid else [])
    if paid:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _format_bytes(size)))
        axes.minorticks_off()
    axes.yaxis.set_major_locator(MaxNLocator(6))
    draw_end_labels(axes, [(c.label, c.slot, 100 * c.costs[-1].mean) for c in drawn if not c.once])
    hits = [hit for course in paid for hit in _make_hits(axes, course, scale)]
    return make_inline_svg(figure, prefix, f"{TITLE}; the numbers are in the table below", styles, hits)


def _format_bytes(size: float) -> str:
    return format_size(size).replace(".0", "")


def _list_ticks(axes: Any) -> list[float]:
    """Return round numbers of bytes along the axis, without those whose labels would touch the one before."""
    low, high = axes.get_xlim()
    decades = LogLocator(subs=(1, 3) if high < 1000 * low else (1,), numticks=8)
    places = (MaxNLocator(4) if high < 10 * low else decades).tick_values(low, high)
    ticks: list[float] = []
    end = -float("inf")  # of the last label, in pixels
    for size in (float(b) for b in places if low <= b <= high):
        middle, half = float(axes.transData.transform((size, 0))[0]), 0.3 * TEXT * len(_format_bytes(size))
        if middle - half > end:
            ticks.append(size)
            end = middle + half + TEXT / 2
    return ticks


def _draw(axes: Any, course: CostCurve) -> None:
    shown = [c for c in thin_out(course.costs, DRAWN) if c.total > 0]
    x, tone = [c.total for c in shown], make_colour(f"s{course.slot}")
    if course.seeds > 1:
        low, high = ([100 * v for v in values] for values in ([c.low for c in shown], [c.high for c in shown]))
        axes.fill_between(x, low, high, color=tone, alpha=0.13, linewidth=0, clip_on=False)
    marks = {"marker": MARKS[course.slot - 1], "markersize": 5, "markeredgewidth": 0}
    marked = sorted({round(k * (len(x) - 1) / 4) for k in range(5)})
    axes.plot(x, [100 * c.mean for c in shown], color=tone, linewidth=1.8, markevery=marked, clip_on=False, **marks)
    if course.once:  # its name stands at its end, which is far from where the other lines end
        end = (x[-1], 100 * shown[-1].mean)
        style: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": TEXT, "color": tone}
        axes.annotate(fit_label(course.label), end, (5, 0), **style)


def _make_hits(axes: Any, course: CostCurve, scale: MetricScale) -> list[Hit]:
    """A square to point at around each listed point."""
    hits: list[Hit] = []
    height = axes.figure.bbox.height
    for cost in (c for c in thin_out(course.costs, LISTED) if c.total > 0):
        x, y = (float(v) for v in axes.transData.transform((cost.total, 100 * cost.mean)))
        of_it = f", {format_size(cost.sent)} of it in rounds" if cost.seed else ""
        title = f"{course.label}, round {cost.round:,}\n{format_size(cost.total)} sent{of_it}"
        hits.append((x - 8, height - y - 8, 16, 16, f"{title}\nACC {scale.format_value(cost.mean)} %"))
    return hits
