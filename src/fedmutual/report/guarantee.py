"""Epsilon beside accuracy: what differential privacy a method gives for what leaves its clients."""

from fedmutual.report.cells import Column, TableCell
from fedmutual.results.comparison import Method, RunComparison
from fedmutual.rundir.schema import RecordedGuarantee

NONE, NOTHING = "none", "nothing leaves"


def is_stated(comparison: RunComparison) -> bool:
    """Return whether a method has an epsilon; if none has one, no table has a column of epsilons."""
    return any(_list_summaries(m) for m in comparison.methods)


def find_epsilon(method: Method) -> float | None:
    """Return the largest epsilon of any client in any counted run; None if a run has no guarantee or no finite epsilon."""
    epsilons = [c.epsilon for s in _list_summaries(method) for c in s.clients.values()]
    if not epsilons or len(_list_summaries(method)) < len(method.counted):
        return None
    return None if None in epsilons else max(e for e in epsilons if e is not None)


def format_epsilon(method: Method) -> str:
    """Return the epsilon in a table: "4.5", "none", or "nothing leaves"."""
    value = find_epsilon(method)
    if value is not None:
        return f"{value:.3g}"
    leaves = [r.summary.leaves for r in method.counted if r.summary and r.summary.leaves]
    return NOTHING if leaves and not any(spec for phases in leaves for spec in phases.values()) else NONE


def make_column(comparison: RunComparison) -> Column:
    """Return the column of epsilons, the largest over clients and runs, with a note on delta and the unit of privacy."""
    known = {(s.delta, s.unit) for m in comparison.methods for s in _list_summaries(m)}
    of = ", ".join(f"at delta {delta:g}, of each {unit}" for delta, unit in sorted(known))
    note = f"Epsilon {of}: the largest of any client, of what leaves in one run; it counts no scores and no validation rows."
    return Column(
        "epsilon",
        "Differential privacy",
        note=note,
        keys=("epsilon",),
        read=lambda use: use.method,
        form=lambda method: TableCell(format_epsilon(method)),
        numbers=lambda method: (find_epsilon(method),),
    )


def _list_summaries(method: Method) -> list[RecordedGuarantee]:
    """What the counted runs say of their guarantees."""
    return [r.summary.privacy for r in method.counted if r.summary and r.summary.privacy]
