"""The columns of the tables of methods: the page, its CSV, the terminal and JSON are selections of these lists.

A line of these tables is a `Use`: a method with a model of its clients. To add a column, add an entry to a list.
"""

from collections.abc import Callable, Iterable
from functools import partial
from statistics import fmean
from typing import Any

from fedmutual.errors import format_count
from fedmutual.metric import ACCURACY
from fedmutual.report import domains, guarantee
from fedmutual.report.cells import Column, TableCell, make_gain_cell, make_share_cell
from fedmutual.report.domains import ACC, TRANSFER_MEASURES
from fedmutual.report.measures import (
    SEEN,
    Best,
    average_global_best,
    average_global_last,
    average_own_best,
    average_own_last,
    average_own_worst,
    average_scores,
    is_validation_test,
    measure_gain,
    measure_gains,
)
from fedmutual.results.comparison import RunComparison, Use
from fedmutual.results.estimate import Missing, Value
from fedmutual.results.gains import Gains
from fedmutual.results.scale import MetricScale
from fedmutual.results.text import format_number, format_size
from fedmutual.rundir.recorded_run import RecordedRun

SHARED, OWN, GAIN = "Shared model, test set", "Client's model, own data", "Gain over local-only"
MEAN, WORST = "Own data, mean", "Own data, worst client"


def list_headline_columns(comparison: RunComparison) -> list[Column]:
    """Return the columns of the headline: those of nodes if clients are domains, else those of clients."""
    return list_node_columns(comparison) if comparison.domains else list_client_columns(comparison)


def list_headline_uses(comparison: RunComparison) -> tuple[Use, ...]:
    """Return the lines of the headline: each model of each method; for nodes, the model that a node would use."""
    return tuple(method.uses[0] for method in comparison.methods) if comparison.domains else comparison.uses


def list_client_columns(comparison: RunComparison) -> list[Column]:
    """Return the columns of accuracies and gains: the shared model on the test set, and the clients' models on own data."""
    scale, unit, points = comparison.scale, comparison.scale.head, comparison.scale.difference_head
    share = partial(make_share_cell, scale=scale)
    shared, own = (_find_choosing_data(map(f, comparison.uses)) for f in (average_global_best, average_own_best))
    best_shared, best_own = (f"best on {by}" if by else "best" for by in (shared, own))
    seen_shared = SEEN if "test" in shared else ""
    seen_own = SEEN if "test" in own and is_validation_test(comparison.first) else ""
    form_shared, form_own = (partial(_format_best, scale=scale, common=by) for by in (shared, own))
    return [
        Column(
            "Method",
            numeric=False,
            brief="Method",
            keys=("method", "model", "seeds"),
            form=lambda use: TableCell(use.method.label, sub=_describe_state(comparison, use)),
            numbers=lambda use: (use.method.label, use.name, len(use.method.counted)),
        ),
        _mean("global_last", "last round", SHARED, average_global_last, share, SHARED, f"shared model\ntest set{unit}"),
        _mean("global_best", best_shared, SHARED, average_global_best, form_shared, note=seen_shared),
        _mean("personal_last", "mean, last round", OWN, average_own_last, share, MEAN, f"own data{unit}\nclients' mean"),
        _mean("personal_best", f"mean, {best_own}", OWN, average_own_best, form_own, note=seen_own),
        _mean("worst_last", "worst, last round", OWN, average_own_worst, share, WORST, f"own data{unit}\nworst client"),
        _mean("worst_best", f"worst, {best_own}", OWN, partial(average_own_best, worst=True), form_own, note=seen_own),
        Column(
            f"mean{points}",
            GAIN,
            brief=f"Gain{points}",
            terminal="gain over\nlocal-only",
            optional=True,
            keys=("gain", "gain_half_width", "gain_n", "gain_unit"),
            read=partial(measure_gain, comparison),
            form=partial(make_gain_cell, scale=scale),
        ),
        Column(
            "gain/harmed",
            GAIN,
            brief="Gain/harmed",
            terminal="gain/\nharmed",
            optional=True,
            keys=("gained", "harmed", "equal"),
            read=partial(measure_gains, comparison),
            form=_format_effects,
            numbers=lambda gains: (len(gains.gained), len(gains.harmed), gains.equal),
        ),
        *([guarantee.make_column(comparison)] if guarantee.is_stated(comparison) else []),
    ]


