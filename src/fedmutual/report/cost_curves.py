"""Accuracy against the bytes that the nodes of a method sent. One line for each method, over the whole run."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from fedmutual.report.cells import Column, PageTable, TableCell, format_csv
from fedmutual.report.curves import DRAWN, assign_slots, make_points, thin_out
from fedmutual.report.domains import ACC
from fedmutual.report.measures import average_by_round
from fedmutual.report.plots import HEIGHT, MARKS, TEXT, WIDTH, draw_end_labels, fit_label, make_axes, measure_label_room
from fedmutual.report.svg import Hit, Styles, make_colour, make_inline_svg
from fedmutual.results.comparison import Method, RunComparison
from fedmutual.results.scale import MetricScale
from fedmutual.results.text import format_size

LISTED = 8  # points of a method in the table; the CSV has all
TITLE = "Accuracy against bytes: mean ACC, %, by what a node has sent"


class Cost(NamedTuple):
    """A method after a round: the bytes that a node has sent, and the accuracy as a fraction in [0, 1].

    Bytes are a mean over nodes and seeds. The accuracy is the mean over seeds, and the lowest and the highest seed.
    """

    round: int
    sent: float
    seed: float  # of its public data, once
    mean: float
    low: float
    high: float

    @property
    def total(self) -> float:
        """The bytes that a node has sent, with its public data."""
        return self.sent + self.seed


@dataclass(frozen=True)
class CostCurve:
    """A method's line in the picture of accuracy against bytes: one `Cost` for each scored round, sorted by round.

    `label` names the method, `slot` (1 .. SLOTS) is its colour and its mark, and `seeds` is the number of its runs.
    """

    label: str
    slot: int
    seeds: int
    costs: tuple[Cost, ...]

    @property
    def free(self) -> bool:
        """Whether nothing is ever sent: no place on an axis of bytes, and a line across it."""
        return self.costs[-1].total == 0

    @property
    def once(self) -> bool:
        """Whether all is sent before the first round that was scored: a line straight up."""
        return not self.free and self.costs[0].total == self.costs[-1].total


def make_courses(comparison: RunComparison) -> list[CostCurve]:
    """Return for each method its accuracies and bytes, round by round; methods without scores or ledger are left out."""
    taken = assign_slots(comparison.methods)
    all_courses = [CostCurve(m.label, taken[m.label], len(m.counted), tuple(_make_course(m))) for m in comparison.methods]
    return [c for c in all_courses if c.costs]


def _make_course(method: Method) -> list[Cost]:
    runs = [r for r in method.counted if r.evaluations]
    values = average_by_round(method.select_scores(method.uses[0].model, ACC.data))
    points = make_points(values.reindex(columns=[r.seed for r in runs]))
    if not points:
        return []
    nodes = [len(r.partition.clients or r.ledger.clients) or 1 for r in runs]  # a server knows no site's partition
    seed = fmean(sum(r.ledger.seed.values()) / n for r, n in zip(runs, nodes, strict=True))
    rounds = [p.round for p in points]
    sent = np.mean([np.divide(r.ledger.sum_until(rounds), n) for r, n in zip(runs, nodes, strict=True)], axis=0)
    return [Cost(p.round, bytes, seed, p.mean, p.low, p.high) for p, bytes in zip(points, sent.tolist(), strict=True)]


def has_seed_set(drawn: Sequence[CostCurve]) -> bool:
    """Return whether a client of any method sends public data."""
    return any(cost.seed for course in drawn for cost in course.costs)


def make_page_cost_table(drawn: Sequence[CostCurve], scale: MetricScale) -> PageTable:
    """Return the table of the picture's numbers; where there is a public seed set, bytes with it and without it."""
    public = has_seed_set(drawn)
    rows = [
        (
            TableCell(c.label),
            TableCell(f"{cost.round:,}"),
            *(TableCell(format_size(sent)) for sent in ((cost.total, cost.sent) if public else (cost.sent,))),
            TableCell(scale.format_value(cost.mean)),
        )
        for c in drawn
        for cost in thin_out(c.costs, LISTED)
    ]
    sent = [Column(name, "A node") for name in (("sent, with the seed set", "without") if public else ("sent",))]
    columns = (Column("Method", numeric=False), Column("Round"), *sent, Column("ACC, %"))
    lines = [[c.label, k.round, k.total, k.sent, k.mean, k.low, k.high] for c in drawn for k in c.costs]
    header = ["method", "round", "sent_with_seed_set", "sent", "acc", "acc_lowest_seed", "acc_highest_seed"]
    some = "" if all(len(c.costs) <= LISTED for c in drawn) else f"; {LISTED} evaluations of each method, the CSV has all"
    return PageTable(
        "costs",
        f"Bytes that a node has sent, and mean ACC; means over seeds{some}",
        columns,
        tuple(rows),
        format_csv(header, lines),
    )


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
    if paid:
        axes.set_xticks(_set_ticks(axes))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda bytes, _: _format_bytes(bytes)))
        axes.minorticks_off()
    else:
        axes.set_xticks([])
    axes.yaxis.set_major_locator(MaxNLocator(6))
    draw_end_labels(axes, [(c.label, c.slot, 100 * c.costs[-1].mean) for c in drawn if not c.once])
    hits = [hit for course in paid for hit in _make_hits(axes, course, scale)]
    return make_inline_svg(figure, prefix, f"{TITLE}; the numbers are in the table below", styles, hits)


def _format_bytes(bytes: float) -> str:
    return format_size(bytes).replace(".0", "")


def _set_ticks(axes: Any) -> list[float]:
    """Round numbers of bytes along the axis, of those whose labels would touch the first."""
    low, high = axes.get_xlim()
    decades = LogLocator(subs=(1, 3) if high < 1000 * low else (1,), numticks=8)
    places = (MaxNLocator(4) if high < 10 * low else decades).tick_values(low, high)
    ticks: list[float] = []
    end = -float("inf")  # of the last label, in pixels
    for bytes in (float(b) for b in places if low <= b <= high):
        middle, half = float(axes.transData.transform((bytes, 0))[0]), 0.3 * TEXT * len(_format_bytes(bytes))
        if middle - half > end:
            ticks.append(bytes)
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
        axes.annotate(
            fit_label(course.label), end, (5, 0), textcoords="offset points", va="center", fontsize=TEXT, color=tone
        )


def _make_hits(axes: Any, course: CostCurve, scale: MetricScale) -> list[Hit]:
    """A square to point at around each listed point."""
    height, hits = axes.figure.bbox.height, []
    for cost in (c for c in thin_out(course.costs, LISTED) if c.total > 0):
        x, y = (float(v) for v in axes.transData.transform((cost.total, 100 * cost.mean)))
        of_it = f", {format_size(cost.sent)} of it in rounds" if cost.seed else ""
        title = f"{course.label}, round {cost.round:,}\n{format_size(cost.total)} sent{of_it}"
        hits.append(Hit(x - 8, height - y - 8, 16, 16, f"{title}\nACC {scale.format_value(cost.mean)} %"))
    return hits
