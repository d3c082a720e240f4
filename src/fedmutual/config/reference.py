"""Describe every key of a configuration, for `fedmutual list keys` and docs/configuration.md."""

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic_core import PydanticUndefined

from fedmutual.algorithms import ALGORITHMS
from fedmutual.algorithms.registry import METHODS
from fedmutual.config.keys import KeyEffect, Section, find_table, read_effect
from fedmutual.config.methods import find_algorithm, find_method, list_setting_types, list_tried_values
from fedmutual.config.schema import ClientData, ColumnConfig, Config, ShareConfig
from fedmutual.core import OnlyIf, Schedule, Setting
from fedmutual.errors import ConfigError, join_words
from fedmutual.role import DEFAULT_ALGORITHM

_HEAD = """# Every key of a configuration

`fedmutual list keys` prints this page. The parentheses hold the type of a key and its default. A key affects the trained
models, unless the parentheses name another effect: `affects scores` (only the scores), `affects machine` (only where and how
the work is done, which may change the last digits), or `affects record` (only the written files). `--resume` accepts another
value of a `resumable` key and more `rounds`; all other keys must keep their values. A key has an effect `only if` all named
conditions are true.

A schedule changes a number over the rounds: `{ start = 0.9, end = 0.3, shape = "linear" }`. The shape may also be
`"cosine"`, `"step"` after the fraction `at` of the rounds, or `"one-cycle"`; `warmup` is the fraction of the rounds in which
the value rises from 0. `--set data.name=mnist` sets a key for one command. An unknown
key is an error. If fedmutual detects that a key has no effect, the key gives an error or a remark."""

_ALGORITHM = "What is minimised, and how replies are combined. Each algorithm has its own keys besides `name`."
_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path", Schedule: "schedule"}
_INHERITED = "the federation's"


def render_page() -> str:
    """Return all keys as Markdown, with a heading for each table."""
    lines, table = [_HEAD, ""], ""
    for key, line in list_reference_keys():
        above = key.partition(".")[0] if "." in key else ""
        if above != table:
            table, kind = above, find_table(Config.model_fields[above].annotation)
            lines += ["", f"## {table}", "", (kind.__doc__ or "") if kind else _ALGORITHM, ""]
        lines.append(line)
    return "\n".join(lines)


def render_key(key: str, type: str, default: str, about: str, effect: KeyEffect | None = None) -> str:
    """Return the line of one key; ID stands for any client, and NAME for any column."""
    effect = effect or KeyEffect()
    parts = [type, default, *([f"affects {effect.affects}"] if effect.affects not in (None, "result") else [])]
    parts += ["resumable"] if effect.resumable else []
    parts += [f"only if {_describe_condition(c)}" for c in effect.only_if or ()]
    return f"- `{key}` ({'; '.join(parts)}): {about}"


def describe_algorithms() -> dict[str, str]:
    """Return algorithm -> one line about it, with its settings."""
    return {
        name: f"{describe_about(name)} Settings: {', '.join(list_setting_types(name)) or 'none'}." for name in ALGORITHMS
    }


def describe_about(name: str) -> str:
    """Return one line about an algorithm of this package."""
    return METHODS[name].about or (ALGORITHMS[name].__doc__ or "").splitlines()[0]


def describe_algorithm(name: str) -> list[str]:
    """Return lines about an algorithm: its title and meaning, and one line for each of its settings.

    name: as for the key `algorithm.name`; your own algorithm as "module:Class".

    Raises:
        ConfigError: there is no such algorithm, or its module cannot be imported.
    """
    try:
        kind, types, method = find_algorithm(name), list_setting_types(name), find_method(name)
    except LookupError as problem:
        raise ConfigError(str(problem)) from None
    docstring = (kind.__doc__ or "").strip()
    is_generated = docstring.startswith(f"{kind.__name__}(")  # a signature, which `dataclass` writes where there is none
    about = method.about or ("" if is_generated else docstring.partition("\n")[0])
    sentences = (f"{name}: {method.title}.", about, f"Settings: {', '.join(types) or 'none'}.")
    lines = [" ".join(filter(None, sentences))]
    for field in (f for f in fields(kind) if f.name in types):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        tune = list_tried_values(field)
        tried = f"; `compare --tune` tries {', '.join(map(_format_default, tune))}" if tune else ""
        meaning = field.metadata.get("about") or "no meaning is given; write the field as fedmutual.core.setting"
        form = _describe_type(types[field.name])
        lines.append(render_key(f"algorithm.{field.name}", form, _format_default(default), meaning + tried))
    return lines


