"""Draw a forest plot: one row for each verdict, with the difference and its interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.ticker import MaxNLocator

from fedmutual.report.plots import TEXT, make_axes
from fedmutual.report.statistics import Estimate
from fedmutual.report.svg import Styles, make_colour, make_inline_svg
from fedmutual.report.text import format_points

ROW, WIDTH, LABELS = 18, 720, 430  # pixels
LONGEST_LABEL = 72  # characters of a label
TONES = {1: "gain", -1: "harm", 0: "muted"}


@dataclass(frozen=True)
class ForestRow:
    """One row of a forest plot: a difference with its 95 % interval, and the verdict that it gives."""

    label: str
    difference: Estimate  # as a fraction
    sign: int  # +1 if the difference supports the claim, -1 if it contradicts the claim, else 0


@dataclass(frozen=True)
class Forest:
    """The content of a forest plot: one row for each verdict, each a difference in points."""

    title: str
    rows: Sequence[ForestRow]

    @property
    def words(self) -> str:
        """Return the description of the plot in words."""
        row_texts = (f"{row.label} {format_points(row.difference.mean)}" for row in self.rows)
        return f"{self.title}, in points: {'; '.join(row_texts)}"


def draw_forest(forest: Forest, prefix: str, styles: Styles) -> str:
    """Return the plot as SVG: a mark at each mean, a line over the 95 % interval, and a line at zero."""
    tall = ROW * len(forest.rows)
    figure, axes = make_axes(WIDTH, tall + 42, left=LABELS, right=14, bottom=38, top=4)
    axes.axvline(0, color=make_colour("ink"), linewidth=1, clip_on=False)
    places = [len(forest.rows) - 1 - k for k in range(len(forest.rows))]
    for place, row in zip(places, forest.rows, strict=True):
        tone = make_colour(TONES[row.sign])
        style: dict[str, Any] = {"color": tone, "linewidth": 1.8, "capsize": 3, "clip_on": False}
        error = None if row.difference.half is None else 100 * row.difference.half
        mark = {1: "^", -1: "v", 0: "o"}[row.sign]
        axes.errorbar([100 * row.difference.mean], [place], xerr=error, marker=mark, markersize=6, **style)
    axes.set_yticks(places, [_fit_label(row.label) for row in forest.rows])
    axes.set_ylim(-0.6, len(forest.rows) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=make_colour("rule"), linewidth=0.8, clip_on=False)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.set_xlabel("difference in points, 95 % interval over seeds", color=make_colour("muted"), fontsize=TEXT)
    return make_inline_svg(figure, prefix, forest.words, styles)


def _fit_label(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"
