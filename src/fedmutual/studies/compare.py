"""Compare several methods over several seeds; on request each method's settings are first tuned on hold-out rows."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from fedmutual import data
from fedmutual.algorithms import ALGORITHMS
from fedmutual.config import (
    Config,
    check_scored,
    list_setting_types,
    list_tunable_settings,
    override_config,
    replace_algorithm,
)
from fedmutual.config.checks import describe_foreign_key
from fedmutual.config.grid import LEARNING_RATE, draw_combinations, expand_grid, format_value, make_folder_name
from fedmutual.core import Schedule
from fedmutual.errors import ConfigError, UserError
from fedmutual.events import Observer
from fedmutual.role import DEFAULT_METHODS
from fedmutual.rundir.file_names import TUNED
from fedmutual.rundir.record_files import write_record
from fedmutual.rundir.schema import TunedRecord
from fedmutual.settings import LEAST_TRIALS, RATE_FACTORS
from fedmutual.studies.observers import Watch
from fedmutual.studies.study import RunKey, Setting, Study, list_runs, list_seeds, train_runs, try_experiment
from fedmutual.studies.sweep import KEPT, SHARE, Sweep, has_effect_on_rows, plan_combinations, train_sweep
from fedmutual.studies.trained_run import Run, open_trained_run

ALL = "all"  # in the place of a method's name: every method of the package
TRIALS = "tune"  # of a comparison's folder: a sweep for each method, by `--tune`
_NOTHING_TO_TUNE = "no setting is left to tune"

Values = Mapping[str, Any]
"""Dotted key -> value."""
Search = Literal["random", "halving"]
"""How `tune` draws trials where it does not try one key after the other; "halving" also ends most of them early."""


class Tuned(NamedTuple):
    """What the trials of one method chose."""

    values: Values  # empty where nothing can be tuned or chosen
    tried: int  # settings that were trained
    most: int  # the budget: settings that each method may train
    is_rate_at_end: bool = False  # whether the chosen learning rate is the smallest or the largest of several tried ones
    cost: Mapping[str, int | None] = MappingProxyType({})  # of all trials (`Sweep.budget`)
    failure: str = ""  # why `values` is empty, in words


def expand_methods(names: Sequence[str] | None, algorithm: str | None) -> tuple[str, ...]:
    """Return the names of `--methods`, with every method of the package in the place of "all".

    names: None where `--methods` is unset; then the methods are the configuration's algorithm and the default methods.
    algorithm: the algorithm that the configuration names, None where the configuration names no algorithm. With "all" it
    is one of the methods.
    """
    named = () if algorithm is None else (algorithm,)
    if names is None:
        return tuple(dict.fromkeys((*named, *DEFAULT_METHODS)))
    if ALL not in names:
        return tuple(names)
    return tuple(dict.fromkeys((*named, *(name for name in names if name != ALL), *ALGORITHMS)))


def find_unfit_methods(
    config: Config, methods: Sequence[str], required: Sequence[str], method_settings: Values | None = None
) -> dict[str, str]:
    """Return method -> the reason, in one sentence, why its networks cannot be made and trained with this configuration.

    The experiment of each method is built once, untrained, with data that are read once.

    required: methods that the user named, which raise an error. method_settings: as `list_variants` takes them.

    Raises:
        UserError: a required method does not fit the configuration; the data cannot be read.
    """
    prepared = data.prepare(config)
    reasons: dict[str, str] = {}
    for method in methods:
        try:
            variant, _ = replace_algorithm(config, method, method_settings)
            experiment = try_experiment(variant, prepared)
            if variant.model.batchnorm != config.model.batchnorm and experiment.nets.notes:  # the method would be FedAvg
                raise ConfigError(experiment.nets.notes[0])
            _check_paces({config.algorithm["name"]: config, method: variant})
        except UserError as problem:
            if method in required:
                raise
            reasons[method] = str(problem)
    return reasons


def list_variants(
    config: Config,
    methods: Sequence[str],
    method_settings: Values | None = None,
    tuned: Mapping[RunKey, Tuned] | None = None,
) -> list[Setting]:
    """Return each method as a setting.

    method_settings: settings for the methods that have them, beside those of the configuration.
    tuned: (method,) or (method, fold) -> the settings that `tune` chose.

    Raises:
        ConfigError: there is no method, one comes twice, or one does not fit the configuration; or a round is not equally
            much training under all methods.
    """
    if not methods:
        raise ConfigError(f"--methods names no algorithm; name some, separated by commas: {','.join(DEFAULT_METHODS)}")
    twice = [method for n, method in enumerate(methods) if method in methods[:n]]
    if twice:
        raise ConfigError(f"--methods names {twice[0]!r} twice; name each algorithm once")
    check_scored(config, config.name)
    changed = {m: replace_algorithm(config, m, method_settings)[0] for m in methods}
    _check_paces(changed)
    chosen = {m: {tuple(fold): one.values for (name, *fold), one in (tuned or {}).items() if name == m} for m in methods}
    return [Setting(m, variant, make_folder_name(m), chosen=chosen[m]) for m, variant in changed.items()]


def _check_paces(variants: Mapping[str, Config]) -> None:
    """Raise ConfigError unless a round is equally much training under every method."""
    steps = {method: config.training.local_steps for method, config in variants.items()}
    counted = next((method for method, n in steps.items() if n is not None), None)
    other = next((method for method, n in steps.items() if n is None), None)
    if counted is not None and other is not None:
        raise ConfigError(
            f"{counted} counts gradient steps and {other} passes over the data, so that a round would be more "
            "training for one of them; set training.local_steps for all methods"
        )


def compare(
    config: Config,
    methods: Sequence[str],
    seeds: int,
    out: Path,
    resume: bool = False,
    watch: Watch | None = None,
    method_settings: Values | None = None,
    tuned: Mapping[RunKey, Tuned] | None = None,
    jobs: int | None = None,
) -> list[Run]:
    """Run every method with every seed into OUT/<method>/<seed>, and return all runs; finished runs are not trained again.

    The folder of a method "module:Class" is named without the colon, which Windows refuses.

    method_settings, tuned: as `list_variants` takes them; the chosen settings are written into each run's tuned.json.
    watch, jobs: as `train_runs` takes them.

    Raises:
        UserError: as `train_runs`; errors of methods and folders are raised before the first training.
        Diverged: as `train_runs`.
    """
    study = Study(list_variants(config, methods, method_settings, tuned), list_seeds(config, seeds), out)
    train_runs(study.runs, resume, watch, jobs)
    for folder, ((method, _, *fold), _) in study.runs.items():
        if choice := (tuned or {}).get((method, *fold)):
            record = TunedRecord(
                set={key: format_value(value) for key, value in choice.values.items()},
                chosen_by="holdout",
                tried=choice.tried,
                budget=choice.most,
                sweep="/".join((TRIALS, make_folder_name(str(method)), *map(str, fold))),
            )
            write_record(folder / TUNED, record)
    return [open_trained_run(folder, run_config) for folder, (_, run_config) in study.runs.items()]


def tune(
    config: Config,
    methods: Sequence[str],
    trials: int,
    out: Path,
    resume: bool = False,
    watch: Watch | None = None,
    method_settings: Values | None = None,
    fixed: Collection[str] = (),
    jobs: int | None = None,
    search: Search | None = None,
    ranges: Values | None = None,
) -> dict[RunKey, Tuned]:
    """Choose each method's settings by a sweep of at most `trials` runs into OUT/tune/<method> -> (method,) -> the choice.

    The learning rate comes first; then, at the best learning rate, the method's settings that declare values to try, one
    after the other. Every trial has the configured rounds and seed, and rows held out of the training data choose. With
    split.folds each fold, whose scored rows must not choose, has a sweep of its own: OUT/tune/<method>/<fold>, and
    (method, fold) -> its choice.

    method_settings, jobs: as for `compare`. fixed: dotted keys that are not tuned.
    search: "random": the first trial has the configured values; the others are drawn, the learning rate log-uniformly up to
    a hundredth and a hundred times, equal draws for all methods. "halving": the same trials, with successive halving.
    ranges: dotted key -> what is drawn instead (`config.grid.Grid`); a key of `algorithm` is drawn for the methods that have
    it. With ranges, `search` is "random" unless it is given.

    Raises:
        ConfigError: the configuration asks for differential privacy; or a range is none, of a key that no method has, or of
            one that changes the rows; or halving has too few trials.
        UserError: as `sweep`.
    """
    if config.privacy.nets != "none":
        raise ConfigError("--tune: the trials would cost privacy that epsilon does not count; set the keys with --set")
    if not config.split.holdout and config.partition.kind != "file":
        config = override_config(config, {"split.holdout": SHARE})
    ranges, search = ranges or {}, search or ("random" if ranges else None)
    if search == "halving" and trials < KEPT:
        raise ConfigError(f"--halving: of {trials} settings none can end early; use --tune {KEPT} or more")
    for name in filter(has_effect_on_rows, ranges):
        raise ConfigError(f"--set: the range of {name!r}: settings are compared on the same rows, so it takes one value")
    for name in (key.split(".")[1] for key in ranges if key.startswith("algorithm.")):
        if not any(name in list_setting_types(method) for method in methods):
            raise ConfigError(f"--set: {describe_foreign_key('algorithm', name, methods)}")
    chosen = dict[RunKey, Tuned]()
    for setting in list_variants(config, methods, method_settings):
        settings = list_setting_types(setting.label)
        for place, (fold, one) in list_runs(setting.config, out / TRIALS / setting.folder).items():
            key = (setting.label, *fold)
            watch_trial = None if watch is None else partial(_watch_trial, watch, format_tuned(key))
            own = {k: v for k, v in ranges.items() if not k.startswith("algorithm.") or k.split(".")[1] in settings}
            search_one = partial(_search_settings, search, own) if search else _tune_method
            chosen[key] = search_one(one, trials, place, resume, watch_trial, fixed, jobs)
    return chosen


def format_tuned(key: RunKey) -> str:
    """Return what was tuned, in words: a method, or a method's fold."""
    return ", fold ".join(map(str, key))


