"""The privacy cost of noised steps: epsilon at delta, computed by the accountants of Opacus (the extra `privacy`).

"rdp": Renyi differential privacy of the sampled Gaussian (Mironov et al., 2019, https://arxiv.org/abs/1908.10530). "prv":
numerical composition of privacy random variables (Gopi et al., 2021, https://arxiv.org/abs/2106.02848), which is tighter.
"""

import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np

from fedmutual.errors import ConfigError

Accountant = Literal["rdp", "prv"]
ORDERS = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 80, 96, 128, 192, 256, 512, 1024]
_MOST = 1e5  # largest sigma: with more noise a network learns nothing
_DIGITS = 4  # significant digits of a planned sigma


class NoisedSteps(NamedTuple):
    """A number of equal steps: each takes a Poisson sample of the units, with noise of sigma times the clipping norm."""

    sigma: float
    rate: float
    number: int  # of steps


def check_installed() -> None:
    """Raise ConfigError, with the install command, where the extra `privacy` is missing."""
    if find_spec("opacus") is None:
        raise ConfigError("privacy.nets needs the extra 'privacy', which computes epsilon: pip install 'fedmutual[privacy]'")


def compute_total_epsilon(taken: Iterable[NoisedSteps], delta: float, accountant: Accountant = "rdp") -> float:
    """Return epsilon at delta of all steps together, under adding or removing one unit; 0 without steps, possibly infinite.

    Raises:
        ConfigError: the extra is missing, or the accountant "prv" cannot compute epsilon.
    """
    counts: dict[tuple[float, float], int] = {}
    for steps in taken:
        key = steps.sigma, steps.rate
        counts[key] = counts.get(key, 0) + steps.number
    history = tuple((sigma, rate, count) for (sigma, rate), count in sorted(counts.items()) if count)
    return max(compute_epsilon(history, delta, accountant), 0.0) if history else 0.0


def compute_fixed_order_epsilon(taken: Sequence[NoisedSteps], delta: float, most: float) -> float:
    """Return epsilon at delta of steps whose settings may have been chosen after earlier answers were seen.

    The Renyi order may not depend on what was seen (Lecuyer, 2021, https://arxiv.org/abs/2103.01379, Theorem 1). While all
    steps are of one kind the best order does not: only their number is chosen. Otherwise the order is the one with which the
    budget `most` allows the most steps of a Gaussian mechanism, whose divergence is proportional to the order.

    Raises:
        ConfigError: the extra is missing.
    """
    kinds = {(steps.sigma, steps.rate) for steps in taken if steps.number}
    if len(kinds) < 2:
        return compute_total_epsilon(taken, delta)
    check_installed()
    from opacus.accountants.analysis import rdp

    def compute_divergence(steps: NoisedSteps, order: float) -> float:
        value = rdp.compute_rdp(q=steps.rate, noise_multiplier=steps.sigma, steps=steps.number, orders=[order])
        return float(np.ravel(value)[0])

    def compute_cost(divergence: float, order: float) -> float:
        return float(rdp.get_privacy_spent(orders=[order], rdp=[divergence], delta=delta)[0])

    best = max(ORDERS, key=lambda order: (most - compute_cost(0.0, order)) / order)
    return max(compute_cost(sum(compute_divergence(steps, best) for steps in taken), best), 0.0)


def find_sigma(target: float, rate: float, count: int, delta: float, accountant: Accountant = "rdp") -> float:
    """Return the smallest noise multiplier with which `count` steps cost at most epsilon `target`, rounded up to 4 digits.

    Raises:
        ConfigError: no noise multiplier is large enough, the extra is missing, or "prv" cannot compute epsilon.
    """

    def compute_cost(sigma: float) -> float:
        return compute_total_epsilon([NoisedSteps(sigma, rate, count)], delta, accountant)

    high = 1.0
    while compute_cost(high) > target:
        high *= 2
        if high > _MOST:
            raise ConfigError(
                f"no noise makes {count} steps cost at most epsilon {target:g} at delta {delta:g}; raise epsilon"
            )
    low = high / 2
    while low > 1e-3 and compute_cost(low) <= target:
        high, low = low, low / 2
    while high - low > 10**-_DIGITS * high / 2:
        middle = (low + high) / 2
        low, high = (low, middle) if compute_cost(middle) <= target else (middle, high)
    unit = 10.0 ** (len(str(int(high))) - _DIGITS) if high >= 1 else 10.0**-_DIGITS
    return round((int(high / unit) + 1) * unit, 8)


@lru_cache
def compute_epsilon(history: tuple[tuple[float, float, int], ...], delta: float, accountant: Accountant) -> float:
    """Return epsilon at delta of a history of (sigma, rate, steps); may be below 0.

    Source: of "rdp" Mironov et al., 2019, https://arxiv.org/abs/1908.10530; of "prv" Gopi et al., 2021,
    https://arxiv.org/abs/2106.02848.

    Raises:
        ConfigError: the extra is missing, or the accountant "prv" cannot compute epsilon.
    """
    check_installed()
    from opacus.accountants import PRVAccountant, RDPAccountant

    computation: Any = RDPAccountant() if accountant == "rdp" else PRVAccountant()
    computation.history = list(history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that the best order is the last one: the bound holds for any order
        if accountant == "rdp":
            return float(computation.get_epsilon(delta, alphas=ORDERS))
        try:
            return float(computation.get_epsilon(delta))
        except (ValueError, RuntimeError, MemoryError) as problem:
            raise ConfigError(
                f"privacy.accountant = 'prv' cannot compute epsilon of these steps ({problem}); use 'rdp'"
            ) from None
