"""Draw curves over rounds, and gains with intervals, and return figures as inline SVG: one nominal pixel a point.

The SVG has real text in the page's font, colours that follow its scheme, and tips to point at.
"""

import io
import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedmutual.report.curves import BYTES, DRAWN, SLOTS, Picture, thin_out
from fedmutual.results.estimate import Estimate
from fedmutual.results.gains import Gains
from fedmutual.results.scale import PERCENT, MetricScale, format_size
from fedmutual.rundir.schema import Reliability

WIDTH, HEIGHT = 420, 250  # of a picture of curves; a column of the page is about as wide, a phone a little less
TEXT = 11
LINE = TEXT + 2  # of text
LONGEST_LABEL = 24  # characters of a label in a picture
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 1.5, 1, 1.5)), (0, (2, 1)), (0, (6, 1.5, 1, 1.5, 1, 1.5)))
MARKED = 5  # markers on a line
_NAMES = [*(f"s{k}" for k in range(1, SLOTS + 1)), "ink", "muted", "rule", "gain", "harm", "paper"]
_TOKENS = {name: f"#fe01{number:02x}" for number, name in enumerate(_NAMES)}  # colours that nothing else has
_TOKEN = re.compile("#fe01([0-9a-f]{2})")
_SVG, _LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"

ROW = 13.0  # height of a client's row of gains in pixels
MOST_ROWS = 44  # of gains: beyond so many rows all clients of a method share a row
AXIS = 40  # pixels below the rows of gains
GAIN_MARKERS = {1: ("^", "gain"), -1: ("v", "harm"), 0: ("o", "muted")}  # direction of a gain -> marker, colour
_CHARACTER = 6.2  # pixels of a character of a label, on average

Hit = tuple[float, float, float, float, str]
"""A place to point at, in pixels from the figure's upper left corner (x, y, width, height), and the text that it shows."""

Styles = dict[str, str]
"""CSS declarations -> the class that has them; filled as figures are drawn, so that equal styles share a class."""


def draw_curves(picture: Picture, prefix: str, styles: Styles) -> str:
    """Return curves as SVG: a line a method, labelled at its end, with the range over seeds as a band."""
    right = _measure_label_room(c.label for c in picture.curves)
    bottom, top = 38, 8
    height = max(HEIGHT, LINE * (len(picture.curves) + 1) + bottom + top)  # the labels fit beside the axes
    figure, axes = make_axes(WIDTH, height, left=44 if picture.log else 34, right=right, bottom=bottom, top=top)
    scale = 100 if picture.percent else 1
    for number, curve in enumerate(picture.curves):
        shown = thin_out(curve.points, DRAWN)
        x, y = [p.round for p in shown], [scale * p.mean for p in shown]
        tone = make_colour(f"s{curve.slot}")
        if len(curve.values.columns) > 1 and picture.percent:  # losses have no band: there are many, and they are no result
            low, high = ([scale * v for v in values] for values in ([p.low for p in shown], [p.high for p in shown]))
            axes.fill_between(x, low, high, color=tone, alpha=0.13, linewidth=0, clip_on=False)
        # curves that lie on each other: the first is the widest, the gaps of the later ones show those below
        style: dict[str, Any] = {
            "linestyle": DASHES[number % len(DASHES)],
            "linewidth": 2.6 if number == 0 else 1.8,
            "marker": MARKS[curve.slot - 1],
            "markerfacecolor": make_colour("paper") if curve.style else tone,
            "markevery": choose_marks(len(x), number, len(picture.curves)),
        }
        axes.plot(x, y, color=tone, markersize=5, markeredgewidth=1, clip_on=False, **style)
    axes.set_xlabel(picture.unit, color=make_colour("muted"), fontsize=TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if picture.unit == BYTES:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(size).replace(".0", "")))
    if picture.log:
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6))
    _draw_end_labels(axes, [(c.label, c.slot, scale * c.points[-1].mean) for c in picture.curves])
    label = f"{picture.title}, by {picture.unit}; the numbers are in the table below"
    return make_inline_svg(figure, prefix, label, styles, _draw_columns(axes, picture))


