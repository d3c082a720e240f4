"""The scores of a run as pandas tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedmutual.rundir.file_names import METRICS
from fedmutual.rundir.record_files import read_records
from fedmutual.rundir.schema import Evaluation, MetricScore

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("round", "model", "client", "data", "metric", "value")


def read_scores(folder: Path) -> "pd.DataFrame":
    """Return all scores of a run's folder, one row for each number; no rows before the first evaluation.

    Columns: round (from 1), model ("global", "personal", "ensemble" or "meme"), client (None: the common test set), data
    ("validation", "test" or "holdout"; of domains also "test.own", "test.others" and "validation.all"), metric,
    value (accuracies are fractions in [0, 1]). The table lacks scores that clients do not share.

    Raises:
        RunError: metrics.jsonl is damaged.
    """
    import pandas as pd  # takes 0.3 s, and only tables need it

    rows = [
        (evaluation.round, row.model, row.client, row.data, metric, float(value))
        for evaluation in read_records(folder / METRICS, Evaluation)
        for row in evaluation.rows
        for metric, value in row.values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def tabulate_scores(evaluations: Sequence[Evaluation], seed: int) -> "pd.DataFrame":
    """Return the scores with the main metric, one row for each evaluation, model, client and kind of rows.

    Columns: seed, round (from 1), is_last (whether the round is the last with a score), and the fields of `MetricScore`. A
    missing number is NaN, and so is the client of the common test set.
    """
    import pandas as pd

    scores = [score for evaluation in evaluations for score in evaluation.scores]
    rounds = [evaluation.round for evaluation in evaluations for _ in evaluation.scores]
    columns = {field: [getattr(score, field) for score in scores] for field in MetricScore.model_fields}
    frame = pd.DataFrame({"seed": seed, "round": rounds, **columns})
    frame["is_last"] = frame["round"] == max(rounds, default=0)
    return frame
