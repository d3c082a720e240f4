"""The numbers of a line of the tables, each a mean over its seeds with an interval, or the reason why it is missing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean

import pandas as pd

from fedmutual.metric import ACCURACY, describe_undefined
from fedmutual.results.comparison import MODELS, OWN_DOMAIN, Line, RunComparison
from fedmutual.results.estimate import Estimate, Missing, Value, estimate
from fedmutual.results.frame import RunFacts
from fedmutual.results.gains import Gains, pair_clients
from fedmutual.role import LOCAL_ONLY
from fedmutual.rundir.schema import TRANSFER_DATA, ClientScores

Pick = Callable[[list[float]], float]  # one number of the values of clients
Best = tuple[Estimate, str, tuple[int, ...]]
"""A mean over seeds at the rounds that some data chose: the mean, the data ("hold-out", "test", ...), and the rounds."""

SEEDS = "seeds"
SEEN = "the same test examples chose the best round and score the model, so the score is too high"
_UNCHOSEN = "a best round is chosen when the run is finished"
_ONE = "one model is trained on all data, and no node has one; its score on the test set is with the shared models' below"


def average_over_seeds(numbers: Iterable[float | None], why: str) -> Value:
    """Return the mean of the numbers of runs, of which None is left out; where no number remains, `why` is the reason."""
    known = [number for number in numbers if number is not None]
    return estimate(known, SEEDS) if known else Missing(why)


def average_scores(scores: pd.DataFrame, why: str, pick: Pick = fmean) -> Value:
    """Return the mean over seeds of a score: of each seed the mean over clients, or another number that `pick` returns.

    scores: rows as `Line.select` returns them. why: the reason where no score remains.
    """
    by_seed: dict[int, list[float]] = {}
    for seed, value in zip(scores["seed"], scores["value"], strict=True):
        by_seed.setdefault(seed, []).append(value)
    return average_over_seeds((pick(values) for _, values in sorted(by_seed.items())), why)


def average_by_round(scores: pd.DataFrame, pick: Pick = fmean) -> pd.DataFrame:
    """Return scores with a row for each round and a column for each seed: the mean over clients, or `pick`."""
    by_seed: dict[int, dict[int, list[float]]] = {}
    for seed, round, value in zip(scores["seed"], scores["round"], scores["value"], strict=True):
        by_seed.setdefault(seed, {}).setdefault(round, []).append(value)
    means = {seed: {round: pick(values) for round, values in rounds.items()} for seed, rounds in by_seed.items()}
    return pd.DataFrame(means).sort_index().sort_index(axis=1)


def average_global_last(line: Line) -> Value:
    """Return the shared model's main metric on the test set after the last round; missing for a line of another model."""
    if line.model != (line.models or (None,))[-1]:
        return Missing("the shared model has a line of its own")
    return average_scores(line.select_last("test", model="global", of_clients=False), _explain_no_global(line))


def average_global_best(line: Line) -> Best | Missing:
    """Return the shared model's value of the main metric on the test set after the chosen round."""
    last = average_global_last(line)
    scores = [r.summary.global_.test for r in line.counted if r.summary and r.summary.global_]
    chosen = [(s.best, s.best_by, s.best_round) for s in scores if s]
    if isinstance(last, Missing) or not chosen:
        return last if isinstance(last, Missing) else Missing(_UNCHOSEN)
    return _join_bests(line, chosen)


def average_own_last(line: Line, pick: Pick = fmean) -> Value:
    """Return a model's main metric on own validation data after the last round: the mean over clients, or `pick` of them."""
    return average_scores(line.select_last("validation"), _explain_no_own(line), pick)


def average_own_worst(line: Line) -> Value:
    """Return the main metric of the worst client on its own validation data after the last round."""
    return average_own_last(line, line.worst)


def average_own_best(line: Line, worst: bool = False) -> Best | Missing:
    """Return the main metric on own validation data after the chosen round: the mean over clients, or the worst client's."""
    if line.models and line.model != line.models[0]:
        return Missing(f"on own data a run chooses its best round for the {MODELS[line.models[0]]}")
    scores = [r.summary.personal.validation for r in line.counted if r.summary and r.summary.personal]
    chosen = [
        (s.best.worst if worst else s.best.mean, s.best.best_by or "validation", s.best.best_round) for s in scores if s
    ]
    if not chosen:
        last = average_own_last(line)
        return last if isinstance(last, Missing) else Missing(_UNCHOSEN)
    return _join_bests(line, chosen)