def list_node_columns(comparison: RunComparison) -> list[Column]:
    """Return the columns of nodes that are domains: ACC, BWT and FWT, the worst node, and the gain in ACC."""
    share, seen = partial(make_share_cell, scale=comparison.scale), domains.describe_caution(comparison)
    columns = [
        Column(
            "Method",
            numeric=False,
            brief="Method",
            keys=("method", "seeds"),
            form=lambda use: TableCell(use.method.label, sub=domains.describe_pace(comparison, use.method)),
            numbers=lambda use: (use.method.label, len(use.method.counted)),
        )
    ]
    for m in TRANSFER_MEASURES:
        last, best = (partial(average, measure=m) for average in (domains.average_last, domains.average_best))
        group, brief, head = f"{m.name}: {m.rows}", f"{m.name}, {m.rows}", f"{m.name}, %\n{m.short}"
        columns.append(_mean(f"{m.key}_last", "last", group, last, share, brief, head))
        columns.append(_mean(f"{m.key}_best", "best", group, best, share, note=seen))
    worst, title = partial(domains.average_last, measure=ACC, pick="min"), "Worst node's ACC"
    columns.append(_mean("acc_worst", "last", title, worst, share, title, "worst node\nACC, %"))
    if domains.list_projecting(comparison):
        columns.append(_mean("projected", "projected", "Mutual steps", domains.average_projected, share))
    gain = partial(measure_gain, comparison, data=ACC.data)  # the page shows it in a picture
    form = partial(make_gain_cell, scale=comparison.scale)
    return [*columns, Column("", terminal="gain in ACC\nover alone", optional=True, read=gain, form=form)]


def list_decision_columns(comparison: RunComparison) -> list[Column]:
    """Return the columns of a decision between methods: how good a model is, on which rows, for whom, and what it costs."""
    unit, share = comparison.scale.head, partial(make_share_cell, scale=comparison.scale)
    return [
        Column(
            "Method",
            numeric=False,
            keys=("method", "model"),
            form=lambda use: TableCell(use.label),
            numbers=lambda use: (use.method.label, use.name),
        ),
        Column(f"mean{unit}", "Own data", keys=("own_mean",), read=average_own_last, form=share),
        Column(
            f"worst client{unit}",
            "Own data",
            keys=("own_worst",),
            read=average_own_worst,
            form=share,
        ),
        Column(
            "clients harmed",
            "Own data",
            keys=("harmed",),
            read=partial(measure_gains, comparison),
            form=lambda gains: TableCell(f"{len(gains.harmed)} of {len(gains.pairs)}"),
            numbers=lambda gains: (len(gains.harmed),),
        ),
        Column(
            f"{'all classes' if comparison.metric == ACCURACY else 'mean'}{unit}",
            "Test set",
            keys=("test",),
            read=_score_all_classes,
            form=share,
        ),
        *COSTS,
    ]


def _make_cost(
    name: str, read: Callable[[RecordedRun], float | None], form: Callable[[float], str], why: str, note: str = ""
) -> Column:
    """Return the column of a cost of all clients in a whole run: the mean over seeds.

    The mean is missing if a run of the method has no number: a mean over fewer seeds would not be comparable.
    """

    def average(use: Use) -> float | Missing:
        values = [read(run) for run in use.method.counted]
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
        lambda run: run.ledger.sum_bytes("up") + run.ledger.sum_bytes("down") + sum(run.ledger.seed.values()),
        format_size,
        "nothing was sent so far",
    ),
    _make_cost(
        "Gradient steps",
        lambda run: run.ledger.steps,
        "{:,.0f}".format,
        "real sites do not send their numbers of steps, and runs of earlier versions did not record them",
    ),
    _make_cost(
        "Forward passes",
        lambda run: run.ledger.forwards,
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
    read: Callable[[Use], Value],
    form: Callable[[Any], TableCell],
    brief: str = "",
    terminal: str = "",
    note: str = "",
) -> Column:
    """Return the column of a mean over seeds, with its interval; see `Column`."""
    keys = (key, f"{key}_half_width")
    return Column(name, group, brief=brief, terminal=terminal, note=note, keys=keys, read=read, form=form)


def _score_all_classes(use: Use) -> Value:
    """Return the accuracy on the test set of all classes after the last round; for personal models the mean over clients."""
    if use.model == "global":
        return average_global_last(use)
    scores = use.method.select_last_scores(use.model, "test")
    return average_scores(scores, "the model is scored on the clients' own rows only")


def _find_choosing_data(bests: Iterable[Best | Missing]) -> str:
    """Return the data that chose the best rounds; "" if the data differ between models."""
    by = {best.by for best in bests if isinstance(best, Best)}
    return by.pop() if len(by) == 1 else ""


def _format_best(best: Best, scale: MetricScale, common: str) -> TableCell:
    """Return the cell of a number at chosen rounds, with the rounds, and what chose them if the column does not say so."""
    rounds = sorted(set(best.rounds))
    which = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
    return make_share_cell(best, scale, which if common else f"on {best.by}, {which}")


def _format_effects(gains: Gains) -> TableCell:
    equal = f", {gains.equal} equal" if gains.equal else ""
    return TableCell(f"{len(gains.gained)}/{len(gains.harmed)}", sub=f"of {len(gains.pairs)}{equal}")


def _describe_state(comparison: RunComparison, use: Use) -> str:
    """Return the line below a method's name: model, number of seeds if methods differ in it, and state if unfinished."""
    counted = use.method.counted
    if not counted:
        return "nothing evaluated yet"
    words = [use.name] if use.name else []
    words += [] if len({len(m.counted) for m in comparison.methods}) == 1 else [format_count(len(counted), "seed")]
    run = counted[0]
    return ", ".join(words + ([] if run.finished else [run.state]))
