"""Which setting is best? Every combination of some values, each a run of its own, judged on data held out of training."""

from collections.abc import Callable
from pathlib import Path

from fedmutual.config import Config
from fedmutual.config.grid import Grid
from fedmutual.errors import warn_user
from fedmutual.events import Observer
from fedmutual.studies.remarks import make_warning_observers
from fedmutual.studies.sweep.plan import By, SweepPlan, plan_sweep
from fedmutual.studies.sweep.result import RESULT, Sweep
from fedmutual.studies.sweep.work import train_sweep
from fedmutual.user_code.recorded_code import set_trust

__all__ = ["RESULT", "By", "Sweep", "SweepPlan", "plan_sweep", "sweep", "train_sweep"]


def sweep(
    experiment: Config | str | Path,
    grid: Grid,
    seeds: int = 1,
    out: str | Path | None = None,
    resume: bool = False,
    by: By | None = None,
    watch: Callable[[str], Observer] | None = None,
    trust_code: bool = False,
    jobs: int | None = None,
) -> Sweep:
    """Train every combination of a grid's values into OUT/<combination>/<seed>, and return all results.

    The best setting has the highest mean score over clients and seeds after the last round, on rows held out of the clients'
    training data: of the model that a client would use, or with by="global" of the shared model. A setting that diverges is
    reported and not chosen.

    grid: {"optimizer.lr": [0.003, 0.01, 0.03], "rounds": [5]}; a single value is fixed.
    out: the folder; None: `runs/<name>-sweep`.
    watch: returns the observer of a run, by the name of the run; in a worker process: start, notes, replies, scores, end.
    trust_code: with resume, continue with code that has changed since the runs recorded the code.
    jobs: how many runs are trained side by side; None: one for each core where that is faster.

    Each remark, and each of `Sweep.warnings`, is a `RemarkWarning`.

    Raises:
        UserError: a combination cannot be trained; raised before the first training.
    """
    with set_trust(trust_code):
        plan = plan_sweep(experiment, grid, seeds, by)
        folder = Path(out) if out is not None else Path("runs") / f"{plan.name}-sweep"
        result = train_sweep(plan, folder, resume, make_warning_observers(watch), jobs)
    for warning in result.warnings:
        warn_user(warning)
    return result
