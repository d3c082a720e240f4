"""Read TOML into typed settings, and write it.

A preset is the keys of [model] that the name of an algorithm sets if they are unset, and that leave with the name.
"""

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from datetime import date, time
from pathlib import Path
from typing import Any

import tomli_w

from fedmutual.algorithms.registry import METHODS
from fedmutual.config.checks import check_config, check_methods, check_model, describe_foreign_key, parse_table
from fedmutual.config.keys import WINDOWS_PATH_FIX, Table
from fedmutual.config.methods import list_setting_types, set_local_steps
from fedmutual.config.schema import Config
from fedmutual.core import Schedule
from fedmutual.errors import ConfigError, warn_user
from fedmutual.role import DEFAULT_ALGORITHM
from fedmutual.user_code.recorded_code import check_tables, is_run_config


def load_config(path: str | Path, **overrides: Any) -> Config:
    """Read an experiment from a TOML file.

    overrides: values by dotted key, ``**{"algorithm.alpha": 0.3}``, or tables, ``optimizer={"lr": 0.1}``, which are
    merged into the tables of the file.

    Raises:
        ConfigError: in one sentence, what is wrong with which key, and the nearest right one.
        RunError: the file is a run folder's config.toml and names code, and the folder's environment.json is damaged.
    """
    return parse_config(read_tables(Path(path)), str(path), overrides)


def read_tables(path: Path) -> Table:
    """Return the tables of a TOML file, unchecked.

    Raises:
        ConfigError: the file cannot be read; or it is a run folder's config.toml and names code that may not be imported
            (see `recorded_code`).
        RunError: the file is a run folder's config.toml and names code, and the folder's environment.json is damaged.
    """
    tables = _read_file_tables(path)
    if is_run_config(path):
        check_tables(tables, path.parent)
    return tables


def read_dumped(path: Path) -> Config:
    """Return the configuration that `dump_config` wrote into a run folder. No code that it names is imported.

    Raises:
        ConfigError: in one sentence, what is wrong with which key.
    """
    return parse_table(Config, _read_file_tables(path), str(path))


def _read_file_tables(path: Path) -> Table:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a mark before it
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as problem:
        if path.is_dir():
            raise ConfigError(f"{path}: is a folder; name a TOML file") from None
        raise ConfigError(f"{path}: cannot be read ({problem})") from None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise ConfigError(f"{path}: not valid TOML: {problem}{_describe_fix(str(problem), text)}") from None


def _describe_fix(problem: str, text: str) -> str:
    """Return the fix for a backslash in a path, or for a table that is written twice, first as data = { ... }; else ""."""
    number = re.search(r"at line (\d+)", problem)  # else the text ends too early
    line = text.rstrip().split("\n")[int(number[1]) - 1 if number else -1]
    if "\\" in line and any(w in problem for w in ("Unescaped '\\'", "hex value", "Unterminated", "Illegal character")):
        return f"; {WINDOWS_PATH_FIX}"
    is_twice = "Cannot declare" in problem or "immutable" in problem
    return "; a table written as data = { ... } ends there: write it as [data], one key on each line" if is_twice else ""


def parse_config(tables: Table, source: str = "configuration", overrides: Mapping[str, Any] | None = None) -> Config:
    """Check tables with overrides by dotted key, and return the configuration. source: the name in error messages.

    An override of `algorithm.name` drops the keys of the tables that the new algorithm lacks, with a warning.

    Raises:
        ConfigError: a key or a value is wrong; one sentence names the key and the fix.
    """
    overrides = overrides or {}
    name = _get_algorithm_name(overrides, overrides)
    if isinstance(name, str):
        tables, dropped = _drop_method(tables, name, source)
        if dropped:
            warn_user(f"algorithm {name!r} has no {', '.join(dropped)}: dropped")
    config = _make_config(merge_overrides(tables, overrides), source)
    check_config(config, source)
    return config


def _make_config(tables: Table, source: str) -> Config:
    """Return the configuration with its preset; [algorithm] is checked, and keys that exclude each other are not."""
    model, preset = tables.get("model", {}), _get_preset(tables)
    is_table = isinstance(model, Mapping)
    config = parse_table(Config, {**tables, "model": {**preset, **model}} if preset and is_table else tables, source)
    check_methods(config, model, source)
    return set_local_steps(config)


