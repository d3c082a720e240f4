"""The tables of the page: methods, what accuracy hides, recall by class, every client."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pandas as pd

from fedmutual.errors import format_count
from fedmutual.metric import ACCURACY
from fedmutual.report import measures
from fedmutual.report.cells import Column, PageTable, TableCell, format_csv, make_missing_cell, make_share_cell, make_table
from fedmutual.report.columns import list_client_columns, list_decision_columns, list_headline_uses, list_node_columns
from fedmutual.report.measures import Subject, average_scores
from fedmutual.results.comparison import Method, RunComparison, Use
from fedmutual.results.estimate import Estimate, Missing
from fedmutual.results.gains import Gains, Pair
from fedmutual.results.scale import MetricScale
from fedmutual.results.text import format_number, format_percent_number
from fedmutual.rundir.recorded_run import RecordedRun


def make_client_headline(comparison: RunComparison) -> PageTable:
    """Return the table of each model of each method: its accuracies, and its gain over local-only training."""
    title, unit = comparison.metric.heading, comparison.scale.head
    caption = f"{title} of every method{unit} {_describe_repetitions(comparison)}"
    return make_table("headline", caption, list_client_columns(comparison), comparison.uses, cards=True)


def make_node_headline(comparison: RunComparison) -> PageTable:
    """Return the table of each method's means over nodes after last and best rounds, and of its worst node."""
    caption = f"Accuracy over nodes, % {_describe_repetitions(comparison)}"
    uses = list_headline_uses(comparison)
    return make_table("domains", caption, list_node_columns(comparison), uses, cards=True)


def make_decision_table(comparison: RunComparison) -> PageTable:
    """Return the table of a decision between methods, with a line for each model."""
    caption = "What each method reaches after the last round, and what it costs; means over seeds"
    return make_table("decision", caption, list_decision_columns(comparison), comparison.uses, cards=True)


def _describe_repetitions(comparison: RunComparison) -> str:
    seeds = {len(m.counted) for m in comparison.methods}
    if seeds == {1}:
        return "(one seed, so without intervals)"
    many = format_count(seeds.pop(), "seed") if len(seeds) == 1 else "seeds"
    return f"(mean ± 95 % interval over {many})"


def make_other_score_table(comparison: RunComparison) -> PageTable:
    """Return the table of scores that a frequent class does not raise, with the accuracy of always naming that class."""
    share = partial(make_share_cell, scale=comparison.scale)
    names = {"value": "Accuracy, %", "majority": "Most frequent class, %", "balanced_accuracy": "Balanced accuracy, %"}
    columns = [
        Column(
            "Method, and what is scored",
            numeric=False,
            keys=("method", "scored"),
            form=lambda line: TableCell(line[0].label, sub=line[1].title),
            numbers=lambda line: (line[0].label, line[1].title),
        ),
        *(_make_score_column(key, name, share) for key, name in names.items()),
        *(_make_score_column(key, name, _make_number_cell) for key, name in (("auroc", "Macro AUROC"), ("loss", "Loss"))),
    ]
    lines = [(m, subject) for m in comparison.methods for subject in measures.list_subjects(comparison, m)]
    caption = "Last round; own data: the mean of the clients' scores. Most frequent class: the accuracy of always naming it"
    return make_table("beyond", caption, columns, lines)


def _make_score_column(key: str, name: str, form: Callable[[Estimate], TableCell]) -> Column:
    """Return the column of a score of a line (method, subject), with a footnote if some clients lack it."""

    def read(line: tuple[Method, Subject]) -> tuple[Estimate, str] | Missing:
        value = average_scores(line[1].scores, _UNDEFINED.get(key, _UNSHARED), key)
        return value if isinstance(value, Missing) else (value, _note_partial(line[1], key))

    return Column(
        name,
        keys=("accuracy" if key == "value" else key,),
        read=read,
        form=lambda value: replace(form(value[0]), note=value[1]),
        numbers=lambda value: (value[0].mean,),
    )


def _make_number_cell(value: Estimate) -> TableCell:
    return TableCell(format_number(value.mean, 3))


