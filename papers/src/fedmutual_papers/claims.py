"""Judge a paper's claims by the stored runs: supported, contradicted, inconclusive, or too short."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from fractions import Fraction
from statistics import fmean

from fedmutual.results.estimate import ENOUGH, Estimate, estimate
from fedmutual_papers.measured_cell import MeasuredCell
from fedmutual_papers.operands import Side, Values, find_grain, find_operands, list_cell_values, list_client_values
from fedmutual_papers.schema import Claim
from fedmutual_papers.significance import Tails, compute_several_tails, compute_tails

SUPPORTED, CONTRADICTED, INCONCLUSIVE = "supported", "contradicted", "inconclusive"
TOO_SHORT, DIVERGED, NOT_RUN = "too short", "diverged", "not run"
DECIDED = (SUPPORTED, CONTRADICTED)
ENOUGH_ROUNDS = 0.5  # the share of its own rounds that every arm must have run for before a verdict
ROUNDED = 2.1e-5  # two differences of accuracies that were kept with 5 decimals each may differ by so much and be equal

DivergedRuns = Mapping[str, tuple[int, int]]
"""Arm -> (its runs in which a client diverged, all its runs); of those of a claim's arms alone that did diverge."""


@dataclass(frozen=True)
class Line:
    """A claim in one cell, or for one client."""

    title: str
    values: Values  # seed -> arm minus than
    difference: Estimate | None  # over seeds; None where it was not run, or has no such number
    grain: float  # by how much one example of the test set moves a value; 0.0 where it is not counted in examples
    verdict: str
    scale: str  # "shortened: ...", or ""
    share: float  # the smallest share of its own rounds that an arm of it ran for
    length: tuple[Fraction, str]  # of its cell's rounds; lines of one length may be averaged
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
    p: float | None  # two-sided; None if no interval was judged
    diverged: DivergedRuns
    holm: tuple[float | None, float | None] = (None, None)  # p adjusted over the verdicts of its page, and of all pages

    @property
    def run(self) -> tuple[Line, ...]:
        """Return the lines that have a difference."""
        return tuple(line for line in self.lines if line.difference is not None)

    @property
    def pooled(self) -> int:
        """Return the number of lines in the mean."""
        return len(self.run) - len(self.unpaired) - len(self.other_lengths)

    @property
    def judged_lines(self) -> tuple[Line, ...]:
        """Return the lines that have a difference or a diverged client."""
        return tuple(line for line in self.lines if line.is_judged)

    @property
    def numerics(self) -> frozenset[int]:
        """Return the numerics versions of all runs behind the verdict."""
        return frozenset[int]().union(*(line.numerics for line in self.lines))

    @property
    def shortened(self) -> bool:
        """Return whether a run behind the verdict is shortened."""
        return any(line.scale for line in self.judged_lines)


def judge_readings(claim: Claim, measured_cells: Sequence[MeasuredCell]) -> tuple[Judgement, ...]:
    """Return the claim judged as the paper trains, then under each other reading of the index."""
    judged = [judge(claim, measured_cells, claim.first_reading if claim.readings else "")]
    judged += [judge(c, measured_cells, r.name) for c, r in zip(claim.read_otherwise, claim.readings, strict=True)]
    return tuple(judged)


def judge(claim: Claim, measured_cells: Sequence[MeasuredCell], reading: str = "") -> Judgement:
    """Return the claim judged over all cells that it concerns."""
    named = [
        (measured, find_operands(claim, measured, measured_cells))
        for measured in measured_cells
        if fnmatch(measured.cell.name, claim.cells)
    ]
    concerned = [(measured, operands) for measured, operands in named if operands]
    lines = [line for measured, operands in concerned for line in _judge_cell(claim, measured, operands)]
    group = _select_one_length(lines)
    chosen, common = pool([line.values.keys() for line in group])
    pooled = [group[n] for n in chosen]
    overall = None
    if common:
        smallest = max(line.grain for line in pooled) / len(pooled)
        overall = _estimate([fmean(line.values[seed] for line in pooled) for seed in common], smallest)
    diverged = _count_divergence(side for _, operands in concerned for side in operands)
    verdict = _judge_all(claim, lines, overall, group, diverged)
    return Judgement(
        claim=claim,
        reading=reading,
        lines=tuple(lines),
        overall=overall,
        unpaired=tuple(line.title for n, line in enumerate(group) if n not in chosen),
        other_lengths=tuple(line.title for line in lines if line.values and line.length != group[0].length),
        verdict=verdict,
        p=_compute_tails(claim, lines, overall).p if verdict in (*DECIDED, INCONCLUSIVE) and _has_interval(lines) else None,
        diverged=diverged,
    )


