"""Which runs belong together: runs on the same data and split are compared, runs of one method differ in the seed."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import pandas as pd

from fedmutual.errors import RunError
from fedmutual.metric import ACCURACY, Metric
from fedmutual.results.estimate import Missing
from fedmutual.results.gains import Gains
from fedmutual.results.scale import MetricScale
from fedmutual.results.settings import flatten_table, format_setting, format_values, is_distinctive, is_under, shorten_key
from fedmutual.role import Role
from fedmutual.rundir.recorded_run import RecordedMethod, RecordedRun

MODELS = {"personal": "personal models", "ensemble": "ensembles", "global": "shared model", "meme": "clients' forks"}
SHORT = {"personal": "personal", "ensemble": "ensemble", "global": "shared", "meme": "fork"}
OWN_DOMAIN = "test.own"  # what only nodes that are domains are scored on
_SAME_DATA = ("data", "partition", "split")  # equal in all runs that are compared

Variant = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Method:
    """An algorithm with its settings, over seeds."""

    algorithm: str
    variant: Variant  # the keys in which the compared runs differ, and their values here
    label: str
    runs: tuple[RecordedRun, ...]  # in the order of their seeds, each seed once
    role: Role

    @cached_property
    def counted(self) -> tuple[RecordedRun, ...]:
        """The runs whose numbers count: the finished runs; where no run is finished, the runs with an evaluation."""
        finished = tuple(r for r in self.runs if r.finished)
        return finished or tuple(r for r in self.runs if r.evaluations)

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The scores of the counted runs, as `fedmutual.rundir.frames.tabulate_scores` describes them."""
        return pd.concat([run.scores for run in self.counted or self.runs], ignore_index=True)

    @cached_property
    def _scores_by_kind(self) -> dict[tuple[str, str, bool], pd.DataFrame]:
        return dict(iter(self.scores.groupby(["model", "data", self.scores["client"].notna()])))

    def select_scores(self, model: str | None, data: str, of_clients: bool = True) -> pd.DataFrame:
        """Return the scores of a model on one kind of rows, with the columns of `scores`; no rows without a score.

        of_clients: scores on the rows of single clients; False: scores on the common test set.
        """
        no_scores = self.scores[:0]
        return no_scores if model is None else self._scores_by_kind.get((model, data, of_clients), no_scores)

    def select_last_scores(self, model: str | None, data: str, of_clients: bool = True) -> pd.DataFrame:
        """Return the scores after the last evaluation of each counted run, as `select_scores`."""
        scores = self.select_scores(model, data, of_clients)
        return scores[scores["is_last"]]

    @property
    def federated(self) -> bool:
        """Whether participants with data of their own learn together."""
        return self.role.federates

    @property
    def is_pooled(self) -> bool:
        """Whether one network learns from the data of all participants in one place."""
        return self.runs[0].method.pooled

    @property
    def is_local_only(self) -> bool:
        """Whether each participant trains without the other participants."""
        return not self.federated and not self.is_pooled

    @cached_property
    def uses(self) -> tuple["Use", ...]:
        """The models that clients can use on their own data, at least one; the first is the model that they would use."""
        models = next((r.models for r in self.counted if r.models), ())
        return tuple(Use(self, m) for m in models) or (Use(self, None),)


@dataclass(frozen=True)
class Use:
    """A method with the model that its clients use on their own data."""

    method: Method
    model: str | None  # "personal", "ensemble", "global", "meme"; None where no client shares its scores

    @property
    def worst(self) -> Literal["min", "max"]:
        """Which of several values of the main metric is the worst."""
        return "min" if self.method.runs[0].metric.is_higher_better else "max"

    @property
    def label(self) -> str:
        """The label of method and model, for example "FML, shared"; for a method with one model the method's label."""
        if self.model is None or len(self.method.uses) == 1:
            return self.method.label
        return f"{self.method.label}, {SHORT[self.model]}"

    @property
    def name(self) -> str:
        """The model's name; "" where there is no model."""
        return MODELS[self.model] if self.model else ""


