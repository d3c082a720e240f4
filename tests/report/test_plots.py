"""The picture of gains: its shapes, its range, and curves that lie on each other."""

import re

import pandas as pd
import pytest

from fedmutual.report.curves import Curve, Picture
from fedmutual.report.plots import GainRow, choose_marks, draw_curves, draw_gains, find_limits
from fedmutual.results.estimate import Estimate
from fedmutual.results.gains import Gains


def gains(clients):
    """Client -> its gain in each seed."""
    return Gains([(s, c, 1, 0.5 + g, 0.5, 100) for c, by_seed in clients.items() for s, g in enumerate(by_seed)])


def count_markers(svg, styles):
    """(stroke, fill) of the markers -> how many there are."""
    names = {name: re.findall(r"(?:stroke|fill): ([^;]*)", style) for style, name in styles.items()}
    markers = [names[name] for name in re.findall(r'<use [^>]*?class="(\w+)"', svg)]
    marks = [(colours[1], colours[0]) for colours in markers if len(colours) > 1]
    return {mark: marks.count(mark) for mark in set(marks)}


def test_each_client_s_marker_tells_gain_or_harm_and_whether_it_is_certain():
    """A client gains for certain, one loses for certain, one may gain, one is equal; the mean of all may be chance."""
    client_gains = gains({"a": (0.1, 0.11, 0.12), "b": (-0.2, -0.21, -0.2), "c": (0.1, -0.05, 0.1), "d": (0, 0, 0)})
    styles = {}
    svg = draw_gains([("FML", client_gains)], "p", styles)
    gain, harm, muted, paper = (f"var(--{name})" for name in ("gain", "harm", "muted", "paper"))
    assert count_markers(svg, styles) == {
        (gain, gain): 1,
        (harm, harm): 1,
        (gain, paper): 1,
        (muted, paper): 1,
        (harm, paper): 1,
    }
    assert svg.count("<title>") == 5
    assert "seed 2: +12.00 points" in svg


def test_many_clients_of_a_method_share_a_row():
    few, many = (draw_gains([("FML", gains({str(k): (0.1, 0.2) for k in range(n)}))], "p", {}) for n in (20, 200))
    heights = [float(re.search(r'viewBox="0 0 \S+ (\S+)"', svg)[1]) for svg in (few, many)]
    assert heights[1] < heights[0] < 350  # a row for the mean, and four lines of marks
    assert many.count("<title>") == 201


@pytest.mark.parametrize(
    ("means", "half", "limits"),
    [
        ((0.1, 0.3), 0.01, (-1.24, 32.24)),  # 0 to 31 points, and 4 % of them on either side
        ((0.1, 0.3), 9.0, (-33.6, 63.6)),  # the means' range is 0 to 30: intervals are cut 30 points beyond
    ],
)
def test_the_axis_shows_all_means_and_cuts_endless_intervals(means, half, limits):
    rows = [GainRow("", 0, Estimate(mean, half, 3, "seeds"), "") for mean in means]
    assert find_limits(rows) == pytest.approx(limits)


def test_an_interval_that_is_not_drawn_widens_no_axis():
    rows = [GainRow("", 0, Estimate(mean, 9.0, 3, "seeds"), "", has_interval=False) for mean in (0.1, 0.3)]
    assert find_limits(rows) == pytest.approx((-1.2, 31.2))


def test_curves_that_lie_on_each_other_differ_in_dash_and_markers_and_have_their_labels():
    values = pd.DataFrame(0.5, index=range(1, 21), columns=[0])
    curves = tuple(Curve(label, k, 0, values) for k, label in enumerate(("A", "B", "C", "D"), 1))
    styles = {}
    svg = draw_curves(Picture("p", "Title", True, curves), "p", styles)
    lines = [style for style in styles if "stroke: var(--s" in style and "stroke-width" in style and "fill: none" in style]
    dashes = [re.search(r"stroke-dasharray: ([^;]*)", style) for style in lines]
    assert len(lines) == 4
    assert len({match and match[1] for match in dashes}) == 4
    assert all(f">{label}</text>" in svg for label in "ABCD")
    places = [set(choose_marks(20, k, 4)) - {19} for k in range(4)]
    assert all(not a & b for k, a in enumerate(places) for b in places[:k])


def test_the_labels_of_many_curves_stay_within_the_picture():
    """Thirty curves that end at one height need more lines of text than the usual height of a picture."""
    values = pd.DataFrame(0.5, index=range(1, 4), columns=[0])
    curves = tuple(Curve(f"method {k}", k % 8 + 1, 0, values) for k in range(30))
    svg = draw_curves(Picture("p", "Title", True, curves), "p", {})
    height = float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[1])
    labels = [float(y) for y in re.findall(r'<text[^>]* y="(-?[\d.]+)">method \d+</text>', svg)]
    assert len(labels) == 30
    assert 0 < min(labels) < max(labels) < height
