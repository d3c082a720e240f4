"""Which setting is best? Combinations of some values, each a run of its own, judged on data held out of training.

All combinations, or some that are drawn at random; with successive halving most of them end early.

The plan of a sweep has local-only training beside the combinations, with which personal models are compared.
"""

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fedmutual import data
from fedmutual.config import (
    Config,
    dump_config,
    is_pooled,
    load_config,
    make_algorithm,
    override_config,
    parse_config,
    read_dumped,
    read_tables,
    replace_algorithm,
)
from fedmutual.config.grid import (
    Grid,
    describe_ranges,
    draw_combinations,
    expand_grid,
    format_value,
    is_range,
    list_combinations,
    make_folder_name,
    make_label,
)
from fedmutual.core import Diverged, get_metric
from fedmutual.errors import ConfigError, UserError, warn_user
from fedmutual.federation import build
from fedmutual.federation.experiment import Experiment
from fedmutual.files import write_json
from fedmutual.metric import ACCURACY, describe_undefined
from fedmutual.models import list_user_networks
from fedmutual.report.choice import ScoredTrial, describe_choice, find_edges, pick_best, rank_trials
from fedmutual.results.estimate import Estimate
from fedmutual.results.frame import read_runs
from fedmutual.results.gains import Gains
from fedmutual.role import LOCAL_ONLY
from fedmutual.rundir.file_names import CONFIG, SUMMARY
from fedmutual.rundir.folder import find_schedule
from fedmutual.scores import is_disclosed
from fedmutual.studies import privacy_plan
from fedmutual.studies.observers import Watch, make_warning_observers
from fedmutual.studies.study import Runs, Setting, Study, check_folders, format_run, list_seeds, train_runs
from fedmutual.user_code.recorded_code import set_trust

RESULT = "sweep.json"
SHARE = 0.1  # of each client's training data, held out where the experiment holds nothing out
KEPT = 3  # successive halving keeps one setting of so many, and gives it so many times the rounds
By = Literal["personal", "global"]


@dataclass(frozen=True)
class Sweep:
    """The tried settings, and the best setting by hold-out scores.

    `folder` contains sweep.json and the runs, and `tried` has all settings in the order in which they were given.
    """

    folder: Path
    tried: tuple[ScoredTrial, ...]
    best: tuple[ScoredTrial, ...]  # one, or several that score the same; none where all diverged
    warnings: tuple[str, ...]  # one sentence each
    budget: Mapping[str, int | None]  # of all trainings: runs, rounds, steps, forwards, bytes down and up; None: not known

    @property
    def chosen(self) -> ScoredTrial | None:
        """The best setting; of several equal settings, the first given."""
        return next(iter(self.best), None)

    @property
    def unscored(self) -> list[ScoredTrial]:
        """The settings without a score that were trained to the end: the main metric is undefined on the hold-out rows."""
        last = max(t.round or 0 for t in self.tried)
        return [t for t in self.tried if (t.round or 0) == last and not t.diverged and t.last is None]

    @property
    def failure(self) -> str:
        """Why no setting could be chosen, in words; empty if one was chosen."""
        if self.best:
            return ""
        last, seeds = max(t.round or 0 for t in self.tried), max(len(t.folders) for t in self.tried)
        how = "diverged in at least one seed" if seeds > 1 else "diverged"
        if self.unscored:
            undefined = describe_undefined(self.unscored[0].metric, "the hold-out rows")
            return f"{undefined}; hold out more rows with split.holdout"
        if all(t.diverged for t in self.tried):
            return f"every setting {how}"
        return f"every setting that halving continued to round {last} {how}; the others were ended early"


