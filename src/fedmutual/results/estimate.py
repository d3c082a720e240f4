"""Means and 95 % intervals: the average behind each number, and its uncertainty."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit  # scipy.stats has the same functions and takes a second longer to import

LEVEL = 0.95
SAME = 1e-12  # the largest difference of two equal accuracies, which sums of floats can cause
ENOUGH = 3  # the fewest units of a certain result: accuracies change in whole examples, so two units may agree by chance


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` units ("seeds" or "clients"), with half the width of its 95 % interval; None for one unit.

    Accuracies and differences of accuracies are fractions; other metrics have their own unit.
    """

    mean: float
    half: float | None
    n: int
    unit: str
    grain: float = 0.0  # by how much one example moves the value of a unit
    limit: float = 1.0  # the greatest difference of two values; infinite for numbers that are no fractions

    @property
    def low(self) -> float:
        """The interval's lower end; the mean where there is no interval."""
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        """The interval's upper end; the mean where there is no interval."""
        return self.mean + (self.half or 0.0)

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval's ends, cut off at the limits: two accuracies differ by 100 points at most."""
        return max(self.low, -self.limit), min(self.high, self.limit)

    @property
    def is_few(self) -> bool:
        """Whether there are too few units to exclude chance."""
        return self.n < ENOUGH

    @property
    def sign(self) -> int:
        """+1 or -1 if the whole interval is better or worse than 0, else 0.

        Also 0 for fewer than three units, and if all units agree on no more than one example.
        """
        slack = SAME + (self.grain if self.tied else 0.0)
        return 0 if self.is_few else (self.low > slack) - (self.high < -slack)

    @property
    def direction(self) -> int:
        """+1 or -1 if the mean is better or worse than 0, else 0; a difference that sums of floats can cause is 0."""
        return (self.mean > SAME) - (self.mean < -SAME)

    @property
    def may_be_chance(self) -> bool:
        """Whether the sign is not certain, and the mean differs from 0 or there are too few units."""
        return not self.sign and (self.is_few or bool(self.direction))

    @property
    def tied(self) -> bool:
        """Whether all units, two or more, have the same value: their interval has no width."""
        return self.half is not None and self.half <= SAME


@dataclass(frozen=True)
class Missing:
    """A number that cannot be given. `why` is the reason, as a clause for a footnote."""

    why: str


Value = Estimate | Missing


def estimate(values: Sequence[float], unit: str, grain: float = 0.0, limit: float = 1.0) -> Estimate:
    """Return the mean and 95 % interval (Student's t with n - 1 degrees of freedom: mean +- t s / sqrt(n)) of values."""
    n = len(values)
    half = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * stdev(values) / n**0.5 if n > 1 else None
    return Estimate(fmean(values), half, n, unit, grain, limit)


def compute_wilson_interval(fraction: float, rows: int) -> tuple[float, float]:
    """Return the 95 % interval (low, high) of a fraction of independent rows: Wilson's score interval.

    Wilson, Probable inference, the law of succession, and statistical inference, 1927,
    https://doi.org/10.1080/01621459.1927.10502953.

    rows: how many, at least one. The interval is about which rows were drawn, not about how the model was trained.
    """
    z = float(ndtri((1 + LEVEL) / 2))
    centre = (fraction + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z / (1 + z * z / rows) * (fraction * (1 - fraction) / rows + z * z / (4 * rows * rows)) ** 0.5
    return max(centre - half, 0.0), min(centre + half, 1.0)


def compute_newcombe_interval(first: tuple[float, int], second: tuple[float, int]) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two fractions (fraction, rows) of independent rows, from Wilson's.

    Newcombe, Interval estimation for the difference between independent proportions, 1998, method 10,
    https://doi.org/10.1002/(SICI)1097-0258(19980430)17:8%3C873::AID-SIM779%3E3.0.CO;2-I.
    """
    (a, _), (b, _) = first, second
    (low, high), (other_low, other_high) = (compute_wilson_interval(*share) for share in (first, second))
    return a - b - math.hypot(a - low, other_high - b), a - b + math.hypot(high - a, b - other_low)


RESAMPLES = 500


def compute_bootstrap_interval(
    compute: Callable[..., float], parts: Sequence[npt.NDArray[np.int64]], method: str = "percentile"
) -> tuple[float, float] | None:
    """Return the 95 % interval of a number by the bootstrap: Efron, 1979, https://doi.org/10.1214/aos/1176344552.

    compute: rows of each part -> the number; NaN where it is undefined. parts: the rows that are resampled, each part by
    itself. method: as `scipy.stats.bootstrap` takes it. None: a part has one row, or the number of a resample is undefined.
    """
    from scipy.stats import DegenerateDataWarning, bootstrap  # takes a second

    if min(map(len, parts)) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateDataWarning)  # the number of a resample is undefined
        result = bootstrap(tuple(parts), compute, vectorized=False, n_resamples=RESAMPLES, method=method, random_state=0)
    low, high = (float(end) for end in result.confidence_interval)
    return (low, high) if math.isfinite(low + high) else None
