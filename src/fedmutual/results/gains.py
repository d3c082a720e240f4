"""Gains in pairs: one client of one seed under two methods, after equally long training."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import isnan, nan
from statistics import fmean
from typing import Any

import pandas as pd

from fedmutual.metric import ACCURACY, Metric
from fedmutual.results.estimate import SAME, Estimate, Missing, estimate
from fedmutual.results.frame import RunFacts
from fedmutual.rundir.schema import ScoreRow

COARSE = 0.02  # the largest weight of one example if a run has no number of examples: an accuracy is of 50 examples or more

PairRow = tuple[int, str, int, float, float, float | None]
"""Seed, client, round (of ours), our value, the other value, and how many examples these are of."""


class Gains:
    """The gains of a method over another: a row of `table` for each client of each seed that both methods have.

    Columns: seed, client, round (of ours), ours and other (values of the metric), gain (positive where ours is better; 0 for
    a difference by rounding alone), grain (the largest change of the gain that one example can cause).
    """

    def __init__(self, pairs: Sequence[PairRow], metric: Metric = ACCURACY, of_folds: "Gains | None" = None) -> None:
        """of_folds: the gains of each fold, where the runs are of folds."""
        rows = [
            (seed, client, round, ours, other, compute_gain(ours, other, metric.sign), compute_grain(examples, metric))
            for seed, client, round, ours, other, examples in pairs
        ]
        self.table = pd.DataFrame(rows, columns=["seed", "client", "round", "ours", "other", "gain", "grain"])
        self._limit, self._of_folds = metric.limit, of_folds

    def __len__(self) -> int:
        return len(self.table)

    @property
    def gained(self) -> int:
        """How many pairs are better with ours."""
        return int((self.table["gain"] > 0).sum())

    @cached_property
    def harmed(self) -> list[Any]:
        """The rows that are worse with ours, the worst first."""
        return [*self.table[self.table["gain"] < 0].sort_values("gain", kind="stable").itertuples()]

    @property
    def equal(self) -> int:
        """How many pairs are equal."""
        return len(self) - self.gained - len(self.harmed)

    @property
    def means(self) -> tuple[float, float]:
        """Our value and the other's: the mean over clients, then over seeds."""
        ours, other = self.table.groupby("seed")[["ours", "other"]].mean().mean()
        return float(ours), float(other)

    @cached_property
    def by_client(self) -> dict[str, Estimate]:
        """Client -> its mean gain over the seeds, with an interval over seeds; of one seed over its folds, if it has any."""
        if self._of_folds is not None and self.seeds == 1:
            means = dict(zip(self.table["client"].map(str), self.table["gain"].tolist(), strict=True))
            folds = self._of_folds._estimate_clients("folds")
            return {i: replace(folds[i], mean=mean) for i, mean in means.items()}  # of all rows, each with equal weight
        return self._estimate_clients("seeds")

    def _estimate_clients(self, unit: str) -> dict[str, Estimate]:
        clients = self.table.groupby("client", sort=False)
        return {
            str(i): estimate(rows["gain"].tolist(), unit, float(rows["grain"].max()), self._limit) for i, rows in clients
        }

    @property
    def seeds(self) -> int:
        """How many seeds have pairs."""
        return int(self.table["seed"].nunique())

    @cached_property
    def estimate(self) -> Estimate:
        """The mean gain: over the seeds' mean gains where there are two seeds or more, else over the run's clients."""
        if self.seeds == 1:
            return estimate(self.table["gain"].tolist(), "clients", float(self.table["grain"].max()), self._limit)
        seeds = self.table.groupby("seed")
        gains, grains = seeds["gain"].agg(fmean), seeds["grain"].max() / seeds.size()
        return estimate(gains.tolist(), "seeds", float(grains.max()), self._limit)


def compute_gain(ours: float, other: float, sign: int) -> float:
    """Return our value minus the other (sign 1), or the reverse (-1); a difference by rounding alone is 0."""
    gain = sign * (ours - other)
    return 0.0 if abs(gain) < SAME else gain


def compute_grain(examples: float | None, metric: Metric) -> float:
    """Return the largest change of a value that one example can cause; 0 if the metric is no fraction."""
    return (1 / examples if examples else COARSE) if metric.is_fraction else 0.0


