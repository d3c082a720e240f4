"""Judge a paper's claims by the stored runs: supported, contradicted, inconclusive, or too short; with p-values."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from fractions import Fraction
from statistics import fmean

import numpy as np
from scipy.stats import t

from fedmutual.results.estimate import LEVEL, SAME, Estimate, estimate
from fedmutual_papers import measures
from fedmutual_papers.experiment_files import Claim
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.measures import End

SUPPORTED, CONTRADICTED, INCONCLUSIVE = "supported", "contradicted", "inconclusive"
TOO_SHORT, DIVERGED, NOT_RUN = "too short", "diverged", "not run"
DECIDED = (SUPPORTED, CONTRADICTED)
LOOKS = (5, 10)  # the numbers of seeds, from 0 on, with which a claim is judged
SURE = 0.029  # the level of each look: of both together it is 0.05 (Pocock, Biometrika 64, 1977)
POWER = 0.8  # with which the smallest detectable difference would have been found
ROUNDED = 2.1e-5  # two differences of accuracies that were kept with 5 decimals each may differ by so much and be equal

DivergedRuns = Mapping[str, tuple[int, int]]
"""Arm -> (its runs in which a client diverged, all its runs); of those of a claim's arms alone that did diverge."""

Side = tuple[int, MeasuredCell, str, End]
"""A number of a claim: (+1, or -1 where it is taken off; the cell; the arm; the end)."""

Tails = tuple[float, float]
"""The one-sided p-values of the null hypotheses that a claim is wrong, and that its opposite is wrong."""


@dataclass(frozen=True)
class Line:
    """A claim in one cell, or for one client."""

    title: str
    values: dict[int, float]  # seed -> arm minus than, or their ratio
    difference: Estimate | None  # over seeds; None where it was not run, or has no such number
    grain: float  # by how much one example of the test set moves a value; 0.0 where it is not counted in examples
    verdict: str
    scale: str  # "shortened: ...", or ""
    share: float  # the smallest share of its own rounds that an arm of it ran for
    is_long: bool  # whether each arm has all its rounds, or curves that no longer rise
    length: tuple[Fraction, str]  # of its cell's rounds, and the changed keys
    numerics: frozenset[int]  # the numerics versions of its runs
    diverged: DivergedRuns

    @property
    def is_judged(self) -> bool:
        """Return whether the line has a difference, or lacks it because a client diverged."""
        return self.difference is not None or self.verdict == DIVERGED


@dataclass(frozen=True)
class Judgement:
    """A claim, judged under one reading."""

    claim: Claim
    reading: str  # the name of the reading; "" if the claim has one reading only
    lines: tuple[Line, ...]
    overall: Estimate | None  # over seeds: the mean over the lines with a difference, without `unpaired` and `other_lengths`
    unpaired: tuple[str, ...]  # titles of lines left out of the mean, because they lack the seeds of the others
    other_lengths: tuple[str, ...]  # titles of lines left out because they ran for another share of their rounds
    verdict: str  # of the mean, unless a line is certain of the opposite; or from the lines, for "every" and "most"
    p: float | None  # two-sided; None if no interval was judged, and of a fact of arithmetic
    diverged: DivergedRuns
    adjusted: float | None = None  # p after Holm's adjustment within the family
    part: str = ""  # the column of the table that is judged; "" for the whole table, and for other claims
    parts: int = 1  # the number of parts with which p is multiplied before Holm's adjustment
    first: "Judgement | None" = None  # the first look, where this is the second

    @property
    def run(self) -> tuple[Line, ...]:
        """Return the lines that have a difference."""
        return tuple(line for line in self.lines if line.difference is not None)

    @property
    def judged_lines(self) -> tuple[Line, ...]:
        """Return the lines that have a difference or a diverged client."""
        return tuple(line for line in self.lines if line.is_judged)

    @property
    def numerics(self) -> frozenset[int]:
        """Return the numerics versions of all runs behind the verdict."""
        return frozenset[int]().union(*(line.numerics for line in self.lines))

    @property
    def title(self) -> str:
        """Return the names of the reading and of the part."""
        return ", ".join(filter(None, (self.reading, self.part)))

    @property
    def unit(self) -> str:
        """Return the unit of the difference: "points" for accuracies, "times" for ratios, else that of the measure."""
        unit = measures.find(self.claim.measure)[0].unit
        return "times" if self.claim.times is not None else "points" if unit == "%" else unit

    @property
    def standing(self) -> str:
        """Return the verdict after Holm's adjustment within the family: one that may be chance is inconclusive."""
        may_be_chance = self.verdict in DECIDED and not self.claim.is_fact and not is_significant(self.adjusted)
        return INCONCLUSIVE if may_be_chance else self.verdict

    @property
    def detectable(self) -> float | None:
        """Return the smallest difference that so many seeds would have found in four of five cases; None if not judged."""
        e = self.overall
        if e is None or e.tied or self.claim.is_fact or e.n not in LOOKS or self.verdict == NOT_RUN:
            return None
        return float(t.ppf(1 - SURE / 2, e.n - 1) + t.ppf(POWER, e.n - 1)) * _compute_error(e)


