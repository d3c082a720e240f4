"""The base class of tables, the declaration of a key with its effect, and the types of values.

A type converts TOML to the value, or gives a sentence about the error.
"""

import math
import os
import re
import unicodedata
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from fedmutual.settings import OnlyIf, Schedule, Setting, within

Table = dict[str, Any]
OnlyIfs = tuple[OnlyIf, ...]
Affects = Literal["result", "scores", "machine", "record"]
"""What another value of a key changes: the numbers that are learned; only which scores there are; only where and how the
work is done, which may change the last digits; only what is written. Fingerprints, comparisons and docs derive from it."""

FEDERATED: Literal["federated"] = "federated"  # data.mean, data.std: of the training rows of all clients
WINDOWS_PATH_FIX = "write a path of Windows in single quotes, 'C:\\data\\rows.csv', or with slashes, \"C:/data/rows.csv\""


class Section(BaseModel):
    """A table of the configuration. It is frozen, refuses unknown keys, and converts no value ("true" is not a boolean)."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
    affects: ClassVar[Affects] = "result"  # the effect of each key that declares none
    only_if: ClassVar[OnlyIfs] = ()  # the conditions of each key that declares none of its own


@dataclass(frozen=True)
class KeyEffect:
    """The effect of a key: on results, on scores, on the machine's work or on the record."""

    affects: Affects | None = None  # None: the effect of the table
    resumable: bool = False  # whether a run may be resumed with another value
    # The conditions of any effect; messages name the first that is false. None: the conditions of the table.
    only_if: OnlyIfs | None = None
    unused_on_sites: str = ""  # why real sites do not read the key; "": they do
    lead_may_change: bool = False  # whether a lead may change the key of a contract without the sites' consent


def key(default: Any = None, about: str | None = None, **effect: Any) -> Any:
    """Return the field of a key with its default (None: unset), its meaning in one line, and the fields of its `KeyEffect`.

    about: the meaning; unset, the docstring below the key.
    """
    return Field(default, description=about, json_schema_extra=cast(Any, {"effect": KeyEffect(**effect)}))


def read_effect(table: type[Section], name: str) -> KeyEffect:
    """Return the effect of a key of a table, with the table's values for what the key does not declare."""
    extra = cast(Any, table.model_fields[name].json_schema_extra or {})
    effect: KeyEffect = extra.get("effect", KeyEffect())
    only_if = table.only_if if effect.only_if is None else effect.only_if
    return replace(effect, affects=effect.affects or table.affects, only_if=only_if)


def list_effects(table: type[Section], prefix: str = "") -> dict[str, KeyEffect]:
    """Return dotted key -> effect for a table and its inner tables, without the tables of clients."""
    effects: dict[str, KeyEffect] = {}
    for name, spec in table.model_fields.items():
        if isinstance(spec.annotation, type) and issubclass(spec.annotation, Section):
            effects |= list_effects(spec.annotation, f"{prefix}{name}.")
        elif prefix or name not in ("clients", "algorithm"):
            effects[f"{prefix}{name}"] = read_effect(table, name)
    return effects


def find_table(kind: Any) -> type[Section] | None:
    """Return the table in the type of a key, also in a dictionary of tables; None if the key is a value."""
    if isinstance(kind, type) and issubclass(kind, Section):
        return kind
    return next(filter(None, map(find_table, get_args(kind))), None)


def _convert_path(value: object) -> object:
    if isinstance(value, str) and any(ord(character) < 32 for character in value):  # "C:\temp" in TOML is "C:", a tab, "emp"
        raise ValueError(f"{value!r} holds a control character, as \\t is between double quotes; {WINDOWS_PATH_FIX}")
    try:
        return Path(value).expanduser() if isinstance(value, str) else value
    except RuntimeError:
        raise ValueError(f"there is no home folder for {value!r}") from None


def _check_run_name(value: str) -> str:
    is_control = any(unicodedata.category(c) in ("Cc", "Cs") for c in value)  # control characters, halves of characters
    if value in ("", ".", "..") or "/" in value or "\\" in value or is_control:
        raise ValueError(
            f"a run's name names its folder, so it is not empty and has no slash or control character: {value!r}"
        )
    return value


def _check_cluster(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"[^/\s]+:\d{1,5}", value):
        raise ValueError(f"a Ray cluster is 'auto' or HOST:PORT, not {value!r}")
    return value


def _make_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _make_names(value: object) -> object:
    return (value,) if isinstance(value, str) else _make_tuple(value)


