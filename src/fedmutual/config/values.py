"""The types of the values of keys: they convert TOML to the value, or give a sentence about the error."""

import math
import os
import re
import unicodedata
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from fedmutual.config.keys import Table
from fedmutual.role import DEFAULT_ALGORITHM
from fedmutual.settings import Schedule, Setting, within

WINDOWS_PATH_FIX = "write a path of Windows in single quotes, 'C:\\data\\rows.csv', or with slashes, \"C:/data/rows.csv\""
FEDERATED: Literal["federated"] = "federated"  # data.mean, data.std: of the training rows of all clients


def _convert_path(value: object) -> object:
    if isinstance(value, str) and any(ord(character) < 32 for character in value):  # "C:\temp" in TOML is "C:", a tab, "emp"
        raise ValueError(f"{value!r} holds a control character, as \\t is between double quotes; {WINDOWS_PATH_FIX}")
    try:
        return Path(value).expanduser() if isinstance(value, str) else value
    except RuntimeError:
        raise ValueError(f"there is no home folder for {value!r}") from None


def _expand_home(value: str) -> str:
    return os.path.expanduser(value)


def _check_run_name(value: str) -> str:
    if value in ("", ".", "..") or "/" in value or "\\" in value:
        raise ValueError(f"the name of a run is also the name of its folder, so the name must not be {value!r}")
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in value):  # control characters, halves of characters
        raise ValueError(
            f"the name of a run is also the name of its folder, so {value!r} must not contain control characters"
        )
    return value


def _check_cluster(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"[^/\s]+:\d{1,5}", value):
        raise ValueError(f"a Ray cluster is 'auto' or HOST:PORT, not {value!r}")
    return value


def _listify(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _list_statistics(value: object) -> object:
    if isinstance(value, str) and value != FEDERATED:
        raise ValueError(f"a list of numbers, or {FEDERATED!r}, not {value!r}")
    return tuple(value) if isinstance(value, list) else value


def drop_empty_table(value: object) -> object:
    """Return None for an empty table."""
    return None if value == {} else value


def _convert_schedule(value: object) -> object:
    """Convert a table { start, end, shape } to a Schedule."""
    if not isinstance(value, dict):
        return value
    unknown = [k for k in value if k not in ("start", "end", "shape", "at")]
    if unknown or not {"start", "end"} <= value.keys():
        raise ValueError(
            f'a schedule is {{ start = 0.9, end = 0.3, shape = "linear" }}, not {value}'
            + (f"; it has no {unknown[0]!r}" if unknown else "")
        )
    if not all(_check_finite(value.get(k, 0.0)) for k in ("start", "end", "at")):
        raise ValueError(f"the start, end and at of a schedule are finite numbers, not {value}")
    within("the at of a schedule", value.get("at", 0.0), 0, 1)
    return Schedule(**value)


def _check_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_not_negative(value: Setting) -> Setting:
    within("a learning rate", value, 0, math.inf)
    return value


def make_column_table(value: object) -> object:
    """Return the table of a column that is given as text (the kind) or as a list (the values of a category)."""
    if isinstance(value, str):
        return {"kind": value}
    return {"kind": "category", "values": value} if isinstance(value, list | tuple) else value


def _check_distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    texts = [v.strip() for v in values]
    if "" in texts or len(set(texts)) < len(texts):
        raise ValueError("the values of a category must differ from one another, and none may be empty")
    return tuple(texts)


def _check_date_format(value: str) -> str:
    day = datetime(2026, 5, 31)
    try:
        is_date = datetime.strptime(day.strftime(value), value) == day
    except ValueError:
        is_date = False
    if not is_date:
        raise ValueError(f"a date format has the year, the month and the day, for example '%d.%m.%Y', and not {value!r}")
    return value


def _list_label_columns(value: object) -> object:
    """A list of columns becomes a tuple of different names."""
    if not isinstance(value, list | tuple):
        return value
    if not value or len(set(map(str, value))) < len(value):
        raise ValueError("a list of label columns has at least one name, and each name once")
    return tuple(value)


def _dump_settings(value: object) -> object:
    """Return the settings of an algorithm as TOML, with schedules as tables."""
    if not isinstance(value, dict):
        return value
    return {k: asdict(v) if isinstance(v, Schedule) else v for k, v in value.items()}


def name_default_algorithm(value: object) -> object:
    """Return the table [algorithm] with a name: its own, or the default."""
    return {"name": DEFAULT_ALGORITHM, **value} if isinstance(value, dict) else value


PathSetting = Annotated[Path, BeforeValidator(_convert_path)]
Pretrained = Annotated[str, Field(min_length=1), AfterValidator(_expand_home)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listify)]
DateFormat = Annotated[str, AfterValidator(_check_date_format)]
LabelColumns = Annotated[str | tuple[str, ...], BeforeValidator(_list_label_columns)]
Parts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listify), Field(min_length=1)]
ColumnValues = Annotated[Names, Field(min_length=1), AfterValidator(_check_distinct)]
Means = Annotated[tuple[float, ...] | Literal["federated"], BeforeValidator(_list_statistics)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Angles = Annotated[tuple[float, ...], BeforeValidator(_listify), Field(min_length=1)]
Spreads = Annotated[tuple[Positive, ...] | Literal["federated"], BeforeValidator(_list_statistics)]
Sides = Annotated[tuple[Count, ...], BeforeValidator(_listify)]
BatchSize = Annotated[int, Field(ge=1, le=1_000_000_000)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0)]
Trim = Annotated[float, Field(ge=0, lt=0.5)]
Moving = Annotated[float | Schedule, BeforeValidator(_convert_schedule)]
Rate = Annotated[Moving, AfterValidator(_check_not_negative)]
Settings = Annotated[Table, BeforeValidator(_dump_settings)]
RunName = Annotated[str, AfterValidator(_check_run_name)]
ClusterAddress = Annotated[str, AfterValidator(_check_cluster)]
