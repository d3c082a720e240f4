"""Where clients are domains: does joining pay over all of them, and does it cost a node accuracy on its own domain?"""

from collections.abc import Iterator

from fedmutual.report import classes
from fedmutual.report.comparison import Method, RunComparison
from fedmutual.report.domains import ACC, BWT, TRANSFER_MEASURES
from fedmutual.report.findings import Contest, Finding, Rivalry
from fedmutual.report.local_only import compare_with_local_only
from fedmutual.report.statistics import Gains, pair_clients


def find_findings(comparison: RunComparison) -> Iterator[Finding]:
    """Return the findings on nodes, in the order of the page."""
    for method in comparison.methods:
        yield from compare_with_local_only(comparison, method, ACC.data, BWT.data)
    first_variants = {method.algorithm: method for method in reversed(comparison.references)}
    for method in reversed(first_variants.values()):
        yield from _compare_with_rivals(comparison, method)
    yield from classes.find_worst_classes(comparison, ACC.data)


def _compare_with_rivals(comparison: RunComparison, method: Method) -> Iterator[Finding]:
    for rival in comparison.federated:
        if rival is method:
            continue
        gains = {measure: pair_clients(method.counted, rival.counted, data=measure.data) for measure in TRANSFER_MEASURES}
        contests = [Contest(m.data, method.label, g.estimate) for m, g in gains.items() if isinstance(g, Gains)]
        if contests:
            yield Rivalry(rival.label, tuple(contests))
