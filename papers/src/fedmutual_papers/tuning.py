"""Read the sweep that chose an arm's settings: the values that were tried, the rows, the rounds, and the chosen values."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fedmutual.config import read_tables
from fedmutual.config.grid import LEARNING_RATE
from fedmutual.errors import ConfigError, RunError
from fedmutual.files import read_json

FOLDER = "sweeps"  # of the experiments: what `fedmutual sweep` wrote as sweep.json, under the names that arms give


class _SweepRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class TriedSetting(_SweepRecord):
    """One combination of values, each as `--set` takes it."""

    set: dict[str, str]


class SweepFile(_SweepRecord):
    """The keys of sweep.json that describe the chosen setting and the choice.

    `name` is the name of the configuration, `seeds` are the seeds of each trial, and `holdout` is the fraction of the
    training rows whose scores chose. `settings` are all trials, and `chosen` maps the keys of the best trial to its values
    as `--set` takes them; None: every trial diverged.
    """

    name: str
    seeds: tuple[int, ...]
    by: str | None  # the model whose accuracy chose, "global" or "personal"; None: the one that a client would use
    holdout: float
    settings: tuple[TriedSetting, ...]
    chosen: dict[str, str] | None


@dataclass(frozen=True)
class Tuning:
    """The settings that a sweep chose for an arm, read from the file of that sweep.

    `path` is the path of the sweep's result, a copy of sweep.json, and `file` is the content of this file.
    """

    path: Path
    file: SweepFile
    rate_times: float  # the arm takes so many times the chosen learning rate

    @cached_property
    def grid(self) -> dict[str, tuple[Any, ...]]:
        """Return key -> the values that were tried, for the keys with several values."""
        tried: dict[str, dict[str, None]] = {}
        for setting in self.file.settings:
            for key, text in setting.set.items():
                tried.setdefault(key, {})[text] = None
        return {key: tuple(_parse_value(text) for text in texts) for key, texts in tried.items() if len(texts) > 1}

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """Return key -> the chosen value, for the keys with several values."""
        return {key: _parse_value((self.file.chosen or {})[key]) for key in self.grid}

    @property
    def ends(self) -> list[str]:
        """Return the keys whose chosen value is the smallest or the largest tried value: a better value may lie outside."""
        return [key for key, won in self.chosen.items() if won in (min(self.grid[key]), max(self.grid[key]))]

    @property
    def rounds(self) -> int:
        """Return the rounds of each trial: from the sweep's command, else from the configuration beside the sweep file."""
        asked = (self.file.chosen or {}).get("rounds")
        return int(asked or read_tables(self.path.with_name(f"{self.file.name}.toml"))["rounds"])


def _parse_value(text: str) -> Any:
    """Parse a value as `--set` does: TOML, else a plain string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_tuning(root: Path, sweep: str, rate_times: float, source: str) -> Tuning:
    """Return the sweep that an arm names. root: the folder of the experiments.

    Raises:
        ConfigError: the file is missing or is not a sweep, or the sweep chose no setting; the message names file and arm.
    """
    path = root / FOLDER / f"{sweep}.json"
    try:
        tuning = Tuning(path, SweepFile.model_validate(read_json(path)), rate_times)
        if tuning.chosen and tuning.rounds:
            return tuning
        reason = "its sweep tried no key with several values"
    except RunError as problem:
        reason = str(problem)
    except ValidationError as problem:
        first = problem.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    except (KeyError, ValueError) as problem:
        reason = f"it does not have {problem}"
    raise ConfigError(
        f"{source}: the sweep {sweep!r} cannot be used ({reason}); name a file of {root / FOLDER} without .json"
    )


def make_tuned_settings(settings: Mapping[str, Any], tuning: Tuning | None, rate_times: float, rate: Any) -> dict[str, Any]:
    """Return an arm's overrides together with the settings of its sweep and with its share of the learning rate.

    rate: the learning rate of the cell, for an arm without a sweep. The arm's overrides win over the sweep.

    Raises:
        ValueError: `rate_times` is set, and the learning rate is not a number.
    """
    merged = {**(tuning.chosen if tuning else {}), **settings}
    if rate_times == 1:
        return merged
    full_rate = merged.get(LEARNING_RATE, rate)
    if isinstance(full_rate, bool) or not isinstance(full_rate, int | float):
        raise ValueError(f"'rate_times' needs {LEARNING_RATE} as a number, not {full_rate!r}")
    return merged | {LEARNING_RATE: full_rate * rate_times}