def _get_preset(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    name = _get_algorithm_name(tables, {})
    return METHODS[name].model if isinstance(name, str) and name in METHODS else {}


def merge_overrides(tables: Table, overrides: Mapping[str, Any]) -> Table:
    """Return the tables with values by dotted key merged in, unchecked.

    Raises:
        ConfigError: an override sets a key below a key that has a value, not a table.
    """
    for key, value in overrides.items():
        tables = _set(tables, key.split("."), _make_plain(value))
    return tables


def _make_plain(value: Any) -> Any:
    """Return a value with lists, numbers and text in place of arrays, tensors and Series, and tables with text as keys."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _make_plain(inner) for key, inner in value.items()}
    return [_make_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def parse_override(text: str) -> tuple[str, Any]:
    """Read ``--set key=value`` and return (dotted key, value). A value that is not TOML is plain text.

    Raises:
        ConfigError: the text has no key or no "=".
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: write key=value, for example --set algorithm.alpha=0.3")
    try:
        read = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
    plain = read.keys() != {"value"} or isinstance(read["value"], date | time)  # dates are no key's type: a name, rather
    return key.strip(), value.strip() if plain else read["value"]


def load_compared(path: Path, methods: Sequence[str], overrides: Mapping[str, Any]) -> tuple[Config, Table]:
    """Read an experiment for a comparison, and return (config, settings that only other methods have).

    overrides: as for `load_config`. A key of `algorithm` applies to the methods that have the key.

    Raises:
        ConfigError: as `load_config`; or there is no such method, or no method has a given setting.
        RunError: as `read_tables`.
    """
    try:
        known = {method: list_setting_types(method) for method in methods}
    except LookupError as problem:
        raise ConfigError(f"--methods: {problem}") from None
    method_settings: Table = {}
    base: Collection[str] = ()
    with suppress(LookupError):  # `load_config` refuses an unknown algorithm
        base = list_setting_types(read_algorithm_name(path, overrides) or DEFAULT_ALGORITHM)
    for key in [k for k in overrides if k.startswith("algorithm.") and k != "algorithm.name" and methods]:
        setting, *inner = key.split(".")[1:]
        if not any(setting in settings for settings in known.values()):
            raise ConfigError(f"--set: {describe_foreign_key('algorithm', setting, methods)}")
        if setting not in base:
            method_settings = _set(method_settings, [setting, *inner], overrides[key], "algorithm.")
            overrides = {k: v for k, v in overrides.items() if k != key}
    return load_config(path, **overrides), method_settings


def read_algorithm_name(path: Path, overrides: Mapping[str, Any]) -> str | None:
    """Return the algorithm that an override or the file names; None if neither names one.

    Raises:
        ConfigError, RunError: as `read_tables`.
    """
    name = _get_algorithm_name(read_tables(path), overrides)
    return name if isinstance(name, str) else None


def _get_algorithm_name(tables: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """Return the value of `algorithm.name` in the overrides, else in the tables; None if it is unset."""
    table = tables.get("algorithm")
    return overrides.get("algorithm.name", table.get("name") if isinstance(table, dict) else None)


def replace_algorithm(
    config: Config, name: str, method_settings: Mapping[str, Any] | None = None
) -> tuple[Config, tuple[str, ...]]:
    """Return the experiment with another algorithm, and the dropped keys of [algorithm], which that algorithm lacks.

    method_settings: settings of [algorithm] to add, if the algorithm has them.

    Raises:
        ConfigError: there is no such algorithm, or a setting is wrong.
    """
    tables = {**config.model_dump(), "model": config.model.model_dump(exclude_defaults=True)}
    tables, dropped = _drop_method(tables, name, "configuration")
    added = {k: v for k, v in (method_settings or {}).items() if k in list_setting_types(name)}
    changed = _make_config({**tables, "algorithm": {**tables["algorithm"], "name": name, **added}}, "configuration")
    check_model(changed, f"algorithm {name!r}")
    return changed, dropped


def override_config(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with values by dotted key, checked.

    Raises:
        ConfigError: as `load_config`.
    """
    return parse_config(tomllib.loads(dump_config(config)), overrides=values) if values else config


def _drop_method(tables: Table, name: str, source: str) -> tuple[Table, tuple[str, ...]]:
    """Return the tables without the preset of their algorithm and without keys of [algorithm] that `name` lacks; these keys.

    Raises:
        ConfigError: there is no such algorithm.
    """
    try:
        known = {"name", *list_setting_types(name)}
    except LookupError as problem:
        raise ConfigError(f"{source}: key 'algorithm.name': {problem}") from None
    preset, tables = _get_preset(tables), deepcopy(tables)
    model, clients, dropped = tables.get("model"), tables.get("clients"), list[str]()
    for key, value in preset.items():
        if isinstance(model, dict) and model.get(key) in (value, list(value) if isinstance(value, tuple) else value):
            del model[key]
    owners = {f"clients.{i}.": client for i, client in clients.items()} if isinstance(clients, dict) else {}
    for where, owner in {"": tables, **owners}.items():
        table: Any = owner.get("algorithm") if isinstance(owner, dict) else None
        for key in [k for k in table if k not in known] if isinstance(table, dict) else ():
            del table[key]
            dropped.append(f"{where}algorithm.{key}")
    return tables, tuple(dropped)


def dump_config(config: Config) -> str:
    """Return the configuration as TOML, with the value of every key. `load_config` returns an equal configuration."""
    return tomli_w.dumps(_convert_plain(config.model_dump()))


def _convert_plain(value: Any) -> Any:
    if isinstance(value, Schedule):
        return value.record()
    if isinstance(value, Mapping):
        return {k: _convert_plain(v) for k, v in value.items() if v is not None and v != {}}
    if isinstance(value, list | tuple):
        return [_convert_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def _set(tables: Table, path: list[str], value: Any, above: str = "") -> Table:
    head, *rest = path
    old = tables.get(head, {})
    if rest:
        key = f"{above}{head}"
        if not isinstance(old, dict):
            raise ConfigError(f"key {key!r} is a value, not a table, so '{key}.{'.'.join(rest)}' cannot be set")
        return {**tables, head: _set(old, rest, value, f"{key}.")}
    if isinstance(value, dict) and isinstance(old, dict):
        for key, inner in value.items():
            old = _set(old, [key], inner)
        return {**tables, head: old}
    return {**tables, head: value}