def _join_bests(line: Line, chosen: Sequence[tuple[float, str, int | None]]) -> Best:
    by = dict.fromkeys(name_choosing_data(data, line.runs[0]) for _, data, _ in chosen)
    rounds = tuple(round for _, _, round in chosen if round)
    return estimate([value for value, _, _ in chosen], SEEDS), " or ".join(by), rounds


def average_transfer_last(line: Line, measure: str, pick: Pick = fmean) -> Value:
    """Return ACC, BWT or FWT (`measure`: "acc", ...) after the last round: the mean over nodes, or `pick` of them."""
    return average_scores(line.select_last(TRANSFER_DATA[measure]), explain_no_node(line), pick)


def average_transfer_best(line: Line, measure: str, node: str | None = None) -> Value:
    """Return the mean over finished runs of ACC, BWT or FWT after each node's best round: over all nodes, or of one."""
    reached = [run.summary.transfer for run in line.counted if run.summary and run.summary.transfer]
    bests: list[ClientScores] = [ends.best for nodes in reached if (ends := getattr(nodes, measure))]
    numbers = (best.mean if node is None else best.per_client.get(node) for best in bests)
    return average_over_seeds(numbers, _ONE if line.is_pooled else "best rounds are chosen when the run is finished")


def average_projected(line: Line, node: str | None = None) -> Value:
    """Return the share of mutual steps whose gradient was projected, mean over finished runs: over all nodes, or of one."""
    shares = [run.summary.projected for run in line.counted if run.summary and run.summary.projected]
    numbers = (share.mean if node is None else share.per_client.get(node) for share in shares)
    return average_over_seeds(numbers, "it projects no gradient")


def list_projecting(comparison: RunComparison) -> list[Line]:
    """Return the methods that project gradients."""
    return [m for m in comparison.methods if not isinstance(average_projected(m), Missing)]


def find_choosing_data(comparison: RunComparison) -> set[str]:
    """Return the data that chose the best rounds of nodes."""
    done = [(r, r.summary.transfer) for m in comparison.methods for r in m.counted if r.summary and r.summary.transfer]
    return {name_choosing_data(reached.best_by, run) for run, reached in done}


def measure_gains(comparison: RunComparison, line: Line, data: str = "validation") -> Gains | Missing:
    """Return each client's gain over local-only training on its rows of one kind: `data`."""
    key = (line.label, data)
    if key not in comparison.measured_gains:
        comparison.measured_gains[key] = _measure_gains(comparison, line, data)
    return comparison.measured_gains[key]


def _measure_gains(comparison: RunComparison, line: Line, data: str) -> Gains | Missing:
    local_only = comparison.find_local_only(line)
    if line.is_local_only:
        return Missing("this is local-only training itself")
    if local_only is None:
        return Missing(explain_no_local(comparison))
    if any(r.evaluations for r in line.runs) and not any(r.models for r in line.counted):
        return Missing(_explain_no_own(line))
    return pair_clients(line.counted, local_only.counted, line.model, data=data)


def measure_gain(comparison: RunComparison, line: Line, data: str = "validation") -> Value:
    """Return the mean gain over local-only training on the clients' rows of one kind."""
    gains = measure_gains(comparison, line, data)
    return gains if isinstance(gains, Missing) else gains.estimate


def list_subjects(comparison: RunComparison, method: Line) -> Iterator[tuple[str, bool, Line, str, bool]]:
    """Yield the models and rows that were scored under a method.

    Each is (title, whether on test rows of all that there is, the line of the model, kind of rows, whether of clients).
    """
    lines = [line for line in comparison.lines if line.method == method.method and line.model]
    shared_everywhere = any(line.model == "global" and len(line.select_last("test")) for line in lines)
    found: list[tuple[str, bool, Line, str, bool]] = []
    if not (comparison.domains and shared_everywhere):  # else the test set is the data of all domains
        found.append(("shared model, test set", True, method, "test", False))
    # Validation rows are those of the own domain.
    is_own_domain_seen = comparison.domains and is_validation_test(comparison.first)
    for line in lines:
        name = _SUBJECTS.get(line.model or "", "shared model")
        if not is_own_domain_seen:
            found.append((f"{name}, own validation data", False, line, "validation", True))
        if comparison.domains:
            found.append((f"{name}, test data of all domains", True, line, "test", True))
            rows = " (its validation data)" if is_own_domain_seen else ""
            found.append((f"{name}, of its own domain{rows}", False, line, OWN_DOMAIN, True))
        elif line.model != "global":
            found.append((f"{name}, all classes (test set)", True, line, "test", True))
    for subject in found:
        _, _, line, data, of_clients = subject
        if len(select_subject(line, data, of_clients)):
            yield subject


