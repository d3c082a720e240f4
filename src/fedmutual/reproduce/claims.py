"""What a paper claims, and what our runs say to it: confirmed, not confirmed, or undecided, with the interval."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedmutual.report.statistics import Estimate, estimate
from fedmutual.reproduce.pooling import pool

if TYPE_CHECKING:
    from fedmutual.reproduce.looks import Look

CONFIRMED, DENIED, UNDECIDED, DIVERGED, NOT_RUN = "confirmed", "not confirmed", "undecided", "diverged", "not run"

Lost = Mapping[str, tuple[int, int]]
"""Arm -> (its runs in which a client diverged, all its runs); of those of a claim's two arms alone that did diverge."""


class Claim(BaseModel):
    """A sentence of the paper in our words, and the difference of two arms that it speaks of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: str
    measure: str
    arm: str
    than: str
    sign: Literal["more", "less", "same"] = "more"
    margin: float = Field(default=0.0, ge=0)  # of "same": so far apart is still the same, in the measure's own unit
    at: Literal["last", "best"] = "last"
    than_at: Literal["last", "best"] = "last"
    per: Literal["cell", "client"] = "cell"
    cells: str = "*"


@dataclass(frozen=True)
class Line:
    """The claim in one cell, or of one client."""

    title: str
    difference: Estimate | None  # arm minus than, over seeds; None where it was not run, or has no such number
    verdict: str
    scale: str  # "shortened: ...", or ""
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
    verdict: str  # of that mean; of a claim per client, that of the clients one by one
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
    def shortened(self) -> bool:
        """Whether some of what it rests on is."""
        return any(line.scale for line in self.told)


def judge(claim: Claim, looks: Sequence["Look"]) -> Judged:
    """A claim over the cells that it speaks of."""
    lines, pooled = [], list[tuple[str, Mapping[int, float]]]()
    spoken = [x for x in looks if fnmatch(x.cell.name, claim.cells) and {claim.arm, claim.than} <= x.cell.arms.keys()]
    for look in spoken:
        seeds = [s for s in look.seeds if look.good(claim.arm, s) and look.good(claim.than, s)]
        diverged = _lost(claim, [look])
        for title, found in (_of_clients if claim.per == "client" else _of_cell)(claim, look, seeds):
            e = estimate(list(found.values()), "seeds") if found else None
            none = DIVERGED if diverged else NOT_RUN
            lines.append(Line(title, e, _verdict(claim, e, diverged) if seeds else none, look.words, diverged))
            pooled += [(title, found)] if found else []
    chosen, common = pool([found.keys() for _, found in pooled])
    overall = estimate([fmean(pooled[n][1][seed] for n in chosen) for seed in common], "seeds") if common else None
    apart = tuple(title for n, (title, _) in enumerate(pooled) if n not in chosen)
    diverged = _lost(claim, spoken)
    return Judged(claim, tuple(lines), overall, apart, _of_all(claim, lines, overall, diverged), diverged)


def _lost(claim: Claim, looks: Sequence["Look"]) -> Lost:
    """How often the two arms diverged, over some cells."""
    counted = {arm: [look.diverged(arm) for look in looks] for arm in (claim.arm, claim.than)}
    sums = {arm: (sum(n for n, _ in found), sum(of for _, of in found)) for arm, found in counted.items()}
    return {arm: (n, of) for arm, (n, of) in sums.items() if n}


def _of_all(claim: Claim, lines: Sequence[Line], overall: Estimate | None, diverged: Lost) -> str:
    """The verdict over those lines that were run: of their mean; of clients one by one, for one's gain is not another's."""
    run = {line.verdict for line in lines} - {NOT_RUN}
    if run <= {DIVERGED}:
        return DIVERGED if run else NOT_RUN
    if claim.per == "cell":
        return _verdict(claim, overall, diverged)
    return DENIED if DENIED in run else CONFIRMED if run == {CONFIRMED} else UNDECIDED


def _of_cell(claim: Claim, look: "Look", seeds: Sequence[int]) -> Iterator[tuple[str, dict[int, float]]]:
    """(the cell, seed -> arm minus than)."""
    found = {}
    for seed in seeds:
        ours = look.number(claim.measure, claim.arm, seed, claim.at)
        theirs = look.number(claim.measure, claim.than, seed, claim.than_at)
        if claim.measure.startswith("rounds_to") and (ours, theirs) != (None, None):  # it takes more than there were
            ours = look.results[claim.arm][seed].rounds + 1.0 if ours is None else ours
            theirs = look.results[claim.than][seed].rounds + 1.0 if theirs is None else theirs
        if ours is not None and theirs is not None:
            found[seed] = ours - theirs
    yield look.cell.title, found


def _of_clients(claim: Claim, look: "Look", seeds: Sequence[int]) -> Iterator[tuple[str, dict[int, float]]]:
    """For each client (who, seed -> arm minus than), of their own models on their own data."""
    pairs = {s: (look.results[claim.arm][s].clients, look.results[claim.than][s].clients) for s in seeds}
    clients = {i: c.network for ours, theirs in pairs.values() for i, c in ours.items() if i in theirs}
    for i, network in clients.items():
        found = {
            s: float(getattr(ours[i], claim.at) - getattr(theirs[i], claim.than_at)) for s, (ours, theirs) in pairs.items()
        }
        yield f"{look.cell.title}, client {i} ({network})", found
    if not clients:
        yield look.cell.title, {}


def _verdict(claim: Claim, difference: Estimate | None, diverged: Lost) -> str:
    """By the interval of the seeds that ended; but an arm that diverged in another wins nothing, nor is it the same."""
    found = _by_interval(claim, difference)
    if claim.sign == "same":
        return UNDECIDED if found == CONFIRMED and diverged else found
    winner = {CONFIRMED: claim.arm, DENIED: claim.than}.get(found)
    return UNDECIDED if winner in diverged else found


def _by_interval(claim: Claim, difference: Estimate | None) -> str:
    if difference is None or difference.half is None:
        return UNDECIDED  # no seed has both numbers, or one: that has no interval
    if claim.sign == "same":
        if -claim.margin <= difference.low and difference.high <= claim.margin:
            return CONFIRMED
        return DENIED if difference.low > claim.margin or difference.high < -claim.margin else UNDECIDED
    sign = difference.sign if claim.sign == "more" else -difference.sign
    return {1: CONFIRMED, -1: DENIED, 0: UNDECIDED}[sign]
