"""Learning curves: a method's numbers after each evaluation, as the mean over seeds and the range of the seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple, TypeVar

import pandas as pd

from fedmutual.report.cells import Column, PageTable, TableCell, format_csv
from fedmutual.report.domains import ACC, TRANSFER_MEASURES, DomainMeasure
from fedmutual.report.measures import Pick, average_by_round
from fedmutual.report.svg import SLOTS
from fedmutual.results.comparison import Method, RunComparison, Use
from fedmutual.results.scale import MetricScale
from fedmutual.results.text import format_number

DRAWN = 100  # the most points of a line
LISTED = 40  # the most rows of a table, and the most values under the pointer; the CSV has all rounds
TERMS = {"meme": "shared", "kl": "KL", "ce": "CE"}  # the name of a loss term on the page
MUTUAL = ("kl", "ce", "digest")  # the terms of learning from peers, which have another size than losses on data
SHARE = "projected"  # recorded with the losses, but no loss: a share of steps
STEEP = 100  # losses that fall by a larger factor are drawn on a log scale


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

    @property
    def seeds(self) -> int:
        """The number of runs."""
        return len(self.values.columns)


@dataclass(frozen=True)
class Picture:
    """Curves with common axes: the horizontal axis has rounds or local steps (`unit`), the vertical axis one measure.

    `id` is the picture's name in the page, and `title` is its heading. `percent`: whether values are fractions that are
    drawn in percent.
    """

    id: str
    title: str
    percent: bool
    curves: tuple[Curve, ...]
    unit: str = "round"  # what the curves go over
    steps: int = 1  # local steps of a round: where there are several, they are an axis of their own

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
    """Return the pictures of a comparison; a picture without a curve is left out."""
    taken = assign_slots(comparison.methods)
    drawn = _make_domain_pictures(comparison, taken) if comparison.domains else _make_client_pictures(comparison, taken)
    losses = [
        c
        for m in comparison.methods
        for c in _make_loss_curves(m, taken[m.label], lambda term: term not in (*MUTUAL, SHARE))
    ]
    mutual = [c for m in comparison.methods for c in _make_loss_curves(m, taken[m.label], lambda term: term in MUTUAL)]
    shares = [c for m in comparison.methods for c in _make_loss_curves(m, taken[m.label], lambda term: term == SHARE)]
    noun = "nodes" if comparison.domains else "clients"
    drawn.append(Picture("loss", f"Training loss, mean over {noun}", False, tuple(losses)))
    drawn.append(Picture("mutual", f"Mutual loss: what peers teach, mean over {noun}", False, tuple(mutual)))
    drawn.append(Picture("shares", f"Mutual steps projected so far, %, mean over {noun}", True, tuple(shares)))
    drawn = [replace(p, curves=tuple(c for c in p.curves if c.points)) for p in drawn]
    return _add_step_pictures([p for p in drawn if p.curves], {m.label: m.runs[0].local_steps for m in comparison.methods})


def _add_step_pictures(over_rounds: list[Picture], paces: Mapping[str, int | None]) -> list[Picture]:
    """Return the pictures with an axis of local steps, or additional pictures over local steps.

    If all methods take the same number of steps in a round, each picture gets a second axis. If the numbers differ, the
    pictures are over local steps, and the first is also drawn over rounds. If a method counts rounds in epochs, the pictures
    are over rounds, and the first is also drawn over local steps.

    paces: label of a method -> its local steps in a round; None: its rounds are counted in epochs.
    """
    if len(set(paces.values())) == 1:
        return [replace(p, steps=next(iter(paces.values())) or 1) for p in over_rounds]
    over_steps = [_stretch_picture(p, paces) for p in over_rounds]
    if None not in paces.values():
        return [
            *over_steps[:1],
            replace(over_rounds[0], id=f"{over_rounds[0].id}-rounds", title=f"{over_rounds[0].title}; over rounds"),
            *over_steps[1:],
        ]
    beside = replace(over_steps[0], id=f"{over_steps[0].id}-steps", title=f"{over_steps[0].title}; over local steps")
    return [over_rounds[0], *([beside] if beside.curves else []), *over_rounds[1:]]


def _stretch_picture(picture: Picture, paces: Mapping[str, int | None]) -> Picture:
    """Return a picture over local steps, of the methods that count rounds in local steps."""
    curves = tuple(
        replace(curve, values=curve.values.set_axis(curve.values.index * steps))
        for curve in picture.curves
        if (steps := paces[curve.method])
    )
    return replace(picture, curves=curves, unit="local step")


def _make_client_pictures(comparison: RunComparison, taken: Mapping[str, int]) -> list[Picture]:
    def make_client_curve(use: Use, style: int, pick: Pick) -> Curve:
        values = average_by_round(use.method.select_scores(use.model, "validation"), pick)
        return Curve(use.label, taken[use.method.label], style, values, use.method.label)

    title, scale = comparison.metric.title, comparison.scale
    ends = (
        ("personal", "Client's model on own validation data, mean", fmean),
        ("worst", "Worst client's model on own validation data", comparison.uses[0].worst),
    )
    tests = {m: average_by_round(m.select_scores("global", "test", of_clients=False)) for m in comparison.methods}
    shared = tuple(Curve(m.label, taken[m.label], 0, values, m.label) for m, values in tests.items())
    pictures = [("global", "Shared model on the test set", shared)]
    for id, name, pick in ends:
        uses = [(use, style) for m in comparison.methods for style, use in enumerate(m.uses)]
        pictures.append((id, name, tuple(make_client_curve(use, style, pick) for use, style in uses)))
    return [
        Picture(id, f"{name}: {title}{scale.head}", comparison.metric.is_fraction, curves) for id, name, curves in pictures
    ]


def _make_domain_pictures(comparison: RunComparison, taken: Mapping[str, int]) -> list[Picture]:
    def make_curves(measure: DomainMeasure, pick: Pick = fmean) -> tuple[Curve, ...]:
        scores = {m: m.select_scores(m.uses[0].model, measure.data) for m in comparison.methods}
        return tuple(Curve(m.label, taken[m.label], 0, average_by_round(rows, pick), m.label) for m, rows in scores.items())

    means = [Picture(m.key, f"{m.name}: {m.rows}, mean over nodes, %", True, make_curves(m)) for m in TRANSFER_MEASURES]
    return [*means, Picture("worst", f"{ACC.name} of the worst node, %", True, make_curves(ACC, "min"))]


def assign_slots(methods: Sequence[Method]) -> dict[str, int]:
    """Return label -> number of colour and mark: the number of the method's role if it is free, else a free number."""
    taken: dict[str, int] = {}
    for method in methods:
        if method.role.colour and (slot := (method.role.colour - 1) % SLOTS + 1) not in taken.values():
            taken[method.label] = slot
    for method in methods:
        if method.label not in taken:
            free = (s for s in reversed(range(1, SLOTS + 1)) if s not in taken.values())
            taken[method.label] = next(free, len(taken) % SLOTS + 1)
    return taken