def make_recall_table(comparison: RunComparison) -> PageTable:
    """Return the table of each class's recall: of each method the shared model, and the personal models on all classes."""
    columns = [Column("Class", numeric=False, keys=("class",), read=lambda number: comparison.classes[number])]
    for m in comparison.methods:
        for subject in measures.list_subjects(comparison, m):
            if subject.everything:
                name = subject.title.partition(",")[0]
                read = partial(_find_recall, _average_recalls(subject))
                columns.append(Column(name, m.label, keys=(f"{m.label}: {name}",), read=read, form=_make_shaded_cell))
    where = "test data of all domains" if comparison.domains else "test set"
    caption = f"Recall of each class on the {where}, %, last round; personal models: the mean over clients"
    return make_table("recall", caption, columns, range(len(comparison.classes)))


def _find_recall(recalls: Mapping[int, float], number: int) -> float | Missing:
    return recalls.get(number, Missing("the test set has no example of the class"))


def make_client_table(comparison: RunComparison) -> PageTable:
    """Return the table of all clients of all seeds: training examples, network, accuracies and gains."""
    pairs = {u: _list_pairs(comparison, u) for u in comparison.uses}
    accuracies = {u: _get_accuracies(u) for u in comparison.uses}
    runs: dict[int, RecordedRun] = {}  # of the first method that has the seed
    for run in (r for m in comparison.methods for r in m.counted):
        runs.setdefault(run.seed, run)
    rows, lines = [], []
    for seed, client in [
        (r.seed, client) for r in sorted(runs.values(), key=lambda r: r.seed) for client in r.partition.clients
    ]:
        run = runs[seed]
        examples, network = sum(run.partition.clients[client].counts.training), _find_network(comparison, seed, client)
        score = run.get_scores(run.last).get(client)
        majority = score.majority if score else None
        about = (TableCell(client), TableCell(str(seed)), TableCell(f"{examples:,}"), TableCell(network))
        served = []
        for u in comparison.uses:
            pair, accuracy = pairs[u].get((seed, client)), accuracies[u].get((seed, client))
            served.append(_format_served(accuracy, pair, comparison.scale))
            compared = (pair.round, pair.other, pair.gain) if pair else (None, None, None)
            lines.append([seed, client, examples, network, majority, u.label, accuracy, *compared])
        rows.append(
            (*about, *([_format_majority(majority, comparison.scale)] if comparison.metric == ACCURACY else []), *served)
        )
    metric, scale = comparison.metric, comparison.scale
    title = metric.heading
    group = f"{title} on own validation data{scale.head} (gain over local-only{scale.difference_head})"
    has_classes = metric == ACCURACY
    columns = (
        Column("Client", numeric=False),
        Column("Seed"),
        Column("Training examples"),
        Column("Own network", numeric=False),
        *([Column("Most frequent class, %")] if has_classes else []),
        *(Column(u.label, group) for u in comparison.uses),
    )
    header = ["seed", "client", "examples", "network", "majority", "method", metric.name, "compared_at_round", "local_only"]
    return PageTable("clients", "Every client, last round", columns, tuple(rows), format_csv([*header, "gain"], lines))


def _list_pairs(comparison: RunComparison, use: Use) -> dict[tuple[int, str], Pair]:
    gains = measures.measure_gains(comparison, use)
    return {(p.seed, p.client): p for p in gains.pairs} if isinstance(gains, Gains) else {}


def _format_majority(share: float | None, scale: MetricScale) -> TableCell:
    return make_missing_cell(_UNTOLD) if share is None else TableCell(scale.format_value(share))


_UNTOLD = "not shared: the run is missing or unfinished, or the client does not share this score (share.metrics)"
_UNDEFINED = {"auroc": "not shared, or undefined, because the scored data have one class only"}
_UNSHARED = "not shared by this task or by these clients"


def _note_partial(subject: Subject, key: str) -> str:
    """A footnote where a score is defined for some clients only."""
    scores = subject.scores[key]
    return f"over the {scores.count()} of {scores.size} for which it is defined" if 0 < scores.count() < scores.size else ""


