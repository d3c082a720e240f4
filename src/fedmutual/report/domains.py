"""Where clients are domains: ACC, BWT and FWT of their models, methods side by side, and what chose a best round."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import pandas as pd

from fedmutual.errors import format_count, join_words
from fedmutual.report.cells import (
    Column,
    PageTable,
    TableCell,
    format_csv,
    format_spread,
    list_interval,
    make_missing_cell,
    make_share_cell,
    make_table,
)
from fedmutual.report.measures import SEEN, Pick, average_over_seeds, average_scores, name_choosing_data
from fedmutual.results.comparison import OWN_DOMAIN, Method, RunComparison, Use
from fedmutual.results.estimate import Estimate, Missing, Value
from fedmutual.results.scale import PERCENT, MetricScale
from fedmutual.rundir.schema import ClientScores


@dataclass(frozen=True)
class DomainMeasure:
    """An accuracy of a node's model over the test rows of some domains, as a fraction in [0, 1].

    The measures are those of FedH2L (Li et al. 2021, https://arxiv.org/abs/2101.11296, Experiments). `key` is the name in
    summary.json, `data` names the scored rows in metrics.jsonl; `rows`, and `short` in the terminal, name them for readers.
    """

    key: str
    data: str
    rows: str
    short: str

    @property
    def name(self) -> str:
        """The measure's name in the paper: "ACC", "BWT" or "FWT"."""
        return self.key.upper()


ACC = DomainMeasure("acc", "test", "all domains", "all domains")
BWT = DomainMeasure("bwt", OWN_DOMAIN, "its own domain", "own domain")
FWT = DomainMeasure("fwt", "test.others", "the other domains", "the others")
TRANSFER_MEASURES = (ACC, BWT, FWT)
_CHOSEN = {
    "validation.all": "the validation data of all nodes pooled, which real sites cannot do: they have their own only",
    "validation": "its own validation data, as a real site can",
    "validation (test examples)": "its own validation data, which are test examples that it is scored on",
    "holdout": "its own hold-out data, as a real site can",
    "test": "the test data that it is scored on, so the score is too high",
}


_ONE = "one model is trained on all data, and no node has one; its score on the test set is with the shared models' below"


def average_last(use: Use, measure: DomainMeasure, pick: Pick = fmean) -> Value:
    """Return the mean over seeds of a measure after the last round: the mean over nodes, or `pick` of the nodes' values."""
    return average_scores(_select_last(use, measure), _explain_missing(use.method), pick=pick)


def _select_last(use: Use, measure: DomainMeasure) -> pd.DataFrame:
    return use.method.select_last_scores(use.model, measure.data)


def average_best(
    use: Use, measure: DomainMeasure, of: Callable[[ClientScores], float | None] = lambda measured: measured.mean
) -> Value:
    """Return the mean over finished runs of a measure after each node's best round: the mean over nodes, or `of` them."""
    reached = [run.summary.transfer for run in use.method.counted if run.summary and run.summary.transfer]
    measured = [scores for nodes in reached if (scores := getattr(nodes, measure.key))]
    why = _ONE if use.method.is_pooled else "best rounds are chosen when the run is finished"
    return average_over_seeds((of(scores.best) for scores in measured), why)


def average_projected(use: Use, node: str | None = None) -> Value:
    """Return the share of mutual steps whose gradient was projected, mean over finished runs: over all nodes, or of one."""
    shares = [run.summary.projected for run in use.method.counted if run.summary and run.summary.projected]
    numbers = (share.mean if node is None else share.per_client.get(node) for share in shares)
    return average_over_seeds(numbers, "it projects no gradient")


def describe_choice(comparison: RunComparison) -> str:
    """Return a sentence: which data chose the best rounds."""
    by = _find_choosing_data(comparison)
    if not by:
        return "Best rounds are chosen when a run is finished."
    data_names = join_words([_CHOSEN.get(data, data) for data in sorted(by)], "or")
    return f"Best is after each node's own best round, chosen by its accuracy on {data_names}."


def _find_choosing_data(comparison: RunComparison) -> set[str]:
    """The data that chose the best rounds."""
    done = [(r, r.summary.transfer) for m in comparison.methods for r in m.counted if r.summary and r.summary.transfer]
    return {name_choosing_data(reached.best_by, run) for run, reached in done}


def describe_caution(comparison: RunComparison) -> str:
    """Return the footnote of the best rounds, where test data chose them."""
    return SEEN if any("test" in data for data in _find_choosing_data(comparison)) else ""


def make_tables(comparison: RunComparison) -> list[PageTable]:
    """Return the tables of nodes by methods: each measure node by node, and the projected steps."""
    shares = [_make_projection_table(comparison)] if list_projecting(comparison) else []
    return [*(make_node_table(comparison, measure) for measure in TRANSFER_MEASURES), *shares]


def make_node_table(comparison: RunComparison, measure: DomainMeasure) -> PageTable:
    """Return a table of nodes by methods: a measure after the last round, and below it after the node's best round."""
    scale, uses = comparison.scale, [m.uses[0] for m in comparison.methods]
    last_scores = [_select_last(use, measure) for use in uses]
    rows, lines = [], []
    for node in comparison.first.partition.clients:
        cells = [
            (
                average_scores(scores[scores["client"] == node], _explain_missing(use.method)),
                average_best(use, measure, lambda best, i=node: best.per_client.get(i)),  # type: ignore[misc]
            )
            for use, scores in zip(uses, last_scores, strict=True)
        ]
        rows.append((TableCell(node), *(_format_last_and_best(*values, scale) for values in cells)))
        lines.append([node, *(v for values in cells for value in values for v in list_interval(value))])
    means = [(average_last(use, measure), average_best(use, measure)) for use in uses]
    rows.append((TableCell("mean"), *(_format_last_and_best(*values, scale) for values in means)))
    ends = ("last", "last_half_width", "best", "best_half_width")
    header = ["node", *(f"{m.label} {end}" for m in comparison.methods for end in ends)]
    seen = describe_caution(comparison)
    columns = (Column("Node", numeric=False), *(Column(m.label, note=seen) for m in comparison.methods))
    caption = f"{measure.name}, %: each node's model on test data of {measure.rows}; last round, and below it best"
    return PageTable(measure.key, caption, columns, tuple(rows), format_csv(header, lines))


def _make_projection_table(comparison: RunComparison) -> PageTable:
    columns = [Column("Node", numeric=False, keys=("node",), read=lambda node: node or "mean")]
    for use in list_projecting(comparison):
        label = use.method.label
        keys = (label, f"{label}_half_width")
        columns.append(Column(label, keys=keys, read=partial(average_projected, use), form=_make_percent_cell))
    caption = "Mutual steps whose gradient was projected, %"
    return make_table("projected", caption, columns, [*comparison.first.partition.clients, None])


def _make_percent_cell(value: Estimate) -> TableCell:
    return make_share_cell(value, PERCENT)


def list_projecting(comparison: RunComparison) -> list[Use]:
    """Return the methods that project gradients."""
    uses = [m.uses[0] for m in comparison.methods]
    return [use for use in uses if not isinstance(average_projected(use), Missing)]


def _format_last_and_best(last: Value, best: Value, scale: MetricScale) -> TableCell:
    """The last round's number, and the best one's below it."""
    if isinstance(last, Missing):
        return make_missing_cell(last.why)
    below = ""
    if not isinstance(best, Missing):
        below = f"best {scale.format_value(best.mean)} {format_spread(best, scale)}".rstrip()
    return make_share_cell(last, scale, below)


def describe_pace(comparison: RunComparison, method: Method) -> str:
    """Return the line below a method's name: its seeds and rounds where not all have as many; its state if unfinished."""
    counted = method.counted
    if not counted:
        return "nothing evaluated yet"
    parts = [] if len({len(m.counted) for m in comparison.methods}) == 1 else [format_count(len(counted), "seed")]
    paces = {(r.settings.rounds, r.local_steps) for r in comparison.runs}
    run = counted[0]
    if len(paces) > 1 or (run.local_steps or 1) > 1:
        each = f" of {format_count(run.local_steps, 'local step')}" if run.local_steps else ""
        parts.append(f"{format_count(run.settings.rounds, 'round')}{each}")
    return ", ".join(parts + ([] if run.finished else [run.state]))


def _explain_missing(method: Method) -> str:
    if method.is_pooled:
        return _ONE
    if not any(r.evaluations for r in method.runs):
        return "nothing was evaluated yet"
    return "no node was scored so: it shares no scores, or there is no other domain"