def list_reference_keys(kind: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, its line) for every key, in the order of the schema."""
    types = get_type_hints(kind, include_extras=True)
    for name, spec in kind.model_fields.items():
        key, inner, about = f"{prefix}{name}", find_table(spec.annotation), " ".join((spec.description or "").split())
        if name == "algorithm":
            yield from _list_algorithm_keys(key)
        elif inner is ClientData:
            yield key, render_key(f"{key}.KEY", "as `data.KEY`", _INHERITED, f"any key of [data]. {inner.__doc__}")
        elif inner is None or inner is ColumnConfig:
            is_inherited = prefix.startswith("clients.") and (spec.default is None or kind is ShareConfig)
            default = _INHERITED if is_inherited else _format_default(spec.default)
            form = (
                "table of a kind, a list of values, or a table with the keys below" if inner else _describe_type(types[name])
            )
            yield key, render_key(key, form, default, about, read_effect(kind, name))
        if inner is not None and inner is not ClientData:
            place = ".NAME" if inner is ColumnConfig else ".ID" if get_origin(spec.annotation) is dict else ""
            yield from list_reference_keys(inner, f"{key}{place}.")


def _describe_condition(condition: OnlyIf) -> str:
    """Return "`optimizer.name` is "sgd"" for a condition of a key."""
    shown = "set" if condition.values == (None,) else join_words([json.dumps(value) for value in condition.values], "or")
    is_not = condition.negated != (condition.values == (None,))
    about = condition.about or f"`{condition.key}` is {'not ' if is_not else ''}{shown}"
    return f"{about} (for {join_words([json.dumps(value) for value in condition.of], 'or')})" if condition.of else about


def _list_algorithm_keys(table: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of [algorithm] for all algorithms, or those of [clients.ID.algorithm] that a client may set."""
    of_client = table != "algorithm"
    if not of_client:
        names = f'{", ".join(ALGORITHMS)}, or your own as "module:Class"'
        yield "algorithm.name", render_key("algorithm.name", "text", f'"{DEFAULT_ALGORITHM}"', names)
    owners: dict[tuple[str, str, str, str, KeyEffect], list[str]] = {}
    for name, kind in ALGORITHMS.items():
        spec = {f.name: f for f in fields(kind)}
        for setting, form in list_setting_types(name).items():
            if form == Setting or not of_client:
                default = _INHERITED if of_client else _format_default(spec[setting].default)
                effect = KeyEffect(only_if=spec[setting].metadata["only_if"])  # as `core.setting` has it
                row = f"{table}.{setting}", _describe_type(form), default, spec[setting].metadata["about"], effect
                owners.setdefault(row, []).append(name)
    for (key, form, default, about, effect), of in owners.items():
        yield key, render_key(key, form, default, f"{join_words(of)}: {about}", effect)


def _describe_type(kind: Any) -> str:
    """Return a type in words: ``Annotated[int, Field(ge=1)]`` is "whole number >= 1"."""
    inner = get_args(kind)
    if kind in _NAMES:
        return _NAMES[kind]
    if get_origin(kind) is Annotated:
        return ", ".join([_describe_type(inner[0]), *_describe_bounds(inner[1:])]).replace("number, ", "number ", 1)
    if get_origin(kind) is tuple:
        return "list of " + _describe_type(inner[0]).replace("number", "numbers")
    if get_origin(kind) is dict:
        return "table of " + _describe_type(inner[1])
    if not inner:  # of a user's own setting
        return str(getattr(kind, "__name__", kind))
    *first, last = map(
        json.dumps if get_origin(kind) is Literal else _describe_type, (k for k in inner if k is not type(None))
    )
    return f"{', '.join(first)} or {last}" if first else last


def _describe_bounds(extras: tuple[Any, ...]) -> Iterator[str]:
    """Return the limits in the annotations of a type, in words."""
    for limit in (limit for extra in extras for limit in getattr(extra, "metadata", ())):
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if hasattr(limit, name):
                yield f"{sign} {getattr(limit, name)}"


def _format_default(default: Any) -> str:
    """Return a default as TOML."""
    if default is PydanticUndefined or default is MISSING:
        return "needed"
    return "unset" if default is None else json.dumps(default, default=str)
