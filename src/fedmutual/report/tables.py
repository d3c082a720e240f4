"""The tables beside the headline: what accuracy hides, recall by class, every client."""

import pandas as pd

from fedmutual.metric import ACCURACY
from fedmutual.report import measures
from fedmutual.report.cells import Column, PageTable, TableCell, format_csv, list_numbers, make_missing_cell, make_share_cell
from fedmutual.report.comparison import RunComparison, Use
from fedmutual.report.measures import Subject, average_scores
from fedmutual.report.scale import MetricScale
from fedmutual.report.statistics import Gains, Missing, Pair
from fedmutual.report.text import format_number, format_percent_number
from fedmutual.rundir.recorded_run import RecordedRun


def make_other_score_table(comparison: RunComparison) -> PageTable:
    """Return the table of scores that a frequent class does not raise, with the accuracy of always naming that class."""
    scale = comparison.scale
    rows, lines = [], []
    keys = ("value", "majority", "balanced_accuracy", "auroc", "loss")
    for m in comparison.methods:
        for subject in measures.list_subjects(comparison, m):
            scores = {key: average_scores(subject.scores, _UNDEFINED[key], key) for key in keys}
            cells = [make_share_cell(scores[key], scale, note=_note_partial(subject, key)) for key in keys[:3]]
            auroc, loss = (
                make_missing_cell(v.why)
                if isinstance(v, Missing)
                else TableCell(format_number(v.mean, 3), note=_note_partial(subject, key))
                for key, v in ((k, scores[k]) for k in keys[3:])
            )
            rows.append((TableCell(m.label, sub=subject.title), *cells, auroc, loss))
            lines.append([m.label, subject.title, *(list_numbers(scores[key])[0] for key in keys)])
    columns = (
        Column("Method, and what is scored", numeric=False),
        Column("Accuracy, %"),
        Column("Most frequent class, %"),
        Column("Balanced accuracy, %"),
        Column("Macro AUROC"),
        Column("Loss"),
    )
    caption = "Last round; own data: the mean of the clients' scores. Most frequent class: the accuracy of always naming it"
    return PageTable("beyond", caption, columns, tuple(rows), format_csv(["method", "scored", "accuracy", *keys[1:]], lines))


def make_recall_table(comparison: RunComparison) -> PageTable:
    """Return the table of each class's recall: of each method the shared model, and the personal models on all classes."""
    columns = [Column("Class", numeric=False)]
    recalls: list[list[float | None]] = []
    for m in comparison.methods:
        for subject in measures.list_subjects(comparison, m):
            if subject.everything:
                columns.append(Column(subject.title.partition(",")[0], m.label))
                recalls.append(_average_recalls(subject, len(comparison.classes)))
    rows = tuple(
        (
            TableCell(name),
            *(
                make_missing_cell("the test set has no example of the class") if v is None else _make_shaded_cell(v)
                for v in values
            ),
        )
        for name, *values in zip(comparison.classes, *recalls, strict=True)
    )
    lines = [[name, *values] for name, *values in zip(comparison.classes, *recalls, strict=True)]
    header = ["class", *(f"{c.group}: {c.name}" for c in columns[1:])]
    where = "test data of all domains" if comparison.domains else "test set"
    caption = f"Recall of each class on the {where}, %, last round; personal models: the mean over clients"
    return PageTable("recall", caption, tuple(columns), rows, format_csv(header, lines))


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
_UNDEFINED = {
    "auroc": "not shared, or undefined, because the scored data have one class only",
    **dict.fromkeys(("value", "majority", "balanced_accuracy", "loss"), "not shared by this task or by these clients"),
}


def _note_partial(subject: Subject, key: str) -> str:
    """A footnote where a score is defined for some clients only."""
    scores = subject.scores[key]
    return f"over the {scores.count()} of {scores.size} for which it is defined" if 0 < scores.count() < scores.size else ""


def _average_recalls(subject: Subject, classes: int) -> list[float | None]:
    """Return for each class the mean recall over seeds, and over clients within a seed; None without a recall."""
    recalls = subject.scores.set_index("seed")["recall"].dropna()
    by_class = pd.DataFrame(recalls.tolist(), recalls.index).stack().dropna()
    means = by_class.groupby(level=[1, 0]).mean().groupby(level=0).mean()
    return [means.get(number) for number in range(classes)]


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
