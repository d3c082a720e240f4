"""The numbers of a method, each a mean over its seeds with an interval, or the reason why it is missing."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import pandas as pd

from fedmutual.metric import ACCURACY
from fedmutual.results.comparison import OWN_DOMAIN, Method, RunComparison, Use
from fedmutual.results.estimate import Estimate, Missing, Value, estimate
from fedmutual.results.gains import Gains, pair_clients
from fedmutual.role import LOCAL_ONLY
from fedmutual.rundir.recorded_run import RecordedRun

Pick = Literal["min", "max"] | Callable[[Iterable[float]], float]  # one number of the values of clients

SEEDS = "seeds"


@dataclass(frozen=True)
class Best(Estimate):
    """A mean over seeds at the rounds that some data chose, and how they were chosen."""

    by: str = ""  # "hold-out", "test", ...
    rounds: tuple[int, ...] = ()


def average_over_seeds(numbers: Iterable[float | None], why: str) -> Value:
    """Return the mean of the numbers of runs, of which None is left out; where no number remains, `why` is the reason."""
    known = [number for number in numbers if number is not None]
    return estimate(known, SEEDS) if known else Missing(why)


def average_scores(scores: pd.DataFrame, why: str, key: str = "value", pick: Pick = fmean) -> Value:
    """Return the mean over seeds of a score: of each seed the mean over clients, or another number that `pick` returns.

    scores: rows of `Method.scores`. key: a column; missing scores are left out. why: the reason where no score remains.
    """
    by_seed = scores[key].dropna().groupby(scores["seed"])
    return average_over_seeds(by_seed.agg(pick), why)  # fmean, because the mean of pandas rounds in another way


def average_by_round(scores: pd.DataFrame, pick: Pick = fmean) -> pd.DataFrame:
    """Return the main metric with a row for each round and a column for each seed: the mean over clients, or `pick`.

    scores: rows of `Method.scores`.
    """
    return scores.groupby(["round", "seed"])["value"].agg(pick).unstack("seed")


def average_global_last(use: Use) -> Value:
    """Return the shared model's main metric on the test set after the last round; missing for a use of another model."""
    if use.model != use.method.uses[-1].model:
        return Missing("the shared model has a line of its own")
    scores = use.method.select_last_scores("global", "test", of_clients=False)
    return average_scores(scores, _explain_no_global(use.method))


def average_global_best(use: Use) -> Best | Missing:
    """Return the shared model's value of the main metric on the test set after the chosen round."""
    last = average_global_last(use)
    scores = [r.summary.global_.test for r in use.method.counted if r.summary and r.summary.global_]
    chosen = [s for s in scores if s]
    if isinstance(last, Missing) or not chosen:
        return last if isinstance(last, Missing) else Missing(_UNCHOSEN)
    by = dict.fromkeys(name_choosing_data(s.best_by, use.method.runs[0]) for s in chosen)
    value = estimate([s.best for s in chosen], SEEDS)
    return Best(**vars(value), by=" or ".join(by), rounds=tuple(s.best_round for s in chosen))


def average_own_last(use: Use, pick: Pick = fmean) -> Value:
    """Return a model's main metric on own validation data after the last round: the mean over clients, or `pick` of them."""
    scores = use.method.select_last_scores(use.model, "validation")
    return average_scores(scores, _explain_no_own(use.method), pick=pick)


def average_own_worst(use: Use) -> Value:
    """Return the main metric of the worst client on its own validation data after the last round."""
    return average_own_last(use, use.worst)


def average_own_best(use: Use, worst: bool = False) -> Best | Missing:
    """Return the main metric on own validation data after the chosen round: the mean over clients, or the worst client's."""
    method = use.method
    if use.model != method.uses[0].model:
        return Missing(f"on own data a run chooses its best round for the {method.uses[0].name}")
    scores = [r.summary.personal.validation for r in method.counted if r.summary and r.summary.personal]
    chosen = [s.best for s in scores if s]
    if not chosen:
        last = average_own_last(use)
        return last if isinstance(last, Missing) else Missing(_UNCHOSEN)
    by = dict.fromkeys(name_choosing_data(s.best_by or "validation", method.runs[0]) for s in chosen)
    value = estimate([s.worst if worst else s.mean for s in chosen], SEEDS)
    return Best(**vars(value), by=" or ".join(by), rounds=tuple(s.best_round for s in chosen if s.best_round))


def measure_gains(comparison: RunComparison, use: Use, data: str = "validation") -> Gains | Missing:
    """Return each client's gain over local-only training on its rows of one kind: `data`."""
    key = (use.label, data)
    if key not in comparison.measured_gains:
        comparison.measured_gains[key] = _measure_gains(comparison, use, data)
    return comparison.measured_gains[key]