def draw_reliability(curves: Sequence[tuple[str, Reliability]], prefix: str, styles: Styles) -> str:
    """Return reliability curves as SVG: frequency by mean probability, in percent; on the thin diagonal both are equal.

    curves: label and what rows show of a model; at most as many as there are colours are drawn.
    """
    drawn = curves[:SLOTS]
    figure, axes = make_axes(WIDTH, WIDTH, left=34, right=_measure_label_room(name for name, _ in drawn), bottom=38, top=8)
    axes.plot([0, 100], [0, 100], color=make_colour("muted"), linewidth=1, clip_on=False)
    for number, (_, seen) in enumerate(drawn):
        places = [[100 * value for value in values] for values in zip(*(bin[:2] for bin in seen.bins), strict=True)]
        tone = make_colour(f"s{number + 1}")
        style: dict[str, Any] = {"linestyle": DASHES[number % len(DASHES)], "marker": MARKS[number], "markersize": 5}
        axes.plot(*places, color=tone, linewidth=1.8, clip_on=False, **style)
    axes.set_xlabel("mean probability, %", color=make_colour("muted"), fontsize=TEXT)
    _draw_end_labels(axes, [(name, number, 100 * seen.bins[-1][1]) for number, (name, seen) in enumerate(drawn, 1)])
    label = "Frequency by mean probability; the numbers are in the table below"
    return make_inline_svg(figure, prefix, label, styles)


class GainRow(NamedTuple):
    """A row of the picture of gains: a method's mean, or one of its clients; `height` counts rows from the top."""

    label: str
    height: float
    estimate: Estimate
    title: str  # for the reader who points at the row
    is_mean: bool = False
    has_interval: bool = True  # whether it is drawn


def draw_gains(
    method_gains: Sequence[tuple[str, Gains]],
    prefix: str,
    styles: Styles,
    noun: str = "client",
    scale: MetricScale = PERCENT,
) -> str:
    """Return gains as SVG: for each method (label, gains) a row for the mean and a row a client, with 95 % intervals.

    scale: of the gains; fractions are shown in points.

    Triangles point up where the mean lies above 0, and down below; a filled one has an interval without 0, over three seeds
    or more. Where there are more than `MOST_ROWS` rows, the clients of a method are marks in one row, without intervals.

    noun: the word for a client whose name is a number.
    """
    is_dense = sum(1 + len(gains.by_client) for _, gains in method_gains) > MOST_ROWS
    rows = _make_rows(method_gains, noun, is_dense, replace(scale, decimals=2))
    labels = {row.height: row for row in rows if row.label}
    left = 12 + _CHARACTER * max(len(row.label) for row in labels.values())
    depth = rows[-1].height + 1.3
    figure, axes = make_axes(WIDTH, ROW * depth + AXIS, left=min(left, 165), right=10, bottom=AXIS - 4, top=4)
    low, high = find_limits(rows, scale.factor)
    axes.set_xlim(low, high)
    axes.set_ylim(depth - 0.6, -0.7)
    axes.axvline(0, color=make_colour("ink"), linewidth=1, clip_on=False)
    for height in [row.height - 0.8 for row in rows if row.is_mean][1:]:
        axes.axhline(height, color=make_colour("rule"), linewidth=1, clip_on=False)
    for row in rows:
        _draw_row(axes, row, (low, high), scale.factor)
    axes.set_yticks([*labels], [row.label for row in labels.values()])
    for tick, row in zip(axes.get_yticklabels(), labels.values(), strict=True):
        tick.set_color(make_colour("ink" if row.is_mean else "muted"))
        tick.set_fontweight("bold" if row.is_mean else "normal")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=make_colour("rule"), linewidth=0.8, clip_on=False)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(scale.difference_mark.strip() or scale.metric.title, color=make_colour("muted"), fontsize=TEXT)
    unit = scale.difference_mark.strip()
    methods = ", ".join(f"{label} {scale.format_gain(gains.estimate.mean)}" for label, gains in method_gains)
    title = f"Gain over local-only in {unit}" if unit else "Gain over local-only"
    label = f"{title}, by method and {noun}; means: {methods}; all numbers are in a table below"
    return make_inline_svg(figure, prefix, label, styles, _make_hits(axes, rows, is_dense, scale.factor))


