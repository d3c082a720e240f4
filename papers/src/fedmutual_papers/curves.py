"""Compute curves over the rounds, one for each arm: the mean over seeds with the lowest and highest seed."""

from collections.abc import Callable, Sequence

import pandas as pd

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config.methods import find_role
from fedmutual.report.curves import Curve
from fedmutual.report.svg import SLOTS
from fedmutual_papers.cell_results import MeasuredCell
from fedmutual_papers.entries import name_arm
from fedmutual_papers.result import Result


def make_curves(measured: MeasuredCell, values: Callable[[Result], Sequence[float]]) -> tuple[Curve, ...]:
    """Return one curve for each arm that has values. values: a result -> one value for each evaluated round, or nothing."""
    slots = _assign_slots(list(measured.cell.shown))
    drawn = []
    for arm, by_seed in measured.results.items():
        runs = {s: dict(zip(r.evaluated, v, strict=True)) for s, r in sorted(by_seed.items()) if (v := values(r))}
        drawn.append(Curve(name_arm(arm, measured.cell.shown[arm]), slots[arm], 0, pd.DataFrame(runs)))
    return tuple(curve for curve in drawn if curve.points)


def _assign_slots(arms: Sequence[str]) -> dict[str, int]:
    """Return arm -> colour and mark slot: arms named as algorithms have the slots of the report, others take free slots."""
    taken = {arm: colour for arm in arms if arm in ALGORITHMS and (colour := find_role(arm).colour)}
    free = [s for s in range(1, SLOTS + 1) if s not in taken.values()]
    rest = [arm for arm in arms if arm not in taken]
    return taken | {arm: free[k % len(free)] for k, arm in enumerate(rest)}
