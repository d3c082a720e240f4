"""The plan of a sweep: every combination as a checked configuration, and local-only training to compare with."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedmutual.config import Config, dump_config, is_pooled, make_algorithm, parse_config, read_tables, replace_algorithm
from fedmutual.config.grid import Grid, expand_grid, list_combinations, make_folder_name, make_label
from fedmutual.errors import ConfigError, warn_user
from fedmutual.role import LOCAL_ONLY
from fedmutual.studies.study import Setting, Study, list_seeds

By = Literal["personal", "global"]
SHARE = 0.1  # of each client's training data, held out where the experiment holds nothing out


@dataclass(frozen=True)
class SweepPlan:
    """A study of combinations of values, with local-only training beside them.

    `by` is the model whose hold-out score chooses; None: the model that a client would use.
    """

    name: str  # of the configuration
    combinations: Sequence[Setting]
    local_only: Sequence[Setting | None]  # beside each combination; None where there are no personal models to compare
    study: Study  # of all settings, each once
    by: By | None = None


def plan_sweep(
    experiment: Config | str | Path, grid: Grid, seeds: int = 1, by: By | None = None, out: Path | None = None
) -> SweepPlan:
    """Return the plan of a sweep, after a check of every combination of values.

    If the experiment has no hold-out rows, a tenth of the training rows becomes hold-out rows, with a warning.

    out: the folder; None: `runs/<name>-sweep`.

    Raises:
        ConfigError: a combination is no experiment, two cannot be compared on the same rows, or `seeds` is below 1.
    """
    lists = expand_grid(grid)
    several = [key for key, tried in lists.items() if len(tried) > 1]
    if not several:
        raise ConfigError("there is nothing to choose from; give a key several values: --set optimizer.lr=0.003,0.01,0.03")
    for key in filter(_has_effect_on_rows, several):
        fix = "--seeds 3 tries each setting with three" if key == "seed" else "make a sweep for each"
        raise ConfigError(f"--set {key}: settings are compared on the same hold-out rows, so it takes one value; {fix}")
    given = isinstance(experiment, Config)
    tables = tomllib.loads(dump_config(experiment)) if isinstance(experiment, Config) else read_tables(Path(experiment))
    settings = _check_settings(
        tables, "configuration" if given else str(experiment), list(list_combinations(lists)), several, by
    )
    first = settings[0].config
    numbers, settings = list_seeds(first, seeds), _hold_out(settings)
    local_only = _list_local_only(settings, several)
    each = {setting.folder: setting for setting in (*settings, *local_only) if setting is not None}
    study = Study([*each.values()], numbers, out if out is not None else Path("runs") / f"{first.name}-sweep")
    return SweepPlan(first.name, settings, local_only, study, by)


def plan_combinations(config: Config, combinations: Sequence[Mapping[str, Any]], out: Path) -> SweepPlan:
    """Return the plan of a sweep over combinations that have equal keys: one seed, no local-only training beside.

    Raises:
        ConfigError: as `plan_sweep`.
    """
    tables, keys = tomllib.loads(dump_config(config)), tuple(combinations[0])
    settings = _hold_out(_check_settings(tables, "configuration", combinations, keys, None))
    return SweepPlan(config.name, settings, [None] * len(settings), Study(settings, [config.seed], out))


def _check_settings(
    tables: Mapping[str, Any], source: str, combinations: Sequence[Mapping[str, Any]], several: Sequence[str], by: By | None
) -> list[Setting]:
    """Each combination as a setting. Raises ConfigError where one is no experiment, or equals another."""
    settings: list[Setting] = []
    for values in combinations:
        label = make_label({key: values[key] for key in several})
        try:
            config = _hide_scores(parse_config(dict(tables), source, values))
            _check_by(config, by)
        except ConfigError as problem:
            raise ConfigError(f"with {label}: {problem}") from None
        if twice := [s.label for s in settings if s.config == config]:
            raise ConfigError(f"--set: {twice[0]} and {label} are equal settings; name each value once")
        settings.append(Setting(label, config, make_folder_name(label), values))
    return settings


def _hide_scores(config: Config) -> Config:
    """Return the configuration without scores of test and validation data, which may take longer than the training."""
    if config.records.evaluate_on != "all":  # the command for the chosen setting would not score them either
        raise ConfigError("records.evaluate_on: a sweep always scores hold-out rows only; remove the key")
    return config.model_copy(
        update={"records": config.records.model_copy(update={"evaluate_on": "holdout", "best_by": None})}
    )


def _hold_out(settings: list[Setting]) -> list[Setting]:
    """Return the settings with hold-out rows, and warn the user if the configurations have none."""
    first = settings[0].config  # they have the same rows
    if first.split.holdout or first.partition.kind == "file":
        return settings
    warn_user(
        f"the experiment has no hold-out rows to choose by, so split.holdout = {SHARE:g} is set for the sweep: "
        "a tenth of each client's training data is not trained on"
    )
    split = first.split.model_copy(update={"holdout": SHARE})
    return [replace(setting, config=setting.config.model_copy(update={"split": split})) for setting in settings]


def _list_local_only(settings: Sequence[Setting], several: Sequence[str]) -> list[Setting | None]:
    """Return local-only training with the values of each setting, equal ones as one; None without personal models."""
    known = [setting for setting in settings if setting.config.algorithm["name"] == LOCAL_ONLY]
    references: list[Setting | None] = []
    for setting in settings:
        made = _make_local_only(setting, several) if _has_personal(setting.config) else None
        same = next((s for s in known if made and s.config == made.config), made)
        known += [same] if same and same not in known else []
        references.append(same if same is not setting else None)
    return references


def _make_local_only(setting: Setting, several: Sequence[str]) -> Setting:
    config, _ = replace_algorithm(setting.config, LOCAL_ONLY)
    values = {k: v for k, v in setting.values.items() if ".algorithm." not in f".{k}."}
    label = ", ".join(filter(None, (LOCAL_ONLY, make_label({k: v for k, v in values.items() if k in several}))))
    return Setting(label, config, make_folder_name(label), values)


def _has_personal(config: Config) -> bool:
    return not is_pooled(config) and "personal" in make_algorithm(config).scores


def _check_by(config: Config, by: By | None) -> None:
    name = config.algorithm["name"]
    if by == "personal" and not _has_personal(config):
        raise ConfigError(f"--by personal: algorithm {name!r} has no personal models; leave --by out")
    if by == "global" and not is_pooled(config) and "global" not in make_algorithm(config).scores:
        raise ConfigError(f"--by global: algorithm {name!r} has no shared model; leave --by out")


def _has_effect_on_rows(key: str) -> bool:
    """Return whether a key changes the rows, or the meaning of their scores."""
    parts = key.split(".")
    inner = parts[2:] if parts[0] == "clients" else parts
    if inner == ["data", "augment"]:  # of training examples only
        return False
    return key in ("name", "seed") or inner[:1] in (["data"], ["partition"], ["split"]) or inner == ["training", "task"]
