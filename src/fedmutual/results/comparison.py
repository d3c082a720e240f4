"""Which runs belong together: runs on the same data and split are compared, runs of one method differ in the seed."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import pandas as pd

from fedmutual.config.keys import list_effects
from fedmutual.config.schema import Config
from fedmutual.errors import RunError, join_words
from fedmutual.metric import ACCURACY, UNLABELLED, Metric
from fedmutual.results.estimate import Missing
from fedmutual.results.folds import join_folds, split_baseline
from fedmutual.results.frame import RunFacts, format_setting, is_number
from fedmutual.results.gains import Gains
from fedmutual.results.scale import MetricScale
from fedmutual.role import Role
from fedmutual.rundir.record_files import flatten_table
from fedmutual.rundir.schema import SHORT

MODELS = {"personal": "personal models", "ensemble": "ensembles", "global": "shared model", "meme": "clients' forks"}
OWN_DOMAIN = "test.own"  # what only nodes that are domains are scored on
_SAME_DATA = ("data", "partition", "split")  # equal in all runs that are compared
_NO_MATTER = {"seed", *(key for key, effect in list_effects(Config).items() if effect.affects != "result")}
_COLUMNS = ["seed", "round", "model", "client", "data", "metric", "value", "examples", "last"]

Variant = tuple[tuple[str, str], ...]


class ScoreTable:
    """The scores of the runs of a method, a row a number: the main metric after each evaluation, all scores after the last.

    Columns of `rows`: seed, round, model, client (None: the common test set), data, metric, value, examples, last.
    """

    def __init__(self, runs: Sequence[RunFacts]) -> None:
        rows = [row for run in runs for row in _list_scores(run)]
        self.rows = pd.DataFrame(rows, columns=_COLUMNS).astype({"value": float, "last": bool})
        groups = self.rows.groupby(["model", "data", "metric", self.rows["client"].notna()])
        self._groups: dict[Any, pd.DataFrame] = dict(iter(groups))

    def select(self, model: str | None, data: str, metric: str, of_clients: bool = True) -> pd.DataFrame:
        """Return the scores of a model by one metric on one kind of rows; no rows without a score.

        of_clients: scores on the rows of single clients; False: scores on the common test set.
        """
        return self._groups.get((model, data, metric, of_clients), self.rows[:0])


def _list_scores(run: RunFacts) -> Iterator[tuple[Any, ...]]:
    main = run.metric.name
    for evaluation in run.evaluations:
        last = evaluation.round == run.reached
        for row in evaluation.rows:
            scores = row.values
            if is_number(scores.get(main)):
                place, examples = (run.seed, evaluation.round, row.model, row.client, row.data), scores.get("examples")
                for name in scores if last else (main,):
                    if name != "examples" and is_number(scores[name]):
                        yield *place, name, float(scores[name]), examples, last


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a comparison's tables: a method over its seeds, with one of the models that its clients use on own data."""

    method: str  # the method's label
    algorithm: str
    variant: Variant  # the keys in which the compared runs differ, and their values here
    runs: tuple[RunFacts, ...]  # in the order of their seeds, each seed once
    role: Role
    counted: tuple[RunFacts, ...]  # whose numbers count: the finished runs; without any, the runs with an evaluation
    models: tuple[str, ...]  # "personal", "ensemble", "global", "meme"; the first one is what clients would use
    model: str | None  # of this line; None where no client shares its scores
    table: ScoreTable = field(repr=False)  # of the counted runs

    @property
    def label(self) -> str:
        """The label of method and model, for example "FML, shared"; for a method with one model the method's label."""
        return f"{self.method}, {SHORT[self.model]}" if self.model and len(self.models) > 1 else self.method

    @property
    def model_name(self) -> str:
        """The model's name; "" where there is no model."""
        return MODELS[self.model] if self.model else ""

    @property
    def variant_text(self) -> str:
        """The variant as text: "alpha = 0.3, rounds = 5"."""
        return ", ".join(f"{key} = {value}" for key, value in self.variant)

    @property
    def metric(self) -> Metric:
        """The main metric of the runs."""
        return self.runs[0].metric

    @property
    def worst(self) -> Callable[[list[float]], float]:
        """The function that returns the worst of several values of the main metric."""
        return min if self.metric.is_higher_better else max

    @property
    def federated(self) -> bool:
        """Whether participants with data of their own learn together."""
        return self.role.federates

    @property
    def is_pooled(self) -> bool:
        """Whether one network learns from the data of all participants in one place."""
        return self.runs[0].environment.pooled

    @property
    def is_local_only(self) -> bool:
        """Whether each participant trains without the other participants."""
        return not self.federated and not self.is_pooled

    def select(self, data: str, metric: str = "", model: str | None = None, of_clients: bool = True) -> pd.DataFrame:
        """Return scores as `ScoreTable.select`. metric: "" is the main metric. model: None is the model of this line."""
        return self.table.select(model or self.model, data, metric or self.metric.name, of_clients)

    def select_last(self, data: str, metric: str = "", model: str | None = None, of_clients: bool = True) -> pd.DataFrame:
        """Return the scores after the last evaluation of each counted run, as `select`."""
        scores = self.select(data, metric, model, of_clients)
        return scores[scores["last"]]


