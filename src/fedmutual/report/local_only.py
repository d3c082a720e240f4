"""A method compared with local-only training: by its gain, for each client or node, and after which rounds."""

from collections.abc import Iterator

from fedmutual.report import measures
from fedmutual.report.comparison import Method, RunComparison
from fedmutual.report.findings import ComparedAfter, Finding, MethodGain, NotCompared, count_clients, count_nodes
from fedmutual.report.statistics import Gains, Missing


def compare_with_local_only(comparison: RunComparison, method: Method, *data: str) -> Iterator[Finding]:
    """Return a method's gain on each kind of rows, and the rounds after which it is compared.

    data: kinds of rows as in `MethodGain`. Without gain on the first kind, only the reason is returned.
    """
    gains = [measures.measure_gains(comparison, method.uses[0], rows) for rows in data]
    if isinstance(gains[0], Missing):
        if method.federated and comparison.find_local_only(method):
            yield NotCompared(method.label, gains[0].why)
        return
    for rows, gain in zip(data, gains, strict=True):
        if isinstance(gain, Gains):
            yield _make_gain(method, rows, gain)
    rounds = {pair.round for pair in gains[0].pairs}
    if rounds != {run.reached for run in method.counted}:
        yield ComparedAfter(method.label, tuple(sorted(rounds)))


def _make_gain(method: Method, data: str, gains: Gains) -> MethodGain:
    effects = count_clients(gains) if data == "validation" else count_nodes(gains)
    model = method.uses[0].model or "personal"
    return MethodGain(method.label, method.is_pooled, model, data, gains.means[0], gains.estimate, effects)
