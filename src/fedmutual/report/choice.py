"""Which of several settings is best by hold-out data, read from run folders. No test or validation score is looked at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedmutual.metric import ACCURACY, Metric
from fedmutual.report.findings import Finding, describe_finding
from fedmutual.report.measures import average_by_round
from fedmutual.results.estimate import SAME, Estimate, Missing, estimate, get_limit
from fedmutual.results.gains import Gains, pair_clients
from fedmutual.results.scale import MetricScale
from fedmutual.rundir.frames import tabulate_scores
from fedmutual.rundir.recorded_run import RecordedRun, read_run

HOLDOUT = "holdout"
_MODELS: Mapping[str | None, tuple[str, ...]] = {
    None: ("personal", "global", "meme"),  # the one that a client would use
    "personal": ("personal",),
    "global": ("global", "meme"),
}


class ChoiceFinding(Finding):
    """A fact about the tried settings."""

    template = "choice.j2"


@dataclass(frozen=True)
class Harmful(ChoiceFinding):
    """A setting whose personal models are worse than local-only training."""

    macro = "harmful"
    label: str
    estimate: Estimate  # of the gain over local-only training; the mean is below 0


@dataclass(frozen=True)
class SettingNotCompared(ChoiceFinding):
    """A setting that cannot be compared with local-only training."""

    macro = "not_compared"
    label: str
    reason: str


@dataclass(frozen=True)
class Tie(ChoiceFinding):
    """Settings that are equally good; the first is chosen."""

    macro = "tie"
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Uncounted(ChoiceFinding):
    """Clients that the choice does not count, because their task lacks the main metric of the others."""

    macro = "uncounted"
    clients: tuple[str, ...]


@dataclass(frozen=True)
class EndOfValues(ChoiceFinding):
    """A chosen value at an end of the tried values, so that a better value may lie beyond."""

    macro = "end_of_values"
    key: str
    value: str  # as TOML
    is_largest: bool


@dataclass(frozen=True)
class ScoredTrial:
    """A setting that was tried, with the hold-out scores of its runs: values of their main metric.

    The properties read the run folders at their first use, and raise RunError as `read_run`.
    """

    values: Mapping[str, Any]  # by dotted key, what is fixed too
    label: str
    folders: Mapping[int, Path]  # by seed
    diverged: Mapping[int, str]  # seed -> how; one is enough for the setting not to be chosen
    by: str | None  # "personal", "global"; None: the model that a client would use
    local_only: Mapping[int, Path] | None = None  # local-only training beside it; None where it has no personal models

    @cached_property
    def runs(self) -> tuple[RecordedRun, ...]:
        """The finished runs of this setting. Raises RunError as `read_run`."""
        return tuple(run for run in map(read_run, self.folders.values()) if run.finished)

    @property
    def metric(self) -> Metric:
        """The main metric of the runs; accuracy before the first run has finished."""
        return self.runs[0].metric if self.runs else ACCURACY

    @cached_property
    def _scores(self) -> pd.DataFrame:
        """The scores of the clients on their hold-out rows, as `RecordedRun.scores` has them."""
        frames = [run.scores for run in self.runs] or [tabulate_scores((), seed=0)]
        scores = pd.concat(frames, ignore_index=True)
        return scores[scores["client"].notna() & (scores["data"] == HOLDOUT)]

    @cached_property
    def model(self) -> str | None:
        """The model that is scored: "personal", "global" (shared), or "meme" where no complete shared model exists.

        None without scores.
        """
        scored = set(self._scores["model"])
        return next((m for m in _MODELS[self.by] if m in scored), None)

    @cached_property
    def _model_scores(self) -> pd.DataFrame:
        return self._scores[self._scores["model"] == self.model]

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """The mean over clients of the main metric: a row for each evaluated round, a column for each run's seed."""
        return average_by_round(self._model_scores).sort_index().reindex(columns=[run.seed for run in self.runs])

    @property
    def last(self) -> Estimate | None:
        """The mean over seeds after the last round, which decides; None where a seed diverged or has no score."""
        if self.diverged or not self.runs or self.rounds.isna().all().any():
            return None
        return self._estimate(self.rounds.ffill().iloc[-1])

    @property
    def best(self) -> Estimate | None:
        """The mean over seeds after each seed's best round; None as for `last`."""
        if self.last is None:
            return None
        return self._estimate(self.rounds.max() if self.metric.is_higher_better else self.rounds.min())

    def _estimate(self, values: pd.Series) -> Estimate:
        return estimate(values.tolist(), "seeds", limit=get_limit(self.metric))

    @property
    def best_rounds(self) -> tuple[int, ...]:
        """Each seed's best round, the earliest if several are equal; empty if `last` is None."""
        if self.last is None:
            return ()
        rounds = self.rounds.idxmax() if self.metric.is_higher_better else self.rounds.idxmin()
        return tuple(rounds.tolist())

    @property
    def examples(self) -> int:
        """The number of hold-out examples of the score, over all clients and seeds."""
        return int(self._model_scores.loc[self._model_scores["is_last"], "examples"].sum())

    @property
    def uncounted(self) -> tuple[str, ...]:
        """The clients whose task lacks the main metric: they have no part in the score."""
        others = [o for run in self.runs[:1] if run.last for o in run.last.others if o.find_score(self.metric.name) is None]
        return tuple(dict.fromkeys(o.client for o in others if o.client is not None and o.data == HOLDOUT))

    @cached_property
    def gain(self) -> Gains | Missing | None:
        """The gain of personal models over local-only training, in pairs on hold-out rows.

        None without local-only training beside the setting, and if `last` is None. Raises RunError as `read_run`.
        """
        if self.local_only is None or self.last is None:
            return None
        others = [run for run in map(read_run, self.local_only.values()) if run.finished]
        if not others:
            return Missing("local-only training diverged with these settings")
        return pair_clients(self.runs, others, "personal", "personal", HOLDOUT)


