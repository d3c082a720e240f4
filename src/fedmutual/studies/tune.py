"""Each method's settings chosen on hold-out rows, before the seeds of a comparison are trained."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedmutual.config import Config, list_tunable_settings
from fedmutual.config.grid import LEARNING_RATE
from fedmutual.core import Schedule, Setting
from fedmutual.errors import ConfigError
from fedmutual.events import Observer
from fedmutual.settings import LEAST_TRIALS, RATE_FACTORS
from fedmutual.studies.compare import TRIALS, Tuned, list_variants
from fedmutual.studies.sweep import train_sweep
from fedmutual.studies.sweep_plan import SHARE, plan_combinations

Values = dict[str, Any]
"""Dotted key -> value."""


def tune(
    config: Config,
    methods: Sequence[str],
    trials: int,
    out: Path,
    resume: bool = False,
    watch: Callable[[str], Observer] | None = None,
    method_settings: Mapping[str, Any] | None = None,
    fixed: Collection[str] = (),
    jobs: int | None = None,
) -> dict[str, Tuned]:
    """Choose each method's settings by a sweep of at most `trials` runs into OUT/tune/<method> -> method -> the choice.

    The learning rate comes first; then, at the best learning rate, the method's settings that declare values to try, one
    after the other. Every trial has the configured rounds and seed, and rows held out of the training data choose.

    method_settings, jobs: as for `compare`. fixed: dotted keys that are not tuned.

    Raises:
        ConfigError: the configuration asks for differential privacy.
        UserError: as `sweep`.
    """
    if config.privacy.nets != "none":
        raise ConfigError(
            "--tune: the trials would cost privacy that epsilon does not count; choose the settings with --set"
        )
    if not config.split.holdout and config.partition.kind != "file":
        config = config.model_copy(update={"split": config.split.model_copy(update={"holdout": SHARE})})
    chosen = {}
    for setting in list_variants(config, methods, method_settings):
        method, folder = setting.label, out / TRIALS / setting.folder
        observers = None if watch is None else (lambda name, method=method: watch(f"tune {method}, {name}"))
        chosen[method] = _tune_method(setting.config, trials, folder, resume, observers, fixed, jobs)
    return chosen


def _tune_method(
    config: Config,
    trials: int,
    out: Path,
    resume: bool,
    watch: Callable[[str], Observer] | None,
    fixed: Collection[str],
    jobs: int | None,
) -> Tuned:
    tunable = {f"algorithm.{key}": values for key, values in list_tunable_settings(config).items()}
    best: Values = {LEARNING_RATE: config.optimizer.lr} | {key: value for key, (value, _) in tunable.items()}
    best = {key: value for key, value in best.items() if key not in fixed}
    tried: list[Values] = []
    for key, values in _plan_trials(best, {key: tunable[key][1] for key in best if key in tunable}, trials):
        tried += [{**best, key: value} for value in values if {**best, key: value} not in tried]
        if len(tried) < LEAST_TRIALS:
            continue
        sweep = train_sweep(plan_combinations(config, tried, out), resume, watch, jobs)
        if sweep.chosen is None:
            return Tuned({}, len(tried), trials)
        best, resume = dict(sweep.chosen.values), True  # the trials of the keys before stay
    rates = {
        values[LEARNING_RATE]
        for values in tried
        if LEARNING_RATE in values and not isinstance(values[LEARNING_RATE], Schedule)
    }
    is_rate_at_end = len(rates) > 1 and best[LEARNING_RATE] in (min(rates), max(rates))
    return Tuned(best if len(tried) >= LEAST_TRIALS else {}, len(tried), trials, is_rate_at_end)


def _plan_trials(
    start: Mapping[str, Any], candidates: Mapping[str, Sequence[Any]], trials: int
) -> Iterator[tuple[str, list[Any]]]:
    """Yield (key, its values) in the order of the trials: half of the trials for the learning rate, then the other keys."""
    left = trials
    if LEARNING_RATE in start:
        rates = [_scale_rate(start[LEARNING_RATE], factor) for factor in RATE_FACTORS]
        count = min(len(rates), math.ceil(trials / 2) if candidates else trials)
        left -= count
        yield LEARNING_RATE, rates[:count]
    else:
        left -= 1  # the first setting's configured value
    for number, (key, values) in enumerate(candidates.items()):
        others = [value for value in values if value != start[key]]
        count = min(len(others), math.ceil(left / (len(candidates) - number)))
        left -= count
        yield key, [start[key], *others[:count]]


def _scale_rate(rate: Setting, factor: float) -> Setting:
    """A learning rate times a factor, with three digits."""
    if isinstance(rate, Schedule):
        return replace(rate, start=_round_number(rate.start * factor), end=_round_number(rate.end * factor))
    return _round_number(rate * factor)


def _round_number(number: float) -> float:
    return float(f"{number:.3g}")