def _watch_trial(watch: Watch, what: str, name: str) -> Observer:
    return watch(f"tune {what}, {name}")


def _search_settings(
    search: Search,
    ranges: Values,
    config: Config,
    trials: int,
    out: Path,
    resume: bool,
    watch: Watch | None,
    fixed: Collection[str],
    jobs: int | None,
) -> Tuned:
    start, candidates = _list_tuned_keys(config, [*fixed, *ranges])
    factors = {LEARNING_RATE: {"log-uniform": [min(RATE_FACTORS), max(RATE_FACTORS)]}} if LEARNING_RATE in start else {}
    drawn = draw_combinations(expand_grid({**factors, **candidates, **ranges}), trials, config.seed)
    if factors:
        drawn = [{**one, LEARNING_RATE: _scale_rate(start[LEARNING_RATE], one[LEARNING_RATE])} for one in drawn]
    drawn[0] |= start
    tried = [values for n, values in enumerate(drawn) if values not in drawn[:n]]
    if len(tried) < LEAST_TRIALS:
        return Tuned({}, 0, trials, failure=_NOTHING_TO_TUNE)
    is_halved = search == "halving" and len(tried) >= KEPT
    sweep = train_sweep(plan_combinations(config, tried, out, is_halved), resume, watch, jobs)
    return _describe_choice(sweep, tried, trials)


