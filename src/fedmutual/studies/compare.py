"""Compare several methods over several seeds; each method and seed is a run in its own folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedmutual import data
from fedmutual.algorithms import ALGORITHMS
from fedmutual.config import Config, check_scored, override_config, replace_algorithm
from fedmutual.config.grid import format_value, make_folder_name
from fedmutual.errors import ConfigError, UserError
from fedmutual.events import Observer
from fedmutual.federation import build
from fedmutual.role import DEFAULT_METHODS
from fedmutual.rundir.file_names import TUNED
from fedmutual.rundir.record_files import write_record
from fedmutual.rundir.schema import TunedRecord
from fedmutual.studies.study import Setting, Study, list_seeds
from fedmutual.studies.trained_run import Run

ALL = "all"  # in the place of a method's name: every method of the package
TRIALS = "tune"  # of a comparison's folder: a sweep for each method, by `--tune`


@dataclass(frozen=True)
class Tuned:
    """What the trials of one method chose."""

    values: Mapping[str, Any]  # by dotted key; empty where nothing can be tuned, or every trial diverged
    tried: int  # settings that were trained
    most: int  # the budget: settings that each method may train
    is_rate_at_end: bool = False  # whether the chosen learning rate is the smallest or the largest of several tried ones


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
    config: Config, methods: Sequence[str], required: Sequence[str], method_settings: Mapping[str, Any] | None = None
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
            _check_method(config, method, method_settings, prepared)
        except UserError as problem:
            if method in required:
                raise
            reasons[method] = str(problem)
    return reasons


def _check_method(
    config: Config, method: str, method_settings: Mapping[str, Any] | None, prepared: Mapping[str, data.Prepared]
) -> None:
    """Raise UserError, in one sentence, unless the method's networks can be made and trained."""
    variant, _ = replace_algorithm(config, method, method_settings)
    with torch.random.fork_rng(devices=[]):
        experiment = build.build(variant, prepared=prepared)
        for client in experiment.clients:
            experiment.build_networks(client)
    if variant.model.batchnorm != config.model.batchnorm and experiment.nets.notes:  # the method would be FedAvg
        raise ConfigError(experiment.nets.notes[0])
    if (variant.training.local_steps is None) != (config.training.local_steps is None):
        raise ConfigError(
            "a round is counted in gradient steps, and under the other methods in passes over the data; set "
            "training.local_steps, which then holds for all methods"
        )


def list_variants(
    config: Config,
    methods: Sequence[str],
    method_settings: Mapping[str, Any] | None = None,
    tuned: Mapping[str, Tuned] | None = None,
) -> list[Setting]:
    """Return each method as a setting.

    method_settings: settings for the methods that have them, beside those of the configuration.
    tuned: method -> the settings that `tune` chose.

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
    chosen = {method: choice.values for method, choice in (tuned or {}).items()}
    changed = {m: override_config(replace_algorithm(config, m, method_settings)[0], chosen.get(m, {})) for m in methods}
    _check_paces(changed)
    return [Setting(method, variant, make_folder_name(method)) for method, variant in changed.items()]


def _check_paces(variants: Mapping[str, Config]) -> None:
    """Raise ConfigError unless a round is equally much training under every method."""
    steps = {method: config.training.local_steps for method, config in variants.items()}
    if len(set(steps.values())) > 1:
        counted, other = (next(m for m, n in steps.items() if (n is None) is none) for none in (False, True))
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
    watch: Callable[[str], Observer] | None = None,
    method_settings: Mapping[str, Any] | None = None,
    tuned: Mapping[str, Tuned] | None = None,
    jobs: int | None = None,
) -> list[Run]:
    """Run every method with every seed into OUT/<method>/<seed>, and return all runs; finished runs are not trained again.

    The folder of a method "module:Class" is named without the colon, which Windows refuses.

    method_settings, tuned: as `list_variants` takes them; the chosen settings are written into each run's folder.
    watch, jobs: as `Study.train` takes them.

    Raises:
        UserError: as `Study.train`; errors of methods and folders are raised before the first training.
        Diverged: as `Study.train`.
    """
    settings = list_variants(config, methods, method_settings, tuned)
    study = Study(settings, list_seeds(config, seeds), out)
    study.check_folders(resume)
    study.train(resume, watch, jobs)
    for setting in settings:
        if tuned and setting.label in tuned:
            for folder in study.find_folders(setting).values():
                _record_choice(folder, setting, tuned[setting.label])
    return [run for setting in settings for run in study.open_runs(setting).values()]


def _record_choice(folder: Path, setting: Setting, choice: Tuned) -> None:
    """Write tuned.json into a run's folder: which values the trials chose, and where the trials are.

    Raises:
        RunError: the file cannot be written.
    """
    write_record(
        folder / TUNED,
        TunedRecord(
            set={key: format_value(value) for key, value in choice.values.items()},
            chosen_by="holdout",
            tried=choice.tried,
            budget=choice.most,
            sweep=f"{TRIALS}/{setting.folder}",
        ),
    )
