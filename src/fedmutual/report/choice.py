"""Which of several settings is best by hold-out data, read from run folders. No test or validation score is looked at."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd

from fedmutual.metric import ACCURACY, Metric
from fedmutual.report.measures import average_by_round
from fedmutual.report.rendering import render_facts
from fedmutual.results.comparison import ScoreTable
from fedmutual.results.estimate import SAME, Estimate, Missing, estimate
from fedmutual.results.folds import join_folds
from fedmutual.results.frame import RunFacts, find_runs, is_number, read_runs
from fedmutual.results.gains import Gains, pair_clients
from fedmutual.results.scale import MetricScale

HOLDOUT = "holdout"
_MODELS: Mapping[str | None, tuple[str, ...]] = {
    None: ("personal", "global", "meme"),  # the one that a client would use
    "personal": ("personal",),
    "global": ("global", "meme"),
}


@dataclass(frozen=True)
class ScoredTrial:
    """A setting that was tried, with the hold-out scores of its runs: values of their main metric.

    The properties read the run folders at their first use, and raise RunError as `find_runs` and `read_run`.
    """

    values: Mapping[str, Any]  # by dotted key, what is fixed too
    label: str
    folders: Mapping[int, Path]  # by seed
    diverged: Mapping[int, str]  # seed -> how; one is enough for the setting not to be chosen
    by: str | None  # "personal", "global"; None: the model that a client would use
    local_only: Mapping[int, Path] | None = None  # local-only training beside it; None where it has no personal models
    round: int | None = None  # the round whose scores decide; None: the last round

    @cached_property
    def runs(self) -> tuple[RunFacts, ...]:
        """The runs of this setting that are finished, or have reached `round`. Raises RunError as `read_run`."""
        return _read_finished(self.folders, self.round)

    @property
    def metric(self) -> Metric:
        """The main metric of the runs; accuracy before the first run has finished."""
        return self.runs[0].metric if self.runs else ACCURACY

    @cached_property
    def _table(self) -> ScoreTable:
        return ScoreTable(self.runs)

    @cached_property
    def model(self) -> str | None:
        """The model that is scored: "personal", "global" (shared), or "meme" where no complete shared model exists.

        None without scores.
        """
        return next((m for m in _MODELS[self.by] if len(self._table.select(m, HOLDOUT, self.metric.name))), None)

    @cached_property
    def _scores(self) -> pd.DataFrame:
        """The scores of the model on the clients' hold-out rows."""
        return self._table.select(self.model, HOLDOUT, self.metric.name)

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """The mean over clients of the main metric: a row for each evaluated round, a column for each run's seed."""
        rounds = average_by_round(self._scores).sort_index().reindex(columns=[run.seed for run in self.runs])
        return rounds.loc[: self.round]

    @property
    def last(self) -> Estimate | None:
        """The mean over seeds after `round`, which decides; None where a seed diverged or has no score."""
        if self.diverged or not self.runs or self.rounds.isna().all().any():
            return None
        return self._estimate(self.rounds.ffill().iloc[-1])

    @property
    def best(self) -> Estimate | None:
        """The mean over seeds after each seed's best round; None as for `last`."""
        if self.last is None:
            return None
        sign = self.metric.sign
        return self._estimate(sign * (sign * self.rounds).max())

    def _estimate(self, values: pd.Series) -> Estimate:
        return estimate(values.tolist(), "seeds", limit=self.metric.limit)

    @property
    def best_rounds(self) -> tuple[int, ...]:
        """Each seed's best round, the earliest if several are equal; empty if `last` is None."""
        if self.last is None:
            return ()
        return tuple((self.metric.sign * self.rounds).idxmax().tolist())

    @property
    def examples(self) -> int:
        """The number of hold-out examples of the score, over all clients and seeds."""
        return int(self._scores.loc[self._scores["last"], "examples"].sum())

    @cached_property
    def gain(self) -> Gains | Missing | None:
        """The gain of personal models over local-only training, in pairs on hold-out rows.

        None without local-only training beside the setting, and if `last` is None. Raises RunError as `read_run`.
        """
        if self.local_only is None or self.last is None:
            return None
        others = _read_finished(self.local_only, self.round)
        if not others:
            return Missing("local-only training diverged with these settings")
        return pair_clients(self.runs, others, "personal", "personal", HOLDOUT)


