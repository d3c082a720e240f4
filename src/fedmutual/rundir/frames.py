"""The scores of a run as a pandas table."""

from pathlib import Path
from typing import TYPE_CHECKING

from fedmutual.rundir.file_names import METRICS
from fedmutual.rundir.record_files import read_records
from fedmutual.rundir.schema import Evaluation

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("round", "model", "client", "data", "metric", "value")


def read_scores(folder: Path) -> "pd.DataFrame":
    """Return all scores of a run's folder, one row for each number; no rows before the first evaluation.

    Columns: round (from 1), model ("global", "personal", "ensemble" or "meme"), client (None: the common test set), data
    ("validation", "test" or "holdout"), metric, value (accuracies are fractions in [0, 1]). The table lacks scores that
    clients do not share.

    Raises:
        RunError: metrics.jsonl is damaged.
    """
    import pandas as pd  # takes 0.3 s, and only tables need it

    rows = [
        (evaluation.round, row.model, row.client, row.data, metric, float(value))
        for evaluation in read_records(folder / METRICS, Evaluation)
        for row in evaluation.rows
        for metric, value in row.values.items()
        if isinstance(value, int | float)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))