@dataclass(frozen=True)
class SweepPlan:
    """A study of combinations of values, with local-only training beside them.

    `by` is the model whose hold-out score chooses; None: the model that a client would use.
    """

    name: str  # of the configuration
    combinations: Sequence[Setting]
    local_only: Mapping[str, Setting]  # label of a combination -> local-only training to compare it with
    study: Study  # of all settings, each once
    by: By | None = None
    halving: bool = False

    @property
    def rungs(self) -> list[tuple[int, int]]:
        """(round, how many settings train up to it), the last round at the end; without halving this one alone.

        Each number of rounds is a multiple of `records.evaluate_every`, so that a resume finds the scores.
        """
        config, count, halvings = self.combinations[0].config, len(self.combinations), 0
        rounds, every = config.rounds, config.records.evaluate_every
        while self.halving and KEPT ** (halvings + 1) <= min(count, rounds // every):
            halvings += 1
        rungs = [
            (math.ceil(rounds / KEPT**n / every) * every, count // KEPT ** (halvings - n)) for n in range(halvings, 0, -1)
        ]
        return [*rungs, (rounds, count // KEPT**halvings)]

    @property
    def most_trainings(self) -> int:
        """How many runs are trained or continued, at most."""
        runs, each = len(self.study.runs), len(self.study.runs) // len(self.study.settings)
        beside = 2 if self.local_only else 1
        return sum(min(runs, beside * count * each) for _, count in self.rungs)


def sweep(
    experiment: Config | str | Path,
    grid: Grid,
    seeds: int = 1,
    out: str | Path | None = None,
    resume: bool = False,
    by: By | None = None,
    watch: Watch | None = None,
    trust_code: bool = False,
    jobs: int | None = None,
    trials: int | None = None,
    halving: bool = False,
) -> Sweep:
    """Train every combination of a grid's values into OUT/<combination>/<seed>, and return all results.

    The best setting has the highest mean score over clients and seeds after the last round, on rows held out of the clients'
    training data: of the model that a client would use, or with by="global" of the shared model. A setting that diverges is
    reported and not chosen.

    grid: {"optimizer.lr": [0.003, 0.01, 0.03], "rounds": [5]}; a single value is fixed. With `trials` also a range:
    {"optimizer.lr": {"log-uniform": [0.001, 0.1]}}, or "uniform", or "integers" with both ends.
    out: the folder; None: `runs/<name>-sweep`.
    watch: returns the observer of a run, by the name of the run; in a worker process: start, notes, replies, scores, end.
    trust_code: with resume, continue with code that has changed since the runs recorded the code.
    jobs: how many runs are trained side by side; None: one for each core where that is faster.
    trials: how many combinations are drawn at random; equal ones are trained once. None: all combinations are tried.
    halving: successive halving. All settings train for a fraction of the rounds; the best third of them goes on, for three
    times as many rounds, until the last ones have all rounds.

    Source of halving: Jamieson and Talwalkar, 2016, https://arxiv.org/abs/1502.07943; of random search: Bergstra and
    Bengio, 2012, https://jmlr.org/papers/v13/bergstra12a.html.

    Each remark, and each of `Sweep.warnings`, is a `RemarkWarning`.

    Raises:
        UserError: a combination cannot be trained; raised before the first training.
    """
    with set_trust(trust_code):
        plan = plan_sweep(experiment, grid, seeds, by, None if out is None else Path(out), trials, halving)
        result = train_sweep(plan, resume, make_warning_observers(watch), jobs)
    for warning in result.warnings:
        warn_user(warning)
    return result


def plan_sweep(
    experiment: Config | str | Path,
    grid: Grid,
    seeds: int = 1,
    by: By | None = None,
    out: Path | None = None,
    trials: int | None = None,
    halving: bool = False,
) -> SweepPlan:
    """Return the plan of a sweep, after a check of every combination of values. trials, halving: as `sweep` takes them.

    If the experiment has no hold-out rows, a tenth of the training rows becomes hold-out rows, with a warning.

    out: the folder; None: `runs/<name>-sweep`.

    Raises:
        ConfigError: a combination is no experiment, two cannot be compared on the same rows, or `seeds` is below 1.
    """
    lists = expand_grid(grid)
    ranges = [key for key, tried in lists.items() if any(map(is_range, tried))]
    several = [key for key, tried in lists.items() if len(tried) > 1 or key in ranges]
    if not several:
        in_python = '(in Python: {"optimizer.lr": [0.003, 0.01, 0.03]})'
        fix = f"give a key several values: --set optimizer.lr=0.003,0.01,0.03 {in_python}"
        meant = describe_ranges(value for values in lists.values() for value in values)
        raise ConfigError(f"there is nothing to choose from; {fix}{meant}")
    for key in filter(has_effect_on_rows, several):
        fix = "--seeds 3 (in Python: seeds=3) tries each setting with three" if key == "seed" else "make a sweep for each"
        raise ConfigError(
            f"key {key!r} of the grid: settings are compared on the same hold-out rows, so it takes one value; {fix}"
        )
    if trials is not None:
        fixed = {key: values[0] for key, values in lists.items() if key not in ranges}
        try:
            read = experiment if isinstance(experiment, Config) else load_config(experiment, **fixed)
        except ConfigError as problem:
            raise ConfigError(f"{problem}{describe_ranges(fixed.values())}") from None
        drawn = draw_combinations(lists, trials, read.seed)
        combinations = [values for n, values in enumerate(drawn) if values not in drawn[:n]]
    elif ranges:
        fix = "say how many settings are drawn: --trials 20 (in Python: trials=20)"
        raise ConfigError(f"key {ranges[0]!r} has a range, of which not every value can be tried; {fix}")
    else:
        combinations = [*list_combinations(lists)]
    settings = _make_settings(experiment, combinations, several, by)
    first = settings[0].config
    local_only = _list_local_only(settings, several)
    each = {setting.folder: setting for setting in (*settings, *local_only.values())}
    study = Study([*each.values()], list_seeds(first, seeds), out or Path("runs") / f"{first.name}-sweep")
    return _check_halving(SweepPlan(first.name, settings, local_only, study, by, halving))


def plan_combinations(
    config: Config, combinations: Sequence[Mapping[str, Any]], out: Path, halving: bool = False
) -> SweepPlan:
    """Return the plan of a sweep over combinations that have equal keys: one seed, no local-only training beside.

    Raises:
        ConfigError: as `plan_sweep`.
    """
    settings = _make_settings(config, combinations, tuple(combinations[0]), None)
    study = Study(settings, [config.seed], out)
    return _check_halving(SweepPlan(config.name, settings, {}, study, halving=halving))


def _check_halving(plan: SweepPlan) -> SweepPlan:
    """Return the plan. Raise ConfigError if halving would change what a setting means, or end nothing early."""
    if not plan.halving:
        return plan
    for setting in plan.combinations:
        if (key := find_schedule(setting.config)) is not None:
            raise ConfigError(
                f"halving: the schedule {key!r} depends on the number of rounds; set one value, or leave halving out"
            )
    if len({setting.config.rounds for setting in plan.combinations}) > 1:
        raise ConfigError("halving: 'rounds' takes one value, of the settings that train to the end; or leave halving out")
    if len(plan.rungs) < 2:
        count, rounds = len(plan.combinations), plan.combinations[0].config.rounds
        raise ConfigError(
            f"halving: of {count} settings with {rounds} rounds none can end early; try {KEPT} settings or more, and at "
            f"least {KEPT} times as many rounds as 'records.evaluate_every'"
        )
    return plan


def _make_settings(
    experiment: Config | str | Path, combinations: Sequence[Mapping[str, Any]], several: Sequence[str], by: By | None
) -> list[Setting]:
    """Return each combination as a setting with hold-out rows, whose test and validation data are not scored."""
    given = isinstance(experiment, Config)
    tables = tomllib.loads(dump_config(experiment)) if isinstance(experiment, Config) else read_tables(Path(experiment))
    settings: list[Setting] = []
    for values in combinations:
        label = make_label({key: values[key] for key in several})
        try:
            config = parse_config(dict(tables), "configuration" if given else str(experiment), values)
            if config.records.evaluate_on != "all":  # the command for the chosen setting would not score them either
                raise ConfigError("records.evaluate_on: a sweep always scores hold-out rows only; remove the key")
            if by is not None and not _has_model(config, by):
                kind = {"personal": "personal models", "global": "shared model"}[by]
                wrong = f"algorithm {config.algorithm['name']!r} has no {kind}; leave it out"
                raise ConfigError(f"--by {by} (in Python: by={by!r}): {wrong}")
        except ConfigError as problem:
            raise ConfigError(f"with {label}: {problem}{describe_ranges(values.values())}") from None
        records = config.records.model_copy(update={"evaluate_on": "holdout", "best_by": None})
        config = config.model_copy(update={"records": records})
        if twice := [s.label for s in settings if s.config == config]:
            raise ConfigError(f"{twice[0]} and {label} are equal settings; name each value once")
        settings.append(Setting(label, config, make_folder_name(label), values))
    first = settings[0].config  # they have the same rows
    if first.split.holdout or first.partition.kind == "file":
        return settings
    warn_user(
        f"the experiment has no hold-out rows to choose by, so split.holdout = {SHARE:g} is set for the sweep: "
        "a tenth of each client's training data is not trained on"
    )
    split = first.split.model_copy(update={"holdout": SHARE})
    return [replace(setting, config=setting.config.model_copy(update={"split": split})) for setting in settings]


def _has_model(config: Config, model: By) -> bool:
    return model == "global" if is_pooled(config) else model in make_algorithm(config).scores


def has_effect_on_rows(key: str) -> bool:
    """Return whether a key changes the rows, or the meaning of their scores."""
    parts = key.split(".")
    inner = parts[2:] if parts[0] == "clients" else parts
    if inner == ["data", "augment"]:  # of training examples only
        return False
    return key in ("name", "seed") or inner[:1] in (["data"], ["partition"], ["split"]) or inner == ["training", "task"]


def _list_local_only(settings: Sequence[Setting], several: Sequence[str]) -> dict[str, Setting]:
    """Return label -> local-only training with equal values, for settings with personal models; equal ones only once."""
    known = [setting for setting in settings if setting.config.algorithm["name"] == LOCAL_ONLY]
    references = dict[str, Setting]()
    for setting in settings:
        if not _has_model(setting.config, "personal"):
            continue
        config, _ = replace_algorithm(setting.config, LOCAL_ONLY)
        same = next((s for s in known if s.config == config), None)
        if same is None:
            values = {k: v for k, v in setting.values.items() if ".algorithm." not in f".{k}."}
            label = ", ".join(filter(None, (LOCAL_ONLY, make_label({k: v for k, v in values.items() if k in several}))))
            known.append(same := Setting(label, config, make_folder_name(label), values))
        if same is not setting:
            references[setting.label] = same
    return references


def train_sweep(plan: SweepPlan, resume: bool = False, watch: Watch | None = None, jobs: int | None = None) -> Sweep:
    """Train the plan, write OUT/sweep.json, and return the result. watch, jobs: as `train_runs` takes them.

    With halving the runs of the best settings go on in their folders, and a resume reads each decision from the scores of
    its round, also of runs that have more rounds by now.

    Raises:
        UserError: a folder, the data or a network is wrong; raised before the first run is trained.
    """
    study = plan.study
    check_folders(study.runs, resume)
    _try_settings(study)
    tried, left = dict[str, ScoredTrial](), [*plan.combinations]
    for round, count in plan.rungs:
        by_label = {setting.label: setting for setting in left[:count]}
        diverged = train_runs(_list_rung(plan, by_label, round), resume, watch, jobs, tolerated=(Diverged,))
        resume = True  # the best of these runs go on
        scored = _score_settings(plan, by_label.values(), round, diverged)
        tried |= scored
        if not (left := [by_label[trial.label] for trial in rank_trials([*scored.values()])]):
            break
    result = _judge_sweep(plan, [tried[s.label] for s in plan.combinations], pick_best([*scored.values()]))
    write_json(study.out / RESULT, _make_sweep_record(plan, result))
    return result


def _list_rung(plan: SweepPlan, chosen: Iterable[str], round: int) -> Runs:
    """Return the runs of some labels, and of local-only training beside, up to a round; without those that are further."""
    if not plan.halving:
        return plan.study.runs
    labels = {*chosen}
    labels |= {beside.label for label in labels if (beside := plan.local_only.get(label)) is not None}
    return {
        folder: (key, config.model_copy(update={"rounds": round}))
        for folder, (key, config) in plan.study.runs.items()
        if key[0] in labels and not ((folder / CONFIG).exists() and read_dumped(folder / CONFIG).rounds > round)
    }


def _score_settings(
    plan: SweepPlan, settings: Iterable[Setting], round: int, diverged: Mapping[Path, Exception]
) -> dict[str, ScoredTrial]:
    """Return label -> the scores of a setting after a round. diverged: folder of a run -> error."""
    ended = {plan.study.runs[folder][0][:2]: str(problem) for folder, problem in diverged.items()}  # by setting and seed
    scored, decides = {}, round if plan.halving else None
    for setting in settings:
        folders, local_only = plan.study.find_folders(setting), plan.local_only.get(setting.label)
        errors = {seed: ended[setting.label, seed] for seed in folders if (setting.label, seed) in ended}
        beside = plan.study.find_folders(local_only) if local_only else None
        scored[setting.label] = ScoredTrial(setting.values, setting.label, folders, errors, plan.by, beside, decides)
    return scored


def _try_settings(study: Study) -> None:
    """Read the data and build the networks of each setting to train, so that errors appear now and not hours later."""
    unfinished = [run for folder, run in study.runs.items() if not (folder / SUMMARY).exists()]
    prepared: dict[tuple[str, ...], dict[str, data.Prepared]] = {}
    tried = set[object]()
    with torch.random.fork_rng(devices=[]):
        for key, config in unfinished:
            if key[0] in tried:
                continue
            tried.add(key[0])
            own_networks = list_user_networks(config)  # which choose the form of inputs
            prepared[own_networks] = prepared.get(own_networks) or data.prepare(config)
            try:
                _check_scores(build.build(config, prepared=prepared[own_networks]))
            except UserError as problem:
                raise type(problem)(f"with {format_run(key)}: {problem}") from None


def _check_scores(experiment: Experiment) -> None:
    """Raise UserError if a client cannot be built, or if no score can choose a setting."""
    shared = []
    for id in experiment.clients:
        client, metric = experiment.build_client(id), get_metric(experiment.make_task(id))
        sizes = [len(rows) for name, rows in client.data.items() if name.startswith("holdout")]  # of pooled data of all
        if any(is_disclosed(client.metrics, rows) if metric == ACCURACY else client.metrics == "all" for rows in sizes):
            shared.append(metric)
    if not shared:
        raise ConfigError("no client sends its scores, so no score can choose a setting; set share.metrics to 'all'")
    if ACCURACY not in shared and (len({*shared}) > 1 or None in shared):
        raise ConfigError("the clients' tasks have no main metric in common to choose by; declare `metric` in the task")


def _judge_sweep(plan: SweepPlan, tried: Sequence[ScoredTrial], best: tuple[ScoredTrial, ...]) -> Sweep:
    """Return the result, with warnings about the best setting and others, and the cost of all trainings."""
    study = plan.study
    last = max((trial.round or 0 for trial in tried), default=0)
    longest = [trial for trial in tried if (trial.round or 0) == last]  # with halving, those that were not ended early
    warnings = describe_choice(longest, best, _find_ends_of_values(plan, tried, best[0]) if best else ())
    split = plan.combinations[0].config.split
    if split.folds and split.fold is None:
        warnings.append(
            f"rows that are held out in one of the {split.folds} folds are scored in another one, so a run with these folds "
            "and the chosen setting scores too well; `fedmutual compare --tune` chooses for each fold by itself"
        )
    if cost := privacy_plan.describe_trials([*study.runs], plan.combinations[0].config):
        warnings.append(cost)
    return Sweep(study.out, tuple(tried), best, tuple(warnings), _sum_costs([*study.runs]))


def _sum_costs(folders: Sequence[Path]) -> dict[str, int | None]:
    """Return what the runs that were begun took, with those that ended early or diverged; None for what a run does not know.

    The round in which a run diverged is not counted, so a run that diverged in its first one took nothing.
    """
    runs = read_runs(folder for folder in folders if (folder / CONFIG).exists())
    rounds = sum(int(run.work["round"].max(initial=0)) for run in runs)
    known = {key: [run.totals[key] for run in runs if len(run.messages)] for key in ("steps", "forwards", "down", "up")}
    sums = {key: None if None in numbers else sum(filter(None, numbers)) for key, numbers in known.items()}
    return {"runs": len(runs), "rounds": rounds, **sums}


def _find_ends_of_values(
    plan: SweepPlan, tried: Sequence[ScoredTrial], chosen: ScoredTrial
) -> Iterator[tuple[str, str, bool]]:
    """Yield (key, chosen value as TOML, whether it is the largest) where a better value may lie beyond the tried ones."""
    config = next(s.config for s in plan.combinations if s.label == chosen.label)
    for key, value, neighbour in find_edges(tried, chosen):
        further = value + (value - neighbour) * (1 if isinstance(value, int) else 1e-3)
        try:
            override_config(config, {key: further})
        except ConfigError:  # the end of what is possible, not of what was tried
            continue
        yield key, format_value(value), value > neighbour


def _make_sweep_record(plan: SweepPlan, sweep: Sweep) -> dict[str, Any]:
    """Return the content of sweep.json: the trials with their hold-out scores (accuracies as fractions), and the choice."""
    settings = []
    for tried in sweep.tried:
        scores = {"last": _make_number(tried.last), "best": _make_number(tried.best), "best_rounds": [*tried.best_rounds]}
        settings.append(
            {
                "label": tried.label,
                "set": _format_settings(tried),
                "runs": [path.relative_to(sweep.folder).as_posix() for path in tried.folders.values()],
                "diverged": {str(seed): how for seed, how in tried.diverged.items()},
                **({} if tried.round is None else {"rounds": tried.round}),
                "model": tried.model,
                f"holdout_{tried.metric.name}": scores,
                "over_local_only": _make_number(tried.gain.estimate) if isinstance(tried.gain, Gains) else None,
            }
        )
    return {
        "format": 1,
        "name": plan.name,
        "seeds": list(plan.study.seeds),
        "by": plan.by,
        "holdout": plan.combinations[0].config.split.holdout,
        "settings": settings,
        "best": [tried.label for tried in sweep.best],
        "chosen": _format_settings(sweep.chosen) if sweep.chosen else None,
        "budget": dict(sweep.budget),
        "warnings": list(sweep.warnings),
    }


def _format_settings(tried: ScoredTrial) -> dict[str, str]:
    """Return key -> value in the form of `--set`."""
    return {key: format_value(value) for key, value in tried.values.items()}


def _make_number(e: Estimate | None) -> dict[str, Any] | None:
    return None if e is None else {"mean": e.mean, "half": e.half, "n": e.n, "over": e.unit}
