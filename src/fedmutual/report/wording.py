"""A verdict, and the words for a difference and for a doubt; `templates/wording.j2` has the text."""

from dataclasses import dataclass

from fedmutual.report.rendering import render_macro
from fedmutual.report.statistics import Estimate


@dataclass(frozen=True)
class Verdict:
    """The question of a comparison, the answer in a sentence, its most important reasons, and all sentences.

    sentences: every fact for the answer and against it; a page folds them.
    """

    question: str
    lead: str
    highlights: tuple[str, ...]
    sentences: tuple[str, ...]


def describe_difference(estimate: Estimate, decimals: int, above: str, below: str, level: str) -> str:
    """Return "1.3 points above (95 % interval 0.4 to 2.2, 3 seeds)", with these words for the direction."""
    return render_macro("wording.j2", "difference", estimate, decimals, above, below, level)


def describe_chance(estimate: Estimate) -> str:
    """Return the clause for a difference that is not certain: ", which may be chance"."""
    return render_macro("wording.j2", "chance", estimate)


def describe_too_few(estimate: Estimate) -> str:
    """Return "two seeds cannot exclude chance"."""
    return render_macro("wording.j2", "too_few", estimate)
