"""A matplotlib figure as inline SVG: real text in the page's font, colours that follow its scheme, tips to point at."""

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure

SLOTS = 8
_NAMES = [*(f"s{k}" for k in range(1, SLOTS + 1)), "ink", "muted", "rule", "gain", "harm", "paper"]
_TOKENS = {name: f"#fe01{number:02x}" for number, name in enumerate(_NAMES)}  # colours that nothing else has
_SVG, _LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"


@dataclass(frozen=True)
class Hit:
    """A rectangle to point at, in pixels from the figure's upper left corner, and the text that it then shows."""

    x: float
    y: float
    width: float
    height: float
    text: str


Styles = dict[str, str]
"""CSS declarations -> the class that has them; filled as figures are drawn, so that equal styles share a class."""


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
    for hit in hits:
        where = {k: _shorten_number(getattr(hit, k)) for k in ("x", "y", "width", "height")}
        rect = ET.SubElement(root, f"{{{_SVG}}}rect", where)
        if hit.text:
            ET.SubElement(rect, f"{{{_SVG}}}title").text = hit.text
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
    for name, token in _TOKENS.items():
        text = text.replace(token, f"var(--{name})")
    return text
