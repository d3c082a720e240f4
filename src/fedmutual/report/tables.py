"""The tables of the page: methods, nodes, scores besides accuracy, recall by class, other tasks, clients and their data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import pandas as pd

from fedmutual.errors import format_count, join_words
from fedmutual.metric import ACCURACY, SCORES, Metric, describe_part, describe_score
from fedmutual.report import columns, measures
from fedmutual.report.cells import Column, PageTable, TableCell, make_share_cell, make_table
from fedmutual.report.columns import DOMAIN_ROWS
from fedmutual.results.comparison import Line, RunComparison
from fedmutual.results.estimate import Estimate, Missing, Value
from fedmutual.results.frame import RunFacts
from fedmutual.results.gains import Gains
from fedmutual.results.scale import PERCENT, MetricScale, format_number
from fedmutual.rundir.record_files import read_calibrations, read_subgroups
from fedmutual.rundir.schema import SHORT, TRANSFER_DATA, Calibration, GroupScore, Measured, Reliability, Subgroups

RELIABILITY = "reliability"  # the table of a curve that the page draws
LARGE = 500  # cells of a table of holdings; of larger ones only the first is shown
_CHOSEN = {
    "validation.all": "the validation data of all nodes pooled, which real sites cannot do: they have their own only",
    "validation": "its own validation data, as a real site can",
    "validation (test examples)": "its own validation data, which are test examples that it is scored on",
    "holdout": "its own hold-out data, as a real site can",
    "test": "the test data that it is scored on, so the score is too high",
}
_UNTOLD = (
    "the run is missing or unfinished, the client does not share this score (share.metrics), or its rows leave the score "
    "undefined"
)
_UNDEFINED = {"auroc": "not shared, or undefined, because the scored data have one class only"}
_UNSHARED = "not shared by this task or by these clients"


def make_client_headline(comparison: RunComparison) -> PageTable:
    """Return the table of each model of each method: its accuracies, and its gain over local-only training."""
    title, unit = comparison.metric.heading, comparison.scale.head
    caption = f"{title} of every method{unit} {_describe_repetitions(comparison)}"
    return make_table("headline", caption, columns.list_client_columns(comparison), comparison.lines, cards=True)


def make_node_headline(comparison: RunComparison) -> PageTable:
    """Return the table of each method's means over nodes after last and best rounds, and of its worst node."""
    caption = f"Accuracy over nodes, % {_describe_repetitions(comparison)}"
    return make_table("domains", caption, columns.list_node_columns(comparison), comparison.methods, cards=True)


def make_decision_table(comparison: RunComparison) -> PageTable:
    """Return the table of a decision between methods, with a line for each model."""
    caption = "What each method reaches after the last round, and what it costs; means over seeds"
    return make_table("decision", caption, columns.list_decision_columns(comparison), comparison.lines, cards=True)


def _describe_repetitions(comparison: RunComparison) -> str:
    seeds = {len(m.counted) for m in comparison.methods}
    if seeds == {1}:
        return "(one seed, so without intervals)"
    many = format_count(seeds.pop(), "seed") if len(seeds) == 1 else "seeds"
    return f"(mean ± 95 % interval over {many})"


def describe_choice(comparison: RunComparison) -> str:
    """Return a sentence: which data chose the best rounds of nodes."""
    by = measures.find_choosing_data(comparison)
    if not by:
        return "Best rounds are chosen when a run is finished."
    data_names = join_words([_CHOSEN.get(data, data) for data in sorted(by)], "or")
    return f"Best is after each node's own best round, chosen by its accuracy on {data_names}."


def make_node_tables(comparison: RunComparison) -> list[PageTable]:
    """Return the tables of nodes by methods: each measure node by node, and the projected steps."""
    shares = [_make_projection_table(comparison)] if measures.list_projecting(comparison) else []
    return [*(make_node_table(comparison, measure) for measure in DOMAIN_ROWS), *shares]


