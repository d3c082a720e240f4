"""A study: settings x seeds, each a run in its own folder. Run, compare, sweep, tune and adapt train their runs here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedmutual import data
from fedmutual.config import Config, override_config
from fedmutual.errors import RUN_NOTE, ConfigError
from fedmutual.events import Observer
from fedmutual.federation import build
from fedmutual.federation.experiment import Experiment
from fedmutual.rundir.file_names import CONFIG
from fedmutual.rundir.folder import check_free, check_resumable
from fedmutual.studies.observers import Watch, make_warning_observers
from fedmutual.studies.run import RunRequest, can_stack
from fedmutual.studies.side_by_side import choose_jobs, limit_jobs, train_queue
from fedmutual.studies.trained_run import Run, open_trained_run
from fedmutual.user_code.recorded_code import set_trust

RunKey = tuple[str | int, ...]
"""Which run: (label of the setting, seed), with split.folds (label, seed, fold); of one configuration () or (fold,)."""
Runs = Mapping[Path, tuple[RunKey, Config]]
"""Folder -> (which run, configuration)."""


def list_runs(config: Config, folder: Path) -> dict[Path, tuple[RunKey, Config]]:
    """Return the run of one configuration; with split.folds one for each fold, in FOLDER/<fold>."""
    if config.split.folds is None or config.split.fold is not None:
        return {folder: ((), config)}
    splits = {fold: config.split.model_copy(update={"fold": fold}) for fold in range(config.split.folds)}
    return {folder / str(fold): ((fold,), config.model_copy(update={"split": split})) for fold, split in splits.items()}


def format_run(key: RunKey) -> str:
    """Return which run it is, in words: "fml, seed 3, fold 0"; "" for the one run of a configuration."""
    if len(key) < 2:
        return "".join(f"fold {fold}" for fold in key)
    return ", ".join((f"{key[0]}, seed {key[1]}", *(f"fold {fold}" for fold in key[2:])))


def run(
    config: Config,
    out: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    trust_code: bool = False,
) -> Run:
    """Train an experiment into a folder, and return the run; with `split.folds` all folds (`Run.folds`).

    out: the folder; None: `runs/<name>`.
    resume: continue the run in the folder from its last saved state; a finished run is not trained again.
    observers: functions that get each event of `fedmutual.events`.
    trust_code: continue with code that has changed since the run recorded the code.

    Each remark is a `RemarkWarning`.

    Raises:
        UserError: the experiment cannot be trained; one sentence says why.
        Diverged: a client's loss or weights are not finite; the last saved state is kept.
        Refused: a reply of a client holds something that must not leave the client.
    """
    folder = Path(out) if out is not None else Path("runs") / config.name
    watch = make_warning_observers()
    with set_trust(trust_code):
        train_runs(list_runs(config, folder), resume, lambda name: watch(name or config.name), observers=observers)
    return open_trained_run(folder, config)


def try_experiment(config: Config, prepared: Mapping[str, data.Prepared]) -> Experiment:
    """Return an experiment after a check that the networks of all clients can be built: errors appear before training.

    Raises:
        UserError: the data or a network do not fit the configuration.
    """
    with torch.random.fork_rng(devices=[]):
        experiment = build.build(config, prepared=prepared)
        for client in experiment.clients:
            experiment.build_networks(client)
    return experiment


def list_seeds(config: Config, count: int) -> range:
    """Return the seeds of a study: `count` numbers from the configured seed upwards.

    Raises:
        ConfigError: `count` is below 1.
    """
    if count < 1:
        raise ConfigError(f"seeds = {count}: must be 1 or more")
    return range(config.seed, config.seed + count)


@dataclass(frozen=True)
class Setting:
    """A configuration that a study trains with each seed."""

    label: str  # in messages
    config: Config
    folder: str  # of its runs, in the folder of the study
    values: Mapping[str, Any] = field(default_factory=dict)  # by dotted key: what the setting changes in the configuration
    chosen: Mapping[RunKey, Mapping[str, Any]] = field(default_factory=dict)  # likewise, by () or (fold,): what trials chose


@dataclass(frozen=True)
class Study:
    """Settings x seeds x folds; runs are in OUT/<folder of the setting>/<seed>, or OUT/<...>/<seed>/<fold>."""

    settings: Sequence[Setting]
    seeds: Sequence[int]
    out: Path

    @cached_property
    def runs(self) -> dict[Path, tuple[RunKey, Config]]:
        """Folder -> (which run, configuration), in the order of the settings and then of the seeds."""
        return {
            folder: ((setting.label, seed, *fold), override_config(config, setting.chosen.get(fold, {})))
            for setting in self.settings
            for seed, place in self.find_folders(setting).items()
            for folder, (fold, config) in list_runs(setting.config.model_copy(update={"seed": seed}), place).items()
        }

    def find_folders(self, setting: Setting) -> dict[int, Path]:
        """Return seed -> folder of the run, or of the runs of all folds."""
        return {seed: self.out / setting.folder / str(seed) for seed in self.seeds}

    def open_runs(self, setting: Setting) -> dict[int, Run]:
        """Return seed -> run, of the finished runs of a setting that this process has trained or resumed."""
        return {seed: open_trained_run(folder, setting.config) for seed, folder in self.find_folders(setting).items()}


def check_folders(runs: Runs, resume: bool) -> None:
    """Check that every run can begin in its folder, or with `resume` can continue there. No folder is changed.

    Raises:
        RunError: a folder holds other files, or a run that this configuration cannot resume.
        ConfigError: config.toml of a run to resume is damaged.
    """
    for folder, (_, config) in runs.items():
        if resume and (folder / CONFIG).exists():
            check_resumable(folder, config)
        else:
            check_free(folder)


def train_runs(
    runs: Runs,
    resume: bool,
    watch: Watch | None = None,
    jobs: int | None = None,
    tolerated: tuple[type[Exception], ...] = (),
    observers: Sequence[Observer] = (),
    seconds: float | None = None,
) -> dict[Path, Exception]:
    """Train each run into its folder, and return folder -> error, of the runs with a tolerated error.

    With the engine "stacked", or "auto" on a GPU, the clients of all runs train at once in common stacks; with several
    jobs, each job trains the seeds of one setting so. Otherwise several runs train side by side if this is faster. With
    `resume` a finished run is not trained again.

    watch: an observer for the run of this name; of a run in a worker process it sees the start, notes, replies, scores,
    and the end. jobs: the number of runs side by side; None: chosen by the time of the first run, and 1 with `observers`,
    which see every event of every run. tolerated: errors of one run after which the other runs continue. seconds: of one
    run, where they are known before the first run.

    Raises:
        ConfigError: `jobs` is above 1, and the runs cannot run side by side.
        UserError: as `check_folders`, before the first run is trained.
        UserError, Diverged: the error of the first run that failed, with a note that names the run. Runs that trained side
            by side are stopped, and can be resumed; runs in common stacks were trained to their end.
    """
    check_folders(runs, resume)
    requests = []
    for folder, (key, config) in runs.items():
        watching = [watch(format_run(key))] if watch else []
        keyed = [lambda event, observer=observer, key=key: observer(replace(event, run=key)) for observer in observers]
        requests.append(RunRequest(config, folder, resume, [*keyed, *watching]))
    configs = [request.config for request in requests]
    limited = limit_jobs(configs, 1 if observers and jobs is None else jobs)
    batches = [[request] for request in requests]
    if can_stack(configs):
        of_settings: dict[str, list[RunRequest]] = {}
        for request in requests:
            of_settings.setdefault(repr(request.config.model_copy(update={"seed": 0})), []).append(request)
        batches = [requests] if limited == 1 else list(of_settings.values())
    queue = _StudyQueue(batches, tolerated, {folder: format_run(key) for folder, (key, _) in runs.items()})
    if limited is None and seconds is not None:
        limited = choose_jobs(len(queue), seconds, configs[0].engine.threads)
    train_queue(queue, limited)
    return queue.problems


class _StudyQueue:
    """The queue of a study, whose runs do not wait for each other."""

    def __init__(
        self, waiting: list[list[RunRequest]], tolerated: tuple[type[Exception], ...], names: Mapping[Path, str]
    ) -> None:
        """waiting: the runs; those in one list train in common stacks. names: folder -> which run it is."""
        self._waiting, self._tolerated, self._names = waiting, tolerated, names
        self.problems: dict[Path, Exception] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def take(self) -> Sequence[RunRequest]:
        return self._waiting.pop(0) if self._waiting else ()

    def finish(self, requests: Sequence[RunRequest], problems: Sequence[Exception | None], seconds: float) -> None:
        for request, problem in zip(requests, problems, strict=True):
            if isinstance(problem, self._tolerated):
                self.problems[request.folder] = problem
            elif problem is not None:
                if name := self._names[request.folder]:
                    problem.add_note(f"{RUN_NOTE}{name}")
                raise problem
