"""How well a score distinguishes members from others, with intervals."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

Scores = npt.NDArray[np.float64]
FEWEST = 4  # rows of each kind that a measurement needs


class Strength(NamedTuple):
    """What a membership attack achieves, with confidence intervals (`low` to `high`, and `auc_low` to `auc_high`).

    The advantage is the share of true positives minus the share of false positives: 0 for guessing, 1 for a perfect attack.
    The AUC is the area under the ROC curve: 0.5 for guessing, 1 for a perfect attack.
    """

    advantage: float
    low: float
    high: float
    auc: float
    auc_low: float
    auc_high: float


def measure_strength(members: Scores, non_members: Scores, level: float, rng: np.random.Generator) -> Strength:
    """Return how well a score distinguishes members from others.

    members [M], others [N]: scores, larger for rows that look like members; at least 4 of each. level: of each of the two
    intervals, for example 0.95.

    A random half of the rows chooses the threshold, and the other half measures the advantage (Yeom et al. 2018,
    https://arxiv.org/abs/1709.01604). Its interval joins those of Clopper and Pearson for both shares.

    Raises:
        ValueError: there are too few rows.
    """
    if min(len(members), len(non_members)) < FEWEST:
        raise ValueError(f"a measurement needs {FEWEST} rows of each kind; got {len(members)} and {len(non_members)}")
    halves = [np.array_split(rng.permutation(scores), 2) for scores in (members, non_members)]
    threshold = choose_threshold(halves[0][0], halves[1][0])
    hits, alarms = (int((half[1] > threshold).sum()) for half in halves)
    sizes = [len(half[1]) for half in halves]
    share = 1 - (1 - level) / 2  # both intervals hold together
    (hit_low, hit_high), (alarm_low, alarm_high) = (
        compute_clopper_pearson_interval(k, n, share) for k, n in zip((hits, alarms), sizes, strict=True)
    )
    advantage = hits / sizes[0] - alarms / sizes[1]
    return Strength(advantage, hit_low - alarm_high, hit_high - alarm_low, *measure_auc(members, non_members, level))


def choose_threshold(members: Scores, others: Scores) -> float:
    """Return the threshold with the largest difference between the shares of members and of others above it.

    The threshold is one of the scores of `members` [M] and `others` [N], or -inf.
    """
    candidates = np.unique(np.concatenate([[-np.inf], members, others]))
    above = [1 - np.searchsorted(np.sort(s), candidates, side="right") / len(s) for s in (members, others)]
    return float(candidates[int(np.argmax(above[0] - above[1]))])


def compute_clopper_pearson_interval(successes: int, trials: int, level: float) -> tuple[float, float]:
    """Return the exact interval (low, high) of a share of successes among trials (Clopper and Pearson, 1934)."""
    interval = stats.binomtest(successes, trials).proportion_ci(level, method="exact")
    return float(interval.low), float(interval.high)


def measure_auc(members: Scores, non_members: Scores, level: float) -> tuple[float, float, float]:
    """Return (area under the ROC curve, low, high), all in [0, 1].

    members [M], non_members [N]: scores, at least two of each. level: of the interval, for example 0.95. The variance is
    that of DeLong et al. 1988 (https://doi.org/10.2307/2531595).
    """
    ranks = stats.rankdata(np.concatenate([members, non_members]))
    group_ranks = stats.rankdata(members), stats.rankdata(non_members)
    placed = (ranks[: len(members)] - group_ranks[0]) / len(non_members)  # the share of others below each member
    passed = 1 - (ranks[len(members) :] - group_ranks[1]) / len(members)  # the share of members above each other row
    auc = float(placed.mean())
    error = float(np.sqrt(placed.var(ddof=1) / len(members) + passed.var(ddof=1) / len(non_members)))
    reach = float(stats.norm.ppf(0.5 + level / 2)) * error
    return auc, max(0.0, auc - reach), min(1.0, auc + reach)


def score_against_shadows(observed: Scores, shadows: Scores, trained: npt.NDArray[np.bool_]) -> Scores:
    """Return the logarithm of the likelihood ratio of each row [n]: that the model was trained on it, to that it was not.

    observed [n]: the confidence of the audited model. shadows [S, n]: of the shadow runs. trained [S, n]: whether the
    shadow run was trained on the row. NaN for rows without shadow runs of both kinds. Normal distributions with one variance
    for all rows, as Carlini et al. 2022 (https://arxiv.org/abs/2112.03570) advise where shadow runs are few.
    """
    terms = []
    for mask in (trained, ~trained):
        counts = mask.sum(0)
        with np.errstate(invalid="ignore"):
            centre = np.where(mask, shadows, 0).sum(0) / counts  # NaN where no shadow run is of this kind
        residuals = np.where(mask, shadows - centre, 0)[:, counts > 1]
        freedom = int((counts[counts > 1] - 1).sum())
        variance = max(float((residuals**2).sum()) / freedom, 1e-12) if freedom else 1.0
        terms.append(-((observed - centre) ** 2) / (2 * variance) - 0.5 * np.log(variance))
    ratio: Scores = terms[0] - terms[1]
    return ratio