def make_lines(
    method: str, runs: Sequence[RunFacts], algorithm: str = "", role: Role | None = None, variant: Variant = ()
) -> list[Line]:
    """Return the lines of a method, at least one: one for each model that its clients use on their own data.

    algorithm, role: those of the runs if they are not given.
    """
    algorithm, role, runs = algorithm or runs[0].algorithm, role or runs[0].role, tuple(runs)
    counted = tuple(r for r in runs if r.finished) or tuple(r for r in runs if r.evaluations)
    models, table = next((r.models for r in counted if r.models), ()), ScoreTable(counted or runs)
    return [Line(method, algorithm, variant, runs, role, counted, models, model, table) for model in models or (None,)]


@dataclass(frozen=True, eq=False)
class RunComparison:
    """Runs of several methods on the same data and split."""

    name: str
    lines: tuple[Line, ...]  # the models of all methods
    remarks: tuple[str, ...]  # what a reader must know about which runs count
    measured_gains: dict[tuple[str, str], Gains | Missing] = field(default_factory=dict)
    """(Label of a line, kind of rows) -> the gains over local-only training, where they were measured already."""

    @cached_property
    def methods(self) -> tuple[Line, ...]:
        """The first line of each method: with the model that its clients would use."""
        return tuple({line.method: line for line in reversed(self.lines)}.values())[::-1]

    @cached_property
    def runs(self) -> tuple[RunFacts, ...]:
        """All runs, method by method."""
        return tuple(r for m in self.methods for r in m.runs)

    @property
    def first(self) -> RunFacts:
        """A run whose data and split stand for all."""
        return self.runs[0]

    @property
    def at_sites(self) -> bool:
        """Whether they are federations of real sites, as their server or lead knows them."""
        return self.first.partition.kind == "sites"

    @property
    def is_of_one_site(self) -> bool:
        """Whether they are from the folder of a real site."""
        engine = self.first.environment.engine
        return engine is not None and engine.name == "sites" and not self.at_sites

    @property
    def federated(self) -> tuple[Line, ...]:
        """The methods that federate."""
        return tuple(m for m in self.methods if m.federated)

    @property
    def references(self) -> tuple[Line, ...]:
        """The methods that are compared with every other method that federates: by their role, else the first."""
        return tuple(m for m in self.federated if m.role.reference) or self.federated[:1]

    @cached_property
    def domains(self) -> bool:
        """Whether clients are domains, scored on each other's test rows."""
        return _has_domains(self.runs)

    @property
    def metric(self) -> Metric:
        """The main metric of the runs."""
        return self.first.metric

    @property
    def classes(self) -> tuple[str, ...]:
        """The federation's classes, without `UNLABELLED` unless a client's class has this name."""
        names, clients = self.first.partition.classes, self.first.environment.clients.values()
        is_class = any(UNLABELLED in client.classes for client in clients)
        return names[:-1] if names[-1:] == (UNLABELLED,) and not is_class else names

    @cached_property
    def scale(self) -> MetricScale:
        """How values are written: percentages with two decimals where an example of the test set weighs 0.02 % or less."""
        tests = (row.find_number("examples") or 0 for r in self.runs for row in r.last_rows if row.data == "test")
        return MetricScale(2 if max(tests, default=0) >= 5000 else 1, self.metric)

    def find_local_only(self, method: Line) -> Line | None:
        """Return the local-only training with which a method is compared, or None.

        If there are several, the one with the largest number of settings equal to the method's.
        """
        local = [m for m in self.methods if m.is_local_only]
        return max(local, key=lambda m: len(set(m.variant) & set(method.variant)), default=None)


