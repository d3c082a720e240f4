"""The picture that answers: each client's gain over local-only training, method by method, with intervals."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from matplotlib.ticker import MaxNLocator

from fedmutual.report.plots import TEXT, WIDTH, Hit, Styles, fit_label, make_axes, make_colour, make_inline_svg
from fedmutual.results.estimate import SAME, Estimate
from fedmutual.results.gains import Gains
from fedmutual.results.scale import PERCENT, MetricScale

ROW = 13.0  # height of a client's row in pixels
MOST_ROWS = 44  # beyond so many rows all clients of a method share a row
AXIS = 40  # pixels below the rows
_SHAPES = {1: ("^", "gain"), -1: ("v", "harm"), 0: ("o", "muted")}  # direction of a gain -> marker, colour
_CHARACTER = 6.2  # pixels, on average


class GainRow(NamedTuple):
    """A row of the picture: a method's mean, or one of its clients; `height` counts rows from the top."""

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
    direction = (gain.mean > SAME) - (gain.mean < -SAME)
    shape, tone = _SHAPES[direction]
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
    """A row to point at, of the whole width; a square around a mark where clients share a row."""
    box, height = axes.get_window_extent(), axes.figure.bbox.height
    hits: list[Hit] = []
    for row in rows:
        x, y = (float(v) for v in axes.transData.transform((factor * row.estimate.mean, row.height)))
        if is_dense and not row.is_mean:
            hits.append((x - 5, height - y - 5, 10, 10, row.title))
        else:
            hits.append((box.x0, height - y - ROW / 2, box.width, ROW, row.title))
    return hits