@dataclass(frozen=True)
class RunComparison:
    """Runs of several methods on the same data and split."""

    name: str
    methods: tuple[Method, ...]
    remarks: tuple[str, ...]  # what a reader must know about which runs count

    @cached_property
    def measured_gains(self) -> dict[tuple[str, str], Gains | Missing]:
        """(Label of a `Use`, kind of rows) -> the gains over local-only training, where they were measured already."""
        return {}

    @property
    def runs(self) -> tuple[RecordedRun, ...]:
        """All runs, method by method."""
        return tuple(r for m in self.methods for r in m.runs)

    @property
    def first(self) -> RecordedRun:
        """A run whose data and split stand for all."""
        return self.runs[0]

    @property
    def at_sites(self) -> bool:
        """Whether they are federations of real sites, as their server or lead knows them."""
        return self.first.partition.kind == "sites"

    @property
    def federated(self) -> tuple[Method, ...]:
        """The methods that federate."""
        return tuple(m for m in self.methods if m.federated)

    @property
    def references(self) -> tuple[Method, ...]:
        """The methods that are compared with every other method that federates: by their role, else the first."""
        return tuple(m for m in self.federated if m.role.reference) or self.federated[:1]

    @property
    def uses(self) -> tuple[Use, ...]:
        """The models of all methods."""
        return tuple(use for m in self.methods for use in m.uses)

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
        """The federation's classes."""
        return self.first.partition.classes

    @property
    def scale(self) -> MetricScale:
        """How values are written: percentages with two decimals where an example of the test set weighs 0.02 % or less."""
        tests = (s.examples or 0 for r in self.runs if r.last for s in r.last.scores if s.data == "test")
        return MetricScale(2 if max(tests, default=0) >= 5000 else 1, self.metric)

    def find_local_only(self, method: Method) -> Method | None:
        """Return the local-only training with which a method is compared, or None.

        If there are several, the one with the largest number of settings equal to the method's.
        """
        local = [m for m in self.methods if m.is_local_only]
        return max(local, key=lambda m: len(set(m.variant) & set(method.variant)), default=None)


def make_comparisons(runs: Sequence[RecordedRun]) -> list[RunComparison]:
    """Return the runs sorted into comparisons, in the given order. Runs of a sweep have no scores to compare.

    Raises:
        RunError: all runs are of a sweep, or tuned.json of a run is damaged.
    """
    return group_runs(_select_scored(runs))


def group_runs(runs: Sequence[RecordedRun]) -> list[RunComparison]:
    """Return all runs sorted into comparisons, those of a sweep, too.

    Raises:
        RunError: tuned.json of a run is damaged.
    """
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        same = {k: v for k, v in flatten_table({key: run.config.get(key, {}) for key in _SAME_DATA}) if is_distinctive(k)}
        key = json.dumps([run.partition.source, run.partition.classes, same], sort_keys=True, default=str)
        groups.setdefault(key, []).append(run)
    names = [_get_name(group) for group in groups.values()]
    return [
        _make_comparison(group, name if names.count(name) == 1 else f"{name} ({number})")
        for number, (name, group) in enumerate(zip(names, groups.values(), strict=True), 1)
    ]


def _select_scored(runs: Sequence[RecordedRun]) -> Sequence[RecordedRun]:
    """Return the runs with scores on validation and test rows; a sweep's runs would only repeat them without numbers."""
    scored = [run for run in runs if not run.held_out]
    if runs and not scored:
        raise RunError(
            f"{runs[0].folder}: hold-out rows alone were scored (records.evaluate_on), as `sweep` does, so there is nothing "
            "to report; a sweep's sweep.json holds what chose, and a run without that key can be reported"
        )
    return scored


