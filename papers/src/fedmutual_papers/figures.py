"""Draw the figures of an experiment as SVG, for the page and as separate files: curves, feature clouds, forest plots."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from importlib.resources import files
from itertools import product
from statistics import fmean
from typing import Any
from xml.sax.saxutils import escape

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config.methods import find_method
from fedmutual.report.cells import PageTable
from fedmutual.report.curves import SLOTS, Curve, Picture, make_data_table
from fedmutual.report.plots import GAIN_MARKERS, MARKS, TEXT, Styles, draw_curves, make_axes, make_colour, make_inline_svg
from fedmutual.results.estimate import Estimate
from fedmutual.results.scale import PERCENT, MetricScale, format_number
from fedmutual_papers import measures
from fedmutual_papers.experiment_files import PaperExperiment
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.prose import name_arm
from fedmutual_papers.store import Cloud, Result
from fedmutual_papers.tables import tabulate

_WORDS = {
    "global_test": "global model on the test set, %",
    "own": "clients' model on own validation data, %",
    "local": "model as the client trained it, validation data, %",
}
LOCAL = ("local", "personal")  # what methods call the loss of the step on the node's own batch
MUTUAL = ("kl", "ce")
EARLY = 1000  # rounds over which the mutual losses are drawn, as the paper's figure has it

SIDE, LEGEND, EDGE = 300, 110, 8  # pixels of a scatter plot
LINE = TEXT + 4
HUES = (1, 2, 3, 5, 7, 6, 8, 4)  # grey last
CLASS_MARKS = (*MARKS, "<", ">", "p", "h")

ROW, WIDTH, LABELS = 18, 720, 430  # pixels of a forest plot
LONGEST_LABEL = 72  # characters of a label

ForestRow = tuple[str, Estimate, int]
"""(label, difference as a fraction, +1 if the difference supports a claim, -1 if it contradicts the claim, else 0)."""


@dataclass(frozen=True)
class Scatter:
    """The picture of the features of test examples in one model, as points on two axes. `id` is its name in file names."""

    id: str
    title: str
    cloud: Cloud

    def draw(self, prefix: str, styles: Styles) -> str:
        """Return the plot as SVG, with a legend of domains and classes."""
        cloud, marks = self.cloud, choose_marks(self.cloud.classes)
        width, height = SIDE + LEGEND, SIDE
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        axes = figure.add_axes((EDGE / width, EDGE / height, (SIDE - 2 * EDGE) / width, 1 - 2 * EDGE / height))
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_color(make_colour("rule"))
        for domain, kind in product(range(len(cloud.domains)), range(len(cloud.classes))):
            if places := _list_places(cloud, domain, kind):
                _plot_points(axes, [x for x, _ in places], [y for _, y in places], marks[kind], domain)
        rows: list[tuple[str, str, int | None]] = [(name, "s", domain) for domain, name in enumerate(cloud.domains)]
        if len(set(marks)) > 1 and not marks[0].startswith("$"):
            rows += [("", "", None), *((name, mark, None) for name, mark in zip(cloud.classes, marks, strict=True))]
        beside = 1 + 10 / (SIDE - 2 * EDGE)
        for number, (name, mark, of) in enumerate(rows):
            place = 1 - (number + 0.5) * LINE / (SIDE - 2 * EDGE)
            if name:
                _plot_points(axes, [beside], [place], mark, of, transform=axes.transAxes)
                style: dict[str, Any] = {"textcoords": "offset points", "annotation_clip": False, "fontsize": TEXT}
                style |= {"va": "center_baseline", "color": _choose_tone(of)}
                axes.annotate(name, (beside, place), xytext=(8, 0), xycoords="axes fraction", **style)
        return make_inline_svg(figure, prefix, self.describe(), styles)

    def describe(self) -> str:
        """Return the description of the plot in words."""
        first, second = (format_number(100 * share, 0) for share in self.cloud.explained)
        silhouette = f"{self.cloud.silhouette:.2f}"
        return f"{self.title}. The axes hold {first} % and {second} % of the variance; silhouette {silhouette}"

    def make_table(self) -> PageTable:
        """Return the mean position of each domain and class as a table."""
        cloud, rows = self.cloud, []
        for domain, kind in product(range(len(cloud.domains)), range(len(cloud.classes))):
            if places := _list_places(cloud, domain, kind):
                means = (format_number(fmean(values), 2) for values in zip(*places, strict=True))
                rows.append((cloud.domains[domain], cloud.classes[kind], str(len(places)), *means))
        caption = f"{self.title}; means of the points"
        return tabulate(f"{self.id}-data", caption, ("Domain", "Class"), ("points", "x", "y"), rows)


def _list_places(cloud: Cloud, domain: int, kind: int) -> list[tuple[float, float]]:
    """Return (x, y) of the points of a domain and a class, each given by its number."""
    return [(x, y) for d, k, x, y in cloud.points if (d, k) == (domain, kind)]


def choose_marks(classes: Sequence[str]) -> Sequence[str]:
    """Return the mark of each class: its name if that is one letter; one common mark if there are too many classes."""
    if all(len(name) == 1 and name.isalnum() for name in classes):
        return [f"${name}$" for name in classes]
    return CLASS_MARKS[: len(classes)] if len(classes) <= len(CLASS_MARKS) else ["o"] * len(classes)


def _plot_points(axes: Any, x: list[float], y: list[float], mark: str, domain: int | None, **more: Any) -> None:
    size = 6 if mark.startswith("$") else 4.5
    style = {"linestyle": "", "marker": mark, "markersize": size, "markeredgewidth": 0, "clip_on": False}
    axes.plot(x, y, color=_choose_tone(domain), **style, **more)


def _choose_tone(domain: int | None) -> str:
    return make_colour("muted") if domain is None else make_colour(f"s{HUES[domain % len(HUES)]}")


@dataclass(frozen=True)
class Forest:
    """The picture of verdicts: one row for each, a difference in points."""

    title: str
    rows: Sequence[ForestRow]

    def draw(self, prefix: str, styles: Styles) -> str:
        """Return the plot as SVG: a mark at each mean, a line over the 95 % interval, and a line at zero."""
        figure, axes = make_axes(WIDTH, ROW * len(self.rows) + 42, left=LABELS, right=14, bottom=38, top=4)
        axes.axvline(0, color=make_colour("ink"), linewidth=1, clip_on=False)
        places = [len(self.rows) - 1 - k for k in range(len(self.rows))]
        for place, (_, difference, sign) in zip(places, self.rows, strict=True):
            mark, tone = GAIN_MARKERS[sign]
            style: dict[str, Any] = {"color": make_colour(tone), "linewidth": 1.8, "capsize": 3, "clip_on": False}
            error = None if difference.half is None else 100 * difference.half
            axes.errorbar([100 * difference.mean], [place], xerr=error, marker=mark, markersize=6, **style)
        long = LONGEST_LABEL
        labels = [label if len(label) <= long else f"{label[: long - 1]}…" for label, _, _ in self.rows]
        axes.set_yticks(places, labels)
        axes.set_ylim(-0.6, len(self.rows) - 0.4)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", color=make_colour("rule"), linewidth=0.8, clip_on=False)
        axes.xaxis.set_major_locator(MaxNLocator(7))
        axes.set_xlabel("difference in points, 95 % interval over seeds", color=make_colour("muted"), fontsize=TEXT)
        return make_inline_svg(figure, prefix, self.describe(), styles)

    def describe(self) -> str:
        """Return the description of the plot in words."""
        row_texts = (f"{label} {PERCENT.format_gain(difference.mean)}" for label, difference, _ in self.rows)
        return f"{self.title}, in points: {'; '.join(row_texts)}"


Plot = Picture | Scatter


def make_pictures(experiment: PaperExperiment, measured_cells: Sequence[MeasuredCell]) -> list[Plot]:
    """Return the pictures of the cells with results.

    There is one picture for each cell and measure of the index, or for each client if the view of the index is "clients".
    Then there are the pictures of the node that a cell names.
    """
    drawn: list[Plot] = []
    for measured in (m for m in measured_cells if m.run and fnmatch(m.cell.name, experiment.index.draw)):
        tag, stem = f" ({measured.words})" if measured.words else "", measured.cell.name.replace("/", "-")
        if measured.cell.about.node is not None:
            drawn += _make_node_pictures(measured, stem, tag)
        if experiment.index.view == "clients":
            named = [
                (i, f"client {i}, {network}, own data, %", lambda r, i=i: r.clients[i].curve if i in r.clients else ())
                for i, network in measured.networks.items()
            ]
        else:
            keys = [measures.find(measure)[0].curve for measure in experiment.index.figures]
            named = [(key.replace("_", "-"), _WORDS[key], partial(Result.get_curve, name=key)) for key in keys]
        for id, words, read in named:
            title = f"{measured.cell.title}: {words}{tag}"
            drawn.append(Picture(f"{stem}-{id}", title, True, make_curves(measured, read)))
    return [p for p in drawn if isinstance(p, Scatter) or p.curves]


def _make_node_pictures(measured: MeasuredCell, stem: str, tag: str) -> Iterator[Plot]:
    """Yield the pictures of the node that the cell names, from all runs that have a node analysis.

    The pictures are those of Figures 1 and 2 of the FedH2L paper, https://arxiv.org/abs/2101.11296.
    """
    title = f"{measured.cell.title}: {{}}node {measured.cell.about.node}{{}}{tag}"
    for arm, by_seed in measured.results.items():
        for seed, closeup in [(s, r.closeup) for s, r in by_seed.items() if r.closeup and r.closeup.cloud.points]:
            words = title.format("features of ", f"'s model, {name_arm(arm, measured.cell.shown[arm])}, seed {seed}")
            yield Scatter(f"{stem}-features-{arm}", words, closeup.cloud)

    def read(term: str) -> tuple[Curve, ...]:
        return make_curves(measured, lambda result: result.closeup_curves.get(term, ()))

    words = title.format("", "'s model on all nodes' validation data, %")
    yield Picture(f"{stem}-validation", words, True, read("validation"))
    local = tuple(curve for term in LOCAL for curve in read(term))
    yield Picture(f"{stem}-local-loss", title.format("", ", loss of the local step"), False, local)
    mutual = [
        Curve(f"{c.label}, {term.upper()}", c.slot, style, c.values[c.values.index <= EARLY])
        for style, term in enumerate(MUTUAL)
        for c in read(term)
    ]
    words = title.format("", f", losses of the mutual step, the first {EARLY:,} rounds")
    yield Picture(f"{stem}-mutual-loss", words, False, tuple(curve for curve in mutual if curve.points))


def make_curves(measured: MeasuredCell, values: Callable[[Result], Sequence[float]]) -> tuple[Curve, ...]:
    """Return one curve for each arm that has values. values: a result -> one value for each evaluated round, or nothing.

    Arms named as algorithms have the colours and marks of the report, others take free ones.
    """
    arms, drawn = measured.cell.shown, []
    slots = {arm: colour for arm in arms if arm in ALGORITHMS and (colour := find_method(arm).role.colour)}
    free = [s for s in range(1, SLOTS + 1) if s not in slots.values()]
    slots |= {arm: free[k % len(free)] for k, arm in enumerate(arm for arm in arms if arm not in slots)}
    for arm, by_seed in measured.results.items():
        runs = {s: dict(zip(r.evaluated, v, strict=True)) for s, r in sorted(by_seed.items()) if (v := values(r))}
        drawn.append(Curve(name_arm(arm, arms[arm]), slots[arm], 0, pd.DataFrame(runs)))
    return tuple(curve for curve in drawn if curve.points)


def draw(picture: Plot | Forest, prefix: str, styles: Styles) -> str:
    """Return the picture as SVG for use inside a page."""
    return draw_curves(picture, prefix, styles) if isinstance(picture, Picture) else picture.draw(prefix, styles)


def make_number_table(picture: Plot, decimals: int) -> PageTable:
    """Return the numbers of a picture as a table. decimals: of accuracies in percent."""
    return picture.make_table() if isinstance(picture, Scatter) else make_data_table(picture, MetricScale(decimals))


def describe_picture(picture: Plot | Forest) -> str:
    """Return a description of the picture in words; for curves, the last value of each line."""
    if not isinstance(picture, Picture):
        return picture.describe()
    format_value = PERCENT.format_value if picture.percent else partial(format_number, decimals=3)
    ends = (f"{c.label} {format_value(c.points[-1].mean)} after round {c.points[-1].round}" for c in picture.curves)
    return f"{picture.title}. {'; '.join(ends)}"


def make_standalone_svg(picture: Plot | Forest) -> str:
    """Return the picture as a separate SVG file, in the page's light colours and with a label on every line."""
    styles: Styles = {}
    drawn = draw(picture, "p", styles)
    css = (files("fedmutual.report") / "templates" / "style.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", css[: css.index("}")]))
    rules = "".join(f".{name}{{{style}}}" for style, name in styles.items())
    rules = re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], rules)
    rules += f"svg{{background:{colours['paper']}}}text{{font-family:sans-serif}}rect{{fill:none}}"
    head, rest = drawn.split(">", 1)
    about = f"<title>{escape(picture.title)}</title><desc>{escape(describe_picture(picture))}</desc>"
    return f'{head} xmlns="http://www.w3.org/2000/svg">{about}<style>{rules}</style>{rest}\n'
