"""What accuracy does not say about a class: the class with the lowest recall, compared with local-only training."""

from collections.abc import Iterator

from fedmutual.report.comparison import Method, RunComparison
from fedmutual.report.findings import WorstClass
from fedmutual.report.statistics import SAME, Gains, Pair, find_last_common, match_runs
from fedmutual.rundir.recorded_run import RecordedRun

_CLEAR = 0.05  # a difference of recall that the report names even if the difference is not certain


def find_worst_classes(comparison: RunComparison, data: str = "validation") -> Iterator[WorstClass]:
    """Return each federating method's worst class, where its recall on the clients' rows clearly differs from local-only.

    The worst class has the lowest sum of the recall under the method and the recall under local-only training. If the
    method's recall alone chose the class, this recall would tend to be too low (selection bias).
    """
    for method in comparison.federated:
        local_only = comparison.find_local_only(method)
        gains = _pair_by_class(comparison, method, local_only, data) if local_only and len(comparison.classes) > 1 else {}
        if not gains:
            continue
        recalls = {name: class_gains.means for name, class_gains in gains.items()}
        worst = min(recalls, key=lambda name: sum(recalls[name]))
        estimate = gains[worst].estimate
        if estimate.sign or abs(estimate.mean) > _CLEAR - SAME:
            yield WorstClass(worst, method.label, *recalls[worst], estimate)


def _pair_by_class(comparison: RunComparison, method: Method, local_only: Method, data: str) -> dict[str, Gains]:
    """Return class -> each client's recall under both methods, where both have one."""
    pairs: dict[str, list[Pair]] = {}
    for run, local_run in match_runs(method.counted, local_only.counted):
        round, local_round = find_last_common(run, local_run)
        scores = run.get_scores(run.find_evaluation(round), method.uses[0].model, data)
        local_scores = local_run.get_scores(local_run.find_evaluation(local_round), local_only.uses[0].model, data)
        for client in scores.keys() & local_scores.keys():
            recalls = zip(comparison.classes, scores[client].recall or (), local_scores[client].recall or (), strict=False)
            for number, (name, recall, local_recall) in enumerate(recalls):
                if recall is not None and local_recall is not None:
                    examples = _count_examples(run, client, number, data)
                    pairs.setdefault(name, []).append(Pair(run.seed, client, round, recall, local_recall, examples))
    return {name: Gains(tuple(class_pairs)) for name, class_pairs in pairs.items()}


def _count_examples(run: RecordedRun, client: str, number: int, data: str) -> int | None:
    """Return how many examples of a class a client is scored on; None where that is not known."""
    holding = run.partition.clients.get(client)
    counts = holding.counts.validation if holding and data == "validation" else None
    return counts[number] if counts else None