def make_node_table(comparison: RunComparison, measure: str) -> PageTable:
    """Return a table of nodes by methods: a measure after the last round, and below it after the node's best round."""
    nodes, seen = [*comparison.first.partition.clients], columns.find_caution(comparison)
    shown = [Column("Node", numeric=False, keys=("node",), read=lambda node: node or "mean")]
    for line in comparison.methods:
        keys = tuple(f"{line.method} {end}" for end in ("last", "last_half_width", "best", "best_half_width"))
        read = partial(_read_node, line, measure, dict(iter(line.select_last(TRANSFER_DATA[measure]).groupby("client"))))
        form = partial(_format_last_and_best, comparison)
        shown.append(Column(line.method, note=seen, keys=keys, read=read, form=form, numbers=_list_intervals))
    rows = DOMAIN_ROWS[measure]
    caption = f"{measure.upper()}, %: each node's model on test data of {rows}; last round, and below it best"
    return make_table(measure, caption, shown, [*nodes, None], nodes)


def _read_node(line: Line, measure: str, scores: dict[str, pd.DataFrame], node: str | None) -> tuple[Value, Value]:
    """Return a node's measure after the last round and after its best round; node None: the means over nodes."""
    best = measures.average_transfer_best(line, measure, node)
    if node is None:
        return measures.average_transfer_last(line, measure), best
    return measures.average_scores(scores.get(node, line.table.rows[:0]), measures.explain_no_node(line)), best


def _list_intervals(values: tuple[Value, Value]) -> list[float | None]:
    return [n for value in values for n in ((None, None) if isinstance(value, Missing) else (value.mean, value.half))]


def _format_last_and_best(comparison: RunComparison, values: tuple[Value, Value]) -> TableCell:
    last, best = values
    below = make_share_cell(best, comparison.scale)
    text = "" if isinstance(best, Missing) else f"best {below.text} {below.spread}".rstrip()
    return make_share_cell(last, comparison.scale, text)


def _make_projection_table(comparison: RunComparison) -> PageTable:
    shown = [Column("Node", numeric=False, keys=("node",), read=lambda node: node or "mean")]
    for line in measures.list_projecting(comparison):
        keys, read = (line.method, f"{line.method}_half_width"), partial(measures.average_projected, line)
        shown.append(Column(line.method, keys=keys, read=read, form=partial(make_share_cell, scale=PERCENT)))
    caption = "Mutual steps whose gradient was projected, %"
    return make_table("projected", caption, shown, [*comparison.first.partition.clients, None])


def make_other_score_table(comparison: RunComparison) -> PageTable:
    """Return the table of scores that a frequent class does not raise, with the accuracy of always naming that class."""
    share = partial(make_share_cell, scale=comparison.scale)

    def number(value: Estimate) -> TableCell:
        return TableCell(format_number(value.mean, 3))

    shares = ("accuracy", "majority", "balanced_accuracy")
    shown = [
        Column(
            "Method, and what is scored",
            numeric=False,
            keys=("method", "scored"),
            form=lambda scored: TableCell(scored[2].method, sub=scored[0]),
            numbers=lambda scored: (scored[2].method, scored[0]),
        ),
        *(_make_score_column(name, f"{SCORES[name].heading}, %", share) for name in shares),
        *(_make_score_column(name, SCORES[name].heading, number) for name in ("auroc", "loss")),
    ]
    lines = [scored for m in comparison.methods for scored in measures.list_subjects(comparison, m)]
    caption = "Last round; own data: the mean of the clients' scores. Most frequent class: the accuracy of always naming it"
    return make_table("beyond", caption, shown, lines)


def _make_score_column(metric: str, name: str, form: Callable[[Estimate], TableCell]) -> Column:
    """Return the column of a score of a subject of `measures.list_subjects`, with a footnote if some clients lack it."""

    def read(scored: Any) -> tuple[Estimate, str] | Missing:
        _, _, line, data, of_clients = scored
        scores = measures.select_subject(line, data, of_clients, metric)
        total = len(measures.select_subject(line, data, of_clients))
        value = measures.average_scores(scores, _UNDEFINED.get(metric, _UNSHARED))
        partly = f"over the {len(scores)} of {total} for which it is defined" if len(scores) < total else ""
        return value if isinstance(value, Missing) else (value, partly)

    return Column(
        name,
        keys=(metric,),
        read=read,
        form=lambda value: replace(form(value[0]), note=value[1]),
        numbers=lambda value: (value[0].mean,),
    )