def _judge_cell(claim: Claim, measured: MeasuredCell, operands: Sequence[Side]) -> Iterator[Line]:
    """Yield the claim's lines in one cell: one line, or one for each client."""
    # Numbers after different rounds are not compared.
    is_comparable = all(side.measured.scale == measured.scale for side in operands)
    seeds = [s for s in measured.seeds if is_comparable and all(side.measured.has_numbers(side.arm, s) for side in operands)]
    diverged, smallest = _count_divergence(operands), find_grain(claim, operands)
    share = min(side.measured.compute_share(side.arm) for side in operands)
    scale = "; ".join(dict.fromkeys(filter(None, (side.measured.describe_arm(side.arm) for side in operands))))
    for title, values in (list_client_values if claim.per == "client" else list_cell_values)(
        claim, measured, operands, seeds
    ):
        e = _estimate(list(values.values()), smallest) if values else None
        if not seeds:
            verdict = DIVERGED if diverged else NOT_RUN
        else:
            verdict = TOO_SHORT if share < ENOUGH_ROUNDS else _judge_difference(claim, e, diverged)
        yield Line(
            title=title,
            values=values,
            difference=e,
            grain=smallest,
            verdict=verdict,
            scale=scale,
            share=share,
            length=measured.scale.compute_length(measured.cell),
            numerics=frozenset[int]().union(*(side.measured.list_numerics(side.arm, seeds) for side in operands)),
            diverged=diverged,
        )


def _estimate(values: Sequence[float], smallest: float) -> Estimate:
    """Return the estimate over seeds, with the grain of the test set; differences by rounding alone count as equal."""
    if smallest and max(values) - min(values) <= ROUNDED:
        values = [fmean(values)] * len(values)
    return estimate(values, "seeds", smallest + ROUNDED if smallest else 0.0)


