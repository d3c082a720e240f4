"""The types of settings: a number that may change over the rounds, what a participant discloses, how replies are combined;
and the condition under which a key has an effect.

Nothing here imports torch, so that the keys of a configuration can be read without it.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Disclosure = Literal["none", "accuracy", "all"]
"""The scores and training losses that a participant discloses: none, only rounded accuracies, or all."""

Rule = Literal["mean", "median", "trimmed-mean"]
"""How replies become one message; the rules are functions of `fedmutual.aggregation`."""

Sum = Literal["float", "fixed"]
"""How a mean adds: in floating point, or in integers (`fedmutual.aggregation`)."""

Products = Literal["auto", "blas", "onednn"]
"""The library that multiplies float32 matrices on a CPU; see `fedmutual.cpu`."""

COMMON_OPTIMIZERS = ("sgd", "adam", "adamw")  # of torch.optim: the keys of [optimizer] are theirs, and stacks can have them
TRIM = 0.34  # of 3 replies 1 is cut off at either end, of 6 it is 2, of 10 it is 3
RATE_FACTORS = (1.0, 0.3, 3.0, 0.1, 10.0, 0.03, 30.0, 0.01, 100.0)  # of the learning rate, in the order of tuning's trials
LEAST_TRIALS, MOST_TRIALS = 2, 2 * len(RATE_FACTORS)  # of a method in tuning
MOST_COALITION_RUNS = 200  # of `worth` and `compare --join` where --runs does not say more
MOST_SUMMED = 2**13 - 1  # clients in a fixed-point sum, which then stays below 2^63 (`aggregation`)


@dataclass(frozen=True)
class OnlyIf:
    """A condition of a key: the key has an effect only if another key has one of some values.

    `config.checks` evaluates the conditions, except for those on "networks": `federation` evaluates these.
    """

    key: str  # the deciding key, dotted; or "algorithm" (its traits), "engine" (of the run), "networks" (then with `about`)
    values: tuple[Any, ...] = ()  # the deciding values; None: unset
    negated: bool = False  # whether the key has an effect with all other values instead
    about: str = ""  # the condition in words, for docs; "": from `key` and `values`
    remark: str = ""  # why the key has no effect; it may hold {name}, the algorithm, and {value}; "": such a key is an error
    of: tuple[Any, ...] = ()  # the values of the key itself that need the condition; (): all

    def holds(self, actual: Iterable[Any]) -> bool:
        """Return whether the condition is true. actual: the value of the deciding key, or several."""
        return any(value in self.values for value in actual) != self.negated


SHAPES = ("linear", "cosine", "step", "one-cycle")


@dataclass(frozen=True)
class Schedule:
    """A setting that changes over the rounds: `start` in the first, `end` in the last.

    shape: "linear", "cosine" (half a period), "step" (`start` before the fraction `at` of the rounds, `end` from there), or
    "one-cycle" (from `start` / 25 up to `start` at the fraction `at` of the rounds, then down to `end`, both half a period).
    warmup: the fraction of the rounds in which the value rises in equal steps from 0 to `start`, before the shape begins.

    Source of "one-cycle": Smith and Topin, 2018, https://arxiv.org/abs/1708.07120.

    Raises:
        ValueError: the shape is none of these four.
    """

    start: float
    end: float
    shape: str = "linear"
    at: float = 0.5
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise ValueError(
                f"a schedule's shape is {', '.join(map(repr, SHAPES[:-1]))} or {SHAPES[-1]!r}, not {self.shape!r}"
            )

    def __call__(self, round: int, rounds: int) -> float:
        """Return the value in `round` (from 0) of `rounds`."""
        rising = int(self.warmup * rounds)
        if round < rising:
            return self.start * (max(round, 0) + 1) / (rising + 1)
        if self.shape == "step":
            return self.start if round / rounds < self.at else self.end
        start, end, done = self.start, self.end, min(max((round - rising) / max(rounds - rising - 1, 1), 0.0), 1.0)
        if self.shape == "one-cycle":
            start, end, done = (start / 25, start, done / self.at) if done < self.at else (start, end, _part(done, self.at))
        if self.shape != "linear":
            done = (1 - math.cos(math.pi * done)) / 2
        return start + (end - start) * done

    def record(self) -> dict[str, float | str]:
        """Return the schedule as a table of a configuration, without a warm-up of 0, which older versions do not know."""
        return {k: v for k, v in asdict(self).items() if k != "warmup" or v}


def _part(done: float, begun: float) -> float:
    """Return the fraction of the way from `begun` to 1 that is done."""
    return (done - begun) / (1 - begun) if begun < 1 else 0.0


Setting = float | Schedule
"""A number, or one that moves over the rounds."""


def above_zero(name: str, value: float) -> None:
    """Raise ValueError, with one sentence, unless the value is above 0."""
    if value <= 0:
        raise ValueError(f"{name} must be above 0, not {value:g}")


def within(name: str, setting: Setting, low: float, high: float) -> None:
    """Raise ValueError, with one sentence, unless the setting stays in [low, high] over all rounds."""
    for value in (setting.start, setting.end) if isinstance(setting, Schedule) else (setting,):
        if not low <= value <= high:
            bound = f"between {low:g} and {high:g}" if math.isfinite(high) else f"at least {low:g}"
            raise ValueError(f"{name} must be {bound}, not {value:g}")