def describe_choice(finding: Finding, metric: Metric = ACCURACY) -> str:
    """Return the sentence of a finding, without a full stop. metric: the main metric of the tried runs."""
    return describe_finding(finding, MetricScale(2, metric))


def pick_best(tried: Sequence[ScoredTrial]) -> tuple[ScoredTrial, ...]:
    """Return the settings with the best mean after the last round, in the given order: one, or several that are equal.

    Empty if each setting diverged or has no score. Raises RunError as `ScoredTrial.runs`.
    """
    means = [(t, t.last.mean if t.metric.is_higher_better else -t.last.mean) for t in tried if t.last is not None]
    top = max((mean for _, mean in means), default=0.0)
    return tuple(t for t, mean in means if top - mean < SAME)


def find_harm(tried: ScoredTrial) -> Finding | None:
    """Return by how much personal models with this setting are worse than local-only training, or why no gain is known.

    None where they are not worse, and where there is no local-only training beside the setting. Raises RunError as
    `ScoredTrial.gain`.
    """
    if isinstance(tried.gain, Missing):
        return SettingNotCompared(tried.label, tried.gain.why)
    if tried.gain is None or tried.gain.estimate.mean > -SAME:
        return None
    return Harmful(tried.label, tried.gain.estimate)


def find_edges(tried: Sequence[ScoredTrial], chosen: ScoredTrial) -> list[tuple[str, float, float]]:
    """Return (key, chosen value, next value) for each numeric key whose chosen value is the lowest or highest tried."""
    edge_values = []
    for key, value in chosen.values.items():
        values = sorted({t.values[key] for t in tried if _is_number(t.values[key])})
        if len(values) > 1 and _is_number(value) and value in (values[0], values[-1]):
            edge_values.append((key, value, values[1] if value == values[0] else values[-2]))
    return edge_values


def find_tie(best: Sequence[ScoredTrial]) -> Finding | None:
    """Return the settings that are equally good; None if there are fewer than two."""
    return Tie(tuple(t.label for t in best)) if len(best) > 1 else None


def find_uncounted(tried: Sequence[ScoredTrial]) -> Finding | None:
    """Return the clients that the choice does not count; None where the choice counts all clients.

    Raises:
        RunError: as `ScoredTrial.runs`.
    """
    clients = tuple(dict.fromkeys(name for t in tried for name in t.uncounted))
    return Uncounted(clients) if clients else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
