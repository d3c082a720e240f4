"""Send a run's numbers to TensorBoard, MLflow and Weights & Biases, besides the files of the run's folder.

Each needs the extra `fedmutual[NAME]`. The environment variables of the trackers say where: MLFLOW_TRACKING_URI (else a
database in the working directory) and MLFLOW_EXPERIMENT_NAME (else "fedmutual"); WANDB_MODE (for example "offline"),
WANDB_PROJECT (else "fedmutual") and others.
"""

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedmutual.config.schema import Config, RecordsConfig
from fedmutual.errors import ConfigError, RunError, format_error, warn_user
from fedmutual.events import Evaluated, Event, Failed
from fedmutual.rundir.file_names import LOCK
from fedmutual.rundir.record_files import flatten_table

_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")  # in a name of MLflow; letters of all languages are allowed


def check_installed(records: RecordsConfig) -> None:
    """Raise ConfigError if a package that a key of `records` needs is not installed."""
    for package, key in _list_wanted(records):
        if find_spec(package) is None:
            raise ConfigError(f'key {key!r} needs the package {package!r}: pip install "fedmutual[{package}]"')


def list_scalars(event: Evaluated) -> Iterator[tuple[str, float]]:
    """Yield a name and a value for each score that clients disclose, and for each mean training loss.

    Names are `<metric>/<model>/<data>`, with `/<client>` for the rows of one client, and `train/<loss>/<client>`.
    """
    for score in event.scores:
        tag = "/".join((score.model, score.data, *([score.client] if score.client is not None else [])))
        yield from ((f"{name}/{tag}", value) for name, value in score.values.items() if isinstance(value, float))
    for client, terms in event.train.items():
        yield from ((f"train/{name}/{client}", value) for name, value in terms.items())


class TensorBoardRun:
    """The folder `tensorboard/` of a run's folder, with scalars. Methods as `MLflowRun`."""

    def __init__(self, folder: Path, key: str, title: str, settings: Mapping[str, str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, round: int, scalars: Mapping[str, float]) -> None:
        """Write the numbers of a round."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, round)

    def end(self, folder: Path, files: Sequence[Path], is_finished: bool) -> None:
        """Close the file; the run's files are beside it."""
        self._writer.close()


class MLflowRun:
    """A run of MLflow; a resumed run continues the run of MLflow that has the key."""

    def __init__(self, folder: Path, key: str, title: str, settings: Mapping[str, str]) -> None:
        """key: of the run folder. title: the name that people read. settings: configuration keys with their values."""
        from mlflow import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedmutual")
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        earlier = self._client.search_runs([experiment_id], filter_string=f"tags.fedmutual = '{key}'", max_results=1)
        if earlier:
            self._id: str = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment_id, tags={"fedmutual": key}, run_name=title).info.run_id
            for setting, value in settings.items():
                self._client.log_param(self._id, _make_mlflow_key(setting), value)

    def log(self, round: int, scalars: Mapping[str, float]) -> None:
        """Log the numbers of a round."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(
            self._id, [Metric(_make_mlflow_key(name), value, now, round) for name, value in scalars.items()]
        )

    def end(self, folder: Path, files: Sequence[Path], is_finished: bool) -> None:
        """End the run; files of the run's folder become artifacts under `run/`."""
        for file in files:
            parent = file.relative_to(folder).parent
            self._client.log_artifact(self._id, str(file), (Path("run") / parent).as_posix())
        self._client.set_terminated(self._id, "FINISHED" if is_finished else "FAILED")


