"""The main metric of a run, as environment.json names it."""

from pathlib import Path

from fedmutual.files import Table, read_json
from fedmutual.metric import ACCURACY, Metric
from fedmutual.rundir.file_names import ENVIRONMENT
from fedmutual.rundir.schema import RecordedMetric


def find_metric(environment: Table) -> Metric:
    """Return the metric that all clients of a run have in common; accuracy where environment.json names no metric."""
    metric = environment.get("metric")
    return ACCURACY if metric is None else Metric(**RecordedMetric.model_validate(metric).model_dump())


def read_metric(folder: Path) -> Metric:
    """Return the main metric of the run in a folder.

    Raises:
        RunError: environment.json is damaged.
    """
    return find_metric(read_json(folder / ENVIRONMENT)) if (folder / ENVIRONMENT).exists() else ACCURACY
