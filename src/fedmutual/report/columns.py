"""The columns of the tables of methods: the page, its CSV, the terminal and JSON are selections of these lists.

A line of these tables is a `Line`: a method with a model of its clients. To add a column, add an entry to a list.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from fedmutual.errors import format_count
from fedmutual.metric import ACCURACY
from fedmutual.report import measures
from fedmutual.report.cells import Column, TableCell, list_numbers, make_gain_cell, make_share_cell
from fedmutual.report.measures import SEEN, Best, average_own_last, measure_gain, measure_gains
from fedmutual.results.comparison import Line, RunComparison
from fedmutual.results.estimate import Missing, Value
from fedmutual.results.frame import RunFacts
from fedmutual.results.gains import Gains
from fedmutual.results.scale import MetricScale, format_number, format_size
from fedmutual.rundir.schema import TRANSFER_DATA

SHARED, OWN, GAIN = "Shared model, test set", "Client's model, own data", "Gain over local-only"
DOMAIN_ROWS = {"acc": "all domains", "bwt": "its own domain", "fwt": "the other domains"}
"""Measure of nodes that are domains -> whose test rows it is over; `schema.NodeMeasures` describes the measures."""
_EPSILON = "the largest of any client, of what leaves in one run; it counts no scores and no validation rows."
_SHORT_ROWS = {"acc": "all domains", "bwt": "own domain", "fwt": "the others"}


def list_headline_columns(comparison: RunComparison) -> list[Column]:
    """Return the columns of the headline: those of nodes if clients are domains, else those of clients."""
    return list_node_columns(comparison) if comparison.domains else list_client_columns(comparison)


def list_headline_lines(comparison: RunComparison) -> tuple[Line, ...]:
    """Return the lines of the headline: each model of each method; for nodes, the model that a node would use."""
    return comparison.methods if comparison.domains else comparison.lines


def list_client_columns(comparison: RunComparison) -> list[Column]:
    """Return the columns of accuracies and gains: the shared model on the test set, and the clients' models on own data."""
    scale, unit, points = comparison.scale, comparison.scale.head, comparison.scale.difference_head
    share = partial(make_share_cell, scale=scale)
    average_global_best, average_own_best = measures.average_global_best, measures.average_own_best
    by_shared, by_own = (_find_choosing_data(map(f, comparison.lines)) for f in (average_global_best, average_own_best))
    best_shared, best_own = (f"best on {by}" if by else "best" for by in (by_shared, by_own))
    seen_shared = SEEN if "test" in by_shared else ""
    seen_own = SEEN if "test" in by_own and measures.is_validation_test(comparison.first) else ""
    shared = partial(_best, scale=scale, common=by_shared, note=seen_shared, group=SHARED)
    own = partial(_best, scale=scale, common=by_own, note=seen_own, group=OWN)
    own_worst = partial(average_own_best, worst=True)
    return [
        Column(
            "Method",
            numeric=False,
            keys=("method", "model", "seeds"),
            form=lambda line: TableCell(line.method, sub=_describe_state(comparison, line)),
            numbers=lambda line: (line.method, line.model_name, len(line.counted)),
        ),
        _mean("global_last", "last round", SHARED, measures.average_global_last, share, f"shared model\ntest set{unit}"),
        shared("global_best", best_shared, read=average_global_best),
        _mean("personal_last", "mean, last round", OWN, average_own_last, share, f"own data{unit}\nclients' mean"),
        own("personal_best", f"mean, {best_own}", read=average_own_best),
        _mean("worst_last", "worst, last round", OWN, measures.average_own_worst, share, f"own data{unit}\nworst client"),
        own("worst_best", f"worst, {best_own}", read=own_worst),
        Column(
            f"mean{points}",
            GAIN,
            terminal="gain over\nlocal-only",
            optional=True,
            keys=("gain", "gain_half_width", "gain_n", "gain_unit"),
            read=partial(measure_gain, comparison),
            form=partial(make_gain_cell, scale=scale),
        ),
        Column(
            "gain/harmed",
            GAIN,
            terminal="gain/\nharmed",
            optional=True,
            keys=("gained", "harmed", "equal"),
            read=partial(measure_gains, comparison),
            form=_format_effects,
            numbers=lambda gains: (gains.gained, len(gains.harmed), gains.equal),
        ),
        *([_make_epsilon_column(comparison)] if has_guarantee(comparison) else []),
    ]


