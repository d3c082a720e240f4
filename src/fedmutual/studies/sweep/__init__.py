"""Which setting is best? Every combination of some values, each a run of its own, judged on data held out of training."""

from collections.abc import Callable
from pathlib import Path

from fedmutual.config import Config
from fedmutual.config.grid import Grid
from fedmutual.events import Observer
from fedmutual.recorded_code import trusting
from fedmutual.studies.sweep.plan import By, SweepPlan, plan_sweep
from fedmutual.studies.sweep.result import RESULT, Sweep
from fedmutual.studies.sweep.work import carry_out

__all__ = ["RESULT", "By", "Sweep", "SweepPlan", "carry_out", "plan_sweep", "sweep"]


def sweep(
    experiment: Config | str | Path,
    grid: Grid,
    seeds: int = 1,
    out: str | Path | None = None,
    resume: bool = False,
    by: By | None = None,
    watch: Callable[[str], Observer] | None = None,
    trust_code: bool = False,
) -> Sweep:
    """Train every combination of a grid's values into OUT/<combination>/<seed> (`runs/<name>-sweep`) -> what is best.

    The best scores highest on rows held out of the clients' training data, after the last round, in the mean over clients
    and seeds: with the model that a client would use, or with by="global" the shared one. A setting that diverges is told
    and not chosen.

    grid: {"optimizer.lr": [0.003, 0.01, 0.03], "rounds": [5]}; one value is fixed. watch: an observer for the run of this
    name. trust_code: with resume, go on with code that has changed since the runs recorded it.

    Raises:
        UserError: in one sentence, what cannot be done, and with which combination, before the first is trained.
    """
    with trusting(trust_code):
        made = plan_sweep(experiment, grid, seeds, by)
        return carry_out(made, Path(out) if out is not None else Path("runs") / f"{made.name}-sweep", resume, watch)