def _average_recalls(subject: Subject) -> Mapping[int, float]:
    """Return the number of each class -> its mean recall over seeds, and over clients within a seed."""
    recalls = subject.scores.set_index("seed")["recall"].dropna()
    by_class = pd.DataFrame(recalls.tolist(), recalls.index).stack().dropna()
    return dict(by_class.groupby(level=[1, 0]).mean().groupby(level=0).mean())


def _make_shaded_cell(value: float) -> TableCell:
    return TableCell(format_percent_number(value), shade=value)


def _get_accuracies(use: Use) -> dict[tuple[int, str], float]:
    """Return (seed, client) -> the main metric of a model on the client's own rows, after the last round."""
    scores = use.method.select_last_scores(use.model, "validation")
    return dict(zip(zip(scores["seed"], scores["client"], strict=True), scores["value"], strict=True))


def _format_served(accuracy: float | None, pair: Pair | None, scale: MetricScale) -> TableCell:
    """A client's accuracy, and its gain beside it."""
    if accuracy is None:
        return make_missing_cell(_UNTOLD)
    if pair is None:
        return TableCell(scale.format_value(accuracy))
    tone = "gain" if pair.gain > 0 else "harm" if pair.gain < 0 else ""
    return TableCell(scale.format_value(accuracy), spread=scale.format_gain(pair.gain), tone=tone)


def _find_network(comparison: RunComparison, seed: int, client: str) -> str:
    """The client's own network; where it has none, the shared one."""
    methods = sorted(comparison.methods, key=lambda m: m.is_local_only)
    models = [r.environment.models for m in methods for r in m.runs if r.seed == seed]
    personal_networks = [m.personal[client] for m in models if client in m.personal]
    networks = [*personal_networks, *(m.shared for m in models if m.shared)]
    return networks[0].name if networks else ""


LARGE = 500  # cells


def make_holdings_tables(comparison: RunComparison) -> list[PageTable]:
    """Return tables of training examples, clients by classes: one for each seed that has its own partition.

    Of large ones only the first: each costs about 30 bytes a class and client. None where sites keep it to themselves.
    """
    known = [r for r in comparison.runs if r.partition.clients]
    runs = sorted(known, key=lambda r: r.seed, reverse=True)
    distinct = {str({i: c.counts.training for i, c in r.partition.clients.items()}): r for r in runs}
    shown = sorted(distinct.values(), key=lambda r: r.seed)
    tables = [_make_holdings_table(r, "Training examples" + (f", seed {r.seed}" if len(shown) > 1 else "")) for r in shown]
    return tables if len(comparison.classes) * len(comparison.first.partition.clients) <= LARGE else tables[:1]


def _make_holdings_table(run: RecordedRun, caption: str) -> PageTable:
    classes, clients = run.partition.classes, run.partition.clients
    counts = {i: c.counts.training for i, c in clients.items()}
    most = max(1, *(n for row in counts.values() for n in row))
    totals = {i: sum(row) for i, row in counts.items()}
    if len(clients) <= len(classes):  # the longer side runs down the page
        columns = (Column("Class", numeric=False), *(Column(i, "Client") for i in clients))
        body = [(TableCell(name), *(_format_held(counts[i][k], most) for i in clients)) for k, name in enumerate(classes)]
        rows = [*body, (TableCell("all"), *(TableCell(f"{totals[i]:,}") for i in clients))]
    else:
        columns = (Column("Client", numeric=False), *(Column(name, "Class") for name in classes), Column("all"))
        rows = [(TableCell(i), *(_format_held(n, most) for n in counts[i]), TableCell(f"{totals[i]:,}")) for i in clients]
    parts = ("private", "public", "validation", "holdout", "test")
    lines = [
        [i, part, *examples]
        for i, c in clients.items()
        for part in parts
        if (examples := getattr(c.counts, part)) is not None
    ]
    return PageTable(f"holdings-{run.seed}", caption, columns, tuple(rows), format_csv(["client", "part", *classes], lines))


def _format_held(n: int, most: int) -> TableCell:
    return TableCell(f"{n:,}", shade=n / most) if n else TableCell("·")