def _make_rows(method_gains: Sequence[tuple[str, Gains]], noun: str, is_dense: bool, scale: MetricScale) -> list[GainRow]:
    rows: list[GainRow] = []
    height = 0.0
    for label, gains in method_gains:
        rows.append(GainRow(fit_label(label), height, gains.estimate, _describe(label, gains.estimate, scale), is_mean=True))
        seeds: dict[str, list[str]] = {}
        for pair in gains.table.itertuples():
            tip = f"seed {pair.seed}: {scale.format_gain(pair.gain)}{scale.difference_mark}"
            seeds.setdefault(pair.client, []).append(tip)
        for number, (client, estimate) in enumerate(gains.by_client.items()):
            name, by_seed = f"{noun} {client}" if client.isdigit() else client, seeds[client]
            title = "\n".join([_describe(name, estimate, scale), *by_seed])
            if is_dense:  # marks lie in four lines, so that neighbours do not hide each other
                rows.append(GainRow("", height + 1.0 + 0.4 * (number % 4), estimate, title, has_interval=False))
            else:
                height += 1
                rows.append(GainRow(fit_label(client if number and client.isdigit() else name), height, estimate, title))
        height += 3.6 if is_dense else 1.6
    return rows


def _describe(label: str, estimate: Estimate, scale: MetricScale) -> str:
    """Return a gain in words: "client 3: +1.20 points, 95 % interval 0.40 to 2.00"."""
    mean = f"{label}: {scale.format_gain(estimate.mean)}{scale.difference_mark}"
    if estimate.half is None:
        return mean
    low, high = estimate.bounds
    return f"{mean}, 95 % interval {scale.format_gain(low)} to {scale.format_gain(high)}"


def find_limits(rows: Sequence[GainRow], factor: int = 100) -> tuple[float, float]:
    """Return (low, high) of the axis: every mean, 0, and intervals that are no wider than the means' own range.

    factor: from a gain to the number on the axis, which is 100 for points.
    Two seeds make intervals of many times the gain; without this limit they would hide all differences.
    """
    means = [0.0, *(row.estimate.mean for row in rows)]
    least = 1 / factor if factor > 1 else 1e-9
    span = max(max(means) - min(means), least)
    drawn = [end for row in rows if row.has_interval for end in (row.estimate.low, row.estimate.high)]
    ends = [min(max(end, min(means) - span), max(means) + span) for end in drawn]
    low, high = min(*means, *ends), max(*means, *ends)
    room = 0.04 * (high - low or least)
    return factor * (low - room), factor * (high + room)


def _draw_row(axes: Any, row: GainRow, limits: tuple[float, float], factor: int) -> None:
    """Draw the interval, cut at the limits with an arrow where it continues, and the mean's marker above it."""
    gain = row.estimate
    shape, tone = GAIN_MARKERS[gain.direction]
    if row.has_interval and gain.half:
        ends = factor * gain.low, factor * gain.high
        shown = max(ends[0], limits[0]), min(ends[1], limits[1])
        axes.plot(shown, (row.height,) * 2, color=make_colour(tone), linewidth=2.4 if row.is_mean else 1.2, clip_on=False)
        arrow: dict[str, Any] = {"color": make_colour(tone), "markersize": 4, "markeredgewidth": 0, "clip_on": False}
        if ends[0] < limits[0]:
            axes.plot(limits[0], row.height, marker="<", **arrow)
        if ends[1] > limits[1]:
            axes.plot(limits[1], row.height, marker=">", **arrow)
    style: dict[str, Any] = {"markersize": 9 if row.is_mean else 6, "markeredgewidth": 1.3, "color": make_colour(tone)}
    face = make_colour(tone if gain.sign else "paper")
    axes.plot(factor * gain.mean, row.height, marker=shape, markerfacecolor=face, clip_on=False, **style)