def _select_one_length(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that may be averaged: those of the largest share of rounds, then of the largest group."""
    groups: dict[tuple[Fraction, str], list[Line]] = {}
    for line in lines:
        if line.values:
            groups.setdefault(line.length, []).append(line)
    return max(groups.values(), key=lambda group: (max(line.share for line in group), len(group)), default=[])


def _has_interval(lines: Iterable[Line]) -> bool:
    """Return whether a line of sufficient length has an interval, which needs three seeds."""
    judged = (line.difference for line in lines if line.verdict in (*DECIDED, INCONCLUSIVE))
    return any(e is not None and e.half is not None and e.n >= ENOUGH for e in judged)


def _compute_tails(claim: Claim, lines: Sequence[Line], overall: Estimate | None) -> Tails:
    if claim.scope == "mean":
        return compute_several_tails([compute_tails(claim, overall)], 1, 1)
    judged = [None if line.verdict in (TOO_SHORT, DIVERGED) else compute_tails(claim, line.difference) for line in lines]
    supporting, contradicting = _count_needed(claim, len(lines))
    return compute_several_tails(judged, supporting, contradicting)


def _count_divergence(operands: Iterable[Side]) -> DivergedRuns:
    """Return arm -> (runs in which a client diverged, all runs), only for arms with such runs."""
    divergences = {(id(side.measured), side.arm): side.measured.count_diverged(side.arm) for side in operands}
    sums: dict[str, tuple[int, int]] = {}
    for (_, arm), (n, of) in divergences.items():
        sums_before = sums.get(arm, (0, 0))
        sums[arm] = (sums_before[0] + n, sums_before[1] + of)
    return {arm: (n, of) for arm, (n, of) in sums.items() if n}


def _count_needed(claim: Claim, lines: int) -> tuple[int, int]:
    """Return (the lines that must support a claim about every or most cells, the lines that must contradict it)."""
    return {"every": (lines, 1), "most": (lines // 2 + 1,) * 2}[claim.scope]


def _judge_all(
    claim: Claim, lines: Sequence[Line], overall: Estimate | None, group: Sequence[Line], diverged: DivergedRuns
) -> str:
    """Return the verdict over all lines: of their mean, or line by line.

    The mean does not decide if a line decides the opposite, or if no line decides anything.
    """
    counted = Counter(line.verdict for line in lines)
    for undecided in (TOO_SHORT, DIVERGED, NOT_RUN):
        if counted[undecided] and counted.keys() <= {TOO_SHORT, DIVERGED, NOT_RUN}:
            return undecided
    if not lines:
        return NOT_RUN
    if claim.scope == "mean":
        if counted.keys() - {NOT_RUN, TOO_SHORT} == {CONTRADICTED}:
            # Also if opposite differences cancel in the mean, and the claim is that two values are equal.
            return CONTRADICTED
        mean = (
            _judge_difference(claim, overall, diverged)
            if all(line.share >= ENOUGH_ROUNDS for line in group)
            else INCONCLUSIVE
        )
        return mean if counted[mean] and not counted.keys() & set(DECIDED) - {mean} else INCONCLUSIVE
    verdicts = [v for v, n in zip(DECIDED, _count_needed(claim, len(lines)), strict=True) if counted[v] >= n]
    return verdicts[0] if verdicts else INCONCLUSIVE


def _judge_difference(claim: Claim, difference: Estimate | None, diverged: DivergedRuns) -> str:
    """Return the verdict by the interval of the finished seeds; an arm that diverged cannot win or be equal."""
    verdict = _judge_interval(claim, difference)
    if claim.sign == "same":
        return INCONCLUSIVE if verdict == SUPPORTED and diverged else verdict
    winner = {SUPPORTED: claim.arm, CONTRADICTED: claim.other[0] or claim.arm}.get(verdict)
    return INCONCLUSIVE if winner in diverged else verdict


def _judge_interval(claim: Claim, difference: Estimate | None) -> str:
    if difference is None or difference.half is None or difference.n < ENOUGH:
        return INCONCLUSIVE  # too few seeds have both numbers
    if claim.sign == "same":
        grain = difference.grain if difference.tied else 0.0
        low, high = difference.low - grain, difference.high + grain
        if -claim.margin <= low and high <= claim.margin:
            return SUPPORTED
        return CONTRADICTED if low > claim.margin or high < -claim.margin else INCONCLUSIVE
    beyond = replace(difference, mean=difference.mean - (claim.times or 0.0))
    sign = beyond.sign if claim.sign == "more" else -beyond.sign
    return {1: SUPPORTED, -1: CONTRADICTED, 0: INCONCLUSIVE}[sign]


def pool(cells: Sequence[Collection[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (the positions of the pooled cells, the seeds that all of them have). cells: the seeds of each cell.

    At least two seeds are taken if possible, because one seed has no interval; then the most pairs of cell and seed;
    then the most cells; then the first. The choice does not use any result.
    """
    shared: set[frozenset[int]] = set()
    for seeds in map(frozenset, cells):
        shared |= {seeds} | {seeds & known for known in shared}
    best: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    for seeds in sorted(filter(None, shared), key=sorted):
        chosen = tuple(n for n, cell in enumerate(cells) if seeds <= set(cell))
        best = max(best, (chosen, tuple(sorted(seeds))), key=_find_worth)
    return best


def _find_worth(pooled: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[bool, int, int]:
    cells, seeds = map(len, pooled)
    return seeds > 1, cells * seeds, cells
