"""Does federating pay here, for which clients, and where does it lose? Findings for the answer and against it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedmutual.report import classes, joining, measures, other_tasks
from fedmutual.report.answer import FEDERATING, JOINING, Verdict, conclude, decide
from fedmutual.report.comparison import Method, RunComparison, Use, make_comparisons
from fedmutual.report.domains import ACC
from fedmutual.report.findings import (
    AllClasses,
    Contest,
    Finding,
    FrequentClass,
    Rivalry,
    TwoModels,
)
from fedmutual.report.local_only import compare_with_local_only
from fedmutual.report.statistics import Estimate, Gains, Missing, pair_clients, pair_global
from fedmutual.rundir.recorded_run import RecordedRun, read_runs


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
    return joining.find_findings(comparison) if comparison.domains else _find_client_findings(comparison)


def _find_client_findings(comparison: RunComparison) -> Iterator[Finding]:
    for method in comparison.methods:
        yield from compare_with_local_only(comparison, method, "validation")
        yield from _compare_models(method)
    for method in comparison.references:
        yield from _compare_with_rivals(comparison, method)
    yield from other_tasks.find_other_tasks(comparison)
    for method in comparison.methods:
        yield from _find_all_classes(method)
    yield from _find_frequent_class(comparison.methods[0])
    yield from classes.find_worst_classes(comparison)


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
            yield TwoModels(method.label, use.name, first.name, estimate, len(wins), len(gains.pairs), len(gains.seeds))


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
            yield Rivalry(rival.label, tuple(contests))


def _find_all_classes(method: Method) -> Iterator[Finding]:
    """Return the accuracies on the test set of a method with personal models and a shared one."""
    personal = measures.average_scores(method.select_last_scores("personal", "test"), "")
    shared = measures.average_global_last(method.uses[-1])
    if isinstance(personal, Estimate) and isinstance(shared, Estimate):
        yield AllClasses(method.label, personal.mean, shared.mean)


def _find_frequent_class(method: Method) -> Iterator[Finding]:
    accuracy = measures.average_scores(method.select_last_scores(method.uses[0].model, "validation"), "", "majority")
    if isinstance(accuracy, Estimate):
        yield FrequentClass(accuracy.mean)
