"""The base class of tables, and the declaration of a key with its effect."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from fedmutual.settings import OnlyIf

Table = dict[str, Any]
OnlyIfs = tuple[OnlyIf, ...]
_EFFECT = "effect"


class Section(BaseModel):
    """A table of the configuration. It is frozen, refuses unknown keys, and converts no value ("true" is not a boolean)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    only_if: ClassVar[OnlyIfs] = ()  # the conditions of each key that declares none of its own


Affects = Literal["result", "scores", "machine", "record"]
"""What another value of a key changes: the numbers that are learned; only which scores there are; only where and how the
work is done, which may change the last digits; only what is written. Fingerprints, comparisons and docs derive from it."""


@dataclass(frozen=True)
class KeyEffect:
    """The effect of a key: on results, on scores, on the machine's work or on the record."""

    affects: Affects = "result"
    resumable: bool = False  # whether a run may be resumed with another value
    # The conditions of any effect; messages name the first that is false. None: the conditions of the table.
    only_if: OnlyIfs | None = None
    unused_on_sites: str = ""  # why real sites do not read the key; "": they do
    lead_may_change: bool = False  # whether a lead may change the key of a contract without the sites' consent


def key(
    default: Any,
    about: str,
    *,
    affects: Affects = "result",
    resumable: bool = False,
    only_if: OnlyIfs | None = None,
    unused_on_sites: str = "",
    lead_may_change: bool = False,
) -> Any:
    """Return the field of a key with its default (None: unset), its meaning in one line, and its `KeyEffect`."""
    effect = KeyEffect(affects, resumable, only_if, unused_on_sites, lead_may_change)
    return Field(default, description=about, json_schema_extra=cast(Any, {_EFFECT: effect}))


def read_effect(table: type[Section], name: str) -> KeyEffect:
    """Return the effect of a key of a table; without a declared effect, the effect on results."""
    extra = table.model_fields[name].json_schema_extra
    declared: object = extra.get(_EFFECT) if isinstance(extra, dict) else None
    effect = declared if isinstance(declared, KeyEffect) else KeyEffect()
    return effect if effect.only_if is not None else replace(effect, only_if=table.only_if)


def list_effects(table: type[Section], prefix: str = "") -> dict[str, KeyEffect]:
    """Return dotted key -> effect for a table and its inner tables, without the tables of clients."""
    effects: dict[str, KeyEffect] = {}
    for name, spec in table.model_fields.items():
        if isinstance(spec.annotation, type) and issubclass(spec.annotation, Section):
            effects |= list_effects(spec.annotation, f"{prefix}{name}.")
        elif prefix or name not in ("clients", "algorithm"):
            effects[f"{prefix}{name}"] = read_effect(table, name)
    return effects