def make_part_tables(comparison: RunComparison) -> list[PageTable]:
    """Return a table for each score that is a list, such as the recall of each class: of each model on each kind of rows.

    The recall only on test rows of all classes, because most clients lack classes in their own rows.
    """
    rows = [row for method in comparison.methods for run in method.counted for row in run.last_rows]
    lengths = {name: len(value) for row in rows for name, value in row.values.items() if isinstance(value, list)}
    made = [_make_part_table(comparison, name, length) for name, length in lengths.items()]
    return [table for table in made if len(table.columns) > 1]


def _make_part_table(comparison: RunComparison, score: str, length: int) -> PageTable:
    metric, (part, of) = describe_score(score, comparison.metric), describe_part(score)
    scale, clients = MetricScale(metric=metric), comparison.first.environment.clients.values()
    candidates = (comparison.classes, *(client.classes for client in clients))
    names = next((one for one in candidates if len(one) == length), tuple(map(str, range(length))))
    shown = [Column(part.capitalize(), numeric=False, keys=(part,), read=lambda number: names[number])]
    is_recall, where = score == "recall", "test data of all domains" if comparison.domains else "test set"
    missing = Missing(f"the {where} has no example of the class" if is_recall else _UNSHARED)
    for m in comparison.methods:
        for title, everything, line, data, of_clients in measures.list_subjects(comparison, m):
            if is_recall and not everything:
                continue
            name = title.partition(",")[0] if is_recall else title
            values = _average_parts(line, data, of_clients, score)
            shown.append(
                Column(
                    name,
                    m.method,
                    keys=(f"{m.method}: {name}",),
                    read=partial(lambda values, number: values.get(number, missing), values),
                    form=lambda v: TableCell(scale.format_value(v), shade=v if metric.is_fraction and v >= 0 else None),
                )
            )
    rows = f"{scale.head}, last round; own data: the mean of the clients' scores"
    if is_recall:
        rows = f" on the {where}{scale.head}, last round; personal models: the mean over clients"
    return make_table(score, f"{metric.heading} {of} each {part}{rows}", shown, range(length))


def _average_parts(line: Line, data: str, of_clients: bool, score: str) -> dict[int, float]:
    """Return the number of each class, label or time -> its mean score over seeds, and over clients within a seed."""
    known = [
        (run.seed, number, value)
        for run in line.counted
        for client, row in run.get_rows(run.reached, line.model if of_clients else "global", data).items()
        if (client is not None) == of_clients
        for number, value in enumerate(row.values.get(score) or ())
        if value is not None
    ]
    by_part = pd.DataFrame(known, columns=["seed", "part", "value"]).groupby(["part", "seed"])["value"].mean()
    return dict(by_part.groupby(level=0).mean())


def make_other_task_table(comparison: RunComparison) -> PageTable | None:
    """Return the table of scores of tasks with another main metric than accuracy, in the units of their task.

    A line for each client and score: each model on the client's own validation data, after the last round. None without
    such a task.
    """
    scores = _tabulate_other_tasks(comparison)
    if scores.empty:
        return None
    shown = [
        Column("Client", numeric=False, keys=("client",), read=lambda line: line[0][0]),
        Column(
            "Score",
            numeric=False,
            keys=("score",),
            read=lambda line: line[0][1],
            form=lambda name: TableCell(describe_score(name, comparison.metric).title),
        ),
    ]

    def average(label: str, line: tuple[object, pd.DataFrame]) -> Value:
        return measures.average_over_seeds(line[1].loc[line[1]["label"] == label, "value"], "not scored")

    def form(value: Estimate) -> TableCell:
        return TableCell(f"{value.mean:.4g}", f"± {value.half:.2g}" if value.half is not None else "")

    shown += [
        Column(label, keys=(label, f"{label}_half_width"), read=partial(average, label), form=form)
        for label in dict.fromkeys(scores["label"])
    ]
    scored = "Clients with another task: scores" if comparison.metric == ACCURACY else "All scores of clients"
    caption = f"{scored} on their own validation data, last round"
    return make_table("others", caption, shown, scores.groupby(["client", "score"], sort=False))


