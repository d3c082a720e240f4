"""Trackers of experiments beside the run's folder: TensorBoard, MLflow, Weights & Biases."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from fedmutual.config.schema import Config, RecordsConfig
from fedmutual.errors import ConfigError, RunError, format_error, warn_user
from fedmutual.events import Evaluated, Event, Failed
from fedmutual.rundir.file_names import LOCK
from fedmutual.rundir.mlflow_tracker import MLflowRun
from fedmutual.rundir.scalars import list_scalars
from fedmutual.rundir.wandb_tracker import WandbRun


class TrackedRun(Protocol):
    """A run of a tracker. A method may raise any error of the tracker; `Tracker` turns the error into a warning."""

    def log(self, round: int, scalars: Mapping[str, float]) -> None:
        """Log the numbers of a round."""

    def end(self, folder: Path, files: Sequence[Path], is_finished: bool) -> None:
        """End the run; keep the files, which are in the run's folder."""


_TRACKERS: dict[str, Callable[[str, str, Mapping[str, str]], TrackedRun]] = {"mlflow": MLflowRun, "wandb": WandbRun}


def check_installed(records: RecordsConfig) -> None:
    """Raise ConfigError if a package that a key of `records` needs is not installed."""
    needed: dict[str, Sequence[str]] = {
        "records.tensorboard": ["tensorboard"] if records.tensorboard else [],
        "records.trackers": records.trackers,
    }
    for key, packages in needed.items():
        for package in packages:
            if find_spec(package) is None:
                raise ConfigError(f'key {key!r} needs the package {package!r}: pip install "fedmutual[{package}]"')


class Tracker:
    """Observer: sends the scores and losses that clients disclose to one tracker, and the run's folder at the end.

    The folders of clients are not sent: a personal model, and scores that `share.metrics` keeps back, stay there. A tracker
    that fails after the first round stops with a warning, and the training continues.

    Raises:
        RunError: the tracker cannot be reached, or refuses the run.
    """

    def __init__(self, name: str, folder: Path, config: Config, identity: str) -> None:
        """identity: of the run's settings and data, so that a resumed run is found again."""
        self._name, self._folder = name, folder
        key = hashlib.sha256(f"{folder.resolve()}\n{identity}".encode()).hexdigest()[:16]
        title = f"{config.name}, {config.algorithm['name']}, seed {config.seed}"
        settings = _flatten(config.model_dump(mode="json", exclude_defaults=True))
        try:
            self._run: TrackedRun | None = _TRACKERS[name](key, title, settings)
        except Exception as problem:  # trackers fail in many ways
            raise RunError(
                f"key 'records.trackers': {name} cannot be used ({format_error(problem)}); check its settings, or take "
                f"{name!r} out of records.trackers"
            ) from None

    def __call__(self, event: Event) -> None:
        """Log the numbers of an evaluation; end the tracker's run if the run fails."""
        if isinstance(event, Evaluated):
            self._try("log", event.round, dict(list_scalars(event)))
        elif isinstance(event, Failed):
            self._try("end", self._folder, (), False)

    def end(self) -> None:
        """Keep the files of the finished run, and end the tracker's run."""
        # a link in a folder from somebody else could name any file of this machine
        files = [f for f in sorted(self._folder.rglob("*")) if f.is_file() and not f.is_symlink() and f.name != LOCK]
        sent = [f for f in files if f.relative_to(self._folder).parts[0] != "clients"]
        self._try("end", self._folder, sent, True)

    def _try(self, method: str, *arguments: Any) -> None:
        """Call a method of the tracker's run; after a failure, the tracker is not used again."""
        if self._run is None:
            return
        try:
            getattr(self._run, method)(*arguments)
        except Exception as problem:  # a tracker's failure must not cost the training
            self._run = None
            warn_user(f"{self._name} failed ({format_error(problem)}); the run continues without this tracker")


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested tables as dotted keys with values as text."""
    flat: dict[str, str] = {}
    for key, value in tables.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value)
    return flat
