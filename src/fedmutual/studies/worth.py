"""Train coalitions: the same federation with some participants absent, to learn what each one gives to each other one."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedmutual import data
from fedmutual.config import Config, check_scored, replace_algorithm
from fedmutual.config.grid import make_folder_name
from fedmutual.config.methods import find_method
from fedmutual.errors import ConfigError, UserError, format_count
from fedmutual.results.frame import read_runs
from fedmutual.results.worth import Coalition, Worth, draw_order, list_steps
from fedmutual.role import LOCAL_ONLY
from fedmutual.settings import MOST_COALITION_RUNS
from fedmutual.studies.observers import Watch
from fedmutual.studies.study import Setting, Study, check_folders, list_seeds, train_runs, try_experiment

EXACT = 6  # participants at most whose coalitions are all trained
LEAST_ORDERS = 3  # of an interval


class WorthPlan(NamedTuple):
    """The coalitions to train, as studies in one folder: the first, then one for each order of joining, if any."""

    studies: tuple[Study, ...]
    cost: str  # a sentence

    @property
    def folders(self) -> list[Path]:
        """The folders of all runs, each once."""
        return [*dict.fromkeys(folder for study in self.studies for folder in study.runs)]


def plan_worth(
    config: Config,
    out: Path,
    seeds: int = 3,
    most: int = MOST_COALITION_RUNS,
    only_left_out: bool = False,
    joining: str | None = None,
) -> WorthPlan:
    """Return the coalitions to train, after a check that each participant can be trained with all others, and alone.

    Of `EXACT` participants at most all coalitions are trained. Of more, each one is left out of all; then others join in
    random orders, each forwards and backwards, with a seed of its own.

    seeds: of all coalitions, or of those with one left out. most: the runs that may be trained. only_left_out: no other
    coalitions. joining: only the coalitions of this participant, and its local-only training.

    Raises:
        ConfigError: the method does not federate, or adds noise; there is one participant; more runs are needed.
        UserError: the data, or a network, cannot be used.
    """
    what = "`fedmutual worth`" if joining is None else "--join"
    check_scored(config, config.name)
    if not find_method(name := config.algorithm["name"]).role.federates:
        raise ConfigError(f"{what}: algorithm {name!r} does not federate; choose another with --set algorithm.name=fml")
    if config.privacy.nets != "none":
        raise ConfigError(f"{what}: the runs would cost privacy that epsilon does not count; set privacy.nets = 'none'")
    if config.participants is not None:
        raise ConfigError(f"{what} chooses the participants of each run; remove the key 'participants'")
    participants = _list_participants(config)
    if len(participants) < 2 or (joining is not None and joining not in participants):
        known = f"there are {', '.join(participants)}" if joining else "there is one participant"
        raise ConfigError(f"{what}: {known}; " + ("name one of them" if joining else "it needs two or more"))
    everyone, is_exact = frozenset(participants), len(participants) <= EXACT and not only_left_out
    if is_exact:
        coalitions = [frozenset(c) for k in range(len(everyone), 0, -1) for c in itertools.combinations(participants, k)]
    else:
        coalitions = [everyone, *(everyone - {i} for i in participants)]
        coalitions += [frozenset((joining, i)) for i in participants if joining is not None]
    if joining is not None:
        coalitions = [c for c in coalitions if joining in c and len(c) > 1]
    settings = [_make_setting(config, participants, c) for c in coalitions]
    if joining is not None:
        alone, _ = replace_algorithm(config, LOCAL_ONLY)
        alone = alone.model_copy(update={"participants": (joining,)})
        settings.insert(0, Setting(f"{joining} alone", alone, make_folder_name(LOCAL_ONLY)))
    studies = [Study(settings, list_seeds(config, seeds), out)]
    count, has_orders = len(studies[0].runs), not is_exact and not only_left_out and joining is None
    cost = f"{len(settings)} coalitions x {format_count(seeds, 'seed')}"
    while has_orders:
        seed = config.seed + len(studies) - 1
        steps = [_make_setting(config, participants, c) for c in list_steps(draw_order(participants, seed))]
        study = Study(steps, [seed], out)
        added = len(study.runs.keys() - studies[0].runs.keys())
        if count + added > most and len(studies) > LEAST_ORDERS:
            break
        studies, count = [*studies, study], count + added
    if has_orders:
        cost += f", then at most {len(studies) - 1} orders of {len(steps)} coalitions"
    if count > most:
        fix = f"allow them with --runs {count}, or take fewer --seeds"
        fix += "" if joining or only_left_out else f", or --left-out, which takes {(len(everyone) + 1) * seeds}"
        raise ConfigError(f"{what}: {cost} are {count} runs, more than {most}; {fix}")
    return WorthPlan(tuple(studies), f"{cost}: {count} runs")


def train_worth(
    plan: WorthPlan, resume: bool = False, watch: Watch | None = None, jobs: int | None = None, precision: float = 0.0
) -> list[Path]:
    """Train the coalitions, and return the folders of the runs. resume, watch, jobs: as `train_runs` takes them.

    Orders end early when half of every interval is at most `precision`, in the unit of the metric (0.01 is one point). An
    interval that ends them may be narrow by chance, and no interval is corrected for this.

    Raises:
        UserError, Diverged: as `train_runs`.
    """
    for study in plan.studies:
        check_folders(study.runs, resume)
    done: dict[Path, Any] = {}
    for number, study in enumerate(plan.studies):
        if number > LEAST_ORDERS and Worth(read_runs(done)).shapley.widest <= precision:
            break
        train_runs({folder: run for folder, run in study.runs.items() if folder not in done}, resume, watch, jobs)
        done |= study.runs
    return [*done]


def _list_participants(config: Config) -> tuple[str, ...]:
    """Return the participants, after a check that each can train with all others and alone. Raises UserError."""
    prepared = data.prepare(config)
    participants = try_experiment(config, prepared).clients
    for i in participants:
        try:
            try_experiment(config.model_copy(update={"participants": (i,)}), prepared)
        except UserError as problem:
            raise type(problem)(f"with the participant {i!r} alone: {problem}") from None
    return participants


def _make_setting(config: Config, participants: Sequence[str], coalition: Coalition) -> Setting:
    members = tuple(i for i in participants if i in coalition)
    label = ", ".join(members)
    key = None if len(members) == len(participants) else members  # None: an ordinary run
    return Setting(label, config.model_copy(update={"participants": key}), make_folder_name(label))
