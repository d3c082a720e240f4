"""What a paper claims, and what our runs say to it: confirmed, not confirmed, or undecided, with the interval."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from statistics import fmean

from fedmutual.report.statistics import ENOUGH, Estimate, estimate
from fedmutual.reproduce.looks import Look
from fedmutual.reproduce.pooling import pool
from fedmutual.reproduce.schema import Claim
from fedmutual.reproduce.sides import Side, of_cell, of_clients, sides

CONFIRMED, DENIED, UNDECIDED, DIVERGED, NOT_RUN = "confirmed", "not confirmed", "undecided", "diverged", "not run"

Lost = Mapping[str, tuple[int, int]]
"""Arm -> (its runs in which a client diverged, all its runs); of those of a claim's arms alone that did diverge."""


@dataclass(frozen=True)
class Line:
    """The claim in one cell, or of one client."""

    title: str
    difference: Estimate | None  # arm minus than, over seeds; None where it was not run, or has no such number
    verdict: str
    scale: str  # "shortened: ...", or ""
    numerics: frozenset[int]  # the numerics versions of its runs
    diverged: Lost

    @property
    def told(self) -> bool:
        """Whether it has a number, or had none because a client diverged."""
        return self.difference is not None or self.verdict == DIVERGED


@dataclass(frozen=True)
class Judged:
    """A claim, judged."""

    claim: Claim
    lines: tuple[Line, ...]
    overall: Estimate | None  # over seeds, of the mean over the lines that were run, but those apart
    apart: tuple[str, ...]  # titles of lines left out of the mean, because they lack the seeds of the others
    verdict: str  # of that mean, unless a line says the opposite; or one by one, where the claim is of every or of most
    diverged: Lost

    @property
    def run(self) -> tuple[Line, ...]:
        """The lines that have a difference."""
        return tuple(line for line in self.lines if line.difference is not None)

    @property
    def told(self) -> tuple[Line, ...]:
        """The lines of which there is something to tell."""
        return tuple(line for line in self.lines if line.told)

    @property
    def numerics(self) -> frozenset[int]:
        """The numerics versions of what it rests on."""
        return frozenset[int]().union(*(line.numerics for line in self.lines))

    @property
    def shortened(self) -> bool:
        """Whether some of what it rests on is."""
        return any(line.scale for line in self.told)


def judge(claim: Claim, looks: Sequence[Look]) -> Judged:
    """A claim over the cells that it speaks of."""
    lines, pooled = [], list[tuple[str, Mapping[int, float]]]()
    named = [(look, sides(claim, look, looks)) for look in looks if fnmatch(look.cell.name, claim.cells)]
    spoken = [(look, found) for look, found in named if found]
    for look, found in spoken:
        alike = all(side.look.scale == look.scale for side in found)  # a number of fewer rounds is not held against another
        seeds = [s for s in look.seeds if alike and all(side.look.good(side.arm, s) for side in found)]
        diverged = _lost(found)
        versions = frozenset[int]().union(*(side.look.numerics(side.arm, seeds) for side in found))
        scale = "; ".join(dict.fromkeys(side.look.words for side in found if side.look.words))
        for title, values in (of_clients if claim.per == "client" else of_cell)(claim, look, found, seeds):
            e = estimate(list(values.values()), "seeds") if values else None
            none = DIVERGED if diverged else NOT_RUN
            lines.append(Line(title, e, _verdict(claim, e, diverged) if seeds else none, scale, versions, diverged))
            pooled += [(title, values)] if values else []
    chosen, common = pool([values.keys() for _, values in pooled])
    overall = estimate([fmean(pooled[n][1][seed] for n in chosen) for seed in common], "seeds") if common else None
    apart = tuple(title for n, (title, _) in enumerate(pooled) if n not in chosen)
    diverged = _lost(side for _, found in spoken for side in found)
    return Judged(claim, tuple(lines), overall, apart, _of_all(claim, lines, overall, diverged), diverged)


def _lost(found: Iterable[Side]) -> Lost:
    """How often the arms diverged."""
    once = {(id(side.look), side.arm): side.look.diverged(side.arm) for side in found}
    sums: dict[str, tuple[int, int]] = {}
    for (_, arm), (n, of) in once.items():
        before = sums.get(arm, (0, 0))
        sums[arm] = (before[0] + n, before[1] + of)
    return {arm: (n, of) for arm, (n, of) in sums.items() if n}


def _of_all(claim: Claim, lines: Sequence[Line], overall: Estimate | None, diverged: Lost) -> str:
    """The verdict over all lines: of the mean of those that were run, unless a line says the opposite; or one by one."""
    counted = Counter(line.verdict for line in lines)
    if counted.keys() <= {DIVERGED, NOT_RUN}:
        return DIVERGED if counted[DIVERGED] else NOT_RUN
    if claim.whose == "mean":
        if counted.keys() - {NOT_RUN} == {DENIED}:
            return DENIED  # also where the mean of opposite differences holds a claim that two are the same
        mean = _verdict(claim, overall, diverged)
        return UNDECIDED if counted.keys() & {CONFIRMED, DENIED} - {mean} else mean
    needed = {"every": (len(lines), 1), "most": (len(lines) // 2 + 1,) * 2}[claim.whose]
    found = [verdict for verdict, n in zip((CONFIRMED, DENIED), needed, strict=True) if counted[verdict] >= n]
    return found[0] if found else UNDECIDED


def _verdict(claim: Claim, difference: Estimate | None, diverged: Lost) -> str:
    """By the interval of the seeds that ended; but an arm that diverged in another wins nothing, nor is it the same."""
    found = _by_interval(claim, difference)
    if claim.sign == "same":
        return UNDECIDED if found == CONFIRMED and diverged else found
    winner = {CONFIRMED: claim.arm, DENIED: claim.other[0] or claim.arm}.get(found)
    return UNDECIDED if winner in diverged else found


def _by_interval(claim: Claim, difference: Estimate | None) -> str:
    if difference is None or difference.half is None or difference.n < ENOUGH:
        return UNDECIDED  # too few seeds have both numbers
    if claim.sign == "same":
        if -claim.margin <= difference.low and difference.high <= claim.margin:
            return CONFIRMED
        return DENIED if difference.low > claim.margin or difference.high < -claim.margin else UNDECIDED
    beyond = replace(difference, mean=difference.mean - (claim.times or 0.0))
    sign = beyond.sign if claim.sign == "more" else -beyond.sign
    return {1: CONFIRMED, -1: DENIED, 0: UNDECIDED}[sign]