def _make_mlflow_key(name: str) -> str:
    """Return a name that MLflow accepts: with `_` for refused characters, and a digest, so that names stay different."""
    key = _NOT_ALLOWED.sub("_", name)
    return name if key == name else f"{key}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class WandbRun:
    """A run of Weights & Biases; a resumed run continues the run that has the key. Methods and arguments as `MLflowRun`."""

    def __init__(self, folder: Path, key: str, title: str, settings: Mapping[str, str]) -> None:
        import wandb

        self._artifact = wandb.Artifact(f"run-{key}", type="run")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedmutual"),
            id=key,
            name=title,
            config=dict(settings),
            resume="allow",
            reinit="create_new",  # several runs can be trained at once in one process
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, round: int, scalars: Mapping[str, float]) -> None:
        """Log the numbers of a round."""
        self._run.log(dict(scalars), step=round)

    def end(self, folder: Path, files: Sequence[Path], is_finished: bool) -> None:
        """End the run; files of the run's folder become an artifact."""
        for file in files:
            self._artifact.add_file(str(file), name=file.relative_to(folder).as_posix())
        if files:
            self._run.log_artifact(self._artifact)
        self._run.finish(exit_code=0 if is_finished else 1)


_Run = TensorBoardRun | MLflowRun | WandbRun
_TRACKERS: dict[str, type[_Run]] = {"tensorboard": TensorBoardRun, "mlflow": MLflowRun, "wandb": WandbRun}


def _list_wanted(records: RecordsConfig) -> list[tuple[str, str]]:
    """Return (tracker, key) of each tracker that `records` names."""
    wanted = [("tensorboard", "records.tensorboard")] if records.tensorboard else []
    return [*wanted, *((name, "records.trackers") for name in records.trackers)]


class Tracker:
    """Observer: sends scores and losses to one tracker, and files of the run's folder at the end.

    A tracker that fails after the first round stops with a warning, and the training continues.

    Raises:
        RunError: the tracker cannot be reached, or refuses the run.
    """

    def __init__(self, name: str, key: str, folder: Path, config: Config, identity: str, title: str = "") -> None:
        """key: of the configuration. identity: of settings and data, to find a resumed run. title: the end of its title."""
        self._name, self._folder = name, folder
        run = hashlib.sha256(f"{folder.resolve()}\n{identity}".encode()).hexdigest()[:16]
        title = f"{config.name}, {config.algorithm['name']}, seed {config.seed}{title}"
        settings = {k: str(v) for k, v in flatten_table(config.model_dump(mode="json", exclude_defaults=True))}
        try:
            self._run: _Run | None = _TRACKERS[name](folder, run, title, settings)
        except Exception as problem:  # trackers fail in many ways
            raise RunError(
                f"key {key!r}: {name} cannot be used ({format_error(problem)}); check its settings, or remove {name} from "
                "the table records"
            ) from None

    def __call__(self, event: Event) -> None:
        """Log the numbers of an evaluation; end the tracker's run if the run fails."""
        if isinstance(event, Evaluated):
            self._try("log", event.round, dict(list_scalars(event)))
        elif isinstance(event, Failed):
            self.end((), is_finished=False)

    def end(self, files: Sequence[Path], is_finished: bool = True) -> None:
        """End the tracker's run, and keep some files of the run's folder. Later calls do nothing."""
        self._try("end", self._folder, files, is_finished)
        self._run = None

    def _try(self, method: str, *arguments: Any) -> None:
        """Call a method of the tracker's run; after a failure, the tracker is not used again."""
        if self._run is None:
            return
        try:
            getattr(self._run, method)(*arguments)
        except Exception as problem:  # a tracker's failure must not cost the training
            self._run = None
            warn_user(f"{self._name} failed ({format_error(problem)}); the run continues without this tracker")


def open_trackers(folder: Path, config: Config, identity: str, title: str = "") -> list[Tracker]:
    """Return the trackers that `records` of a configuration names. Arguments and errors as `Tracker`."""
    return [Tracker(name, key, folder, config, identity, title) for name, key in _list_wanted(config.records)]


def list_sent_files(folder: Path) -> list[Path]:
    """Return the files of a finished run that a tracker keeps: all but the folders of clients and the lock.

    A personal model, and scores that `share.metrics` keeps back, stay in the folders of clients.
    """
    # a link in a folder from somebody else could name any file of this machine
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and not f.is_symlink() and f.name != LOCK]
    return [f for f in files if f.relative_to(folder).parts[0] != "clients"]
