"""Draw what matplotlib draws for the pages of papers alone: scatter plots of features and forest plots of verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedmutual.report.cells import Column, PageTable, TableCell, format_csv
from fedmutual.report.plots import TEXT, Styles, make_axes, make_colour, make_inline_svg
from fedmutual.results.estimate import Estimate
from fedmutual.results.scale import format_number, format_percent_number, format_points
from fedmutual_papers.result import Cloud

SIDE, LEGEND, EDGE = 300, 110, 8  # pixels
LINE = TEXT + 4
HUES = (1, 2, 3, 5, 7, 6, 8, 4)  # grey last
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")


@dataclass(frozen=True)
class Scatter:
    """The picture of the features of test examples in one model, as points on two axes. `id` is its name in file names."""

    id: str
    title: str
    cloud: Cloud

    @property
    def marks(self) -> Sequence[str]:
        """Return the mark of each class: its name if that is one letter; one common mark if there are too many classes."""
        names = self.cloud.classes
        if all(len(n) == 1 and n.isalnum() for n in names):
            return [f"${n}$" for n in names]
        return MARKS[: len(names)] if len(names) <= len(MARKS) else ["o"] * len(names)

    @property
    def words(self) -> str:
        """Return the description of the plot in words."""
        first, second = (format_percent_number(share, 0) for share in self.cloud.explained)
        return (
            f"{self.title}. The axes hold {first} % and {second} % of the variance; silhouette {self.cloud.silhouette:.2f}"
        )


def draw_scatter(scatter: Scatter, prefix: str, styles: Styles) -> str:
    """Return the plot as SVG, with a legend of domains and classes."""
    cloud, marks = scatter.cloud, scatter.marks
    width, height = SIDE + LEGEND, SIDE
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    axes = figure.add_axes((EDGE / width, EDGE / height, (SIDE - 2 * EDGE) / width, 1 - 2 * EDGE / height))
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(make_colour("rule"))
    for domain, kind in product(range(len(cloud.domains)), range(len(cloud.classes))):
        x = [p[2] for p in cloud.points if p[:2] == (domain, kind)]
        y = [p[3] for p in cloud.points if p[:2] == (domain, kind)]
        if x:
            _plot_points(axes, x, y, marks[kind], domain)
    rows: list[tuple[str, str, int | None]] = [(name, "s", domain) for domain, name in enumerate(cloud.domains)]
    if len(set(marks)) > 1 and not marks[0].startswith("$"):
        rows += [("", "", None), *((name, mark, None) for name, mark in zip(cloud.classes, marks, strict=True))]
    for number, (name, mark, of) in enumerate(rows):
        place = 1 - (number + 0.5) * LINE / (SIDE - 2 * EDGE)
        beside = 1 + 10 / (SIDE - 2 * EDGE)
        if name:
            _plot_points(axes, [beside], [place], mark, of, transform=axes.transAxes)
            style: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False, "fontsize": TEXT}
            style |= {"va": "center_baseline", "color": _choose_tone(of)}
            axes.annotate(name, (beside, place), xytext=(8, 0), xycoords="axes fraction", **style)
    return make_inline_svg(figure, prefix, scatter.words, styles)


def _plot_points(axes: Any, x: list[float], y: list[float], mark: str, domain: int | None, **more: Any) -> None:
    size = 6 if mark.startswith("$") else 4.5
    style = {"linestyle": "", "marker": mark, "markersize": size, "markeredgewidth": 0, "clip_on": False}
    axes.plot(x, y, color=_choose_tone(domain), **style, **more)


def _choose_tone(domain: int | None) -> str:
    return make_colour("muted") if domain is None else make_colour(f"s{HUES[domain % len(HUES)]}")


def make_scatter_table(scatter: Scatter) -> PageTable:
    """Return the mean position of each domain and class as a table; its CSV has every point."""
    cloud, rows = scatter.cloud, []
    for domain, kind in product(range(len(cloud.domains)), range(len(cloud.classes))):
        points = [p[2:] for p in cloud.points if p[:2] == (domain, kind)]
        if points:
            x, y = (fmean(values) for values in zip(*points, strict=True))
            texts = (cloud.domains[domain], cloud.classes[kind], str(len(points)), format_number(x, 2), format_number(y, 2))
            rows.append(tuple(map(TableCell, texts)))
    lines = [(cloud.domains[d], cloud.classes[k], x, y) for d, k, x, y in cloud.points]
    heads = (Column("Domain", numeric=False), Column("Class", numeric=False), *map(Column, ("points", "x", "y")))
    csv = format_csv(("domain", "class", "x", "y"), lines)
    return PageTable(f"{scatter.id}-data", f"{scatter.title}; means of the points", heads, tuple(rows), csv)


ROW, WIDTH, LABELS = 18, 720, 430  # pixels
LONGEST_LABEL = 72  # characters of a label
TONES = {1: "gain", -1: "harm", 0: "muted"}


ForestRow = tuple[str, Estimate, int]
"""(label, difference as a fraction, +1 if the difference supports a claim, -1 if it contradicts the claim, else 0)."""


@dataclass(frozen=True)
class Forest:
    """The content of a forest plot: one row for each verdict, each a difference in points."""

    title: str
    rows: Sequence[ForestRow]

    @property
    def words(self) -> str:
        """Return the description of the plot in words."""
        row_texts = (f"{label} {format_points(difference.mean)}" for label, difference, _ in self.rows)
        return f"{self.title}, in points: {'; '.join(row_texts)}"


def draw_forest(forest: Forest, prefix: str, styles: Styles) -> str:
    """Return the plot as SVG: a mark at each mean, a line over the 95 % interval, and a line at zero."""
    tall = ROW * len(forest.rows)
    figure, axes = make_axes(WIDTH, tall + 42, left=LABELS, right=14, bottom=38, top=4)
    axes.axvline(0, color=make_colour("ink"), linewidth=1, clip_on=False)
    places = [len(forest.rows) - 1 - k for k in range(len(forest.rows))]
    for place, (_, difference, sign) in zip(places, forest.rows, strict=True):
        tone = make_colour(TONES[sign])
        style: dict[str, Any] = {"color": tone, "linewidth": 1.8, "capsize": 3, "clip_on": False}
        error = None if difference.half is None else 100 * difference.half
        mark = {1: "^", -1: "v", 0: "o"}[sign]
        axes.errorbar([100 * difference.mean], [place], xerr=error, marker=mark, markersize=6, **style)
    axes.set_yticks(places, [_fit_label(label) for label, *_ in forest.rows])
    axes.set_ylim(-0.6, len(forest.rows) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=make_colour("rule"), linewidth=0.8, clip_on=False)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.set_xlabel("difference in points, 95 % interval over seeds", color=make_colour("muted"), fontsize=TEXT)
    return make_inline_svg(figure, prefix, forest.words, styles)


def _fit_label(label: str) -> str:
    return label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL - 1]}…"
