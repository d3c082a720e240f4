"""What a paper claims, and what our runs say to it: confirmed, not confirmed, or undecided, with the interval."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedmutual.report.statistics import Estimate, estimate

if TYPE_CHECKING:
    from fedmutual.reproduce.looks import Look

CONFIRMED, DENIED, UNDECIDED, NOT_RUN = "confirmed", "not confirmed", "undecided", "not run"


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
    difference: Estimate | None  # arm minus than, over seeds; None where it was not run
    verdict: str
    scale: str  # "shortened: ...", or ""


@dataclass(frozen=True)
class Judged:
    """A claim, judged."""

    claim: Claim
    lines: tuple[Line, ...]
    overall: Estimate | None  # over seeds, of the mean over the lines that were run
    verdict: str

    @property
    def run(self) -> tuple[Line, ...]:
        """The lines that were run."""
        return tuple(line for line in self.lines if line.difference is not None)

    @property
    def shortened(self) -> bool:
        """Whether some of what it rests on is."""
        return any(line.scale for line in self.run)


def judge(claim: Claim, looks: Sequence["Look"]) -> Judged:
    """A claim over the cells that it speaks of."""
    lines, pooled = [], list[Mapping[int, float]]()
    for look in looks:
        if not fnmatch(look.cell.name, claim.cells) or not {claim.arm, claim.than} <= look.cell.arms.keys():
            continue
        for title, found in _differences(claim, look):
            e = estimate(list(found.values()), "seeds") if found else None
            lines.append(Line(title, e, _verdict(claim, e), look.words))
            pooled += [found] if found else []
    common = sorted(set.intersection(*(set(found) for found in pooled))) if pooled else []
    overall = estimate([fmean(found[seed] for found in pooled) for seed in common], "seeds") if common else None
    return Judged(claim, tuple(lines), overall, _verdict(claim, overall) if pooled else NOT_RUN)


def _differences(claim: Claim, look: "Look") -> Iterator[tuple[str, dict[int, float]]]:
    """(what is compared, seed -> arm minus than)."""
    seeds = [s for s in look.seeds if look.good(claim.arm, s) and look.good(claim.than, s)]
    if claim.per == "cell":
        pairs = {
            seed: (
                look.number(claim.measure, claim.arm, seed, claim.at),
                look.number(claim.measure, claim.than, seed, claim.than_at),
            )
            for seed in seeds
        }
        if claim.measure.startswith("rounds_to"):  # what was not reached takes more rounds than there were
            pairs = {s: pair for s, (a, b) in pairs.items() if (pair := look.at_least(claim, s, a, b)) is not None}
        yield look.cell.title, {s: a - b for s, (a, b) in pairs.items() if a is not None and b is not None}
        return
    clients = dict.fromkeys(i for s in seeds for i in look.results[claim.arm][s].clients)
    if not clients:
        yield look.cell.title, {}
    for i in clients:
        found, network = {}, ""
        for seed in seeds:
            ours, theirs = (look.results[arm][seed].clients.get(i) for arm in (claim.arm, claim.than))
            if ours and theirs:
                found[seed] = getattr(ours, claim.at) - getattr(theirs, claim.than_at)
                network = ours.network
        yield f"{look.cell.title}, client {i} ({network})", found


def _verdict(claim: Claim, difference: Estimate | None) -> str:
    if difference is None:
        return NOT_RUN
    if difference.half is None:
        return UNDECIDED  # one seed has no interval
    if claim.sign == "same":
        if max(abs(difference.low), abs(difference.high)) <= claim.margin:
            return CONFIRMED
        return DENIED if min(abs(difference.low), abs(difference.high)) > claim.margin and difference.sign else UNDECIDED
    sign = difference.sign if claim.sign == "more" else -difference.sign
    return {1: CONFIRMED, -1: DENIED, 0: UNDECIDED}[sign]
