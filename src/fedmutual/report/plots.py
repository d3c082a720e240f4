"""Draw curves over rounds with matplotlib, and return figures as inline SVG: one nominal pixel a point.

The SVG has real text in the page's font, colours that follow its scheme, and tips to point at.
"""

import io
import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fedmutual.report.curves import BYTES, DRAWN, SLOTS, Picture, thin_out
from fedmutual.results.scale import format_size
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
    return 10 + 6.2 * max(len(fit_label(label)) for label in labels)


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