def judge_readings(claim: Claim, measured_cells: Sequence[MeasuredCell]) -> tuple[Judgement, ...]:
    """Return the claim judged as the paper trains, then under each other reading of the index.

    A claim about a table (`by = "column"`) is judged for each of several columns, if it has results, then for the whole
    table; without all its cells a column or the table is not run.
    """
    judgements = list[Judgement]()
    for name, read in claim.list_readings():
        of_table = judge(read, measured_cells, name)
        if not claim.by:
            judgements.append(of_table)
            continue
        titles = dict.fromkeys(x.cell.about.column for x in _list_matching(claim, measured_cells))
        by_column = {title: [x for x in measured_cells if x.cell.about.column == title] for title in titles}
        of_columns = [replace(judge(read, cells, name), part=title) for title, cells in by_column.items() if len(titles) > 1]
        for judged in (*(j for j in of_columns if j.judged_lines), of_table):
            is_complete = all(line.is_judged for line in judged.lines)
            complete = judged if is_complete else replace(judged, verdict=NOT_RUN, p=None, first=None)
            judgements.append(replace(complete, parts=len(of_columns) + 1))
    return tuple(judgements)


def _list_matching(claim: Claim, measured_cells: Sequence[MeasuredCell]) -> list[MeasuredCell]:
    return [measured for measured in measured_cells if fnmatch(measured.cell.name, claim.cells)]


def judge(claim: Claim, measured_cells: Sequence[MeasuredCell], reading: str = "", look: int = LOOKS[-1]) -> Judgement:
    """Return the claim judged over all cells that it concerns. look: of two looks, the one with so many seeds."""
    matching = _list_matching(claim, measured_cells)
    sides_by_cell = [(measured, _find_sides(claim, measured, measured_cells)) for measured in matching]
    lines = [line for measured, sides in sides_by_cell if sides for line in _judge_cell(claim, measured, sides, look)]
    group = _select_one_length(lines)
    chosen, common = pool([line.values.keys() for line in group])
    pooled, overall = [group[n] for n in chosen], None
    if common:
        smallest = max(line.grain for line in pooled) / len(pooled)
        seeds = _take_look(common, look)
        overall = _estimate([fmean(line.values[seed] for line in pooled) for seed in seeds], smallest)
    diverged = _count_divergence(side for _, sides in sides_by_cell for side in sides)
    verdict = _judge_all(claim, lines, overall, group, diverged)
    tails = [None if line.verdict in (TOO_SHORT, DIVERGED) else compute_tails(claim, line.difference) for line in lines]
    p = None
    if verdict in (*DECIDED, INCONCLUSIVE) and any(tails) and not claim.is_fact:
        is_mean = claim.scope == "mean"
        p = 2 * min(combine_tails([compute_tails(claim, overall)] if is_mean else tails, *_count_needed(claim, len(lines))))
    return Judgement(
        claim=claim,
        reading=reading,
        lines=tuple(lines),
        overall=overall,
        unpaired=tuple(line.title for n, line in enumerate(group) if n not in chosen),
        other_lengths=tuple(line.title for line in lines if line.values and line not in group),
        verdict=verdict,
        p=None if p is None else min(p, 1.0),
        diverged=diverged,
        first=judge(claim, measured_cells, reading, LOOKS[0]) if overall and LOOKS[0] < overall.n else None,
    )


def _take_look(seeds: Iterable[int], look: int) -> list[int]:
    """Return the seeds of the last complete look; seeds that complete no look are all returned, and decide nothing."""
    ordered = sorted(seeds)
    return ordered[: max((n for n in LOOKS if n <= min(len(ordered), look)), default=None)]


