"""Log a run to MLflow, which needs the extra `fedmutual[mlflow]`.

MLflow's own environment variables say where: MLFLOW_TRACKING_URI (else a database in the working directory) and
MLFLOW_EXPERIMENT_NAME (else "fedmutual").
"""

import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_NOT_ALLOWED = re.compile(r"[^\w\-. :/]")  # in a name of MLflow; letters of all languages are allowed


class MLflowRun:
    """A run of MLflow; a resumed run continues the run of MLflow that has the key."""

    def __init__(self, key: str, title: str, settings: Mapping[str, str]) -> None:
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
                self._client.log_param(self._id, _make_key(setting), value)

    def log(self, round: int, scalars: Mapping[str, float]) -> None:
        """Log the numbers of a round."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, [Metric(_make_key(name), value, now, round) for name, value in scalars.items()])

    def end(self, folder: Path, files: Sequence[Path], is_finished: bool) -> None:
        """End the run; files of the run's folder become artifacts under `run/`."""
        for file in files:
            parent = file.relative_to(folder).parent
            self._client.log_artifact(self._id, str(file), (Path("run") / parent).as_posix())
        self._client.set_terminated(self._id, "FINISHED" if is_finished else "FAILED")


def _make_key(name: str) -> str:
    """Return a name that MLflow accepts: with `_` for refused characters, and a digest, so that names stay different."""
    key = _NOT_ALLOWED.sub("_", name)
    return name if key == name else f"{key}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
