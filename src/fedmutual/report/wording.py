"""What verdicts have in common: how a difference and a doubt are put into words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedmutual.report.comparison import TUNED, Comparison
from fedmutual.report.statistics import ENOUGH, Estimate, Gains
from fedmutual.report.text import count, percent


@dataclass(frozen=True)
class Verdict:
    """What a page says of a comparison: the question, the answer in a sentence, the most important of what supports it, all.

    sentences: all that can be said for it and against it; a page folds them.
    """

    question: str
    lead: str
    highlights: tuple[str, ...]
    sentences: tuple[str, ...]


def chance(e: Estimate) -> str:
    """A clause for a difference that is not certain: why it may be none."""
    return f", and {too_few(e)}" if e.n < ENOUGH else ", which may be chance"


def too_few(e: Estimate) -> str:
    """ "two seeds cannot exclude chance"."""
    units = f"two {e.unit}" if e.n > 1 else f"one {e.unit.removesuffix('s')}"
    return f"{units} cannot exclude chance"


def score(name: str, e: Estimate, comparison: Comparison) -> str:
    """Whether a method wins, and by how much."""
    decimals = comparison.decimals
    if e.sign:
        verb = "wins by" if e.sign > 0 else "loses by"
        return f"{name} {verb} {away(e, decimals, ('', '', ''))}"
    chance = ", which may be chance" if e.half is not None and e.mean else ""
    return f"{name} is {away(e, decimals, ('ahead', 'behind', 'level'), chance)}"


def away(e: Estimate, decimals: int, words: tuple[str, str, str], remark: str = "") -> str:
    """ "1.3 points above (95 % interval 0.4 to 2.2, 3 seeds)", in words for above, below and level."""
    amount = percent(abs(e.mean), decimals)
    above, below, level = words
    way = above if e.mean > 0 else below
    said = f"{amount} points {way}".strip() if amount.strip("0.") else level or f"{amount} points"
    if e.half is None:
        return f"{said}{remark} (one {e.unit.removesuffix('s')}, so no interval)"
    if e.tied:
        return f"{said}{remark} (the same {format_all(e)})"
    ends = max(e.low, -1.0), min(e.high, 1.0)  # no accuracy is further from another than 100 points
    low, high = sorted((percent(abs(v), decimals) for v in ends), key=float)
    if e.low < 0 < e.high:
        first, second = (w.partition(" ")[0] for w in (below, above))
        low, high = f"{percent(-ends[0], decimals)} {first}", f"{percent(ends[1], decimals)} {second}"
    return f"{said}{remark} (95 % interval {low} to {high}, {e.n} {e.unit})"


def format_all(e: Estimate) -> str:
    """ "in both seeds", "for all 3 clients"."""
    return f"{'in' if e.unit == 'seeds' else 'for'} {'both' if e.n == 2 else f'all {e.n}'} {e.unit}"


def clients(found: Gains, noun: str = "client") -> str:
    """ "25 clients over 5 seeds"."""
    seeds = len(found.seeds)
    return count(len(found.pairs), noun) + (f" over {seeds} seeds" if seeds > 1 else "")


def doubts(comparison: Comparison, found: Sequence[Estimate]) -> Iterator[str]:
    """What few seeds leave open, and what would tell more."""
    few = min((e.n for e in found if e.sign == 0 and e.unit == "seeds" and not (e.tied and e.n >= ENOUGH)), default=5)
    if few < 5:
        why = "Two seeds cannot exclude chance" if few < ENOUGH else f"An interval over {few} seeds is wide"
        yield f"{why}; more seeds may tell: {_more(comparison, 5)}."
    if comparison.federated and all(len(m.counted) == 1 for m in comparison.methods if m.counted):
        yield (
            "There is one seed only: intervals over clients tell how clients differ, not what another seed would give; "
            f"{_more(comparison, 3)} makes more."
        )


def _more(comparison: Comparison, seeds: int) -> str:
    """How to get more seeds."""
    if comparison.at_sites:
        return "submitting the federation with another seed and another name"
    if any(m.algorithm == TUNED for m in comparison.methods):
        return f"`fedmutual adapt RUN --seeds {seeds}`"
    return f"`fedmutual compare FILE.toml --seeds {seeds}`"
