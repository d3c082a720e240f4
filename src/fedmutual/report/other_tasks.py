"""Scores of tasks without accuracy, such as a regression, in the units of their task."""

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean

import pandas as pd

from fedmutual.metric import ACCURACY
from fedmutual.report.cells import Column, PageTable, TableCell, make_table
from fedmutual.report.findings import Finding
from fedmutual.report.measures import average_over_seeds
from fedmutual.results.comparison import SHORT, Method, RunComparison
from fedmutual.results.estimate import Estimate, Value
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
    columns = [
        Column("Client", numeric=False, keys=("client",), read=lambda line: line[0][0]),
        Column("Score", numeric=False, keys=("score",), read=lambda line: line[0][1]),
    ]
    for label in dict.fromkeys(scores["label"]):
        keys, read = (label, f"{label}_half_width"), partial(_average_label, label)
        columns.append(Column(label, keys=keys, read=read, form=_make_cell))
    scored = "Clients with another task: scores" if comparison.metric == ACCURACY else "All scores of clients"
    caption = f"{scored} on their own validation data, last round"
    return make_table("others", caption, columns, list(scores.groupby(["client", "score"], sort=False)))


def _average_label(label: str, line: tuple[object, pd.DataFrame]) -> Value:
    scores = line[1]
    return average_over_seeds(scores.loc[scores["label"] == label, "value"], "not scored")


def find_other_tasks(comparison: RunComparison) -> Iterator[Finding]:
    """Return the first few clients without the main metric, each with its first score, and how many more there are."""
    if comparison.metric != ACCURACY:
        return
    clients = list(_tabulate_scores(comparison).groupby("client", sort=False))
    for client, scores in clients[:_MOST]:
        first_score = scores["score"].iloc[0]
        means = scores[scores["score"] == first_score].groupby("label", sort=False)["value"].agg(fmean)
        yield Finding(macro="other_task", client=str(client), score=first_score, values=tuple(means.items()))
    if len(clients) > _MOST:
        yield Finding(macro="more_tasks", clients=len(clients) - _MOST)


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


def _make_cell(value: Estimate) -> TableCell:
    return TableCell(f"{value.mean:.4g}", f"± {value.half:.2g}" if value.half is not None else "")
