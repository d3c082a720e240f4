"""Gains in pairs: one client of one seed under two methods, after equally long training."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import pandas as pd

from fedmutual.metric import ACCURACY, Metric
from fedmutual.results.estimate import SAME, Estimate, Missing, estimate, get_limit
from fedmutual.rundir.recorded_run import RecordedRun

COARSE = 0.02  # the largest weight of one example if a run has no number of examples: an accuracy is of 50 examples or more


@dataclass(frozen=True)
class Pair:
    """One client of one seed under two methods, after equal training: the main metric on its own rows."""

    seed: int
    client: str
    round: int  # of ours
    ours: float
    other: float
    examples: int | None = None  # how many rows these are
    metric: Metric = ACCURACY

    @property
    def gain(self) -> float:
        """Our value minus the other, or the reverse if lower is better; a difference by rounding alone is 0."""
        gain = self.ours - self.other if self.metric.is_higher_better else self.other - self.ours
        return 0.0 if abs(gain) < SAME else gain

    @property
    def grain(self) -> float:
        """The largest change of the gain that one example can cause; 0 if the metric is no fraction."""
        if not self.metric.is_fraction:
            return 0.0
        return 1 / self.examples if self.examples else COARSE


@dataclass(frozen=True)
class Gains:
    """The results of two methods: one `Pair` for each client of each seed that both methods have."""

    pairs: tuple[Pair, ...]

    @property
    def gained(self) -> tuple[Pair, ...]:
        """The pairs in which ours is better."""
        return tuple(p for p in self.pairs if p.gain > 0)

    @property
    def harmed(self) -> tuple[Pair, ...]:
        """The pairs in which ours is worse, the worst first."""
        return tuple(sorted((p for p in self.pairs if p.gain < 0), key=lambda p: p.gain))

    @property
    def equal(self) -> int:
        """How many pairs are equal."""
        return len(self.pairs) - len(self.gained) - len(self.harmed)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row for each pair. Columns: seed, client, ours, other, gain, grain, as `Pair`."""
        rows = [(p.seed, p.client, p.ours, p.other, p.gain, p.grain) for p in self.pairs]
        return pd.DataFrame(rows, columns=["seed", "client", "ours", "other", "gain", "grain"])

    @property
    def means(self) -> tuple[float, float]:
        """Our value and the other's: the mean over clients, then over seeds."""
        ours, other = self.frame.groupby("seed")[["ours", "other"]].mean().mean()
        return float(ours), float(other)

    @property
    def by_client(self) -> dict[str, Estimate]:
        """Client -> its mean gain over the seeds, where there are two or more with an interval."""
        clients = self.frame.groupby("client", sort=False)
        return {
            str(client): estimate(of_client["gain"].tolist(), "seeds", float(of_client["grain"].max()), self._limit)
            for client, of_client in clients
        }

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds that have pairs."""
        return tuple(sorted({p.seed for p in self.pairs}))

    @property
    def estimate(self) -> Estimate:
        """The mean gain: over the seeds' mean gains where there are two seeds or more, else over the run's clients."""
        seeds = self.frame.groupby("seed")
        if len(seeds) == 1:
            return estimate(self.frame["gain"].tolist(), "clients", float(self.frame["grain"].max()), self._limit)
        gains, grains = seeds["gain"].agg(fmean), seeds["grain"].max() / seeds.size()
        return estimate(gains.tolist(), "seeds", float(grains.max()), self._limit)

    @property
    def _limit(self) -> float:
        return get_limit(self.pairs[0].metric)


def pair_clients(
    ours: Sequence[RecordedRun],
    others: Sequence[RecordedRun],
    model: str | None = None,
    other: str | None = None,
    data: str = "validation",
) -> Gains | Missing:
    """Return pairs of values with equal seed, data and client, of `ours` and `others`, after equally long training.

    The values are of the last such round of both runs (`find_last_common`). model, other: the scored models of `ours` and
    of `others`; None: the model that a client would use. data: the scored rows of the client.
    """
    pairs = []
    for a, b in match_runs(ours, others):
        round, their_round = find_last_common(a, b)
        our_scores, their_scores = (
            a.get_scores(a.find_evaluation(round), model, data),
            b.get_scores(b.find_evaluation(their_round), other, data),
        )
        both = [(i, our_scores[i], their_scores[i]) for i in our_scores if i in their_scores]
        pairs += [Pair(a.seed, i, round, x.value, y.value, x.examples, a.metric) for i, x, y in both]
    if pairs:
        return Gains(tuple(pairs))
    if not ours or not others:
        return Missing("one of the two has no run with numbers")
    if not match_runs(ours, others):
        return Missing("no run of the other method has the same seed and the same partition")
    return Missing("the two have no evaluated round, or no client that shares its scores, in common")


def pair_global(ours: Sequence[RecordedRun], others: Sequence[RecordedRun]) -> Estimate | None:
    """Return how much better our shared model is on the test set, mean over seeds; None where no runs can be paired.

    The values are those of the main metric after the last round of `find_last_common`.
    """
    gains, grain = [], 0.0
    for a, b in match_runs(ours, others):
        rounds = zip((a, b), find_last_common(a, b), strict=True)
        our_score, their_score = (
            e.find("global", "test") if (e := run.find_evaluation(round)) else None for run, round in rounds
        )
        if our_score and their_score:
            pair = Pair(a.seed, "", 0, our_score.value, their_score.value, our_score.examples, a.metric)
            gains.append(pair.gain)
            grain = max(grain, pair.grain if our_score.examples else 0.0)
    return estimate(gains, "seeds", grain, get_limit(ours[0].metric)) if gains else None


def match_runs(ours: Sequence[RecordedRun], others: Sequence[RecordedRun]) -> list[tuple[RecordedRun, RecordedRun]]:
    """Return the pairs of runs with the same seed and the same partition of the same data."""
    return [(a, b) for a in ours for b in others if (a.seed, a.partition.fingerprint) == (b.seed, b.partition.fingerprint)]


def find_last_common(a: RecordedRun, b: RecordedRun) -> tuple[int, int]:
    """Return the last round of each run after which both were evaluated and had trained equally long; (0, 0) without one.

    Training is equally long after the same round, or after the same number of local steps if both runs record them. If only
    one run records them, the two last rounds of finished runs are compared.
    """
    if (a.local_steps is None) != (b.local_steps is None):
        return (a.reached, b.reached) if a.finished and b.finished else (0, 0)
    ours, theirs = ({e.round * (run.local_steps or 1) for e in run.evaluations} for run in (a, b))
    last = max(ours & theirs, default=0)
    return last // (a.local_steps or 1), last // (b.local_steps or 1)