def make_comparisons(runs: Sequence[RunFacts]) -> list[RunComparison]:
    """Return the runs sorted into comparisons, in the given order. Runs of a sweep have no scores to compare.

    Raises:
        RunError: all runs are of a sweep, or tuned.json of a run is damaged.
    """
    scored = [run for run in runs if not run.held_out]
    if runs and not scored:
        raise RunError(
            f"{runs[0].folder}: hold-out rows alone were scored (records.evaluate_on), as `sweep` does, so there is nothing "
            "to report; a sweep's sweep.json holds what chose, and a run without that key can be reported"
        )
    return group_runs(scored)


def group_runs(runs: Sequence[RunFacts]) -> list[RunComparison]:
    """Return all runs sorted into comparisons, those of a sweep, too.

    Raises:
        RunError: tuned.json of a run is damaged.
    """
    groups: dict[str, list[RunFacts]] = {}
    for run in join_folds([part for recorded in runs for part in split_baseline(recorded)]):
        same = {k: v for k, v in flatten_table({key: run.config.get(key, {}) for key in _SAME_DATA}) if is_distinctive(k)}
        key = json.dumps([run.partition.source, run.partition.classes, same], sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    names = [_get_name(group) for group in groups.values()]
    return [
        _make_comparison(group, name if names.count(name) == 1 else f"{name} ({number})")
        for number, (name, group) in enumerate(zip(names, groups.values(), strict=True), 1)
    ]


def find_differences(compared: Sequence[RunComparison]) -> list[tuple[str, list[str]]]:
    """Return (key, its values in each comparison) for each key in which comparisons differ, without keys of algorithms."""
    if len(compared) < 2:
        return []
    tables = [[dict(flatten_table(run.config)) for run in c.runs] for c in compared]
    keys = dict.fromkeys(k for runs in tables for t in runs for k in t)
    rows = [
        (key, [format_values(runs, key) for runs in tables])
        for key in keys
        if is_distinctive(key) and not _is_under(key, ("algorithm",))
    ]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _get_name(runs: Sequence[RunFacts]) -> str:
    names = {r.settings.name for r in runs}
    return names.pop() if len(names) == 1 else runs[0].partition.source


def _make_comparison(runs: Sequence[RunFacts], name: str) -> RunComparison:
    domains = _has_domains(runs)
    groups: dict[tuple[str, Variant], list[RunFacts]] = {}
    for run, variant in zip(runs, _find_variants(runs), strict=True):
        groups.setdefault((run.algorithm, variant), []).append(run)
    distinctive = {
        g: _select_distinctive_settings(g[1], [v for name, v in groups if name == g[0]]) if domains else g[1] for g in groups
    }
    algorithms = {(members[0].method.title, algorithm) for (algorithm, _), members in groups.items()}
    titles = [title for title, _ in algorithms]
    lines: list[Line] = []
    folds = {run.folds[1] for run in runs if run.folds}
    remarks = [f"{number} folds score every row once; costs are of the first fold." for number in folds]
    for group in sorted(groups, key=lambda g: (*_make_sort_key(groups[g][0]), domains and bool(distinctive[g]))):
        (algorithm, variant), members = group, groups[group]
        title = members[0].method.title
        unique_title = f"{title} ({algorithm})" if titles.count(title) > 1 else title  # two methods may have one title
        settings = [f"{k.removeprefix('algorithm.').removeprefix('training.')} = {v}" for k, v in distinctive[group]]
        label = _format_label(unique_title, settings, domains)
        once = {r.seed: r for r in reversed(members)}
        of_method = make_lines(label, [once[seed] for seed in sorted(once)], variant=variant)
        lines += of_method
        remarks += [
            f"{label}: seed {r.seed} is there twice; {r.folder} is left out." for r in members if r is not once[r.seed]
        ]
        remarks += _describe_unfinished(of_method[0])
    remarks += _describe_undisclosed(runs)
    return RunComparison(name, tuple(lines), tuple(remarks))


def _make_sort_key(run: RunFacts) -> tuple[bool, bool, bool, int]:
    """Return a key that sorts methods by their position; local-only training and training on pooled data come last."""
    role = run.role
    return run.environment.pooled, not role.federates, role.position is None, role.position or 0


def _format_label(name: str, settings: Sequence[str], domains: bool) -> str:
    """Return a method's label with its settings: "FML, alpha = 0.3".

    If clients are domains, the settings are in brackets, because lists of methods are long there: "FedH2L (kl = false)".
    """
    if domains:
        return f"{name} ({', '.join(settings)})" if settings else name
    return ", ".join((name, *settings))


def _has_domains(runs: Sequence[RunFacts]) -> bool:
    return any(row.data == OWN_DOMAIN and row.has_accuracy for r in runs if r.metric == ACCURACY for row in r.last_rows)


def _select_distinctive_settings(variant: Variant, beside: Sequence[Variant]) -> Variant:
    """Return the settings that distinguish a variant from most other variants of its algorithm.

    A setting is left out if all variants have it, or if more than half of at least three variants have it.
    """

    def common(key: str, value: str) -> bool:
        same = sum(dict(other)[key] == value for other in beside)
        return same == len(beside) or (len(beside) > 2 and same > len(beside) / 2)

    return tuple((k, v) for k, v in variant if not common(k, v))


def _describe_undisclosed(runs: Sequence[RunFacts]) -> Iterator[str]:
    """Yield which real sites disclose no gain, to a reader of the results of the server."""
    alone = [run for run in runs if run.partition.kind == "sites" and not run.role.federates]
    hidden = sorted(
        {i for run in alone for i in run.environment.clients} - {row.client for run in alone for row in run.last_rows}
    )
    if hidden:
        yield (
            f"The gain of {join_words(hidden)} is not disclosed (share.metrics, fewer than 50 scored rows, or nothing was "
            "trained alone); the operator of a site sees it by `fedmutual report` of the site's own folder."
        )


def _describe_unfinished(method: Line) -> Iterator[str]:
    for run in method.runs:
        if not run.finished:
            unfinished = run.diverged is None
            state = f"{method.method}, seed {run.seed}{', is' if unfinished else ''} {run.state}."
            last_round = "that round" if unfinished else f"round {run.reached}"
            numbers = f"Its numbers are from {last_round}." if run in method.counted else "Its numbers are left out."
            none = f"It has no numbers{' yet' if unfinished else ''}."
            yield f"{state} {numbers if run.evaluations else none}"


def _find_variants(runs: Sequence[RunFacts]) -> list[Variant]:
    """Return for each run its settings that differ between the runs; an algorithm's settings between its runs."""
    tables = [{k: format_setting(v) for k, v in flatten_table(r.config)} for r in runs]
    varied = {k for t in tables for k in t} - {"algorithm.name"}
    keys = sorted(k for k in varied if is_distinctive(k) and not _is_under(k, _SAME_DATA))
    values: dict[tuple[str, str], set[str | None]] = {}  # (key, algorithm or "") -> its values in the runs that set it
    for table, run in zip(tables, runs, strict=True):
        for key in keys:
            if _is_chosen(key, run):
                values.setdefault((key, run.algorithm if _is_of_algorithm(key) else ""), set()).add(table.get(key))
    return [
        tuple(
            (key, table.get(key, "default"))
            for key in keys
            if _is_chosen(key, run) and len(values[key, run.algorithm if _is_of_algorithm(key) else ""]) > 1
        )
        for table, run in zip(tables, runs, strict=True)
    ]


def _is_chosen(key: str, run: RunFacts) -> bool:
    """Return whether a key's value is not set by the method's name or by trials on hold-out rows."""
    return key not in run.method.preset and key not in run.tuned


def _is_of_algorithm(key: str) -> bool:
    return key.startswith("algorithm.") or ".algorithm." in key


@cache
def is_distinctive(key: str) -> bool:
    """Return whether runs that differ in this key, or in a client's own key of this name, are compared as other methods."""
    *_, client_key = key.split(".", 2) if key.startswith("clients.") else (key,)
    return not _is_under(client_key, _NO_MATTER)


def _is_under(key: str, names: Iterable[str]) -> bool:
    """Return whether a dotted key is one of these names, or a key in a table of one of these names."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def format_values(tables: Sequence[Mapping[str, Any]], key: str, missing: str = "not set") -> str:
    """Return the distinct values of a key in the settings of runs. missing: the text for a run that does not set the key."""
    return "; ".join(dict.fromkeys(format_setting(t[key]) if key in t else missing for t in tables))
