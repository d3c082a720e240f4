"""Clients whose task has no accuracy metric, as a regression: their scores, in the units of their task."""

from collections.abc import Iterator

from fedmutual.report.cells import Cell, Column, Table, csv_text, missing, numbers
from fedmutual.report.comparison import SHORT, Comparison, Method
from fedmutual.report.measures import over_seeds
from fedmutual.report.statistics import Estimate, Value
from fedmutual.report.text import listed
from fedmutual.rundir.recorded_run import RecordedRun

_MOST = 3  # clients that the verdict names


def other_tasks(comparison: Comparison) -> Table | None:
    """A line a client and score: each model on the client's own validation data, after the last round; None without such."""
    models = list(_models(comparison))
    clients = _clients(comparison)
    if not clients:
        return None
    rows, lines = [], []
    for client, scores in clients.items():
        for score in scores:
            found = [_value(method, model, client, score) for method, model in models]
            rows.append((Cell(client), Cell(score), *(_cell(value) for value in found)))
            lines.append([client, score, *(v for value in found for v in numbers(value)[:2])])
    names = [_label(method, model) for method, model in models]
    columns = (Column("Client", numeric=False), Column("Score", numeric=False), *(Column(name) for name in names))
    header = ["client", "score", *(f"{name}{end}" for name in names for end in ("", "_half_width"))]
    caption = "Clients whose task has no accuracy metric: scores on their own validation data, last round"
    return Table("others", caption, columns, tuple(rows), csv_text(header, lines))


def sentences(comparison: Comparison) -> Iterator[str]:
    """What to say of the first few of them."""
    clients, models = _clients(comparison), list(_models(comparison))
    for client, scores in list(clients.items())[:_MOST]:
        found = [(_label(*m), _value(*m, client, scores[0])) for m in models]
        said = [f"{value.mean:.4g} with {label}" for label, value in found if isinstance(value, Estimate)]
        yield f"Client {client!r} has a task without accuracy: its {scores[0]} on its own validation data is {listed(said)}."
    if len(clients) > _MOST:
        yield f"{len(clients) - _MOST} more clients have a task without accuracy; the page has a table of all."


def _clients(comparison: Comparison) -> dict[str, list[str]]:
    """Client -> the names of its scores."""
    found: dict[str, dict[str, None]] = {}
    for run in (r for m in comparison.methods for r in m.counted if r.last):
        for other in run.last.others if run.last else ():
            if other.client is not None and other.data == "validation":
                found.setdefault(other.client, {}).update(dict.fromkeys(other.values))
    return {client: list(scores) for client, scores in found.items() if scores}


def _models(comparison: Comparison) -> Iterator[tuple[Method, str]]:
    for method in comparison.methods:
        there = {o.model for r in method.counted if r.last for o in r.last.others if o.client is not None}
        yield from ((method, model) for model in SHORT if model in there)


def _label(method: Method, model: str) -> str:
    return method.label if method.algorithm != "fml" else f"{method.label}, {SHORT[model]}"


def _value(method: Method, model: str, client: str, score: str) -> Value:
    def number(run: RecordedRun) -> float | None:
        others = run.last.others if run.last else ()
        return next(
            (o.values.get(score) for o in others if (o.model, o.client, o.data) == (model, client, "validation")), None
        )

    return over_seeds(method.counted, number, "not scored")


def _cell(value: Value) -> Cell:
    if not isinstance(value, Estimate):
        return missing(value.why)
    return Cell(f"{value.mean:.4g}", f"± {value.half:.2g}" if value.half is not None else "")