def _find_sides(claim: Claim, measured: MeasuredCell, measured_cells: Sequence[MeasuredCell]) -> list[Side]:
    """Return the numbers that a claim compares in a cell; [] if the cell, or another cell of the claim, lacks an arm."""
    by_name = {x.cell.name: x for x in measured_cells} | {measured.cell.name: measured}
    operands = claim.list_operands(measured.cell.name)
    has_all = all(place in by_name and arm in by_name[place].cell.arms for _, place, arm, _ in operands)
    return [(sign, by_name[place], arm, at) for sign, place, arm, at in operands] if has_all else []


def _judge_cell(claim: Claim, measured: MeasuredCell, sides: Sequence[Side], look: int) -> Iterator[Line]:
    """Yield the claim's lines in one cell: one line, or one for each client."""
    finished = [x.list_finished(arm) for _, x, arm, _ in sides]
    # Numbers after different rounds are not compared.
    is_alike = all(x.scale == measured.scale for _, x, _, _ in sides)
    seeds = sorted(set.intersection(*map(set, finished))) if is_alike else []
    measure, diverged, grain = measures.find(claim.measure)[0], _count_divergence(sides), 0.0
    if measure.grain is not None and claim.times is None:
        grain = max((measure.grain([*runs.values()], claim.per == "client") for runs in finished if runs), default=0.0)
    is_level = not measured.scale.changed and all(x.is_level(arm) for _, x, arm, _ in sides)
    share = min(rounds / full for rounds, full in (x.scale.count_rounds(x.cell, arm) for _, x, arm, _ in sides))
    numerics = frozenset[int]().union(*(x.list_numerics(arm, seeds) for _, x, arm, _ in sides))
    scale = "; ".join(dict.fromkeys(filter(None, (x.describe_arm(arm) for _, x, arm, _ in sides))))
    for title, values in _list_values(claim, measured, sides, seeds).items():
        e = _estimate([values[seed] for seed in _take_look(values, look)], grain) if values else None
        verdict = _judge_difference(claim, e, diverged) if seeds else DIVERGED if diverged else NOT_RUN
        length = measured.scale.compute_length(measured.cell)
        line = Line(title, values, e, grain, verdict, scale, share, share >= 1 or is_level, length, numerics, diverged)
        yield line if line.is_long or not seeds else replace(line, verdict=TOO_SHORT)


