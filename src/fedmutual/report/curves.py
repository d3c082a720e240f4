"""Learning curves: a method's numbers after each evaluation, as the mean over seeds and the range of the seeds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, TypeVar

import pandas as pd

from fedmutual.report.cells import Column, PageTable, TableCell, format_csv
from fedmutual.report.comparison import Method, RunComparison, Use
from fedmutual.report.domains import ACC, TRANSFER_MEASURES, DomainMeasure
from fedmutual.report.scale import MetricScale
from fedmutual.report.svg import SLOTS
from fedmutual.report.text import format_number
from fedmutual.rundir.recorded_run import RecordedRun
from fedmutual.rundir.schema import Evaluation

Number = Callable[[RecordedRun, Evaluation], float | None]
DRAWN, LISTED = (
    100,
    40,
)  # the most points of a line, and the most rows of a table and values under the pointer; the CSV has all rounds
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


@dataclass(frozen=True)
class Curve:
    """A line of a picture: one number of a method, such as an accuracy or a loss term, over the rounds.

    `label` is the text of the legend. `points` are sorted by round, and `seeds` is the number of runs that they are means
    of.
    """

    label: str
    slot: int  # 1 .. SLOTS: its colour and its mark
    style: int  # its place among the models, or loss terms, of its method; markers of all but the first are hollow
    points: tuple[Point, ...]
    seeds: int
    runs: tuple[tuple[int, dict[int, float]], ...]  # (seed, round -> value), for the CSV
    method: str = ""  # the label of the method that it is of


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
    who = "nodes" if comparison.domains else "clients"
    drawn.append(Picture("loss", f"Training loss, mean over {who}", False, tuple(losses)))
    drawn.append(Picture("mutual", f"Mutual loss: what peers teach, mean over {who}", False, tuple(mutual)))
    drawn.append(Picture("shares", f"Mutual steps projected so far, %, mean over {who}", True, tuple(shares)))
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
    curves = []
    for curve in picture.curves:
        if steps := paces[curve.method]:
            runs = tuple((seed, {r * steps: v for r, v in values.items()}) for seed, values in curve.runs)
            points = tuple(p._replace(round=p.round * steps) for p in curve.points)
            curves.append(replace(curve, points=points, runs=runs))
    return replace(picture, curves=tuple(curves), unit="local step")


def _make_client_pictures(comparison: RunComparison, taken: Mapping[str, int]) -> list[Picture]:
    def shared(run: RecordedRun, evaluation: Evaluation) -> float | None:
        score = evaluation.find("global", "test")
        return score.value if score else None

    def summarise_clients(pick: Callable[[list[float]], float]) -> tuple[Curve, ...]:
        uses = [(style, use) for m in comparison.methods for style, use in enumerate(m.uses)]
        return tuple(
            _make_one_curve(u.method, u.label, taken[u.method.label], style, _read_own_score(u, pick)) for style, u in uses
        )

    title, scale = comparison.metric.title, comparison.scale
    is_percent = comparison.metric.is_fraction
    worst = min if comparison.metric.is_higher_better else max
    tests = tuple(_make_one_curve(m, m.label, taken[m.label], 0, shared) for m in comparison.methods)
    return [
        Picture("global", f"Shared model on the test set: {title}{scale.head}", is_percent, tests),
        Picture(
            "personal",
            f"Client's model on own validation data, mean: {title}{scale.head}",
            is_percent,
            summarise_clients(fmean),
        ),
        Picture(
            "worst",
            f"Worst client's model on own validation data: {title}{scale.head}",
            is_percent,
            summarise_clients(worst),
        ),
    ]


def _make_domain_pictures(comparison: RunComparison, taken: Mapping[str, int]) -> list[Picture]:
    def over(measure: DomainMeasure, pick: Callable[[list[float]], float] = fmean) -> tuple[Curve, ...]:
        return tuple(
            _make_one_curve(m, m.label, taken[m.label], 0, _read_own_score(m.uses[0], pick, measure.data))
            for m in comparison.methods
        )

    means = [Picture(m.key, f"{m.name}: {m.rows}, mean over nodes, %", True, over(m)) for m in TRANSFER_MEASURES]
    return [*means, Picture("worst", f"{ACC.name} of the worst node, %", True, over(ACC, min))]


def _read_own_score(use: Use, pick: Callable[[list[float]], float], data: str = "validation") -> Number:
    """A model on rows that are the clients' own: their mean, or `pick` of them."""

    def number(run: RecordedRun, evaluation: Evaluation) -> float | None:
        scores = [s.value for s in run.get_scores(evaluation, use.model, data).values()]
        return pick(scores) if scores else None

    return number


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
    """Return at most `most` items at even distances, with the first and the last."""
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
    runs = [(c.label, seed, values) for c in picture.curves for seed, values in c.runs]
    return format_csv(
        [picture.unit.replace(" ", "_"), *(f"{label}, seed {seed}" for label, seed, _ in runs)],
        [[round, *(f"{values[round]:.4f}" if round in values else "" for _, _, values in runs)] for round in rounds],
    )


def average_over_seeds(runs: Iterable[tuple[int, Mapping[int, float]]]) -> tuple[Point, ...]:
    """Return a point for each round that all runs have. runs: (seed, round -> value)."""
    values = pd.DataFrame(dict(runs)).dropna().sort_index()  # a row for each round, a column for each seed
    return tuple(Point(int(round), fmean(row), min(row), max(row)) for round, *row in values.itertuples(name=None))


def make_curve(label: str, slot: int, style: int, runs: Iterable[tuple[int, dict[int, float]]], method: str = "") -> Curve:
    """Return a curve of the runs with values. runs: (seed, round -> value)."""
    runs_with_values = tuple((seed, values) for seed, values in runs if values)
    points = average_over_seeds(runs_with_values)
    return Curve(label, slot, style, points, len(runs_with_values), runs_with_values, method)


def _make_one_curve(method: Method, label: str, slot: int, style: int, number: Number) -> Curve:
    runs = (
        (run.seed, {e.round: value for e in run.evaluations if (value := number(run, e)) is not None})
        for run in method.counted
    )
    return make_curve(label, slot, style, runs, method.label)


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
        runs = ((seed, of_seed.droplevel(["term", "seed"]).to_dict()) for seed, of_seed in of_term.groupby("seed"))
        curves.append(make_curve(label, slot, style, runs, method.label))
    return curves