def list_node_columns(comparison: RunComparison) -> list[Column]:
    """Return the columns of nodes that are domains: ACC, BWT and FWT, the worst node, and the gain in ACC."""
    share, seen = partial(make_share_cell, scale=comparison.scale), find_caution(comparison)
    columns = [
        Column(
            "Method",
            numeric=False,
            keys=("method", "seeds"),
            form=lambda line: TableCell(line.method, sub=_describe_state(comparison, line, of_nodes=True)),
            numbers=lambda line: (line.method, len(line.counted)),
        )
    ]
    for key, rows in DOMAIN_ROWS.items():
        last, best = (partial(f, measure=key) for f in (measures.average_transfer_last, measures.average_transfer_best))
        name = key.upper()
        group = f"{name}: {rows}"
        columns.append(_mean(f"{key}_last", "last", group, last, share, f"{name}, %\n{_SHORT_ROWS[key]}"))
        columns.append(_mean(f"{key}_best", "best", group, best, share, note=seen))
    worst, title = partial(measures.average_transfer_last, measure="acc", pick=min), "Worst node's ACC"
    columns.append(_mean("acc_worst", "last", title, worst, share, "worst node\nACC, %"))
    if measures.list_projecting(comparison):
        columns.append(_mean("projected", "projected", "Mutual steps", measures.average_projected, share))
    gain = partial(measure_gain, comparison, data=TRANSFER_DATA["acc"])  # the page shows it in a picture
    form = partial(make_gain_cell, scale=comparison.scale)
    return [*columns, Column("", terminal="gain in ACC\nover alone", optional=True, read=gain, form=form)]


def list_decision_columns(comparison: RunComparison) -> list[Column]:
    """Return the columns of a decision between methods: how good a model is, on which rows, for whom, and what it costs."""
    unit, share = comparison.scale.head, partial(make_share_cell, scale=comparison.scale)
    tested = f"{'all classes' if comparison.metric == ACCURACY else 'mean'}{unit}"
    return [
        Column(
            "Method",
            numeric=False,
            keys=("method", "model"),
            form=lambda line: TableCell(line.label),
            numbers=lambda line: (line.method, line.model_name),
        ),
        Column(f"mean{unit}", "Own data", keys=("own_mean",), read=average_own_last, form=share),
        Column(f"worst client{unit}", "Own data", keys=("own_worst",), read=measures.average_own_worst, form=share),
        Column(
            "clients harmed",
            "Own data",
            keys=("harmed",),
            read=partial(measure_gains, comparison),
            form=lambda gains: TableCell(f"{len(gains.harmed)} of {len(gains)}"),
            numbers=lambda gains: (len(gains.harmed),),
        ),
        Column(tested, "Test set", keys=("test",), read=_score_all_classes, form=share),
        *COSTS,
    ]


def _make_cost(
    name: str, read: Callable[[RunFacts], float | None], form: Callable[[float], str], why: str, note: str = ""
) -> Column:
    """Return the column of a cost of all clients in a whole run: the mean over seeds.

    The mean is missing if a run of the method has no number: a mean over fewer seeds would not be comparable.
    """

    def average(line: Line) -> float | Missing:
        values = [read(run) for run in line.counted]
        known = [value for value in values if value is not None]
        return fmean(known) if known and len(known) == len(values) else Missing(why)

    key = name.lower()
    return Column(
        name,
        "All clients, whole run",
        note=note,
        terminal=key,
        keys=(key.replace(" ", "_"),),
        read=average,
        form=lambda mean: TableCell(form(mean)),
    )


COSTS = (
    _make_cost(
        "Bytes",
        lambda run: (run.totals["up"] or 0) + (run.totals["down"] or 0) + run.seed_bytes,
        format_size,
        "nothing was sent so far",
    ),
    _make_cost(
        "Gradient steps",
        lambda run: run.totals["steps"],
        "{:,.0f}".format,
        "real sites do not send their numbers of steps, and runs of earlier versions did not record them",
    ),
    _make_cost(
        "Forward passes",
        lambda run: run.totals["forwards"],
        "{:,.0f}".format,
        "real sites, differential privacy and earlier versions do not count them",
        note="passes of a network over the batch of a gradient step; passes for scores are not counted",
    ),
    _make_cost(
        "Seconds",
        lambda run: run.summary.seconds if run.summary else None,
        lambda n: format_number(n, 1 if n < 100 else 0),
        "the run is not finished",
    ),
)