def _tabulate_other_tasks(comparison: RunComparison) -> pd.DataFrame:
    """Return all scores of tasks with another main metric on clients' own validation data, after the last round of each run.

    Columns: label (of the method, with the model where the method has several), client, score (its name), value.
    """
    rows = []
    for method in comparison.methods:
        of_clients = (row for r in method.counted for row in r.last_rows if row.client is not None)
        others = [row for row in of_clients if not row.has_accuracy or comparison.metric != ACCURACY]
        models = [model for model in SHORT if any(row.model == model for row in others)]
        for model in models:
            label = f"{method.method}, {SHORT[model]}" if len(models) > 1 else method.method
            scored = (row for row in others if row.model == model and row.data == "validation")
            rows += [(label, row.client, k, v) for row in scored for k, v in row.values.items() if isinstance(v, float)]
    return pd.DataFrame(rows, columns=["label", "client", "score", "value"])


def make_client_table(comparison: RunComparison) -> PageTable:
    """Return the table of all clients of all seeds: training examples, network, accuracies and gains."""
    scale, metric = comparison.scale, comparison.metric
    runs: dict[int, RunFacts] = {}  # of the first method that has the seed
    for run in (r for m in comparison.methods for r in m.counted):
        runs.setdefault(run.seed, run)
    clients = [(runs[seed], client) for seed in sorted(runs) for client in runs[seed].partition.clients]
    nets, shared = _list_networks(comparison)
    majorities = {seed: run.get_rows(run.reached) for seed, run in runs.items()}

    def read_majority(who: tuple[RunFacts, str]) -> float | Missing:
        row = majorities[who[0].seed].get(who[1])
        majority = row.find_number("majority") if row else None
        return Missing(_UNTOLD) if majority is None else majority

    about = [
        Column("Client", numeric=False, keys=("client",), read=lambda who: who[1]),
        Column("Seed", keys=("seed",), read=lambda who: who[0].seed),
        Column(
            "Training examples",
            keys=("examples",),
            read=lambda who: sum(who[0].partition.clients[who[1]].training),
            form=lambda n: TableCell(f"{n:,}"),
        ),
        Column("Own network", numeric=False, keys=("network",), read=lambda who: nets.get((who[0].seed, who[1]), shared)),
        Column(
            f"{SCORES['majority'].heading}, %" if metric == ACCURACY else "",
            keys=("majority",),
            read=read_majority,
            form=lambda share: TableCell(scale.format_value(share)),
        ),
    ]
    group = f"{metric.heading} on own validation data{scale.head} (gain over local-only{scale.difference_head})"
    by_line = {line: _list_client_results(comparison, line) for line in comparison.lines}

    def read_result(line: Line, who: tuple[RunFacts, str]) -> tuple[float, Any] | Missing:
        return by_line[line].get((who[0].seed, who[1]), Missing(_UNTOLD))

    def format_result(result: tuple[float, Any]) -> TableCell:
        value, pair = result
        if pair is None:
            return TableCell(scale.format_value(value))
        tone = "gain" if pair.gain > 0 else "harm" if pair.gain < 0 else ""
        return TableCell(scale.format_value(value), spread=scale.format_gain(pair.gain), tone=tone)

    shown = [*about, *(Column(u.label, group, read=partial(read_result, u), form=format_result) for u in comparison.lines)]
    long = [replace(c, read=partial(lambda read, who: read(who[:2]), c.read)) for c in (about[1], about[0], *about[2:])]
    long += [
        Column("", keys=("method",), read=lambda who: who[2].label),
        Column(
            "",
            keys=(metric.name, "compared_at_round", "local_only", "gain"),
            read=lambda who: read_result(who[2], who[:2]),
            numbers=lambda result: (result[0], *((p.round, p.other, p.gain) if (p := result[1]) else ())),
        ),
    ]
    long_lines = [(run, client, line) for run, client in clients for line in comparison.lines]
    return make_table("clients", "Every client, last round", shown, clients, long_lines, long)


