"""What each participant gains from each other one, by the scores of runs that differ only in who takes part."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from statistics import fmean

import numpy as np

from fedmutual.errors import RunError, join_words
from fedmutual.results.comparison import is_distinctive
from fedmutual.results.estimate import Estimate, Missing, Value, estimate
from fedmutual.results.folds import join_folds
from fedmutual.results.frame import RunFacts
from fedmutual.results.gains import compute_grain
from fedmutual.rundir.record_files import flatten_table

Coalition = frozenset[str]
Scores = Mapping[Coalition, Mapping[str, float]]
"""Coalition -> participant in it -> its score on its own validation rows; greater is better."""

Pair = tuple[str, str]
"""Who gains, and from whom."""


def compute_shapley(scores: Scores, one: str, others: Sequence[str]) -> dict[str, float]:
    """Return each other's Shapley value for one participant: what it adds to `one`, on average over all orders of joining.

    The values sum to the gain of `one` from all others over training without them. Shapley, A value for n-person games,
    1953, https://doi.org/10.1515/9781400881970-018. Raises KeyError if a score is missing.
    """
    values = {}
    for other in others:
        rest = [i for i in others if i != other]
        parts = (
            (scores[frozenset((one, other, *before))][one] - scores[frozenset((one, *before))][one])
            / (len(others) * math.comb(len(rest), size))
            for size in range(len(others))
            for before in itertools.combinations(rest, size)
        )
        values[other] = math.fsum(parts)
    return values


def compute_overlap(scores: Scores, one: str, pair: Pair, rest: Sequence[str]) -> float:
    """Return how much more two others add to `one` together than the sum of what each adds; below 0 if they give the same.

    This is the Shapley interaction index (Grabisch & Roubens, An axiomatic approach to the concept of interaction among
    players in cooperative games, 1999, https://doi.org/10.1007/s001820050125). rest: the participants beside `one` and the
    two. Raises KeyError if a score is missing.
    """
    first, second = pair

    def score(*members: str) -> float:
        return scores[frozenset((one, *members))][one]

    return math.fsum(
        (score(first, second, *before) - score(first, *before) - score(second, *before) + score(*before))
        / ((len(rest) + 1) * math.comb(len(rest), size))
        for size in range(len(rest) + 1)
        for before in itertools.combinations(rest, size)
    )


def draw_order(participants: Sequence[str], seed: int) -> list[str]:
    """Return the order in which participants join in the runs of a seed, where not all coalitions are trained."""
    return [participants[k] for k in np.random.default_rng([seed, len(participants)]).permutation(len(participants))]


def list_steps(order: Sequence[str]) -> list[Coalition]:
    """Return the coalitions that grow in an order, and in its reverse, each once."""
    return [*dict.fromkeys(frozenset(o[:k]) for o in (order, order[::-1]) for k in range(1, len(order) + 1))]


def weigh_gains(scores: Scores, order: Sequence[str]) -> Iterator[tuple[Pair, float, float]]:
    """Yield (pair, weight, gain) of each participant that is already there, when the next one of an order joins.

    The mean of weight x gain over all orders, with 0 where the other comes first, is the Shapley value: with p before it,
    the other joins `one` and p - 1 more, which the orders of all participants have p/n times as often as those without
    `one`. So a run serves all its participants; one without known scores has no gains. Raises KeyError if a run is
    missing.
    """
    for place, other in enumerate(order[1:], 1):
        before, after = scores[frozenset(order[:place])], scores[frozenset(order[: place + 1])]
        for one in (i for i in order[:place] if i in before and i in after):
            yield (one, other), len(order) / place, after[one] - before[one]


class GainMatrix:
    """What each participant gains from each other one, with a number for each seed or order of each pair."""

    def __init__(self, numbers: Mapping[Pair, Mapping[int, float]], worth: "Worth", unit: str = "seeds") -> None:
        """numbers: pair -> seed -> gain. unit: what a seed counts as."""
        self.numbers, self.unit, self._worth = numbers, unit, worth

    def measure(self, pairs: Iterable[Pair], join: Callable[[list[float]], float] = fmean) -> Value:
        """Return the mean over seeds of the gains of some pairs, joined to one number for each seed."""
        known = [numbers for pair in pairs if (numbers := self.numbers[pair])]
        seeds = set[int]().union(*known).intersection(*known)
        if not seeds:
            return Missing("the runs that it needs are missing, or do not disclose the scores")
        return self._worth.estimate([join([numbers[seed] for numbers in known]) for seed in sorted(seeds)], self.unit)

    def measure_received(self, one: str) -> Value:
        """Return what `one` gains from all others together."""
        return self.measure([pair for pair in self.numbers if pair[0] == one], math.fsum)

    def measure_given(self, other: str) -> Value:
        """Return what each of the others gains from one participant, on average."""
        return self.measure(pair for pair in self.numbers if pair[1] == other)

    @property
    def widest(self) -> float:
        """Half the width of the widest interval of participants with known scores; infinity if an interval is missing."""
        halves = [getattr(self.measure([pair]), "half", None) for pair, numbers in self.numbers.items() if numbers]
        return max((math.inf if half is None else half for half in halves), default=math.inf)


class Worth:
    """The scores of coalitions: of finished runs of one method that differ only in the seed and in who takes part."""

    def __init__(self, runs: Sequence[RunFacts]) -> None:
        """Raises RunError unless there are runs of one method, equal settings and equal data, with several participants."""
        finished = [run for run in join_folds(runs) if run.finished and run.role.federates]
        first = max(finished, key=lambda run: len(list_members(run)), default=None)
        if first is None or len(list_members(first)) < 2:
            raise RunError("there is no finished run of several participants; train them with `fedmutual worth FILE.toml`")
        _check_alike(finished)
        self.participants, self.metric, self.method = list_members(first), first.metric, first.method.title
        self.name, self.at_sites = first.settings.name, first.partition.kind == "sites"
        self.scores: dict[int, dict[Coalition, dict[str, float]]] = {}
        self._grain = 0.0
        for run in finished:
            self.scores.setdefault(run.seed, {})[frozenset(list_members(run))] = read_member_scores(run)
            rows = run.get_rows(run.reached).values()
            self._grain = max(self._grain, *(compute_grain(row.find_number("examples"), self.metric) for row in rows), 0.0)

    @property
    def runs(self) -> int:
        """How many runs there are."""
        return sum(map(len, self.scores.values()))

    @property
    def pairs(self) -> list[Pair]:
        """Each participant with each other one."""
        return [*itertools.permutations(self.participants, 2)]

    @cached_property
    def left_out(self) -> GainMatrix:
        """What each participant loses if one other is left out of all."""
        everyone, numbers = frozenset(self.participants), dict[Pair, dict[int, float]]()
        for one, other in self.pairs:
            both = {seed: (s.get(everyone, {}), s.get(everyone - {other}, {})) for seed, s in self.scores.items()}
            numbers[one, other] = {seed: a[one] - b[one] for seed, (a, b) in both.items() if one in a and one in b}
        return GainMatrix(numbers, self)

    @cached_property
    def shapley(self) -> GainMatrix:
        """The Shapley values: exact for each seed with all coalitions, else estimated from the order of each seed."""
        numbers: dict[Pair, dict[int, float]] = {pair: {} for pair in self.pairs}
        for seed, scores in self.scores.items():
            for one in self.participants:
                with suppress(KeyError):
                    values = compute_shapley(scores, one, [i for i in self.participants if i != one])
                    for other, value in values.items():
                        numbers[one, other][seed] = value
        if any(numbers.values()):
            return GainMatrix(numbers, self)
        weighed = {pair: dict[int, tuple[float, float]]() for pair in self.pairs}
        for seed, scores in self.scores.items():
            order = draw_order(self.participants, seed)
            with suppress(KeyError):
                for pair, weight, gain in [g for o in (order, order[::-1]) for g in weigh_gains(scores, o)]:
                    weighed[pair][seed] = weight, gain
        return GainMatrix({pair: spread_ratio(of_pair) for pair, of_pair in weighed.items()}, self, "orders")

    @cached_property
    def overlaps(self) -> dict[Pair, Estimate]:
        """Two participants -> how much more both add to one of the others than the sum of what each adds."""
        measured: dict[Pair, Value] = {}
        for pair in itertools.combinations(self.participants, 2):
            others = [i for i in self.participants if i not in pair]
            numbers: dict[Pair, dict[int, float]] = {(one, pair[0]): {} for one in others}
            for (one, _), (seed, scores) in itertools.product(numbers, self.scores.items()):
                with suppress(KeyError):
                    numbers[one, pair[0]][seed] = compute_overlap(scores, one, pair, [i for i in others if i != one])
            measured[pair] = GainMatrix(numbers, self).measure(numbers)
        return {pair: value for pair, value in measured.items() if isinstance(value, Estimate)}

    def judge_joining(self, name: str, alone: Sequence[RunFacts]) -> tuple[dict[Coalition, Estimate], Value]:
        """Return what one participant gains over training alone in each coalition, and by a choice of the best coalition.

        The second value is over joining all: for each seed the other seeds choose the coalition, because the seeds that
        choose one make it look better than it is. alone: runs of local-only training.

        Raises:
            RunError: no run of local-only training has the seed of another run.
        """
        starts = {run.seed: of_one[name] for run in alone if name in (of_one := read_member_scores(run))}
        gains: dict[Coalition, dict[int, float]] = {}
        for seed, scores in self.scores.items():
            for coalition, of_members in scores.items():
                if name in of_members and len(coalition) > 1 and seed in starts:
                    gains.setdefault(coalition, {})[seed] = of_members[name] - starts[seed]
        everyone = frozenset(self.participants)
        gains = {c: gains[c] for c in sorted(gains, key=lambda c: (-len(c), sorted(c)))}
        if everyone not in gains:
            raise RunError(f"no run of {name!r} alone has the seed and the scores of a run of all; train them with --resume")
        complete = {c: of_seed for c, of_seed in gains.items() if of_seed.keys() == gains[everyone].keys()}
        chosen = Missing("one seed cannot choose a coalition for another one")
        over_all = {}
        for seed in gains[everyone] if len(gains[everyone]) > 1 else ():
            best = max(complete, key=lambda c: math.fsum(gain for s, gain in complete[c].items() if s != seed))
            over_all[seed] = complete[best][seed] - gains[everyone][seed]
        measured = {c: self.estimate([*of_seed.values()]) for c, of_seed in complete.items()}
        return measured, self.estimate([*over_all.values()]) if over_all else chosen

    def estimate(self, gains: Sequence[float], unit: str = "seeds") -> Estimate:
        """Return the mean of gains, with its interval. unit: what each gain is of, such as "seeds"."""
        return estimate(gains, unit, self._grain, self.metric.limit)


def list_members(run: RunFacts) -> tuple[str, ...]:
    """Return the participants of a run. The server of real sites records no rows of them."""
    return tuple(run.partition.clients or run.environment.clients)


def read_member_scores(run: RunFacts) -> dict[str, float]:
    """Return participant -> its model's main metric on own validation rows after the last round; greater is better."""
    rows = run.get_rows(run.reached)
    return {i: run.metric.sign * (row.find_number(run.metric.name) or 0.0) for i, row in rows.items() if i is not None}


def spread_ratio(weighed: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """Return a number for each (weight, gain), whose mean is the weighted mean of the gains, and whose spread is its error.

    This is the usual estimate of a ratio of means: exact for equal gains, whatever their weights.
    """
    if not weighed:
        return {}
    weight = fmean(w for w, _ in weighed.values())
    mean = math.fsum(w * gain for w, gain in weighed.values()) / (weight * len(weighed))
    return {seed: mean + w * (gain - mean) / weight for seed, (w, gain) in weighed.items()}


def _check_alike(runs: Sequence[RunFacts]) -> None:
    """Raise RunError if runs differ in more than the seed and who takes part."""
    tables = [dict(flatten_table(run.config)) for run in runs]
    keys = {key for table in tables for key in table if is_distinctive(key)} - {"participants"}
    varied = sorted(key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables))
    if varied:
        raise RunError(
            f"{runs[0].folder} and others differ in {join_words(varied[:3])}, not only in who takes part; name one of them"
        )
    data = {(run.seed, run.partition.fingerprint) for run in runs}
    if len(data) > len({run.seed for run in runs}):
        raise RunError(f"{runs[0].folder} and others have other rows under one seed; name runs on the same data")