def _make_hits(axes: Any, rows: Sequence[GainRow], is_dense: bool, factor: int) -> list[Hit]:
    """Return the places to point at: rows of the whole width; where clients share a row, a square around each mark."""
    box, height = axes.get_window_extent(), axes.figure.bbox.height
    hits: list[Hit] = []
    for row in rows:
        x, y = (float(v) for v in axes.transData.transform((factor * row.estimate.mean, row.height)))
        if is_dense and not row.is_mean:
            hits.append((x - 5, height - y - 5, 10, 10, row.title))
        else:
            hits.append((box.x0, height - y - ROW / 2, box.width, ROW, row.title))
    return hits


def choose_marks(length: int, number: int, curves: int) -> list[int]:
    """Return the positions of a curve's markers among its points: the end, and before it places without others' markers.

    length: points of the curve; number: its place among the curves.
    """
    step = (length - 1) / MARKED
    return sorted({length - 1, *(round(step * (k + (number + 0.5) / curves)) for k in range(MARKED))})


def make_axes(width: float, height: float, left: float, right: float, bottom: float, top: float) -> tuple[Figure, Any]:
    """Return a figure of width x height pixels and its one pair of axes, with these margins in pixels."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    axes = figure.add_axes((left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height))
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=make_colour("rule"), linewidth=0.8, clip_on=False)
    axes.tick_params(length=0, pad=5, labelcolor=make_colour("muted"), labelsize=TEXT)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(make_colour("rule"))
    return figure, axes


def _draw_end_labels(axes: Any, ends: Sequence[tuple[str, int, float]]) -> None:
    """Draw the label of each line at its end, and move labels apart that would touch.

    ends: for each line its label, the number of its colour, and its last value.
    """
    axes.get_ylim()  # settles the limits, which the places below depend on
    height = axes.get_window_extent().height
    up = [
        float(axes.transAxes.inverted().transform(axes.transData.transform((axes.get_xlim()[1], y)))[1]) for _, _, y in ends
    ]
    order = sorted(range(len(ends)), key=lambda k: up[k])
    gap = LINE / height
    for k, place in zip(order, _spread_places([up[k] for k in order], gap), strict=True):
        label, slot, _ = ends[k]
        axes.annotate(
            fit_label(label),
            (1, place),
            xytext=(4, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center_baseline",
            fontsize=TEXT,
            color=make_colour(f"s{slot}"),
            annotation_clip=False,
        )


def _measure_label_room(labels: Iterable[str]) -> float:
    """Return the pixels to the right of the axes for the longest of some labels, as they are drawn."""
    return 10 + _CHARACTER * max(len(fit_label(label)) for label in labels)


def fit_label(label: str) -> str:
    """Return a label for a picture: a long one without its middle; the tables have the whole label."""
    short = label if len(label) <= LONGEST_LABEL else f"{label[: LONGEST_LABEL // 2]}…{label[-LONGEST_LABEL // 2 + 1 :]}"
    return short.replace("$", r"\$")  # a name with two of them is no formula


def _spread_places(places: Sequence[float], gap: float) -> list[float]:
    """Ascending places within 0 .. 1, moved as little as it takes to have a gap between neighbours; if all fit, within."""
    moved = list(places)
    if not moved:
        return moved
    for _ in range(200):
        for k in range(1, len(moved)):
            if (lack := gap - (moved[k] - moved[k - 1])) > 0:
                moved[k - 1], moved[k] = moved[k - 1] - lack / 2, moved[k] + lack / 2
        if gap * len(moved) <= 1:
            moved[-1] = min(moved[-1], 1 - gap / 2)
        moved[0] = max(moved[0], gap / 2)
    return moved


def _draw_columns(axes: Any, picture: Picture) -> list[Hit]:
    """Draw a column to point at for each row of the picture's table, with the text of that row."""
    box, height = axes.get_window_extent(), axes.figure.bbox.height
    centres = [float(axes.transData.transform((r, 0))[0]) for r in picture.listed]
    edges = [box.x0, *((a + b) / 2 for a, b in itertools.pairwise(centres)), box.x1]
    return [(a, height - box.y1, b - a, box.height, "") for a, b in itertools.pairwise(edges)]


