"""Which setting is best? Every combination of some values, each a run of its own, judged on data held out of training."""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedmutual import data
from fedmutual.config import Config, dump_config, parse_config
from fedmutual.config.grid import Grid, format_value
from fedmutual.core import Client, Diverged, get_metric
from fedmutual.errors import ConfigError, UserError, warn_user
from fedmutual.events import Observer
from fedmutual.federation import build
from fedmutual.federation.experiment import Experiment
from fedmutual.files import write_json
from fedmutual.metric import ACCURACY, Metric
from fedmutual.models import list_user_networks
from fedmutual.report.choice import ScoredTrial, describe_choice, find_edges, pick_best
from fedmutual.results.estimate import Estimate
from fedmutual.results.gains import Gains
from fedmutual.rundir.file_names import SUMMARY
from fedmutual.scores import is_disclosed
from fedmutual.studies import privacy_plan
from fedmutual.studies.remarks import make_warning_observers
from fedmutual.studies.study import PlannedRun
from fedmutual.studies.sweep_plan import By, SweepPlan, plan_sweep
from fedmutual.user_code.recorded_code import set_trust

RESULT = "sweep.json"


@dataclass(frozen=True)
class Sweep:
    """The tried settings, and the best setting by hold-out scores.

    `folder` contains sweep.json and the runs, and `tried` has all settings in the order in which they were given.
    """

    folder: Path
    tried: tuple[ScoredTrial, ...]
    best: tuple[ScoredTrial, ...]  # one, or several that score the same; none where all diverged
    warnings: tuple[str, ...]  # one sentence each

    @property
    def chosen(self) -> ScoredTrial | None:
        """The best setting; of several equal settings, the first given."""
        return next(iter(self.best), None)


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
        plan = plan_sweep(experiment, grid, seeds, by, None if out is None else Path(out))
        result = train_sweep(plan, resume, make_warning_observers(watch), jobs)
    for warning in result.warnings:
        warn_user(warning)
    return result


def train_sweep(
    plan: SweepPlan, resume: bool = False, watch: Callable[[str], Observer] | None = None, jobs: int | None = None
) -> Sweep:
    """Train the plan, write OUT/sweep.json, and return the result. watch, jobs: as `Study.train` takes them.

    Raises:
        UserError: a folder, the data or a network is wrong; raised before the first run is trained.
    """
    study = plan.study
    study.check_folders(resume)
    _rehearse([run for run in study.runs if not (run.folder / SUMMARY).exists()])
    diverged = study.train(resume, watch, jobs, tolerated=(Diverged,))
    result = _judge_sweep(plan, diverged)
    write_json(study.out / RESULT, _make_sweep_record(plan, result))
    return result


def _rehearse(runs: list[PlannedRun]) -> None:
    """Read the data and build the networks of each setting once, so that errors appear now and not hours later."""
    first_runs = list({run.folder.parent: run for run in reversed(runs)}.values())[::-1]
    prepared: dict[tuple[str, ...], dict[str, data.Prepared]] = {}
    with torch.random.fork_rng(devices=[]):
        for run in first_runs:
            own_networks = list_user_networks(run.config)  # which choose the form of inputs
            prepared[own_networks] = prepared.get(own_networks) or data.prepare(run.config)
            try:
                experiment = build.build(run.config, prepared=prepared[own_networks])
                _check_scores(experiment)
            except UserError as problem:
                raise type(problem)(f"with {run.label}: {problem}") from None


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


def _judge_sweep(plan: SweepPlan, diverged: Mapping[Path, Exception]) -> Sweep:
    """Return the best setting, and warnings about this setting and others. diverged: folder of a run -> error."""
    study = plan.study
    tried = []
    for setting, local_only in zip(plan.combinations, plan.local_only, strict=True):
        folders = study.find_folders(setting)
        errors = {seed: str(diverged[folder]) for seed, folder in folders.items() if folder in diverged}
        beside = study.find_folders(local_only) if local_only else None
        tried.append(ScoredTrial(setting.values, setting.label, folders, errors, plan.by, beside))
    best = pick_best(tried)
    warnings = describe_choice(tried, best, _find_ends_of_values(plan, tried, best[0]) if best else ())
    if cost := privacy_plan.describe_trials([run.folder for run in study.runs], study.runs[0].config):
        warnings.append(cost)
    return Sweep(study.out, tuple(tried), best, tuple(warnings))


def _find_ends_of_values(plan: SweepPlan, tried: list[ScoredTrial], chosen: ScoredTrial) -> Iterator[tuple[str, str, bool]]:
    """Yield (key, chosen value as TOML, whether it is the largest) where a better value may lie beyond the tried ones."""
    config = next(s.config for s in plan.combinations if s.label == chosen.label)
    for key, value, neighbour in find_edges(tried, chosen):
        further = value + (value - neighbour) * (1 if isinstance(value, int) else 1e-3)
        try:
            parse_config(tomllib.loads(dump_config(config)), overrides={key: further})
        except ConfigError:  # the end of what is possible, not of what was tried
            continue
        yield key, format_value(value), value > neighbour


def _make_sweep_record(plan: SweepPlan, sweep: Sweep) -> dict[str, Any]:
    """Return the content of sweep.json: the trials with their hold-out scores (accuracies as fractions), and the choice."""
    return {
        "format": 1,
        "name": plan.name,
        "seeds": list(plan.study.seeds),
        "by": plan.by,
        "holdout": plan.combinations[0].config.split.holdout,
        "settings": [_make_setting_record(tried, sweep.folder) for tried in sweep.tried],
        "best": [tried.label for tried in sweep.best],
        "chosen": _format_settings(sweep.chosen) if sweep.chosen else None,
        "warnings": list(sweep.warnings),
    }


def _make_setting_record(tried: ScoredTrial, out: Path) -> dict[str, Any]:
    return {
        "label": tried.label,
        "set": _format_settings(tried),
        "runs": [path.relative_to(out).as_posix() for path in tried.folders.values()],
        "diverged": {str(seed): how for seed, how in tried.diverged.items()},
        "model": tried.model,
        f"holdout_{tried.metric.name}": {
            "last": _make_number(tried.last),
            "best": _make_number(tried.best),
            "best_rounds": list(tried.best_rounds),
        },
        "over_local_only": _make_number(tried.gain.estimate) if isinstance(tried.gain, Gains) else None,
    }


def _format_settings(tried: ScoredTrial) -> dict[str, str]:
    """Return key -> value in the form of `--set`."""
    return {key: format_value(value) for key, value in tried.values.items()}


def _make_number(e: Estimate | None) -> dict[str, Any] | None:
    return None if e is None else {"mean": e.mean, "half": e.half, "n": e.n, "over": e.unit}
