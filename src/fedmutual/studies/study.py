"""A study: settings x seeds, each a run in its own folder. Compare, sweep, tune and adapt train their runs here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedmutual.config import Config
from fedmutual.errors import ConfigError
from fedmutual.events import Observer
from fedmutual.rundir.file_names import CONFIG
from fedmutual.rundir.folder import check_free, check_resumable
from fedmutual.studies.observers import Watch
from fedmutual.studies.run import RunRequest, can_stack, list_folds
from fedmutual.studies.side_by_side import limit_jobs, train_queue
from fedmutual.studies.trained_run import Run, open_trained_run


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


@dataclass(frozen=True)
class Study:
    """Settings x seeds x folds; runs are in OUT/<folder of the setting>/<seed>, or OUT/<...>/<seed>/<fold>."""

    settings: Sequence[Setting]
    seeds: Sequence[int]
    out: Path

    @property
    def runs(self) -> dict[Path, tuple[str, Config]]:
        """Folder -> (label in messages, configuration) of each run, in the order of the settings and then of the seeds."""
        return {
            folder: (f"{setting.label}, seed {seed}{'' if folder == place else f', fold {folder.name}'}", config)
            for setting in self.settings
            for seed, place in self.find_folders(setting).items()
            for folder, config in list_folds(setting.config.model_copy(update={"seed": seed}), place).items()
        }

    def find_folders(self, setting: Setting) -> dict[int, Path]:
        """Return seed -> folder of the run, or of the runs of all folds."""
        return {seed: self.out / setting.folder / str(seed) for seed in self.seeds}

    def open_runs(self, setting: Setting) -> dict[int, Run]:
        """Return seed -> run, of the finished runs of a setting that this process has trained or resumed."""
        return {seed: open_trained_run(folder, setting.config) for seed, folder in self.find_folders(setting).items()}

    def check_folders(self, resume: bool) -> None:
        """Check that every run can begin in its folder, or with `resume` can continue there. No folder is changed.

        Raises:
            RunError: a folder holds other files, or a run that this configuration cannot resume.
            ConfigError: config.toml of a run to resume is damaged.
        """
        for folder, (_, config) in self.runs.items():
            if resume and (folder / CONFIG).exists():
                check_resumable(folder, config)
            else:
                check_free(folder)

    def train(
        self,
        resume: bool,
        watch: Watch | None = None,
        jobs: int | None = None,
        tolerated: tuple[type[Exception], ...] = (),
        observers: Sequence[Observer] = (),
    ) -> dict[Path, Exception]:
        """Train each run into its folder, and return folder -> error, of the runs with a tolerated error.

        With the engine "stacked", or "auto" on a GPU, all runs train at once, with their clients in common stacks; else
        several runs train side by side if this is faster. With `resume` a finished run is not trained again.

        watch: an observer for the run of this name; of a run in a worker process it sees the start, notes, replies, scores,
        and the end. jobs: the number of runs side by side; None: chosen by the time of the first run. tolerated: errors of
        one run after which the other runs continue. observers: of every run, as `watch` sees it.

        Raises:
            ConfigError: `jobs` is above 1, and the runs cannot run side by side.
            UserError, Diverged: the error of the first run that failed. Runs that trained side by side are stopped, and can
                be resumed; runs in common stacks were trained to their end.
        """
        requests = [
            RunRequest(config, folder, resume, [*observers, *([watch(label)] if watch else [])])
            for folder, (label, config) in self.runs.items()
        ]
        configs = [request.config for request in requests]
        is_stacked = can_stack(configs)
        queue = _StudyQueue([requests] if is_stacked else [[request] for request in requests], tolerated)
        train_queue(queue, 1 if is_stacked else limit_jobs(configs, jobs))
        return queue.problems


class _StudyQueue:
    """The queue of a study, whose runs do not wait for each other."""

    def __init__(self, waiting: list[list[RunRequest]], tolerated: tuple[type[Exception], ...]) -> None:
        """waiting: the runs; those in one list train in common stacks."""
        self._waiting, self._tolerated = waiting, tolerated
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
                raise problem