def find_differences(compared: Sequence[RunComparison]) -> list[tuple[str, list[str]]]:
    """Return (key, its values in each comparison) for each key in which comparisons differ, without keys of algorithms."""
    tables = [[dict(flatten_table(run.config)) for run in c.runs] for c in compared]
    keys = dict.fromkeys(
        k for runs in tables for t in runs for k in t if is_distinctive(k) and not is_under(k, ("algorithm",))
    )
    rows = [(key, [format_values(runs, key) for runs in tables]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _get_name(runs: Sequence[RecordedRun]) -> str:
    names = dict.fromkeys(r.settings.name for r in runs)
    return next(iter(names)) if len(names) == 1 else runs[0].partition.source


def _make_comparison(runs: Sequence[RecordedRun], name: str) -> RunComparison:
    variants, domains = _find_variants(runs), _has_domains(runs)
    groups: dict[tuple[str, Variant], list[RecordedRun]] = {}
    for run, variant in zip(runs, variants, strict=True):
        groups.setdefault((run.algorithm, variant), []).append(run)
    distinctive = {
        g: _select_distinctive_settings(g[1], [v for name, v in groups if name == g[0]]) if domains else g[1] for g in groups
    }
    algorithms = {(members[0].method.title, algorithm) for (algorithm, _), members in groups.items()}
    titles = [title for title, _ in algorithms]
    methods, remarks = [], []
    for group in sorted(groups, key=lambda g: (*_make_sort_key(groups[g][0].method), domains and bool(distinctive[g]))):
        (algorithm, variant), members = group, groups[group]
        title = members[0].method.title
        unique_title = f"{title} ({algorithm})" if titles.count(title) > 1 else title  # two methods may have one title
        label = _format_label(unique_title, [f"{shorten_key(k)} = {v}" for k, v in distinctive[group]], domains)
        once = {r.seed: r for r in reversed(members)}
        ordered_runs = tuple(once[seed] for seed in sorted(once))
        method = Method(algorithm, variant, label, ordered_runs, members[0].method.role)
        methods.append(method)
        remarks += [
            f"{label}: seed {r.seed} is there twice; {r.folder} is left out." for r in members if r is not once[r.seed]
        ]
        remarks += _describe_unfinished(method)
    return RunComparison(name, tuple(methods), tuple(remarks))


def _make_sort_key(method: RecordedMethod) -> tuple[bool, bool, bool, int]:
    """Return a key that sorts methods by their position; local-only training and training on pooled data come last."""
    role = method.role
    return method.pooled, not role.federates, role.position is None, role.position or 0


def _format_label(name: str, settings: Sequence[str], domains: bool) -> str:
    """Return a method's label with its settings: "FML, alpha = 0.3".

    If clients are domains, the settings are in brackets, because lists of methods are long there: "FedH2L (kl = false)".
    """
    if domains:
        return f"{name} ({', '.join(settings)})" if settings else name
    return ", ".join((name, *settings))


def _has_domains(runs: Sequence[RecordedRun]) -> bool:
    return any(s.data == OWN_DOMAIN for r in runs if r.last and r.metric == ACCURACY for s in r.last.scores)


def _select_distinctive_settings(variant: Variant, beside: Sequence[Variant]) -> Variant:
    """Return the settings that distinguish a variant from most other variants of its algorithm.

    A setting is left out if all variants have it, or if more than half of at least three variants have it.
    """

    def common(key: str, value: str) -> bool:
        same = sum(dict(other)[key] == value for other in beside)
        return same == len(beside) or (len(beside) > 2 and same > len(beside) / 2)

    return tuple((k, v) for k, v in variant if not common(k, v))


def _describe_unfinished(method: Method) -> Iterator[str]:
    for run in method.runs:
        if not run.finished:
            unfinished = run.diverged is None
            state = f"{method.label}, seed {run.seed}{', is' if unfinished else ''} {run.state}."
            last_round = "that round" if unfinished else f"round {run.reached}"
            numbers = f"Its numbers are from {last_round}." if run in method.counted else "Its numbers are left out."
            none = f"It has no numbers{' yet' if unfinished else ''}."
            yield f"{state} {numbers if run.evaluations else none}"


def _find_variants(runs: Sequence[RecordedRun]) -> list[Variant]:
    """Return for each run its settings that differ between the runs; an algorithm's settings between its runs."""
    tables = [
        {k: format_setting(v) for k, v in flatten_table(r.config) if is_distinctive(k) and not is_under(k, _SAME_DATA)}
        for r in runs
    ]

    def values(key: str, run: RecordedRun) -> set[str | None]:
        """Return the key's values in the runs that set it, but not by the method's name or by trials on hold-out rows."""
        if key in run.method.preset or key in run.tuned:
            return set()
        is_setting = key.startswith("algorithm.") or ".algorithm." in key
        pairs = [(t, r) for t, r in zip(tables, runs, strict=True) if not is_setting or r.algorithm == run.algorithm]
        return {t.get(key) for t, r in pairs if key not in r.method.preset and key not in r.tuned}

    keys = sorted({k for t in tables for k in t} - {"algorithm.name"})
    return [
        tuple((key, table.get(key, "default")) for key in keys if len(values(key, run)) > 1)
        for table, run in zip(tables, runs, strict=True)
    ]