def pair_clients(
    ours: Sequence[RunFacts],
    others: Sequence[RunFacts],
    model: str | None = None,
    other: str | None = None,
    data: str = "validation",
) -> Gains | Missing:
    """Return the gains of `ours` over `others`, of pairs with equal seed, data and client, after equally long training.

    The values are of the last such round of both runs (`find_last_common`). model, other: the scored models of `ours` and
    of `others`; None: the model that a client would use. data: the scored rows of the client.
    """
    metric = ours[0].metric if ours else ACCURACY
    pairs = [
        (run.seed, client, round, *(row.find_number(metric.name) for row in rows), rows[0].find_number("examples"))
        for run, client, round, *rows in match_rows(ours, others, model, other, data)
    ]
    if pairs:
        our_folds, other_folds = ([fold for run in runs for fold in run.of_folds] for runs in (ours, others))
        of_folds = pair_clients(our_folds, other_folds, model, other, data) if our_folds and other_folds else None
        return Gains(pairs, metric, of_folds if isinstance(of_folds, Gains) else None)  # type: ignore[arg-type]  # with the metric
    if not ours or not others:
        return Missing("one of the two has no run with numbers")
    if not match_runs(ours, others):
        return Missing("no run of the other method has the same seed and the same partition")
    return Missing("the two have no evaluated round, or no client that shares its scores, in common")


def match_rows(
    ours: Sequence[RunFacts], others: Sequence[RunFacts], model: str | None, other: str | None, data: str
) -> Iterator[tuple[RunFacts, str, int, ScoreRow, ScoreRow]]:
    """Yield (our run, client, our round, our scores, the other scores) as `pair_clients` describes them."""
    for run, other_run in match_runs(ours, others):
        round, other_round = find_last_common(run, other_run)
        other_rows = other_run.get_rows(other_round, other, data)
        for client, row in run.get_rows(round, model, data).items():
            if client is not None and client in other_rows:
                yield run, client, round, row, other_rows[client]


def pair_global(ours: Sequence[RunFacts], others: Sequence[RunFacts]) -> Estimate | None:
    """Return how much better our shared model is on the test set, mean over seeds; None where no runs can be paired.

    The values are those of the main metric after the last round of `find_last_common`.
    """
    gains, grain = [], 0.0
    for pair in match_runs(ours, others):
        rounds = zip(pair, find_last_common(*pair), strict=True)
        rows = [row for run, round in rounds if (row := run.get_rows(round, "global", "test").get(None))]
        if len(rows) == 2:
            metric, examples = pair[0].metric, rows[0].find_number("examples")
            first, second = (row.find_number(metric.name) or 0.0 for row in rows)
            gains.append(compute_gain(first, second, metric.sign))
            grain = max(grain, compute_grain(examples, metric) if examples else 0.0)
    return estimate(gains, "seeds", grain, ours[0].metric.limit) if gains else None


def average_steps(ours: Sequence[RunFacts], others: Sequence[RunFacts]) -> tuple[float, float] | None:
    """Return the gradient steps of all clients up to the compared rounds of ours and of the others, mean over pairs of runs.

    None without a pair, or where a run does not record its steps.
    """

    def count(run: RunFacts, round: int) -> float:
        return float(run.messages["steps"][run.messages["round"] <= round].sum())

    pairs = [(pair, rounds) for pair in match_runs(ours, others) if all(rounds := find_last_common(*pair))]
    counts = [tuple(map(count, pair, rounds)) for pair, rounds in pairs]
    ours_mean, others_mean = (fmean(steps) for steps in zip(*counts, strict=True)) if counts else (nan, nan)
    return None if isnan(ours_mean + others_mean) else (ours_mean, others_mean)


def match_runs(ours: Sequence[RunFacts], others: Sequence[RunFacts]) -> list[tuple[RunFacts, RunFacts]]:
    """Return the pairs of runs with the same seed and the same partition of the same data."""

    def identify(run: RunFacts) -> tuple[int, str, int | None]:
        fold = run.config.get("split", {}).get("fold") if run.partition.kind == "sites" else None  # the server has no rows
        return run.seed, run.partition.fingerprint, fold

    by_data = dict[tuple[int, str, int | None], list[RunFacts]]()
    for run in others:
        by_data.setdefault(identify(run), []).append(run)
    return [(run, other) for run in ours for other in by_data.get(identify(run), ())]


def find_last_common(a: RunFacts, b: RunFacts) -> tuple[int, int]:
    """Return the last round of each run after which both were evaluated and had trained equally long; (0, 0) without one.

    Training is equally long after the same round, or after the same number of local steps if both runs record them. If only
    one run records them, the two last rounds of finished runs are compared.
    """
    paces = a.settings.local_steps, b.settings.local_steps
    if (paces[0] is None) != (paces[1] is None):
        return (a.reached, b.reached) if a.finished and b.finished else (0, 0)
    first, second = (pace or 1 for pace in paces)
    last = max({e.round * first for e in a.evaluations} & {e.round * second for e in b.evaluations}, default=0)
    return last // first, last // second