def _mean(
    key: str,
    name: str,
    group: str,
    read: Callable[[Line], Value],
    form: Callable[[Any], TableCell],
    terminal: str = "",
    note: str = "",
) -> Column:
    """Return the column of a mean over seeds, with its interval; see `Column`."""
    keys = (key, f"{key}_half_width")
    return Column(name, group, terminal=terminal, note=note, keys=keys, read=read, form=form)


def _best(
    key: str, name: str, group: str, read: Callable[[Line], Best | Missing], scale: MetricScale, common: str, note: str
) -> Column:
    """Return the column of a mean at the rounds that some data chose. common: the data that chose all of them, or ""."""

    def form(best: Best) -> TableCell:
        mean, by, rounds = best[0], best[1], sorted(set(best[2]))
        which = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
        return make_share_cell(mean, scale, which if common else f"on {by}, {which}")

    return replace(_mean(key, name, group, read, form, note=note), numbers=lambda best: list_numbers(best[0]))  # type: ignore[arg-type]


def has_guarantee(comparison: RunComparison) -> bool:
    """Return whether a method states an epsilon; if none does, no table has a column of epsilons."""
    return any(r.summary and r.summary.privacy for m in comparison.methods for r in m.counted)


def _make_epsilon_column(comparison: RunComparison) -> Column:
    """Return the column of epsilons, the largest over clients and runs, with a note on delta and the unit of privacy."""
    stated = [r.summary.privacy for m in comparison.methods for r in m.counted if r.summary and r.summary.privacy]
    of = ", ".join(f"at delta {delta:g}, of each {unit}" for delta, unit in sorted({(s.delta, s.unit) for s in stated}))
    return Column(
        "epsilon",
        "Differential privacy",
        note=f"Epsilon {of}: {_EPSILON}",
        keys=("epsilon",),
        form=lambda line: TableCell(measures.format_epsilon(line)),
        numbers=lambda line: (measures.find_epsilon(line),),
    )


def find_caution(comparison: RunComparison) -> str:
    """Return the footnote of the best rounds of nodes, where test data chose them; else ""."""
    return SEEN if any("test" in data for data in measures.find_choosing_data(comparison)) else ""


def _score_all_classes(line: Line) -> Value:
    """Return the accuracy on the test set of all classes after the last round; for personal models the mean over clients."""
    if line.model == "global":
        return measures.average_global_last(line)
    return measures.average_scores(line.select_last("test"), "the model is scored on the clients' own rows only")


def _find_choosing_data(bests: Iterable[Best | Missing]) -> str:
    """Return the data that chose the best rounds; "" if the data differ between models."""
    by = {best[1] for best in bests if not isinstance(best, Missing)}
    return by.pop() if len(by) == 1 else ""


def _format_effects(gains: Gains) -> TableCell:
    equal = f", {gains.equal} equal" if gains.equal else ""
    return TableCell(f"{gains.gained}/{len(gains.harmed)}", sub=f"of {len(gains)}{equal}")


def _describe_state(comparison: RunComparison, line: Line, of_nodes: bool = False) -> str:
    """Return the text below a method's name: model, number of seeds if methods differ in it, and state if unfinished.

    of_nodes: with the rounds in place of the model, if methods differ in them or a round has several local steps.
    """
    if not line.counted:
        return "nothing evaluated yet"
    run, seeds = line.counted[0], len(line.counted)
    words = [line.model_name] if line.model and not of_nodes else []
    words += [] if len({len(m.counted) for m in comparison.methods}) == 1 else [format_count(seeds, "seed")]
    steps = run.settings.local_steps
    paces = {(r.settings.rounds, r.settings.local_steps) for r in comparison.runs}
    if of_nodes and (len(paces) > 1 or (steps or 1) > 1):
        each = f" of {format_count(steps, 'local step')}" if steps else ""
        words.append(f"{format_count(run.settings.rounds, 'round')}{each}")
    return ", ".join(words + ([] if run.finished else [run.state]))