def _list_client_results(comparison: RunComparison, line: Line) -> dict[tuple[int, str], tuple[float, Any]]:
    """Return (seed, client) -> the main metric on its own rows after the last round, and its pair of `Gains.table`."""
    gains = measures.measure_gains(comparison, line)
    pairs = {(p.seed, p.client): p for p in gains.table.itertuples()} if isinstance(gains, Gains) else {}
    scores = line.select_last("validation")
    places = zip(scores["seed"], scores["client"], scores["value"], strict=True)
    return {(seed, client): (value, pairs.get((seed, client))) for seed, client, value in places}


def _list_networks(comparison: RunComparison) -> tuple[dict[tuple[int, str], str], str]:
    """Return (seed, client) -> its own network, and the shared one: those of the first method, local-only training last."""
    methods = sorted(comparison.methods, key=lambda m: m.is_local_only)
    models = [(run.seed, run.environment.models) for m in reversed(methods) for run in m.runs]
    networks = {(seed, i): network.name for seed, of_run in models for i, network in of_run.personal.items()}
    return networks, next((of_run.shared.name for _, of_run in reversed(models) if of_run.shared), "")


def make_holdings_tables(comparison: RunComparison) -> list[PageTable]:
    """Return tables of training examples, clients by classes: one for each seed that has its own partition.

    Of large ones only the first: each costs about 30 bytes a class and client. None where sites keep it to themselves.
    """
    known = [r for r in comparison.runs if r.partition.clients]
    runs = sorted(known, key=lambda r: r.seed, reverse=True)
    distinct = {tuple((i, c.training) for i, c in r.partition.clients.items()): r for r in runs}
    shown = sorted(distinct.values(), key=lambda r: r.seed)
    shown = shown if len(comparison.classes) * len(comparison.first.partition.clients) <= LARGE else shown[:1]
    return [_make_holdings_table(r, "Training examples" + (f", seed {r.seed}" if len(distinct) > 1 else "")) for r in shown]


def _make_holdings_table(run: RunFacts, caption: str) -> PageTable:
    classes, clients = run.partition.classes, run.partition.clients
    most = max(1, *(n for c in clients.values() for n in c.training))

    def count(client: str, number: int | None) -> TableCell:
        """Return the cell with a client's examples of a class; number None: of all classes."""
        held = clients[client].training
        if number is None:
            return TableCell(f"{sum(held):,}")
        return TableCell(f"{held[number]:,}", shade=held[number] / most) if held[number] else TableCell("·")

    numbers = [*range(len(classes) if len(classes) > 1 else 0), None]  # a single class stands for all rows of another task
    if len(clients) <= len(classes):  # the longer side runs down the page
        lines: list[Any] = numbers
        shown = [Column("Class", numeric=False, read=lambda k: "all" if k is None else classes[k])]
        shown += [Column(i, "Client", read=partial(count, i)) for i in clients]
    else:
        lines = [*clients]
        shown = [Column("Client", numeric=False)]
        shown += [Column(classes[k], "Class", read=partial(count, number=k)) for k in numbers[:-1]]
        shown.append(Column("all", read=partial(count, number=None)))
    parts = ("private", "public", "validation", "holdout", "test")
    held = [(i, part, *c.counts[part]) for i, c in clients.items() for part in parts if part in c.counts]
    long = Column("", keys=("client", "part", *classes))
    return make_table(f"holdings-{run.seed}", caption, shown, lines, held, [replace(long, numbers=list)])


