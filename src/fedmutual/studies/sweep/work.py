"""Check, train and compare the runs of a sweep."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import torch

from fedmutual import data
from fedmutual.config import Config
from fedmutual.core import Client, Diverged, get_metric
from fedmutual.errors import ConfigError, UserError
from fedmutual.events import Observer
from fedmutual.federation import build
from fedmutual.federation.experiment import Experiment
from fedmutual.files import write_json
from fedmutual.metric import ACCURACY, Metric
from fedmutual.models import list_user_networks
from fedmutual.report.choice import ScoredTrial
from fedmutual.rundir.file_names import SUMMARY
from fedmutual.scores import is_disclosed
from fedmutual.studies import privacy_plan
from fedmutual.studies.compare import check_folders
from fedmutual.studies.run import attempt_together, can_stack
from fedmutual.studies.side_by_side import RunRequest, limit_jobs, train_runs
from fedmutual.studies.sweep.plan import SweepPlan
from fedmutual.studies.sweep.result import RESULT, Sweep, judge_sweep, make_sweep_record


class SweepRun(NamedTuple):
    """A run of a sweep: its folder, its name in messages, and its configuration with the seed of this run."""

    folder: Path
    name: str
    config: Config


def train_sweep(
    plan: SweepPlan,
    out: Path,
    resume: bool = False,
    watch: Callable[[str], Observer] | None = None,
    jobs: int | None = None,
) -> Sweep:
    """Train the plan, write OUT/sweep.json, and return the result. Finished runs are not trained again on resume.

    With the engine "stacked", or "auto" on a GPU, all runs train at once, with their clients in common stacks.
    jobs: the number of runs that are trained side by side; None: chosen by the duration of the first run.

    Raises:
        UserError: a folder, the data or a network is wrong; raised before the first run is trained.
    """
    works = [SweepRun(out / s.folder / str(seed), f"{s.label}, seed {seed}", config) for s, seed, config in plan.runs]
    check_folders([(work.name, work.config, work.folder) for work in works], resume)
    _rehearse([work for work in works if not (work.folder / SUMMARY).exists()])
    diverged = _train(works, resume, watch, jobs)
    sweep = judge_sweep(plan, out, _collect_tried(plan, out, diverged))
    cost = privacy_plan.describe_trials([work.folder for work in works], works[0].config)
    sweep = replace(sweep, warnings=(*sweep.warnings, cost)) if cost else sweep
    write_json(out / RESULT, make_sweep_record(plan, sweep))
    return sweep


def _rehearse(works: Sequence[SweepRun]) -> None:
    """Read the data and build the networks of each setting once, so that errors appear now and not hours later."""
    once = list({work.folder.parent: work for work in reversed(works)}.values())[::-1]
    prepared: dict[tuple[str, ...], dict[str, data.Prepared]] = {}
    with torch.random.fork_rng(devices=[]):
        for work in once:
            own_networks = list_user_networks(work.config)  # which choose the form of inputs
            prepared[own_networks] = prepared.get(own_networks) or data.prepare(work.config)
            try:
                experiment = build.build(work.config, prepared=prepared[own_networks])
                _check_scores(experiment)
            except UserError as problem:
                raise type(problem)(f"with {work.name}: {problem}") from None


def _check_scores(experiment: Experiment) -> None:
    """Raise UserError if a client cannot be built, or if no score can choose a setting."""
    metrics = {id: get_metric(experiment.make_task(id)) for id in experiment.clients}
    sharing = [id for id in experiment.clients if _has_shared_metric(experiment.build_client(id), metrics[id])]
    if not sharing:
        raise ConfigError("no client sends its scores, so no score can choose a setting; set share.metrics to 'all'")
    if ACCURACY not in (common := {metrics[id] for id in sharing}) and (len(common) > 1 or None in common):
        raise ConfigError(
            "the clients' tasks have no main metric in common, and a sweep chooses by one; declare `metric` in the task"
        )


def _has_shared_metric(client: Client, metric: Metric | None) -> bool:
    """Return whether a client shares its main metric on hold-out rows; of pooled data, on the rows of any client."""
    sizes = [len(rows) for name, rows in client.data.items() if name.startswith("holdout")]
    return any(is_disclosed(client.metrics, rows) if metric == ACCURACY else client.metrics == "all" for rows in sizes)


def _train(
    works: Sequence[SweepRun], resume: bool, watch: Callable[[str], Observer] | None, jobs: int | None
) -> dict[Path, str]:
    """Train all runs; return the error text of each diverged run, by its folder."""
    folders, configs = [work.folder for work in works], [work.config for work in works]
    observers = [[watch(work.name)] if watch else [] for work in works]
    problems: Sequence[BaseException | None]
    if all(map(can_stack, configs)) and all(config.engine == configs[0].engine for config in configs):
        problems = attempt_together(configs, folders, resume, observers)
    else:
        requests = [RunRequest(*each) for each in zip(configs, folders, repeat(resume), observers)]
        problems = train_runs(requests, limit_jobs(configs, jobs), tolerated=(Diverged,))
    for problem in problems:
        if problem is not None and not isinstance(problem, Diverged):
            raise problem
    return {folder: str(problem) for folder, problem in zip(folders, problems, strict=True) if problem is not None}


def _collect_tried(plan: SweepPlan, out: Path, diverged: Mapping[Path, str]) -> list[ScoredTrial]:
    def folders(name: str) -> dict[int, Path]:
        return {seed: out / name / str(seed) for seed in plan.seeds}

    return [
        ScoredTrial(
            values=setting.values,
            label=setting.label,
            folders=folders(setting.folder),
            diverged={s: diverged[path] for s, path in folders(setting.folder).items() if path in diverged},
            by=plan.by,
            local_only=folders(local_only.folder) if local_only else None,
        )
        for setting, local_only in zip(plan.settings, plan.local_only_settings, strict=True)
    ]
