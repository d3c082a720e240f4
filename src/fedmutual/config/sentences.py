"""Format an error of a configuration as one sentence that names the key and the fix."""

import difflib
import json
from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from fedmutual.config.keys import Section
from fedmutual.config.schema import ClientConfig, ClientData, ColumnConfig, Config, DataConfig

_WANTED = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "dict_type": "a table",
    "model_type": "a table",
    "tuple_type": "a list",
    "path_type": "a path",
    "is_instance_of": "a path",
}
# pydantic's own steps in a path
_INNER = ("function-", "tuple[", "is-instance", "union", "float", "Schedule", "dataclass")


def format_validation_error(
    problem: ErrorDetails, everywhere: Iterable[str], prefix: str = "", kind: type[Section] = Config
) -> str:
    """Return a validation error of pydantic as one sentence. everywhere: all keys of the configuration, for suggestions.

    prefix: the dotted key of the checked value; "": the value is the whole configuration. kind: the type of the table.
    """
    place = _locate_key(problem)
    key = ".".join([prefix, *place] if prefix else place)
    if problem["type"] == "extra_forbidden":
        return format_unknown_key(key, _list_keys_at(place[:-1], kind), everywhere)
    shown_value = problem["input"] if isinstance(problem["input"], dict) else json.dumps(problem["input"], default=str)
    if problem["type"] == "missing":
        return f"the key {key!r} is missing"
    if problem["type"] in _WANTED:
        return f"key {key!r} must be {_WANTED[problem['type']]}, not {shown_value}"
    if problem["type"] == "value_error":
        return f"key {key!r}: {problem['ctx']['error']}"
    message = problem["msg"].removeprefix("Input ").replace("should be", "must be", 1)
    return f"key {key!r} {message[0].lower()}{message[1:]}, not {shown_value}"


def _locate_key(problem: ErrorDetails) -> list[str]:
    """Return the keys from the top to the wrong key, without pydantic's own steps. Names that users choose are kept."""
    loc = [str(p) for p in problem["loc"]]
    user_names = {len(loc) - 1} if problem["type"] == "extra_forbidden" else set()
    user_names |= {n for n in range(1, len(loc)) if loc[:n] in (["clients"], ["data", "labels"], ["data", "columns"])}
    return [p for n, p in enumerate(loc) if n in user_names or not p.startswith(_INNER)]


def format_unknown_key(key: str, known: Iterable[str], everywhere: Iterable[str]) -> str:
    """Return "unknown key ..." with the most similar key: of the table first, then of all tables."""
    table, _, last = key.rpartition(".")
    known, everywhere = list(known), [k for k in everywhere if k != key]
    near = [f"{table}.{k}" if table else k for k in difflib.get_close_matches(last, known, 1)]
    near = near or [k for k in everywhere if key.endswith(f".{k}") and "." in k]
    for like in ([last], difflib.get_close_matches(last, {k.rpartition(".")[2] for k in everywhere}, 1, 0.75)):
        near = near or [k for k in everywhere if k.rpartition(".")[2] in like]
    if near:
        return f"unknown key {key!r}; did you mean {' or '.join(repr(k) for k in near)}?"
    return f"unknown key {key!r}; there {'is' if len(known) == 1 else 'are'} {', '.join(map(repr, known)) or 'none'}"


def _list_keys_at(table: list[str], kind: type[BaseModel]) -> Iterable[str]:
    """Return the keys of the table at a path."""
    if table[:1] == ["clients"] and len(table) > 1:
        kind, table = ClientConfig, table[2:]
    path = iter(table)
    for name in path:
        annotation: Any = kind.model_fields[name].annotation
        if kind in (DataConfig, ClientData) and name == "columns":
            kind = ColumnConfig
            next(path, None)  # the name of a column
            continue
        kind = next(t for t in (annotation, *get_args(annotation)) if isinstance(t, type) and issubclass(t, Section))
    return kind.model_fields