def _measure_gains(comparison: RunComparison, use: Use, data: str) -> Gains | Missing:
    method = use.method
    local_only = comparison.find_local_only(method)
    if method.is_local_only:
        return Missing("this is local-only training itself")
    if local_only is None:
        return Missing(explain_no_local(comparison))
    if any(r.evaluations for r in method.runs) and not any(r.serves for r in method.counted):
        return Missing(_explain_no_own(method))
    return pair_clients(method.counted, local_only.counted, use.model, data=data)


def measure_gain(comparison: RunComparison, use: Use, data: str = "validation") -> Value:
    """Return the mean gain over local-only training on the clients' rows of one kind."""
    gains = measure_gains(comparison, use, data)
    return gains if isinstance(gains, Missing) else gains.estimate


def explain_no_local(comparison: RunComparison) -> str:
    """Return the clause that local-only training is missing, and how to get it."""
    first = (*comparison.federated, *comparison.methods)[0].algorithm
    fix = f"`fedmutual compare FILE.toml --methods {first},{LOCAL_ONLY}` makes it"
    if comparison.at_sites:
        fix = f"submit the federation once more with the algorithm {LOCAL_ONLY} and another name, and report on both results"
    return f"local-only training ({LOCAL_ONLY}) is not among these runs; {fix}"


@dataclass(frozen=True, eq=False)
class Subject:
    """Which model is scored on which rows: a line of the table of what accuracy hides."""

    title: str
    scores: pd.DataFrame  # after the last round of each run
    everything: bool = False  # whether on test rows of all that there is


def list_subjects(comparison: RunComparison, method: Method) -> list[Subject]:
    """Return the models and rows that were scored under a method."""
    all_of = [Subject("shared model, test set", method.select_last_scores("global", "test", of_clients=False), True)]
    # Validation rows are those of the own domain.
    is_own_domain_seen = comparison.domains and is_validation_test(comparison.first)
    for model in (use.model for use in method.uses if use.model):
        name = {"personal": "personal model", "ensemble": "ensemble of both models", "meme": "own fork"}.get(
            model, "shared model"
        )
        if not is_own_domain_seen:
            own_scores = method.select_last_scores(model, "validation")
            all_of.append(Subject(f"{name}, own validation data", own_scores))
        if comparison.domains:
            everywhere = Subject(f"{name}, test data of all domains", method.select_last_scores(model, "test"), True)
            if model == "global" and len(everywhere.scores):
                del all_of[0]  # the test set is the data of all domains
            title = (
                f"{name}, of its own domain (its validation data)" if is_own_domain_seen else f"{name}, of its own domain"
            )
            all_of += [everywhere, Subject(title, method.select_last_scores(model, OWN_DOMAIN))]
        elif model != "global":
            all_of.append(Subject(f"{name}, all classes (test set)", method.select_last_scores(model, "test"), True))
    return [s for s in all_of if len(s.scores)]


_UNCHOSEN = "a best round is chosen when the run is finished"


def name_choosing_data(data: str, run: RecordedRun) -> str:
    """Return the name of the data that chose the best round; test examples are always named as such."""
    if data == "holdout":
        return "hold-out"
    if data.startswith("validation") and is_validation_test(run):
        return f"{data} (test examples)"
    return data


def is_validation_test(run: RecordedRun) -> bool:
    """Return whether the clients' validation data are taken from the test set, as in the papers."""
    return any(c.validation and c.validation.of == "test" for c in run.partition.clients.values())


SEEN = "the same test examples chose the best round and score the model, so the score is too high"


def _explain_no_global(method: Method) -> str:
    recorded = method.runs[0].method  # of the run: the fine-tuning of a newcomer is a federated method, and trains alone
    if not recorded.shares:
        return "there is no shared model" + ("" if recorded.role.federates else ": nothing is shared")
    if not any(r.evaluations for r in method.runs):
        return "nothing was evaluated yet"
    if any(o.client is None for r in method.counted if r.last for o in r.last.others):
        return "its task has no main metric"
    if "global" in method.counted[0].models:
        return "the shared model is scored on the clients' rows only"
    return "no complete shared model exists: a part of it stays with the clients"


def _explain_no_own(method: Method) -> str:
    if not any(r.evaluations for r in method.runs):
        return "nothing was evaluated yet"
    metric = method.runs[0].metric
    if metric == ACCURACY and any(r.last.others for r in method.counted if r.last):
        return "the clients' task has no main metric; another table has their scores"
    return f"no client shares its {metric.title}: share.metrics forbids it, or it was computed on fewer than 50 rows"
