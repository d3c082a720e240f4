"""Scores of tasks without accuracy, such as a regression, in the units of their task."""

from collections.abc import Iterator, Sequence
from statistics import fmean

import pandas as pd

from fedmutual.metric import ACCURACY
from fedmutual.report.cells import Column, PageTable, TableCell, format_csv, list_numbers, make_missing_cell
from fedmutual.report.comparison import SHORT, Method, RunComparison
from fedmutual.report.findings import Finding, MoreTasks, OtherTask
from fedmutual.report.measures import average_over_seeds
from fedmutual.report.statistics import Estimate, Value
from fedmutual.rundir.recorded_run import RecordedRun
from fedmutual.rundir.schema import ScoreRow

_MOST = 3  # clients that the verdict names


def make_other_task_table(comparison: RunComparison) -> PageTable | None:
    """Return a table with a line for each client and score: each model on the client's own validation data, last round.

    None where all scores are those of classes.
    """
    scores = _tabulate_scores(comparison)
    if scores.empty:
        return None
    labels = list(dict.fromkeys(scores["label"]))
    rows, lines = [], []
    for (client, score), values in scores.groupby(["client", "score"], sort=False):
        means = [average_over_seeds(values.loc[values["label"] == label, "value"], "not scored") for label in labels]
        rows.append((TableCell(client), TableCell(score), *(_make_cell(mean) for mean in means)))
        lines.append([client, score, *(number for mean in means for number in list_numbers(mean)[:2])])
    columns = (Column("Client", numeric=False), Column("Score", numeric=False), *(Column(label) for label in labels))
    header = ["client", "score", *(f"{label}{end}" for label in labels for end in ("", "_half_width"))]
    scored = "Clients with another task: scores" if comparison.metric == ACCURACY else "All scores of clients"
    caption = f"{scored} on their own validation data, last round"
    return PageTable("others", caption, columns, tuple(rows), format_csv(header, lines))


def find_other_tasks(comparison: RunComparison) -> Iterator[Finding]:
    """Return the first few clients without the main metric, each with its first score, and how many more there are."""
    if comparison.metric != ACCURACY:
        return
    clients = list(_tabulate_scores(comparison).groupby("client", sort=False))
    for client, scores in clients[:_MOST]:
        first_score = scores["score"].iloc[0]
        means = scores[scores["score"] == first_score].groupby("label", sort=False)["value"].agg(fmean)
        yield OtherTask(str(client), first_score, tuple(means.items()))
    if len(clients) > _MOST:
        yield MoreTasks(len(clients) - _MOST)


def _tabulate_scores(comparison: RunComparison) -> pd.DataFrame:
    """Return all scores of tasks without accuracy on the clients' own validation data, after the last round of each run.

    Columns: label (of the method, with the model where the method has several), client, score (its name), value.
    """
    rows = [
        (f"{method.label}, {SHORT[model]}" if len(models) > 1 else method.label, other.client, score, value)
        for method in comparison.methods
        for models in [_list_models(method)]
        for model in models
        for run in method.counted
        for other in _list_others(run)
        if other.model == model and other.data == "validation"
        for score, value in other.values.items()
        if isinstance(value, float)
    ]
    return pd.DataFrame(rows, columns=["label", "client", "score", "value"])


def _list_models(method: Method) -> list[str]:
    scored = {other.model for run in method.counted for other in _list_others(run)}
    return [model for model in SHORT if model in scored]


def _list_others(run: RecordedRun) -> Sequence[ScoreRow]:
    return [other for other in run.last.others if other.client is not None] if run.last else []


def _make_cell(value: Value) -> TableCell:
    if not isinstance(value, Estimate):
        return make_missing_cell(value.why)
    return TableCell(f"{value.mean:.4g}", f"± {value.half:.2g}" if value.half is not None else "")
