"""Learning curves: a method's numbers after each evaluation, as the mean over seeds and the range of the seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

import pandas as pd

from fedmutual.report.cells import Column, PageTable, TableCell, make_table
from fedmutual.report.columns import DOMAIN_ROWS
from fedmutual.report.measures import Pick, average_by_round
from fedmutual.results.comparison import Line, RunComparison
from fedmutual.results.scale import MetricScale, format_number
from fedmutual.rundir.schema import TRANSFER_DATA

SLOTS = 8  # colours and marks
DRAWN = 100  # the most points of a line
LISTED = 40  # the most rows of a table, and the most values under the pointer; the CSV has all rounds
TERMS = {"meme": "shared", "kl": "KL", "ce": "CE"}  # the name of a loss term on the page
MUTUAL = ("kl", "ce", "digest")  # the terms of learning from peers, which have another size than losses on data
SHARE = "projected"  # recorded with the losses, but no loss: a share of steps
BYTES = "bytes sent"  # what curves go over in place of rounds
STEEP = 100  # losses that fall by a larger factor are drawn on a log scale

T = TypeVar("T")


class Point(NamedTuple):
    """A value of a method after a round: the mean over the method's seeds, and the lowest and the highest seed.

    Accuracies and other shares are fractions in [0, 1]; losses and other metrics have their own unit.
    """

    round: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Curve:
    """A line of a picture: one number of a method, such as an accuracy or a loss term, over the rounds.

    `label` is the text of the legend.
    """

    label: str
    slot: int  # 1 .. SLOTS: its colour and its mark
    style: int  # its place among the models, or loss terms, of its method; markers of all but the first are hollow
    values: pd.DataFrame  # a row for each round, a column for each seed
    method: str = ""  # the label of the method that it is of

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """The means over seeds after the rounds that all runs have."""
        return make_points(self.values)


@dataclass(frozen=True)
class Picture:
    """Curves with common axes: the horizontal axis has rounds, local steps or bytes (`unit`), the vertical axis one measure.

    `id` is the picture's name in the page, and `title` is its heading. `percent`: whether values are fractions that are
    drawn in percent.
    """

    id: str
    title: str
    percent: bool
    curves: tuple[Curve, ...]
    unit: str = "round"  # what the curves go over

    @property
    def log(self) -> bool:
        """Whether heights are so far apart that they are drawn on a log scale."""
        heights = [p.mean for c in self.curves for p in c.points]
        return not self.percent and min(heights) > 0 and max(heights) > STEEP * min(heights)

    @property
    def rounds(self) -> list[int]:
        """All rounds at which a curve has a point."""
        return sorted({p.round for c in self.curves for p in c.points})

    @property
    def listed(self) -> list[int]:
        """The rounds that the table lists and that show their numbers under the pointer."""
        return thin_out(self.rounds, LISTED)


def make_pictures(comparison: RunComparison) -> list[Picture]:
    """Return the pictures of a comparison, that over bytes last; a picture without a curve is left out."""
    slots = assign_slots(comparison.methods)
    pictures = _make_domain_pictures(comparison, slots) if comparison.domains else _make_client_pictures(comparison, slots)
    losses = {m: _average_losses(m) for m in comparison.methods}
    noun = "nodes" if comparison.domains else "clients"
    of_losses: tuple[tuple[str, str, Callable[[str], bool]], ...] = (
        ("loss", f"Training loss, mean over {noun}", lambda term: term not in (*MUTUAL, SHARE)),
        ("mutual", f"Mutual loss: what peers teach, mean over {noun}", lambda term: term in MUTUAL),
        ("shares", f"Mutual steps projected so far, %, mean over {noun}", lambda term: term == SHARE),
    )
    for id, title, wanted in of_losses:
        curves = [c for m, terms in losses.items() for c in _make_loss_curves(m, slots[m.method], terms, wanted)]
        pictures.append(Picture(id, title, id == "shares", tuple(curves)))
    pictures = [replace(p, curves=tuple(c for c in p.curves if c.points)) for p in pictures]
    pictures = [p for p in pictures if p.curves]
    sent = {m.method: _count_sent(m) for m in comparison.methods if m.counted and comparison.domains}
    over_bytes = [_replace_rounds(picture, BYTES, sent) for picture in pictures if picture.id == "acc"]
    title = "{}; over the bytes that a node has sent, mean over nodes"
    over_bytes = [replace(p, id="costs", title=title.format(p.title)) for p in over_bytes if p.curves]
    per_round = {m.method: m.runs[0].settings.local_steps for m in comparison.methods}
    if None not in per_round.values() and len({*per_round.values()}) > 1:  # all count local steps, with different numbers
        rounds = pd.Series(range(max(run.reached for run in comparison.runs) + 1))
        steps = {label: rounds * number for label, number in per_round.items()}
        pictures = [_replace_rounds(picture, "local step", steps) for picture in pictures]
    return [*pictures, *over_bytes]


def _replace_rounds(picture: Picture, unit: str, places: Mapping[str, "pd.Series[int]"]) -> Picture:
    """Return a picture over local steps or bytes in place of rounds; a method that has none of them is left out.

    places: label of a method -> round -> the round's place on the horizontal axis. Of scores at one place the last is drawn.
    """
    curves = tuple(
        replace(c, values=c.values.set_axis(places[c.method].loc[c.values.index]).groupby(level=0).last())
        for c in picture.curves
        if places[c.method].any()
    )
    return replace(picture, unit=unit, curves=curves)


def _count_sent(method: Line) -> "pd.Series[int]":
    """Return round -> the bytes that a client has sent up to its end: the mean over clients and seeds, rounded."""
    rounds = range(max(run.reached for run in method.counted) + 1)
    sums = []
    for run in method.counted:
        clients = len(run.partition.clients or set(run.work["client"])) or 1  # a server knows no partition
        by_round = pd.Series(run.work["up"]).groupby(run.work["round"]).sum()
        sums.append(by_round.reindex(rounds, fill_value=0).cumsum() / clients)
    return pd.DataFrame(sums, columns=rounds).mean().round().astype(int)


def _make_client_pictures(comparison: RunComparison, slots: Mapping[str, int]) -> list[Picture]:
    def make_own_curve(line: Line, pick: Pick) -> Curve:
        style = line.models.index(line.model) if line.model else 0
        values = average_by_round(line.select("validation"), pick)
        return Curve(line.label, slots[line.method], style, values, line.method)

    title, scale, lines = comparison.metric.title, comparison.scale, comparison.lines
    tests = {m: average_by_round(m.select("test", model="global", of_clients=False)) for m in comparison.methods}
    shared = [Curve(m.method, slots[m.method], 0, values, m.method) for m, values in tests.items()]
    own, worst = ([make_own_curve(line, pick) for line in lines] for pick in (fmean, lines[0].worst))
    return [
        Picture(id, f"{name}: {title}{scale.head}", comparison.metric.is_fraction, tuple(curves))
        for id, name, curves in (
            ("global", "Shared model on the test set", shared),
            ("personal", "Client's model on own validation data, mean", own),
            ("worst", "Worst client's model on own validation data", worst),
        )
    ]


def _make_domain_pictures(comparison: RunComparison, slots: Mapping[str, int]) -> list[Picture]:
    def make_curves(measure: str, pick: Pick = fmean) -> tuple[Curve, ...]:
        values = {m: average_by_round(m.select(TRANSFER_DATA[measure]), pick) for m in comparison.methods}
        return tuple(Curve(m.method, slots[m.method], 0, of_method, m.method) for m, of_method in values.items())

    titles = {key: f"{key.upper()}: {rows}, mean over nodes, %" for key, rows in DOMAIN_ROWS.items()}
    means = [Picture(key, title, True, make_curves(key)) for key, title in titles.items()]
    return [*means, Picture("worst", "ACC of the worst node, %", True, make_curves("acc", min))]


def assign_slots(methods: Sequence[Line]) -> dict[str, int]:
    """Return label -> number of colour and mark: the number of the method's role if it is free, else a free number."""
    taken: dict[str, int] = {}
    for method in methods:
        if method.role.colour and (slot := (method.role.colour - 1) % SLOTS + 1) not in taken.values():
            taken[method.method] = slot
    for method in methods:
        if method.method not in taken:
            free = (s for s in reversed(range(1, SLOTS + 1)) if s not in taken.values())
            taken[method.method] = next(free, len(taken) % SLOTS + 1)
    return taken


