"""What moves over the rounds: a method's numbers after each evaluation, as a mean over seeds with their range."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple, TypeVar

from fedmutual.report.cells import Cell, Column, Table, csv_text
from fedmutual.report.comparison import NAMES, Comparison, Method, Use
from fedmutual.report.lines import Evaluation
from fedmutual.report.runs import Run
from fedmutual.report.svg import SLOTS
from fedmutual.report.text import fixed, percent

Number = Callable[[Run, Evaluation], float | None]
DRAWN, LISTED = 100, 40  # points of a line, rows of a table (and what is pointed at): the CSV has all rounds
TERMS = {"meme": "shared"}  # what the page calls a loss term


class Point(NamedTuple):
    """A method after a round: the mean over its seeds, the lowest and the highest of them."""

    round: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """A line of a picture."""

    label: str
    slot: int  # 1 .. SLOTS: its colour and its mark
    style: int  # 0, 1, 2: solid, dashed, dotted
    points: tuple[Point, ...]
    seeds: int
    runs: tuple[tuple[int, dict[int, float]], ...]  # (seed, round -> value), for the CSV


@dataclass(frozen=True)
class Picture:
    """Curves that share their axes."""

    id: str
    title: str
    percent: bool
    curves: tuple[Curve, ...]

    @property
    def rounds(self) -> list[int]:
        """All rounds that a curve has a point at."""
        return sorted({p.round for c in self.curves for p in c.points})

    @property
    def listed(self) -> list[int]:
        """The rounds that the table lists, and that can be pointed at."""
        return thin(self.rounds, LISTED)


def pictures(comparison: Comparison) -> list[Picture]:
    """The curves of a comparison; a picture without a curve is left out."""

    def shared(run: Run, evaluation: Evaluation) -> float | None:
        score = evaluation.find("global", "test")
        return score.accuracy if score else None

    taken = slots(comparison.methods)

    def own(pick: Callable[[list[float]], float]) -> tuple[Curve, ...]:
        uses = [(style, use) for m in comparison.methods for style, use in enumerate(m.uses)]
        return tuple(_curve(u.method, u.label, taken[u.method.label], style, _own(u, pick)) for style, u in uses)

    tests = tuple(_curve(m, m.label, taken[m.label], 0, shared) for m in comparison.methods)
    found = [
        Picture("global", "Shared model on the test set: accuracy, %", True, tests),
        Picture("personal", "Client's model on own validation data: mean accuracy, %", True, own(fmean)),
        Picture("worst", "The same for the worst client, %", True, own(min)),
    ]
    losses = tuple(c for m in comparison.methods for c in _losses(m, taken[m.label]))
    found.append(Picture("loss", "Training loss, mean over clients", False, losses))
    kept = [Picture(p.id, p.title, p.percent, tuple(c for c in p.curves if c.points)) for p in found]
    return [p for p in kept if p.curves]


def _own(use: Use, pick: Callable[[list[float]], float]) -> Number:
    """A model on the clients' own validation data: the clients' mean, or `pick` of them."""

    def number(run: Run, evaluation: Evaluation) -> float | None:
        scores = [s.accuracy for s in run.own(evaluation, use.model).values()]
        return pick(scores) if scores else None

    return number


def slots(methods: Sequence[Method]) -> dict[str, int]:
    """A colour and a mark for each method: always the same for the known ones, what is free for others."""
    taken: dict[str, int] = {}
    for method in methods:
        wanted = list(NAMES).index(method.algorithm) + 1 if method.algorithm in NAMES else SLOTS
        free = [wanted, *range(len(NAMES) + 1, SLOTS + 1), *range(1, SLOTS + 1)]
        taken[method.label] = next((s for s in free if s not in taken.values()), len(taken) % SLOTS + 1)
    return taken


T = TypeVar("T")


def thin(found: Sequence[T], most: int) -> list[T]:
    """At most so many, evenly over the rounds, the first and the last among them."""
    if len(found) <= most:
        return list(found)
    return [found[round(k * (len(found) - 1) / (most - 1))] for k in range(most)]


def data_table(picture: Picture, decimals: int) -> Table:
    """The numbers of a picture, round by round."""
    at = {c.label: {p.round: p for p in c.points} for c in picture.curves}
    rounds, kept = picture.rounds, picture.listed
    rows = []
    for round in kept:
        points = [at[c.label].get(round) for c in picture.curves]
        told = [(percent(p.mean, decimals) if picture.percent else fixed(p.mean, 3)) if p else "" for p in points]
        rows.append((Cell(str(round)), *map(Cell, told)))
    some = "" if len(kept) == len(rounds) else f"; {len(kept)} of {len(rounds)} evaluations, the CSV has all"
    return Table(
        id=f"{picture.id}-data",
        caption=f"{picture.title}; means over seeds{some}",
        columns=(Column("Round"), *(Column(c.label) for c in picture.curves)),
        rows=tuple(rows),
        csv=_csv(picture, rounds),
    )


def _csv(picture: Picture, rounds: Sequence[int]) -> str:
    runs = [(c.label, seed, values) for c in picture.curves for seed, values in c.runs]
    return csv_text(
        ["round", *(f"{label}, seed {seed}" for label, seed, _ in runs)],
        [[round, *(f"{values[round]:.4f}" if round in values else "" for _, _, values in runs)] for round in rounds],
    )


def _curve(method: Method, label: str, slot: int, style: int, number: Number) -> Curve:
    runs = [
        (run.seed, {e.round: value for e in run.evaluations if (value := number(run, e)) is not None})
        for run in method.counted
    ]
    runs = [(seed, values) for seed, values in runs if values]
    common = sorted(set.intersection(*(set(values) for _, values in runs))) if runs else []
    points = []
    for round in common:
        found = [values[round] for _, values in runs]
        points.append(Point(round, fmean(found), min(found), max(found)))
    return Curve(label, slot, style, tuple(points), len(runs), tuple(runs))


def _losses(method: Method, slot: int) -> list[Curve]:
    """A curve a loss term: the mean over the clients that took part in the round."""
    terms = list(dict.fromkeys(t for r in method.counted for e in r.evaluations for c in e.train.values() for t in c))

    def of(term: str) -> Number:
        def number(run: Run, evaluation: Evaluation) -> float | None:
            found = [losses[term] for losses in evaluation.train.values() if term in losses]
            return fmean(found) if found else None

        return number

    names = {t: method.label if len(terms) == 1 else f"{method.label}, {TERMS.get(t, t)}" for t in terms}
    return [_curve(method, names[t], slot, style, of(t)) for style, t in enumerate(terms)]
