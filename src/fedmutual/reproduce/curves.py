"""A number over the rounds, an arm a curve: means over seeds with their range."""

from collections.abc import Callable, Sequence
from statistics import fmean

from fedmutual.report.curves import Curve, Point
from fedmutual.report.svg import SLOTS
from fedmutual.reproduce.cell_results import Look
from fedmutual.reproduce.entries import name
from fedmutual.reproduce.result import Result
from fedmutual.rundir.recorded_run import NAMES


def curves(look: Look, values: Callable[[Result], Sequence[float]]) -> tuple[Curve, ...]:
    """Of each arm that has such values, one for each evaluated round of a run."""
    taken = _slots(list(look.cell.shown))
    drawn = []
    for arm, found in look.results.items():
        runs = [(s, dict(zip(r.evaluated, v, strict=True))) for s, r in sorted(found.items()) if (v := values(r))]
        common = sorted(set.intersection(*(set(v) for _, v in runs))) if runs else []
        points = [Point(n, fmean(of := [v[n] for _, v in runs]), min(of), max(of)) for n in common]
        if points:
            label = name(arm, look.cell.shown[arm])
            drawn.append(Curve(label, taken[arm], 0, tuple(points), len(runs), tuple(runs)))
    return tuple(drawn)


def _slots(arms: Sequence[str]) -> dict[str, int]:
    """A colour and a mark for each arm: the known methods have their own, as in every report."""
    taken = {arm: list(NAMES).index(arm) + 1 for arm in arms if arm in NAMES}
    free = [s for s in range(1, SLOTS + 1) if s not in taken.values()]
    rest = [arm for arm in arms if arm not in taken]
    return taken | {arm: free[k % len(free)] for k, arm in enumerate(rest)}
