"""The settings of runs, and which of them make runs different experiments."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fedmutual.config.keys import list_effects
from fedmutual.config.schema import Config

_NO_MATTER = {"seed", *(key for key, effect in list_effects(Config).items() if effect.affects != "result")}


def is_distinctive(key: str) -> bool:
    """Return whether runs that differ in this key, or in a client's own key of this name, are compared as other methods."""
    *_, client_key = key.split(".", 2) if key.startswith("clients.") else (key,)
    return not is_under(client_key, _NO_MATTER)


def is_under(key: str, names: Iterable[str]) -> bool:
    """Return whether a dotted key is one of these names, or a key in a table of one of these names."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def flatten_table(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return (dotted key, value) for each value of nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten_table(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def format_setting(value: Any) -> str:
    """Return the value of a setting for a table: text without quotes, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def format_values(tables: Sequence[Mapping[str, Any]], key: str, missing: str = "not set") -> str:
    """Return the distinct values of a key in the settings of runs. missing: the text for a run that does not set the key."""
    return "; ".join(dict.fromkeys(format_setting(t[key]) if key in t else missing for t in tables))


def shorten_key(key: str) -> str:
    """Return a key without the table of the algorithm or of training, for labels."""
    return key.removeprefix("algorithm.").removeprefix("training.")