def _list_values(
    claim: Claim, measured: MeasuredCell, sides: Sequence[Side], seeds: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Return the title of the cell, or of each of its clients -> seed -> the difference or ratio that the claim is about."""
    of_sides = [x.read_numbers(claim.measure, arm, at) for _, x, arm, at in sides]
    if claim.per == "cell":
        numbers = [clients.get(None, {}) for clients in of_sides]
        if claim.measure.startswith("rounds_to"):  # a target that was not reached counts one round more than were run
            more = [{seed: r.rounds + 1.0 for seed, r in x.list_finished(arm).items()} for _, x, arm, _ in sides]
            reached = set[int]().union(*numbers)
            numbers = [{s: v for s, v in (late | n).items() if s in reached} for late, n in zip(more, numbers, strict=True)]
        return {measured.cell.title: _compare(claim, sides, numbers, seeds)}
    titles = {i: f"{measured.cell.title}, client {i} ({measured.networks[i]})" for i in of_sides[0] if i is not None}
    compared = {i: _compare(claim, sides, [of_side.get(i, {}) for of_side in of_sides], seeds) for i in titles}
    return {titles[i]: values for i, values in compared.items() if values} or {measured.cell.title: {}}


def _compare(
    claim: Claim, sides: Sequence[Side], numbers: Sequence[Mapping[int, float]], seeds: Iterable[int]
) -> dict[int, float]:
    """Return seed -> the difference or the ratio, for the seeds that have all numbers. numbers: of each side, by seed."""
    values = {}
    for seed in (seed for seed in seeds if all(seed in by_seed for by_seed in numbers)):
        if claim.times is None:
            values[seed] = sum(side[0] * by_seed[seed] for side, by_seed in zip(sides, numbers, strict=True))
        elif numbers[1][seed]:  # a ratio to 0 is undefined
            values[seed] = numbers[0][seed] / numbers[1][seed]
    return values


def _estimate(values: Sequence[float], smallest: float) -> Estimate:
    """Return the estimate over seeds, with the grain of the test set; differences by rounding alone count as equal."""
    if smallest and max(values) - min(values) <= ROUNDED:
        values = [fmean(values)] * len(values)
    return estimate(values, "seeds", smallest + ROUNDED if smallest else 0.0)


def _select_one_length(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that may be averaged: those of the largest share of rounds, then of the largest group.

    By the protocol's rule of the plateau, curves that no longer rise count as whole.
    """
    groups: dict[tuple[Fraction, str], list[Line]] = {}
    for line in (one for one in lines if one.values):
        share = Fraction(1) if line.is_long else line.length[0]
        groups.setdefault((share, line.length[1]), []).append(line)
    return groups[max(groups, key=lambda length: (length[0], len(groups[length])))] if groups else []


def _count_divergence(sides: Iterable[Side]) -> DivergedRuns:
    """Return arm -> (runs in which a client diverged, all runs), only for arms with such runs."""
    runs: dict[str, list[bool]] = {}
    for arm, measured in {(arm, id(measured)): (arm, measured) for _, measured, arm, _ in sides}.values():
        runs.setdefault(arm, []).extend(bool(result.failed) for result in measured.results.get(arm, {}).values())
    return {arm: (sum(failed), len(failed)) for arm, failed in runs.items() if any(failed)}


def _count_needed(claim: Claim, lines: int) -> tuple[int, int]:
    """Return (the lines that must support a claim, the lines that must contradict it); of the mean, its one line."""
    return {"mean": (1, 1), "every": (lines, 1), "most": (lines // 2 + 1,) * 2}[claim.scope]


def _judge_all(
    claim: Claim, lines: Sequence[Line], overall: Estimate | None, group: Sequence[Line], diverged: DivergedRuns
) -> str:
    """Return the verdict over all lines: of their mean, or line by line.

    The mean does not decide if a line decides the opposite, or if no line decides anything.
    """
    counted = Counter(line.verdict for line in lines)
    if counted.keys() <= {TOO_SHORT, DIVERGED, NOT_RUN}:
        return next((undecided for undecided in (TOO_SHORT, DIVERGED) if counted[undecided]), NOT_RUN)
    if claim.scope != "mean":
        needed = zip(DECIDED, _count_needed(claim, len(lines)), strict=True)
        return next((verdict for verdict, n in needed if counted[verdict] >= n), INCONCLUSIVE)
    if counted.keys() - {NOT_RUN, TOO_SHORT} == {CONTRADICTED}:
        # Also if opposite differences cancel in the mean, and the claim is that two values are equal.
        return CONTRADICTED
    mean = _judge_difference(claim, overall, diverged) if all(line.is_long for line in group) else INCONCLUSIVE
    return mean if counted[mean] and not counted.keys() & set(DECIDED) - {mean} else INCONCLUSIVE


def _judge_difference(claim: Claim, difference: Estimate | None, diverged: DivergedRuns) -> str:
    """Return the verdict by the p-value of the finished seeds; an arm that diverged cannot win or be equal."""
    tails = compute_tails(claim, difference) or (1.0, 1.0)
    is_supported = tails[0] < tails[1]
    winner = claim.arm if is_supported else claim.other[0] or claim.arm
    if not is_significant(2 * min(tails)) or (is_supported and diverged if claim.sign == "same" else winner in diverged):
        return INCONCLUSIVE
    return SUPPORTED if is_supported else CONTRADICTED


def pool(cells: Sequence[Collection[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (the positions of the pooled cells, the seeds that all of them have). cells: the seeds of each cell.

    At least two seeds are taken if possible, because one seed has no interval; then the most pairs of cell and seed;
    then the most cells; then the first. The choice does not use any result.
    """

    def find_worth(pooled: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[bool, int, int]:
        cells, seeds = map(len, pooled)
        return seeds > 1, cells * seeds, cells

    shared: set[frozenset[int]] = set()
    for seeds in map(frozenset, cells):
        shared |= {seeds} | {seeds & known for known in shared}
    ways = [
        (tuple(n for n, cell in enumerate(cells) if seeds <= set(cell)), tuple(sorted(seeds)))
        for seeds in sorted(filter(None, shared), key=sorted)
    ]
    return max(ways, key=find_worth, default=((), ()))


def compute_tails(claim: Claim, difference: Estimate | None) -> Tails | None:
    """Return the p-values of one difference over seeds; None for fewer seeds than the first look, which decide nothing.

    Student's t; 0 and 1 for a fact of arithmetic. A claim of "same" takes two one-sided tests (Schuirmann, A comparison of
    the two one-sided tests procedure and the power approach, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987).
    """
    if difference is None or not (claim.is_fact or difference.n >= LOOKS[0]):
        return None
    e = difference

    def compute_p(bound: float, sign: int) -> float:
        """Return the p-value that the mean lies above (1) or below (-1) a bound; for equal seeds, 0 or 1 by the grain."""
        distance = sign * (e.mean - bound)
        if e.tied or claim.is_fact:
            return 0.0 if distance > e.grain + SAME else 1.0
        return float(t.sf(distance / _compute_error(e), e.n - 1))

    if claim.sign == "same":  # two one-sided tests: the difference is above -margin, and below margin
        within = max(compute_p(-claim.margin, 1), compute_p(claim.margin, -1))
        return within, min(compute_p(claim.margin, 1), compute_p(-claim.margin, -1))
    above, below = (compute_p(claim.times or 0.0, sign) for sign in (1, -1))
    return (above, below) if claim.sign == "more" else (below, above)


def _compute_error(e: Estimate) -> float:
    """Return the standard error of a mean over two seeds or more."""
    return (e.half or 0.0) / float(t.ppf((1 + LEVEL) / 2, e.n - 1))


def combine_tails(lines: Sequence[Tails | None], supporting: int, contradicting: int) -> Tails:
    """Return the p-values that at least `supporting` cells support a claim and at least `contradicting` contradict it.

    The k-th smallest of n p-values times n - k + 1: Bonferroni's partial conjunction (Benjamini and Heller, Screening for
    partial conjunction hypotheses, Biometrics 64, 2008). A cell without a number counts as 1.
    """
    n, (supports, contradicts) = len(lines), map(sorted, zip(*(line or (1.0, 1.0) for line in lines), strict=True))
    least = (values[k - 1] * (n - k + 1) for values, k in ((supports, supporting), (contradicts, contradicting)))
    first, second = (min(p, 1.0) for p in least)
    return first, second


def is_significant(p: float | None) -> bool:
    """Return whether a verdict with this adjusted p-value stands."""
    return p is not None and p < SURE


def adjust_by_holm(p_values: Sequence[float], size: int) -> list[float]:
    """Return Holm's adjusted p-values, in the order of `p_values`. size: of the family, with hypotheses without a p-value.

    Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6, 1979.
    """
    order = np.argsort(p_values, kind="stable")
    factors = max(size, len(order)) - np.arange(len(order))
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * np.array(p_values, dtype=float)[order]), 1.0)
    return adjusted.tolist()


def adjust_family(claims: Sequence[Sequence[Judgement]]) -> list[tuple[Judgement, ...]]:
    """Return the judgements of each claim of a family with Holm's adjusted p-values.

    claims: all of the family, measured or not, because a reading of each is a hypothesis, unless it is a fact of arithmetic.
    The p-value of a part of a table is multiplied by the number of parts; the smallest one is the claim's. A claim that the
    first look decides keeps its verdict.
    """
    firsts = _adjust_look([[replace(j.first, part=j.part, parts=j.parts) if j.first else j for j in of] for of in claims])

    def choose(firsts: Sequence[Judgement], others: Sequence[Judgement]) -> tuple[Judgement, ...]:
        return tuple(first if first.standing in DECIDED else j for first, j in zip(firsts, others, strict=True))

    seconds = _adjust_look([choose(*pair) for pair in zip(firsts, claims, strict=True)])
    return [choose(*pair) for pair in zip(firsts, seconds, strict=True)]


def _adjust_look(claims: Sequence[Sequence[Judgement]]) -> list[tuple[Judgement, ...]]:
    """Return the judgements of one look at each claim of a family with Holm's adjusted p-values."""
    smallest: dict[tuple[int, str], float] = {}  # (number of the claim, reading) -> the smallest p-value of its parts
    for n, j in ((n, j) for n, of in enumerate(claims) for j in of if j.p is not None):
        smallest[n, j.reading] = min(smallest.get((n, j.reading), 1.0), (j.p or 0.0) * j.parts)
    size = len({(n, j.reading) for n, of in enumerate(claims) for j in of if not j.claim.is_fact})
    adjusted = dict(zip(smallest, adjust_by_holm([*smallest.values()], size), strict=True))

    def adjust(n: int, j: Judgement) -> Judgement:
        if j.p is None:
            return j
        least = smallest[n, j.reading]
        return replace(j, adjusted=min(j.p * j.parts * (adjusted[n, j.reading] / least if least else size), 1.0))

    return [tuple(adjust(n, j) for j in of) for n, of in enumerate(claims)]
