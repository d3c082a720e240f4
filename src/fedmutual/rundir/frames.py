"""The scores of a run as pandas tables."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedmutual.rundir.file_names import METRICS
from fedmutual.rundir.record_files import read_records
from fedmutual.rundir.schema import Evaluation, MetricScore

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["round", "model", "client", "data", "metric", "value", "examples"]


def read_scores(folder: Path) -> "pd.DataFrame":
    """Return all scores of a run's folder, one row for each number, as `Run.history` describes them.

    Raises:
        RunError: metrics.jsonl is damaged.
    """
    return tabulate_numbers(read_records(folder / METRICS, Evaluation)).drop(columns="examples")


def tabulate_numbers(evaluations: Iterable[Evaluation]) -> "pd.DataFrame":
    """Return all scores, a row for each number: the columns of `Run.history`, and examples, how many were scored."""
    import pandas as pd  # takes 0.3 s, and only tables need it

    rows = [
        (evaluation.round, row.model, row.client, row.data, metric, float(value), row.find_number("examples"))
        for evaluation in evaluations
        for row in evaluation.rows
        for metric, value in row.values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return pd.DataFrame(rows, columns=COLUMNS)


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