def make_colour(name: str) -> str:
    """Return a colour for matplotlib that stands for a CSS variable of a page: "s1" .. "s8", "ink", "muted", ..."""
    return _TOKENS[name]


def make_inline_svg(figure: Figure, prefix: str, label: str, styles: Styles, hits: Sequence[Hit] = ()) -> str:
    """Return a figure as an <svg> element. prefix: keeps its ids apart from other figures'. label: its text alternative.

    The figure's artists are to be drawn without clipping: a clip path would be named by every line.
    """
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(file := io.StringIO(), format="svg")
    ET.register_namespace("", _SVG)
    root = ET.fromstring(file.getvalue())
    for child in [c for c in root if c.tag.endswith(("metadata", "defs"))]:
        root.remove(child)  # the first <defs> holds a style rule that would apply to the whole page
    _tidy_svg(root, prefix, styles)
    root.attrib |= {"role": "img", "aria-label": label, "class": "plot"}
    for *place, tip in hits:
        where = dict(zip(("x", "y", "width", "height"), map(_shorten_number, place), strict=True))
        rect = ET.SubElement(root, f"{{{_SVG}}}rect", where)
        if tip:
            ET.SubElement(rect, f"{{{_SVG}}}title").text = tip
    text = ET.tostring(root, encoding="unicode").replace(f' xmlns="{_SVG}"', "").replace(" />", "/>")
    return re.sub(r">\s+<", "><", re.sub(r"</?g ?/?>", "", text))  # no group says anything any more


def _tidy_svg(root: ET.Element, prefix: str, styles: Styles) -> None:
    """Take out what only costs bytes (unused ids, long decimals, fonts by name); styles become classes."""
    used = dict.fromkeys(e.attrib[_LINK][1:] for e in root.iter() if _LINK in e.attrib)
    ids = {id: f"{prefix}-{number}" for number, id in enumerate(used)}
    for element in root.iter():
        marks = dict(element.attrib)
        element.attrib.clear()
        if marks.get("id") in ids:
            element.set("id", ids[marks["id"]])
        if _LINK in marks:
            element.set("href", f"#{ids[marks[_LINK][1:]]}")
        if style := _replace_colours(re.sub(r"font-family:[^;]*;?\s*", "", marks.get("style", ""))):
            element.set("class", styles.setdefault(style, f"p{len(styles)}"))
        for key in ("viewBox", "d", "x", "y", "transform"):
            if key in marks and not re.match(r"rotate\(-?0[ ,]", marks[key]):
                element.set(key, _shorten_numbers(marks[key]))


def _shorten_numbers(text: str) -> str:
    """Coordinates to a tenth of a pixel. After a move (M) what follows is a line (L) even if it is not said, but not after a
    curve (C, Q)."""
    short = " ".join(re.sub(r"-?\d+\.\d+", lambda m: _shorten_number(float(m[0])), text).split())
    return short if re.search("[CQ]", short) else short.replace(" L ", " ")


def _shorten_number(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def _replace_colours(text: str) -> str:
    return _TOKEN.sub(lambda m: f"var(--{_NAMES[int(m[1], 16)]})", text)
