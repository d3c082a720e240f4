"""Scores of tasks without accuracy, such as a regression, in the units of their task."""

from collections.abc import Iterator

from fedmutual.metric import ACCURACY
from fedmutual.report.cells import Column, PageTable, TableCell, format_csv, list_numbers, make_missing_cell
from fedmutual.report.comparison import SHORT, Method, RunComparison
from fedmutual.report.findings import Finding, MoreTasks, OtherTask
from fedmutual.report.measures import average_over_seeds
from fedmutual.report.statistics import Estimate, Value
from fedmutual.rundir.recorded_run import RecordedRun

_MOST = 3  # clients that the verdict names


def make_other_task_table(comparison: RunComparison) -> PageTable | None:
    """Return a table with a line for each client and score: each model on the client's own validation data, last round.

    None where all scores are those of classes.
    """
    models = _list_models(comparison)
    clients = _list_scores(comparison)
    if not clients:
        return None
    rows, lines = [], []
    for client, scores in clients.items():
        for score in scores:
            values = [_average_score(method, model, client, score) for method, model in models.values()]
            rows.append((TableCell(client), TableCell(score), *(_make_cell(value) for value in values)))
            lines.append([client, score, *(number for value in values for number in list_numbers(value)[:2])])
    columns = (Column("Client", numeric=False), Column("Score", numeric=False), *(Column(label) for label in models))
    header = ["client", "score", *(f"{label}{end}" for label in models for end in ("", "_half_width"))]
    whose = "Clients with another task: scores" if comparison.metric == ACCURACY else "All scores of clients"
    caption = f"{whose} on their own validation data, last round"
    return PageTable("others", caption, columns, tuple(rows), format_csv(header, lines))


def find_other_tasks(comparison: RunComparison) -> Iterator[Finding]:
    """Return the first few clients without the main metric, each with its first score, and how many more there are."""
    if comparison.metric != ACCURACY:
        return
    clients, models = _list_scores(comparison), _list_models(comparison)
    for client, scores in list(clients.items())[:_MOST]:
        values = {label: _average_score(*model, client, scores[0]) for label, model in models.items()}
        means = tuple((label, value.mean) for label, value in values.items() if isinstance(value, Estimate))
        yield OtherTask(client, scores[0], means)
    if len(clients) > _MOST:
        yield MoreTasks(len(clients) - _MOST)


def _list_scores(comparison: RunComparison) -> dict[str, list[str]]:
    """Return client -> the names of its scores."""
    names: dict[str, dict[str, None]] = {}
    for run in (r for m in comparison.methods for r in m.counted if r.last):
        for other in run.last.others if run.last else ():
            if other.client is not None and other.data == "validation":
                names.setdefault(other.client, {}).update({n: None for n in other.values if other.find_score(n) is not None})
    return {client: list(scores) for client, scores in names.items() if scores}


def _list_models(comparison: RunComparison) -> dict[str, tuple[Method, str]]:
    """Return label -> a method and one of its models; the label names the model where the method has several."""
    models = {}
    for method in comparison.methods:
        scored = {o.model for r in method.counted if r.last for o in r.last.others if o.client is not None}
        for model in (m for m in SHORT if m in scored):
            models[f"{method.label}, {SHORT[model]}" if len(scored) > 1 else method.label] = (method, model)
    return models


def _average_score(method: Method, model: str, client: str, score: str) -> Value:
    def read_score(run: RecordedRun) -> float | None:
        others = run.last.others if run.last else ()
        return next(
            (o.find_number(score) for o in others if (o.model, o.client, o.data) == (model, client, "validation")), None
        )

    return average_over_seeds(method.counted, read_score, "not scored")


def _make_cell(value: Value) -> TableCell:
    if not isinstance(value, Estimate):
        return make_missing_cell(value.why)
    return TableCell(f"{value.mean:.4g}", f"± {value.half:.2g}" if value.half is not None else "")
