"""Does federating pay here, for which clients, and where does it lose? Findings for the answer and against it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedmutual.report import measures, other_tasks
from fedmutual.report.answer import FEDERATING, JOINING, Verdict, conclude, decide
from fedmutual.report.domains import ACC, BWT, TRANSFER_MEASURES
from fedmutual.report.findings import Contest, Finding, count_clients, count_nodes
from fedmutual.results.comparison import Method, RunComparison, Use, make_comparisons
from fedmutual.results.estimate import SAME, Estimate, Missing
from fedmutual.results.gains import Gains, Pair, find_last_common, match_runs, pair_clients, pair_global
from fedmutual.rundir.recorded_run import RecordedRun, read_runs

_CLEAR = 0.05  # a difference of recall that the report names even if the difference is not certain


def find_answers(runs: Sequence[Path | RecordedRun]) -> list[str]:
    """Return the answer about run folders, one sentence for each comparison: does federating pay.

    Raises:
        RunError: a folder is not the folder of a run or is damaged, or all runs are of a sweep.
    """
    compared = make_comparisons(read_runs(runs))
    return [f"{c.name}: {judge(c).lead}" if len(compared) > 1 else judge(c).lead for c in compared]


def judge(comparison: RunComparison) -> Verdict:
    """Return the verdict on one comparison: whether federating pays, the sentences of the page, and the findings."""
    data = ACC.data if comparison.domains else "validation"
    gains = {method.label: measures.measure_gains(comparison, method.uses[0], data) for method in comparison.federated}
    estimates = [g.estimate for g in gains.values() if isinstance(g, Gains)]
    ways, question = (gains, JOINING) if comparison.domains else (_find_ways(comparison), FEDERATING)
    return conclude(comparison, decide(comparison, ways, question), list(find_findings(comparison)), estimates)


def find_findings(comparison: RunComparison) -> Iterator[Finding]:
    """Return the findings of a comparison, in the order of the page."""
    return _find_node_findings(comparison) if comparison.domains else _find_client_findings(comparison)


def _find_node_findings(comparison: RunComparison) -> Iterator[Finding]:
    """Return what a reader wants to know of domains: the gain over all domains, and the loss of a node on its own domain."""
    for method in comparison.methods:
        yield from _compare_with_local_only(comparison, method, ACC.data, BWT.data)
    first_variants = {method.algorithm: method for method in reversed(comparison.references)}
    for method in reversed(first_variants.values()):
        for rival in (m for m in comparison.federated if m is not method):
            gains = {m.data: pair_clients(method.counted, rival.counted, data=m.data) for m in TRANSFER_MEASURES}
            contests = [Contest(data, method.label, g.estimate) for data, g in gains.items() if isinstance(g, Gains)]
            if contests:
                yield Finding(macro="rivalry", rival=rival.label, contests=tuple(contests))
    yield from _find_worst_classes(comparison, ACC.data)


def _find_client_findings(comparison: RunComparison) -> Iterator[Finding]:
    for method in comparison.methods:
        yield from _compare_with_local_only(comparison, method, "validation")
        yield from _compare_models(method)
    for method in comparison.references:
        yield from _compare_with_rivals(comparison, method)
    yield from other_tasks.find_other_tasks(comparison)
    for method in comparison.methods:
        yield from _find_all_classes(method)
    yield from _find_frequent_class(comparison.methods[0])
    yield from _find_worst_classes(comparison, "validation")


def _find_ways(comparison: RunComparison) -> dict[str, Gains | Missing]:
    """Return the gains of each federating method; of each of its models, where another model than the first is better."""
    ways: dict[str, Gains | Missing] = {}
    for method in comparison.federated:
        gains = {use: measures.measure_gains(comparison, use) for use in method.uses}
        signs = [g.estimate.sign for g in gains.values() if isinstance(g, Gains)]
        is_split = bool(signs) and max(signs) > signs[0]
        ways |= {_name_use(use): g for use, g in gains.items()} if is_split else {method.label: gains[method.uses[0]]}
    return ways


def _name_use(use: Use) -> str:
    """Return the method's label, with the model if the method has several: "FML (shared model)"."""
    return f"{use.method.label} ({use.name})" if len(use.method.uses) > 1 else use.method.label