def _read_finished(folders: Mapping[int, Path], round: int | None) -> tuple[RunFacts, ...]:
    """Return the runs of a setting that are finished or have reached a round, folds as one run. folders: by seed."""
    runs = read_runs(run for folder in folders.values() for run in find_runs(folder))
    return tuple(run for run in join_folds(runs, round) if run.finished or (round is not None and run.reached >= round))


def rank_trials(tried: Sequence[ScoredTrial]) -> list[ScoredTrial]:
    """Return the settings that have a score, the best mean first, and equal ones in the given order.

    Raises:
        RunError: as `ScoredTrial.runs`.
    """
    scored = [(t.metric.sign * t.last.mean, t) for t in tried if t.last is not None]
    return [trial for _, trial in sorted(scored, key=lambda one: -one[0])]


def pick_best(tried: Sequence[ScoredTrial]) -> tuple[ScoredTrial, ...]:
    """Return the settings with the best mean, in the given order: one, or several that are equal.

    Empty if each setting diverged or has no score. Raises RunError as `ScoredTrial.runs`.
    """
    means = [t.last.mean for t in rank_trials(tried) if t.last is not None]
    return tuple(t for t in tried if t.last is not None and abs(t.last.mean - means[0]) < SAME)


def describe_choice(
    tried: Sequence[ScoredTrial], best: Sequence[ScoredTrial], ends: Iterable[tuple[str, str, bool]] = ()
) -> list[str]:
    """Return what to know about a choice, as sentences without a full stop.

    Clients that the choice does not count, settings that are equally good, chosen values at an end of the tried values, and
    settings whose personal models are worse than local-only training, or cannot be compared with it.

    ends: (key, chosen value as TOML, whether it is the largest that was tried).

    Raises:
        RunError: as `ScoredTrial.runs`.
    """
    say = partial(render_facts, "choice.j2", MetricScale(2, (best or tried)[0].metric))
    uncounted = [*dict.fromkeys(name for t in tried for name in _list_uncounted(t))]
    sentences = [say("uncounted", clients=uncounted)] if uncounted else []
    sentences += [say("tie", labels=[t.label for t in best])] if len(best) > 1 else []
    sentences += [say("end_of_values", key=key, value=value, is_largest=is_largest) for key, value, is_largest in ends]
    for trial in tried:
        if isinstance(trial.gain, Missing):
            sentences.append(say("not_compared", label=trial.label, reason=trial.gain.why))
        elif trial.gain is not None and trial.gain.estimate.mean <= -SAME:
            sentences.append(say("harmful", label=trial.label, estimate=trial.gain.estimate))
    return sentences


def _list_uncounted(trial: ScoredTrial) -> list[str]:
    """Return the clients whose task lacks the main metric: they have no part in the score."""
    rows = [row for run in trial.runs[:1] for row in run.last_rows if row.data == HOLDOUT and not row.has_accuracy]
    return [row.client for row in rows if row.client is not None and not is_number(row.values.get(trial.metric.name))]


def find_edges(tried: Sequence[ScoredTrial], chosen: ScoredTrial) -> list[tuple[str, float, float]]:
    """Return (key, chosen value, next value) for each numeric key whose chosen value is the lowest or highest tried."""
    edge_values = []
    for key, value in chosen.values.items():
        values = sorted({t.values[key] for t in tried if is_number(t.values[key])})
        if len(values) > 1 and is_number(value) and value in (values[0], values[-1]):
            edge_values.append((key, value, values[1] if value == values[0] else values[-2]))
    return edge_values
