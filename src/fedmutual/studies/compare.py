"""Compare several methods over several seeds; each method and seed is a run in its own folder."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from fedmutual.config import Config, check_scored, override_config, replace_algorithm
from fedmutual.config.grid import format_value, make_folder_name
from fedmutual.errors import ConfigError
from fedmutual.events import Observer
from fedmutual.role import DEFAULT_METHODS
from fedmutual.rundir.file_names import CONFIG, TUNED
from fedmutual.rundir.folder import check_free, check_resumable
from fedmutual.rundir.record_files import write_record
from fedmutual.rundir.schema import TunedRecord
from fedmutual.studies.run import can_stack, run_together
from fedmutual.studies.side_by_side import RunRequest, limit_jobs, train_runs
from fedmutual.studies.trained_run import Run, open_trained_run

TRIALS = "tune"  # of a comparison's folder: a sweep for each method, by `--tune`
Planned = tuple[str, Config, Path]  # what a run is called while it is watched, what it is, where it goes


@dataclass(frozen=True)
class Tuned:
    """What the trials of one method chose."""

    values: Mapping[str, Any]  # by dotted key; empty where nothing can be tuned, or every trial diverged
    tried: int  # settings that were trained
    most: int  # the budget: settings that each method may train
    is_rate_at_end: bool = False  # whether the chosen learning rate is the smallest or the largest of several tried ones


def list_seeds(config: Config, count: int) -> range:
    """Return the seeds of a study: `count` numbers from the configured seed upwards.

    Raises:
        ConfigError: `count` is below 1.
    """
    if count < 1:
        raise ConfigError(f"--seeds must be 1 or more, not {count}")
    return range(config.seed, config.seed + count)


def list_variants(
    config: Config,
    methods: Sequence[str],
    seeds: int,
    method_settings: Mapping[str, Any] | None = None,
    tuned: Mapping[str, Tuned] | None = None,
) -> Iterator[tuple[str, int, Config]]:
    """Return (method, seed, configuration) for each method and seed, from the configured seed upwards.

    method_settings: settings for the methods that have them, beside those of the configuration.
    tuned: method -> the settings that `tune` chose.

    Raises:
        ConfigError: there is no method, one comes twice, or one does not fit the configuration; a round is not equally
            much training under all methods; or `seeds` is below 1.
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
    for method, variant in changed.items():
        for seed in list_seeds(config, seeds):
            yield method, seed, variant.model_copy(update={"seed": seed})


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

    watch: an observer for the run of this name; of a run in a worker process it sees the start, notes, replies, scores, and
    the end. method_settings, tuned: as `list_variants` takes them; the chosen settings are written into
    each run's folder. jobs: as `train_all` takes it. With the engine "stacked", or "auto" on a GPU, all runs train at once,
    with their clients in common stacks.

    Raises:
        UserError: as `run`; errors of methods and folders are raised before the first training.
        Diverged: as `run`.
    """
    planned = [
        (f"{method}, seed {seed}", variant, out / make_folder_name(method) / str(seed))
        for method, seed, variant in list_variants(config, methods, seeds, method_settings, tuned)
    ]
    check_folders(planned, resume)
    runs = train_all(planned, resume, watch, jobs)
    for method in tuned or {}:
        for done in runs[methods.index(method) * seeds :][:seeds]:
            record_choice(done.folder, method, (tuned or {})[method])
    return runs


def record_choice(folder: Path, method: str, choice: Tuned) -> None:
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
            sweep=f"{TRIALS}/{make_folder_name(method)}",
        ),
    )


def check_folders(planned: Sequence[Planned], resume: bool) -> None:
    """Check that every run can begin in its folder, or with `resume` can continue there. No folder is changed.

    Raises:
        RunError: a folder holds other files, or a run that this configuration cannot resume.
        ConfigError: config.toml of a run to resume is damaged.
    """
    for _, config, folder in planned:
        if resume and (folder / CONFIG).exists():
            check_resumable(folder, config)
        else:
            check_free(folder)


def train_all(
    planned: Sequence[Planned], resume: bool, watch: Callable[[str], Observer] | None = None, jobs: int | None = None
) -> list[Run]:
    """Train each run into its folder, and return the runs.

    All runs train at once in common stacks if the first run can; otherwise several run side by side if this is faster.

    jobs: the number of runs side by side; None: chosen by the time of the first run.

    Raises:
        ConfigError: `jobs` is above 1, and the runs cannot run side by side.
        UserError, Diverged: the error of the first run that failed.
    """
    configs, folders = [config for _, config, _ in planned], [folder for *_, folder in planned]
    observers = [[watch(label)] if watch else [] for label, *_ in planned]
    if can_stack(configs[0]):
        return run_together(configs, folders, resume, observers)
    requests = [RunRequest(*each) for each in zip(configs, folders, repeat(resume), observers)]
    train_runs(requests, limit_jobs(configs, jobs))
    return [open_trained_run(folder, config) for folder, config in zip(folders, configs, strict=True)]