def _make_statistics(value: object) -> object:
    if isinstance(value, str) and value != FEDERATED:
        raise ValueError(f"a list of numbers, or {FEDERATED!r}, not {value!r}")
    return _make_tuple(value)


def _make_weights(value: object) -> object:
    if isinstance(value, str) and value != "balanced":
        raise ValueError(f"a list of numbers, or 'balanced', not {value!r}")
    return _make_tuple(value)


def _make_distinct(value: object) -> object:
    """Return a list as a tuple of different texts."""
    if isinstance(value, list | tuple) and (not value or "" in value or len(set(map(str, value))) < len(value)):
        raise ValueError("a list here has at least one text, each text once, and no empty text")
    return _make_tuple(value)


def _strip_values(values: tuple[str, ...]) -> object:
    return _make_distinct([v.strip() for v in values])


def _convert_schedule(value: object) -> object:
    """Convert a table { start, end, shape, at, warmup } to a Schedule."""
    if not isinstance(value, dict):
        return value
    numbers: tuple[Any, ...] = value.get("start"), value.get("end"), value.get("at", 0.5), value.get("warmup", 0.0)
    if value.keys() - {"start", "end", "shape", "at", "warmup"} or not all(
        type(n) in (int, float) and math.isfinite(n) for n in numbers
    ):
        raise ValueError(f'a schedule is {{ start = 0.9, end = 0.3, shape = "linear" }} of finite numbers, not {value}')
    within("the at of a schedule", numbers[2], 0, 1)
    within("the warmup of a schedule", numbers[3], 0, 1)
    return Schedule(**value)


def _check_not_negative(value: Setting) -> Setting:
    within("a learning rate", value, 0, math.inf)
    return value


def _check_increasing(values: tuple[float, ...]) -> tuple[float, ...]:
    if list(values) != sorted(set(values)):
        raise ValueError("must be increasing numbers")
    return values


def _check_date_format(value: str) -> str:
    day = datetime(2026, 5, 31)
    try:
        is_date = datetime.strptime(day.strftime(value), value) == day
    except ValueError:
        is_date = False
    if not is_date:
        raise ValueError(f"a date format has the year, the month and the day, for example '%d.%m.%Y', and not {value!r}")
    return value


def _dump_settings(value: object) -> object:
    """Return the settings of an algorithm as TOML, with schedules as tables."""
    return {k: v.record() if isinstance(v, Schedule) else v for k, v in value.items()} if isinstance(value, dict) else value


PathSetting = Annotated[Path, BeforeValidator(_convert_path)]
Pretrained = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
Names = Annotated[tuple[str, ...], BeforeValidator(_make_names)]
DateFormat = Annotated[str, AfterValidator(_check_date_format)]
LabelColumns = Annotated[str | tuple[str, ...], BeforeValidator(_make_distinct)]
Participants = Annotated[tuple[str, ...], BeforeValidator(_make_distinct)]
ColumnValues = Annotated[Names, BeforeValidator(_make_distinct), AfterValidator(_strip_values)]
Parts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_make_names), Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Angles = Annotated[tuple[float, ...], BeforeValidator(_make_tuple), Field(min_length=1)]
Times = Annotated[tuple[Positive, ...], BeforeValidator(_make_tuple), Field(min_length=1), AfterValidator(_check_increasing)]
_Means = Annotated[tuple[float, ...], BeforeValidator(_make_tuple)]
_Spreads = Annotated[tuple[Positive, ...], BeforeValidator(_make_tuple)]
Means = Annotated[_Means | Literal["federated"] | dict[str, _Means], BeforeValidator(_make_statistics)]
Spreads = Annotated[_Spreads | Literal["federated"] | dict[str, _Spreads], BeforeValidator(_make_statistics)]
Sides = Annotated[tuple[Count, ...], BeforeValidator(_make_tuple)]
BatchSize = Annotated[int, Field(ge=1, le=1_000_000_000)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0)]
Moving = Annotated[float | Schedule, BeforeValidator(_convert_schedule)]
Weights = Annotated[tuple[Annotated[float, Field(ge=0)], ...] | Literal["balanced"], BeforeValidator(_make_weights)]
Rate = Annotated[Moving, AfterValidator(_check_not_negative)]
Settings = Annotated[Table, BeforeValidator(_dump_settings)]
RunName = Annotated[str, AfterValidator(_check_run_name)]
ClusterAddress = Annotated[str, AfterValidator(_check_cluster)]
