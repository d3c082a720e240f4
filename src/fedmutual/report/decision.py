"""What a decision between methods needs, a line a model: how good the model is, on which rows, for whom, and its costs."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from fedmutual.metric import ACCURACY
from fedmutual.report import measures
from fedmutual.report.cells import Column, PageTable, TableCell, format_csv, list_numbers, make_missing_cell, make_share_cell
from fedmutual.report.comparison import Method, RunComparison, Use
from fedmutual.report.statistics import Gains, Missing, Value
from fedmutual.report.text import format_number, format_size
from fedmutual.rundir.recorded_run import RecordedRun


@dataclass(frozen=True)
class CostColumn:
    """A cost of all clients in a whole run: a column of the decision table, and of the table in the terminal."""

    name: str
    read_number: Callable[[RecordedRun], float | None]  # None: the run has no number
    format_number: Callable[[float], str]
    missing_reason: str  # a clause: why a run may have no number
    note: str = ""  # a footnote of the column


COSTS = (
    CostColumn(
        "Bytes",
        lambda run: run.ledger.sum_bytes("up") + run.ledger.sum_bytes("down") + sum(run.ledger.seed.values()),
        format_size,
        "nothing was sent so far",
    ),
    CostColumn(
        "Gradient steps",
        lambda run: run.ledger.steps,
        "{:,.0f}".format,
        "real sites do not send their numbers of steps, and runs of earlier versions did not record them",
    ),
    CostColumn(
        "Forward passes",
        lambda run: run.ledger.forwards,
        "{:,.0f}".format,
        "real sites, differential privacy and earlier versions do not count them",
        note="passes of a network over the batch of a gradient step; passes for scores are not counted",
    ),
    CostColumn(
        "Seconds",
        lambda run: run.summary.seconds if run.summary else None,
        lambda n: format_number(n, 1 if n < 100 else 0),
        "the run is not finished",
    ),
)


def make_decision_table(comparison: RunComparison) -> PageTable:
    """Return a table with a line for each model: accuracies on own data and all classes, clients harmed, costs."""
    rows, lines = [], []
    for use in comparison.uses:
        mean, worst, test = (
            measures.average_own_last(use),
            measures.average_own_last(use, use.worst),
            score_all_classes(use),
        )
        gains, costs = measures.measure_gains(comparison, use), list_costs(use.method)
        rows.append(
            (
                TableCell(use.label),
                *(make_share_cell(value, comparison.scale) for value in (mean, worst)),
                make_missing_cell(gains.why)
                if isinstance(gains, Missing)
                else TableCell(f"{len(gains.harmed)} of {len(gains.pairs)}"),
                make_share_cell(test, comparison.scale),
                *(make_missing_cell(why) if value is None else TableCell(text) for value, text, why in costs),
            )
        )
        harmed = len(gains.harmed) if isinstance(gains, Gains) else None
        line = [
            *list_numbers(mean)[:1],
            *list_numbers(worst)[:1],
            harmed,
            *list_numbers(test)[:1],
            *(value for value, *_ in costs),
        ]
        lines.append([use.method.label, use.name, *line])
    columns = (
        Column("Method", numeric=False),
        Column(f"mean{comparison.scale.head}", "Own data"),
        Column(f"worst client{comparison.scale.head}", "Own data"),
        Column("clients harmed", "Own data"),
        Column(f"{'all classes' if comparison.metric == ACCURACY else 'mean'}{comparison.scale.head}", "Test set"),
        *(Column(cost.name, "All clients, whole run", note=cost.note) for cost in COSTS),
    )
    header = ["method", "model", "own_mean", "own_worst", "harmed", "test", *(_make_key(cost.name) for cost in COSTS)]
    caption = "What each method reaches after the last round, and what it costs; means over seeds"
    return PageTable("decision", caption, columns, tuple(rows), format_csv(header, lines), cards=True)


def score_all_classes(use: Use) -> Value:
    """Return the accuracy on the test set of all classes after the last round; for personal models the mean over clients."""
    if use.model == "global":
        return measures.average_global_last(use)
    scores = use.method.select_last_scores(use.model, "test")
    return measures.average_scores(scores, "the model is scored on the clients' own rows only")


def list_costs(method: Method) -> list[tuple[float | None, str, str]]:
    """Return for each of `COSTS` (the mean over seeds, its text, the reason where it is missing).

    The mean is None and the text "" if a run of the method has no number: a mean over fewer seeds would not be comparable.
    """
    costs = []
    for cost in COSTS:
        values = [cost.read_number(run) for run in method.counted]
        known = [value for value in values if value is not None]
        mean = fmean(known) if known and len(known) == len(values) else None
        costs.append((mean, "" if mean is None else cost.format_number(mean), cost.missing_reason))
    return costs


def _make_key(name: str) -> str:
    return name.lower().replace(" ", "_")