def _compare_models(method: Method) -> Iterator[Finding]:
    first = method.uses[0]
    for use in method.uses[1:]:
        gains = pair_clients(method.counted, method.counted, use.model, first.model)
        if isinstance(gains, Gains):
            estimate = gains.estimate
            wins = gains.gained if estimate.mean > 0 else gains.harmed
            better, worse = (use.name, first.name) if estimate.mean > 0 else (first.name, use.name)
            counts = {"wins": len(wins), "total": len(gains.pairs), "seeds": len(gains.seeds)}
            names = {"label": method.label, "model": use.name, "better": better, "worse": worse}
            yield Finding(macro="two_models", estimate=estimate, **names, **counts)


def _compare_with_rivals(comparison: RunComparison, method: Method) -> Iterator[Finding]:
    for rival in comparison.federated:
        if rival.algorithm == method.algorithm:
            continue
        contests = []
        gains = pair_clients(method.counted, rival.counted)
        if isinstance(gains, Gains):
            contests.append(Contest("validation", _name_use(method.uses[0]), gains.estimate))
        shared = pair_global(method.counted, rival.counted)
        if shared:
            contests.append(Contest("shared", method.label, shared))
        if contests:
            yield Finding(macro="rivalry", rival=rival.label, contests=tuple(contests))


def _find_all_classes(method: Method) -> Iterator[Finding]:
    """Return the accuracies on the test set of a method with personal models and a shared one."""
    personal = measures.average_scores(method.select_last_scores("personal", "test"), "")
    shared = measures.average_global_last(method.uses[-1])
    if isinstance(personal, Estimate) and isinstance(shared, Estimate):
        yield Finding(macro="all_classes", label=method.label, personal=personal.mean, shared=shared.mean)


def _find_frequent_class(method: Method) -> Iterator[Finding]:
    accuracy = measures.average_scores(method.select_last_scores(method.uses[0].model, "validation"), "", "majority")
    if isinstance(accuracy, Estimate):
        yield Finding(macro="frequent_class", accuracy=accuracy.mean)


def _compare_with_local_only(comparison: RunComparison, method: Method, *data: str) -> Iterator[Finding]:
    """Return a method's gain on each kind of rows, and the rounds after which it is compared.

    data: kinds of rows: "validation" (own rows), of nodes "test" (all domains) or "test.own". Without gain on the first
    kind, only the reason is returned.
    """
    gains = [measures.measure_gains(comparison, method.uses[0], rows) for rows in data]
    if isinstance(gains[0], Missing):
        if method.federated and comparison.find_local_only(method):
            yield Finding(macro="not_compared", label=method.label, reason=gains[0].why)
        return
    for rows, gain in zip(data, gains, strict=True):
        if isinstance(gain, Gains):
            yield _make_gain(method, rows, gain)
    rounds = {pair.round for pair in gains[0].pairs}
    if rounds != {run.reached for run in method.counted}:
        yield Finding(macro="compared_after", label=method.label, rounds=tuple(sorted(rounds)))


def _make_gain(method: Method, data: str, gains: Gains) -> Finding:
    effects = count_clients(gains) if data == "validation" else count_nodes(gains)
    model = method.uses[0].model or "personal"
    return Finding(
        macro="method_gain",
        label=method.label,
        is_pooled=method.is_pooled,
        model=model,
        data=data,
        accuracy=gains.means[0],
        estimate=gains.estimate,
        effects=effects,
    )


def _find_worst_classes(comparison: RunComparison, data: str) -> Iterator[Finding]:
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
            recall, local_recall = recalls[worst]
            ends = {"recall": recall, "local_recall": local_recall, "estimate": estimate}
            yield Finding(macro="worst_class", name=worst, label=method.label, **ends)


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