def make_calibration_tables(shown: Sequence[tuple[str, Calibration, Reliability]]) -> list[PageTable]:
    """Return tables of expected calibration errors, of reliability curves, and of thresholds, if there are any.

    shown: the name of a model or of rows, what was fitted to the model, and what rows show of it.
    """
    share = PERCENT.format_value

    def form_share(value: Measured | None) -> str:
        return "{} ({} to {})".format(*map(share, value)) if value else "n/a"

    errors = [
        (name, seen.examples, form_share(seen.error), share(seen.uncalibrated), f"{fitted.temperature:.4g}")
        for name, fitted, seen in shown
    ]
    curve = [(name, share(p), share(frequency), n) for name, _, seen in shown for p, frequency, n in seen.bins]
    decided = [
        (key, name, "n/a" if (p := fitted.thresholds[key]) is None else f"{p:.4f}", *map(form_share, shares))
        for name, fitted, seen in shown
        for key, shares in seen.decisions.items()
    ]
    error, interval = SCORES["calibration_error"].heading, "% (95 % interval)"
    of_error = ("Rows", "Examples", f"{error}, {interval}", "Without temperature, %", "Temperature")
    of_curve = ("Rows", "Mean probability, %", "Frequency, %", "Number")
    of_decided = ("Threshold of", "Rows", "Probability", f"Sensitivity, {interval}", f"Specificity, {interval}")
    tables: list[tuple[str, str, tuple[str, ...], Sequence[tuple[object, ...]]]] = [
        ("calibration", "Calibration error and temperature", of_error, errors),
        (RELIABILITY, "Reliability curve", of_curve, curve),
        ("thresholds", "Thresholds fitted for a sensitivity, and what they reach", of_decided, decided),
    ]
    return [
        make_table(id, caption, [Column(h, numeric=h != "Rows", read=itemgetter(k)) for k, h in enumerate(heads)], rows)
        for id, caption, heads, rows in tables
        if rows
    ]


def make_group_table(
    by: str, metric: Metric, shown: Sequence[tuple[str, Mapping[str, GroupScore]]], rows: str = "Test rows"
) -> PageTable:
    """Return the table of groups: the main metric of each, and its difference from all other rows, with 95 % intervals.

    by: the column whose values are the groups. shown: the name of each model, "" for the only one, and its
    groups. rows: what the groups are of.
    """
    scale = MetricScale(metric=metric)

    def join(ends: tuple[float, float] | None, form: Callable[[float], str]) -> str:
        return " to ".join(map(form, ends)) if ends else "n/a"

    lines = [
        (
            name,
            model,
            group.examples,
            "n/a" if group.value is None else scale.format_value(group.value),
            join(group.interval, scale.format_value),
            "n/a" if group.difference is None else scale.format_gain(group.difference),
            join(group.difference_interval, scale.format_gain),
        )
        for model, groups in shown
        for name, group in groups.items()
    ]
    heads: tuple[str, ...] = (by, "model", "examples", f"{metric.title}{scale.head}", "95 % interval")
    heads += (f"minus others{scale.difference_head}", "95 % interval")
    has_models = any(model for model, _ in shown)
    columns = [
        Column(head if k == 0 else head[:1].upper() + head[1:], numeric=k > 1, terminal=head, read=itemgetter(k))
        for k, head in enumerate(heads)
        if k != 1 or has_models
    ]
    return make_table(f"groups-{by}", f"{rows} by {by}", columns, lines)


def list_group_tables(comparison: RunComparison) -> list[PageTable]:
    """Return a table for each column by which groups of test rows were scored and kept."""
    shown: dict[tuple[str, Metric], list[tuple[str, Mapping[str, GroupScore]]]] = {}
    for method in comparison.methods:
        for seed, kept in ((run.seed, kept) for run in method.counted for kept in read_subgroups(run.folder)):
            name = name_model(method.method, seed, kept)
            shown.setdefault((kept.by, kept.metric), []).append((name, kept.groups))
    return [make_group_table(by, metric, of_column) for (by, metric), of_column in shown.items()]


def name_model(method: str, seed: int, of: Calibration | Subgroups) -> str:
    """Return which model of a comparison a record is of."""
    whose = "" if of.client is None else f" of {of.client}"
    return f"{method}, seed {seed}, {SHORT[of.role]} model{whose}, round {of.round}"


def list_calibrations(comparison: RunComparison) -> list[tuple[str, Calibration, Reliability]]:
    """Return what the rows of each run show of its calibrated models, as `make_calibration_tables` takes it."""
    lines: list[tuple[str, Calibration, Reliability]] = []
    for method in comparison.methods:
        for seed, fitted in ((run.seed, fitted) for run in method.counted for fitted in read_calibrations(run.folder)):
            name = name_model(method.method, seed, fitted)
            lines += [(f"{name}: {seen.rows} rows", fitted, seen) for seen in fitted.seen]
    return lines