T = TypeVar("T")


def thin_out(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` items at even distances, with the first and the last. most: 2 or more."""
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def make_data_table(picture: Picture, scale: MetricScale) -> PageTable:
    """Return the table of a picture's numbers, round by round."""
    at = {c.label: {p.round: p for p in c.points} for c in picture.curves}
    rounds, shown_rounds = picture.rounds, picture.listed
    rows = []
    for round in shown_rounds:
        points = [at[c.label].get(round) for c in picture.curves]
        texts = [(scale.format_value(p.mean) if picture.percent else format_number(p.mean, 3)) if p else "" for p in points]
        rows.append((TableCell(str(round)), *map(TableCell, texts)))
    some = "" if len(shown_rounds) == len(rounds) else f"; {len(shown_rounds)} of {len(rounds)} evaluations, the CSV has all"
    return PageTable(
        id=f"{picture.id}-data",
        caption=f"{picture.title}; means over seeds{some}",
        columns=(Column(picture.unit.capitalize()), *(Column(c.label) for c in picture.curves)),
        rows=tuple(rows),
        csv=_make_csv(picture, rounds),
    )


def _make_csv(picture: Picture, rounds: Sequence[int]) -> str:
    header = [f"{c.label}, seed {seed}" for c in picture.curves for seed in c.values.columns]
    values = pd.concat([c.values for c in picture.curves], axis=1).reindex(rounds)
    lines = [[round, *("" if v != v else f"{v:.4f}" for v in row)] for round, *row in values.itertuples(name=None)]
    return format_csv([picture.unit.replace(" ", "_"), *header], lines)


def make_points(values: pd.DataFrame) -> tuple[Point, ...]:
    """Return a point for each round that all runs have. values: a row for each round, a column for each seed."""
    rows = values.dropna().sort_index().itertuples(name=None)
    return tuple(Point(int(round), fmean(row), min(row), max(row)) for round, *row in rows)


def _make_loss_curves(method: Method, slot: int, wanted: Callable[[str], bool]) -> list[Curve]:
    """Return a curve for each loss term: the mean over the clients that took part in the round."""
    rows = [
        (term, run.seed, evaluation.round, loss)
        for run in method.counted
        for evaluation in run.evaluations
        for losses in evaluation.train.values()
        for term, loss in losses.items()
        if wanted(term)
    ]
    losses = pd.DataFrame(rows, columns=["term", "seed", "round", "loss"])
    means = losses.groupby(["term", "seed", "round"], sort=False)["loss"].mean()
    curves = []
    for style, (term, of_term) in enumerate(means.groupby("term", sort=False)):
        is_plain = losses["term"].nunique() == 1 and term not in MUTUAL
        label = method.label if is_plain else f"{method.label}, {TERMS.get(str(term), term)}"
        curves.append(Curve(label, slot, style, of_term.droplevel("term").unstack("seed"), method.label))
    return curves