def _list_tuned_keys(config: Config, fixed: Collection[str]) -> tuple[dict[str, Any], dict[str, Sequence[Any]]]:
    """Return key -> configured value of what is tuned, and of the method's own settings key -> values to try."""
    tunable = {f"algorithm.{key}": values for key, values in list_tunable_settings(config).items()}
    start: dict[str, Any] = {LEARNING_RATE: config.optimizer.lr} | {key: value for key, (value, _) in tunable.items()}
    start = {key: value for key, value in start.items() if key not in fixed}
    return start, {key: tunable[key][1] for key in start if key in tunable}


def _tune_method(
    config: Config, trials: int, out: Path, resume: bool, watch: Watch | None, fixed: Collection[str], jobs: int | None
) -> Tuned:
    best, candidates = _list_tuned_keys(config, fixed)
    tried: list[Values] = []
    sweep = None
    for key, values in _plan_trials(best, candidates, trials):
        tried += [{**best, key: value} for value in values if {**best, key: value} not in tried]
        if len(tried) < LEAST_TRIALS:
            continue
        sweep = train_sweep(plan_combinations(config, tried, out), resume, watch, jobs)
        if sweep.chosen is None:
            break
        best, resume = dict(sweep.chosen.values), True  # the trials of the keys before stay
    return _describe_choice(sweep, tried, trials) if sweep else Tuned({}, 0, trials, failure=_NOTHING_TO_TUNE)


def _describe_choice(sweep: Sweep, tried: Sequence[Values], trials: int) -> Tuned:
    if sweep.chosen is None:
        return Tuned({}, len(tried), trials, cost=sweep.budget, failure=sweep.failure)
    rates = {rate for values in tried if not isinstance(rate := values.get(LEARNING_RATE), Schedule | None)}
    is_rate_at_end = len(rates) > 1 and sweep.chosen.values[LEARNING_RATE] in (min(rates), max(rates))
    return Tuned(sweep.chosen.values, len(tried), trials, is_rate_at_end, sweep.budget)


def _plan_trials(start: Values, candidates: Mapping[str, Sequence[Any]], trials: int) -> Iterator[tuple[str, list[Any]]]:
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


def _scale_rate(rate: Any, factor: float) -> Any:
    """Return a learning rate, constant or scheduled, times a factor, with three digits."""
    if isinstance(rate, Schedule):
        return replace(rate, start=_scale_rate(rate.start, factor), end=_scale_rate(rate.end, factor))
    return float(f"{rate * factor:.3g}")