def thin_out(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items at even distances, with the first and the last. most: 2 or more."""
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def make_data_table(picture: Picture, scale: MetricScale) -> PageTable:
    """Return the table of a picture's numbers, round by round; the CSV has the number of each seed."""

    def form(mean: float | None) -> TableCell:
        if mean is None:
            return TableCell("")
        return TableCell(scale.format_value(mean) if picture.percent else format_number(mean, 3))

    unit, rounds, listed = picture.unit, picture.rounds, picture.listed
    shown, full = [Column(unit.capitalize())], [Column("", keys=(unit.replace(" ", "_"),))]
    for curve in picture.curves:
        means = {p.round: p.mean for p in curve.points}
        shown.append(Column(curve.label, read=means.get, form=form))
        keys = tuple(f"{curve.label}, seed {seed}" for seed in curve.values.columns)
        texts = curve.values.reindex(rounds).map(lambda v: "" if v != v else f"{v:.4f}")
        full.append(Column("", keys=keys, numbers=partial(lambda texts, round: texts.loc[round].tolist(), texts)))
    some = "" if len(listed) == len(rounds) else f"; {len(listed)} of {len(rounds)} evaluations, the CSV has all"
    return make_table(f"{picture.id}-data", f"{picture.title}; means over seeds{some}", shown, listed, rounds, full)


def make_points(values: pd.DataFrame) -> tuple[Point, ...]:
    """Return a point for each round that all runs have. values: a row for each round, a column for each seed."""
    rows = values.dropna().sort_index().itertuples(name=None)
    return tuple(Point(int(round), fmean(row), min(row), max(row)) for round, *row in rows)


def _average_losses(method: Line) -> dict[str, pd.DataFrame]:
    """Return loss term -> its mean over the clients that took part in a round: a row for each round, a column a seed."""
    terms: dict[str, dict[int, dict[int, float]]] = {}
    for run in method.counted:
        for evaluation in run.evaluations:
            losses: dict[str, list[float]] = {}
            for of_client in evaluation.train.values():
                for term, loss in of_client.items():
                    losses.setdefault(term, []).append(loss)
            for term, values in losses.items():
                terms.setdefault(term, {}).setdefault(run.seed, {})[evaluation.round] = sum(values) / len(values)
    return {term: pd.DataFrame(by_seed) for term, by_seed in terms.items()}


def _make_loss_curves(
    method: Line, slot: int, losses: Mapping[str, pd.DataFrame], wanted: Callable[[str], Any]
) -> list[Curve]:
    terms = [term for term in losses if wanted(term)]
    is_plain = len(terms) == 1 and terms[0] not in MUTUAL
    labels = [method.method if is_plain else f"{method.method}, {TERMS.get(term, term)}" for term in terms]
    return [
        Curve(label, slot, style, losses[term], method.method)
        for style, (label, term) in enumerate(zip(labels, terms, strict=True))
    ]