_SUBJECTS = {"personal": "personal model", "ensemble": "ensemble of both models", "meme": "own fork"}


def select_subject(line: Line, data: str, of_clients: bool, metric: str = "") -> pd.DataFrame:
    """Return the last scores of a subject of `list_subjects` by one metric, as `Line.select`."""
    return line.select_last(data, metric, None if of_clients else "global", of_clients)


def find_epsilon(line: Line) -> float | None:
    """Return the largest epsilon of any client in any counted run; None if a run has no guarantee or no finite epsilon."""
    stated = [r.summary.privacy for r in line.counted if r.summary and r.summary.privacy]
    epsilons = [privacy.epsilon for privacy in stated]
    if len(stated) < len(line.counted) or None in epsilons:
        return None
    return max((epsilon for epsilon in epsilons if epsilon is not None), default=None)


def format_epsilon(line: Line) -> str:
    """Return the epsilon in a table: "4.5", "none", or "nothing leaves"."""
    value = find_epsilon(line)
    if value is not None:
        return f"{value:.3g}"
    leaves = [r.summary.leaves for r in line.counted if r.summary and r.summary.leaves]
    return "nothing leaves" if leaves and not any(spec for phases in leaves for spec in phases.values()) else "none"


def explain_no_local(comparison: RunComparison) -> str:
    """Return the clause that local-only training is missing, and how to get it, or at a site why it is missing."""
    first = (*comparison.federated, *comparison.methods)[0].algorithm
    fix = f"`fedmutual compare FILE.toml --methods {first},{LOCAL_ONLY}` makes it"
    if comparison.is_of_one_site:
        fix = "this site only scores, or cannot train alone, or the federation has `sites.baseline = false`"
    if comparison.at_sites:
        fix = "submit the federation under another name with `sites.baseline = true`, at sites that disclose scores"
        if comparison.first.config.get("privacy", {}).get("nets", "none") != "none":  # which no site may then
            fix = "with privacy.nets no site discloses scores; each site sees its gain: `fedmutual report STATE/NAME`"
    return f"local-only training ({LOCAL_ONLY}) is not among these runs; {fix}"


def name_choosing_data(data: str, run: RunFacts) -> str:
    """Return the name of the data that chose the best round; test examples are always named as such."""
    if data == "holdout":
        return "hold-out"
    if data.startswith("validation") and is_validation_test(run):
        return f"{data} (test examples)"
    return data


def is_validation_test(run: RunFacts) -> bool:
    """Return whether the clients' validation data are taken from the test set, as in the papers."""
    return any(c.validation and c.validation.of == "test" for c in run.partition.clients.values())


def explain_no_node(line: Line) -> str:
    """Return why no node has a score under a method."""
    if line.is_pooled:
        return _ONE
    if not any(r.evaluations for r in line.runs):
        return "nothing was evaluated yet"
    return "no node was scored so: it shares no scores, or there is no other domain"


def _explain_no_global(line: Line) -> str:
    recorded = line.runs[0]  # of the run: the fine-tuning of a newcomer is a federated method, and trains alone
    if not recorded.method.shares:
        return "there is no shared model" + ("" if recorded.role.federates else ": nothing is shared")
    if not any(r.evaluations for r in line.runs):
        return "nothing was evaluated yet"
    if any(row.client is None and not row.has_accuracy for r in line.counted for row in r.last_rows):
        return "its task has no main metric"
    if "global" in line.counted[0].models:
        return "the shared model is scored on the clients' rows only"
    return "no complete shared model exists: a part of it stays with the clients"


def _explain_no_own(line: Line) -> str:
    if not any(r.evaluations for r in line.runs):
        return "nothing was evaluated yet"
    if line.metric == ACCURACY and any(not row.has_accuracy for r in line.counted for row in r.last_rows):
        return "the clients' task has no main metric; another table has their scores"
    name, rows = line.metric.name, (row for r in line.counted for row in r.last_rows if row.data == "validation")
    if any(name in row.values and row.find_number(name) is None for row in rows):
        return describe_undefined(line.metric, "the clients' rows")
    return f"no client shares its {line.metric.title}: share.metrics forbids it, or it was computed on fewer than 50 rows"
