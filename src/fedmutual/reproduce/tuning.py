"""The sweep that chose an arm's settings: which values were tried, on which rows, for how long, and which won."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fedmutual.config import read_tables
from fedmutual.errors import ConfigError, RunError
from fedmutual.files import read_json

FOLDER = "sweeps"  # of the experiments: what `fedmutual sweep` wrote as sweep.json, under the names that arms give
RATE = "optimizer.lr"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Tried(_Record):
    """One combination of values, each as `--set` takes it."""

    set: dict[str, str]


class SweepFile(_Record):
    """sweep.json, as far as it says what was chosen and how."""

    name: str
    seeds: tuple[int, ...]
    by: str | None  # the model whose accuracy chose, "global" or "personal"; None: the one that a client would use
    holdout: float
    settings: tuple[Tried, ...]
    chosen: dict[str, str] | None


@dataclass(frozen=True)
class Tuning:
    """What a sweep chose for an arm."""

    path: Path
    file: SweepFile
    rate_times: float  # the arm takes so many times the chosen learning rate

    @cached_property
    def grid(self) -> dict[str, tuple[Any, ...]]:
        """Key -> the values that were tried, of the keys with several."""
        tried: dict[str, dict[str, None]] = {}
        for setting in self.file.settings:
            for key, text in setting.set.items():
                tried.setdefault(key, {})[text] = None
        return {key: tuple(_value(text) for text in texts) for key, texts in tried.items() if len(texts) > 1}

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """Key -> the value that won, of the keys with several."""
        return {key: _value((self.file.chosen or {})[key]) for key in self.grid}

    @property
    def ends(self) -> list[str]:
        """The keys whose winner is the smallest or the largest value that was tried: a better one may lie beyond."""
        return [key for key, won in self.chosen.items() if won in (min(self.grid[key]), max(self.grid[key]))]

    @property
    def rounds(self) -> int:
        """How long each setting was trained: as the sweep's command asked, else as the configuration beside it has it."""
        asked = (self.file.chosen or {}).get("rounds")
        return int(asked or read_tables(self.path.with_name(f"{self.file.name}.toml"))["rounds"])


def _value(text: str) -> Any:
    """A value as `--set` takes it: TOML, else a plain word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_tuning(root: Path, sweep: str, rate_times: float, source: str) -> Tuning:
    """The sweep that an arm names, of a folder of experiments.

    Raises:
        ConfigError: there is no such file, it is none of a sweep's, or no setting won; file and arm are named.
    """
    path = root / FOLDER / f"{sweep}.json"
    try:
        tuning = Tuning(path, SweepFile.model_validate(read_json(path)), rate_times)
        if tuning.chosen and tuning.rounds:
            return tuning
        why = "its sweep tried no key with several values"
    except RunError as problem:
        why = str(problem)
    except ValidationError as problem:
        first = problem.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
    except (KeyError, ValueError) as problem:
        why = f"it says nothing of {problem}"
    raise ConfigError(f"{source}: the sweep {sweep!r} cannot be used ({why}); name a file of {root / FOLDER} without .json")


def tuned_settings(settings: Mapping[str, Any], tuning: Tuning | None, rate_times: float, rate: Any) -> dict[str, Any]:
    """An arm's overrides with what its sweep chose beneath them, and with its share of the learning rate.

    rate: the cell's own learning rate, for an arm without a sweep.

    Raises:
        ValueError: a share is asked of a rate that is no number.
    """
    found = {**(tuning.chosen if tuning else {}), **settings}
    if rate_times == 1:
        return found
    whole = found.get(RATE, rate)
    if isinstance(whole, bool) or not isinstance(whole, int | float):
        raise ValueError(f"'rate_times' needs {RATE} as a number, not {whole!r}")
    return found | {RATE: whole * rate_times}
