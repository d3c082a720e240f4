"""Compute p-values of claims: Student's t, the combination over cells, and Holm's adjustment."""

from collections.abc import Sequence
from typing import NamedTuple

from scipy.stats import t

from fedmutual.results.estimate import ENOUGH, LEVEL, SAME, Estimate
from fedmutual_papers.schema import Claim


class Tails(NamedTuple):
    """The one-sided p-values of a claim and of its opposite: the smaller `supports` is, the better the claim is supported.

    `supports` belongs to the null hypothesis that the claim is wrong, and `contradicts` to the null hypothesis that the
    opposite of the claim is wrong.
    """

    supports: float
    contradicts: float

    @property
    def p(self) -> float:
        """Return the two-sided p-value; it is below 1 - LEVEL exactly if the interval supports or contradicts the claim."""
        return min(2 * min(self), 1.0)


NO_NUMBER = Tails(1.0, 1.0)


def compute_tails(claim: Claim, difference: Estimate | None) -> Tails | None:
    """Return the p-values of one difference over seeds; None for fewer than three seeds, which decide nothing.

    Student's t. A claim of "same" takes two one-sided tests (Schuirmann, A comparison of the two one-sided tests procedure
    and the power approach, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987).
    """
    if difference is None or difference.half is None or difference.n < ENOUGH:
        return None
    if claim.sign == "same":  # two one-sided tests: the difference is above -margin, and below margin
        within = max(_compute_p_above(difference, -claim.margin), _compute_p_below(difference, claim.margin))
        return Tails(within, min(_compute_p_above(difference, claim.margin), _compute_p_below(difference, -claim.margin)))
    bound = claim.times or 0.0
    above, below = _compute_p_above(difference, bound), _compute_p_below(difference, bound)
    return Tails(above, below) if claim.sign == "more" else Tails(below, above)


def compute_several_tails(lines: Sequence[Tails | None], supporting: int, contradicting: int) -> Tails:
    """Return the p-values that at least `supporting` cells support a claim and at least `contradicting` contradict it.

    The k-th smallest of n p-values times n - k + 1: Bonferroni's partial conjunction (Benjamini and Heller, Screening for
    partial conjunction hypotheses, Biometrics 64, 2008). A cell without a number counts as 1.
    """
    p_values = [line or NO_NUMBER for line in lines]
    n = len(p_values)
    supports = sorted(line.supports for line in p_values)[supporting - 1] * (n - supporting + 1)
    contradicts = sorted(line.contradicts for line in p_values)[contradicting - 1] * (n - contradicting + 1)
    return Tails(min(supports, 1.0), min(contradicts, 1.0))


def _compute_p_above(difference: Estimate, bound: float) -> float:
    """Return the one-sided p-value that the mean lies above a bound; for equal seeds, 0 or 1 by the grain."""
    assert difference.half is not None
    if difference.tied:
        return 0.0 if difference.mean - bound > difference.grain + SAME else 1.0
    error = difference.half / float(t.ppf((1 + LEVEL) / 2, difference.n - 1))
    return float(t.sf((difference.mean - bound) / error, difference.n - 1))


def _compute_p_below(difference: Estimate, bound: float) -> float:
    assert difference.half is not None
    if difference.tied:
        return 0.0 if bound - difference.mean > difference.grain + SAME else 1.0
    return _compute_p_above(
        Estimate(-difference.mean, difference.half, difference.n, difference.unit, difference.grain), -bound
    )


SURE = 0.05  # an adjusted p below it stands


def is_significant(p: float | None) -> bool:
    """Return whether a verdict with this adjusted p-value stands."""
    return p is not None and p < SURE


def adjust_by_holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values, in the order of `p_values`.

    Holm, A simple sequentially rejective multiple test procedure, Scandinavian Journal of Statistics 6, 1979.
    """
    order = sorted(range(len(p_values)), key=lambda k: p_values[k])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, k in enumerate(order):
        largest = max(largest, min((len(p_values) - rank) * p_values[k], 1.0))
        adjusted[k] = largest
    return adjusted
