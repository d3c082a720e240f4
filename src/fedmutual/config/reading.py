"""Read TOML into typed settings, and write it. Errors name the key and suggest the nearest valid key."""

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import date, time
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from fedmutual.config.checks import check_config, check_model
from fedmutual.config.keys import Table
from fedmutual.config.methods import (
    check_methods,
    describe_foreign_key,
    list_keys,
    list_setting_types,
    set_local_steps,
)
from fedmutual.config.presets import apply_preset, check_preset, drop_preset, remove_preset
from fedmutual.config.schema import Config
from fedmutual.config.sentences import format_validation_error
from fedmutual.config.unused import check_effects
from fedmutual.config.values import WINDOWS_PATH_FIX
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
        RunError: as `read_tables`.
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
    try:
        return Config.model_validate(_read_file_tables(path))
    except ValidationError as problem:
        raise ConfigError(f"{path}: {format_validation_error(problem.errors()[0], list_keys())}") from None


def _read_file_tables(path: Path) -> Table:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a mark before it
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{path}: cannot be read ({problem})") from None
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        raise ConfigError(f"{path}: not valid TOML: {problem}{_describe_fix(str(problem), text)}") from None


def _describe_fix(problem: str, text: str) -> str:
    """Return the fix for a backslash in a path, or for a table that is written twice, first as data = { ... }; else ""."""
    number = re.search(r"at line (\d+)", problem)  # else the text ends too early
    line = text.rstrip().split("\n")[int(number[1]) - 1 if number else -1]
    if "\\" in line and any(
        words in problem for words in ("Unescaped '\\'", "hex value", "Unterminated", "Illegal character")
    ):
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
        try:
            tables, dropped = _drop_foreign_keys(drop_preset(tables), name)
        except LookupError as problem:
            raise ConfigError(f"{source}: key 'algorithm.name': {problem}") from None
        if dropped:
            warn_user(f"algorithm {name!r} has no {', '.join(dropped)}: dropped")
    tables = merge_overrides(tables, overrides)
    try:
        config = Config.model_validate(tables)
    except ValidationError as problem:
        raise ConfigError(f"{source}: {format_validation_error(problem.errors()[0], list_keys())}") from None
    check_methods(config, source)
    check_preset(config, tables, source)
    config = set_local_steps(apply_preset(config))
    check_config(config, source)
    return config


def merge_overrides(tables: Table, overrides: Mapping[str, Any]) -> Table:
    """Return the tables with values by dotted key merged in, unchecked.

    Raises:
        ConfigError: an override sets a key below a key that has a value, not a table.
    """
    for key, value in overrides.items():
        tables = _set(tables, key.split("."), value)
    return tables


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
    base = _get_known_settings(read_tables(path), overrides)
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


def _get_known_settings(tables: Table, overrides: Mapping[str, Any]) -> Collection[str]:
    """Return the settings of the algorithm that the tables or an override name; none for an unknown algorithm."""
    name = _get_algorithm_name(tables, overrides)
    try:
        return list_setting_types(DEFAULT_ALGORITHM if name is None else name) if isinstance(name, str | None) else ()
    except LookupError:
        return ()


def replace_algorithm(
    config: Config, name: str, method_settings: Mapping[str, Any] | None = None
) -> tuple[Config, tuple[str, ...]]:
    """Return the experiment with another algorithm, and the dropped keys of [algorithm], which that algorithm lacks.

    method_settings: settings of [algorithm] to add, if the algorithm has them.

    Raises:
        ConfigError: there is no such algorithm, or a setting is wrong.
    """
    try:
        tables, dropped = _drop_foreign_keys(config.model_dump(), name)
    except LookupError as problem:
        raise ConfigError(f"key 'algorithm.name': {problem}") from None
    clients = {i: c.model_copy(update={"algorithm": tables["clients"][i]["algorithm"]}) for i, c in config.clients.items()}
    added = {k: v for k, v in (method_settings or {}).items() if k in list_setting_types(name)}
    algorithm = {**tables["algorithm"], "name": name, **added}
    changed = apply_preset(remove_preset(config).model_copy(update={"algorithm": algorithm, "clients": clients}))
    check_methods(changed, "configuration")
    check_model(changed, f"algorithm {name!r}")
    check_effects(changed, f"algorithm {name!r}", "model.")
    return set_local_steps(changed), dropped


def override_config(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with values by dotted key, checked.

    Raises:
        ConfigError: as `load_config`.
    """
    return parse_config(tomllib.loads(dump_config(config)), overrides=values) if values else config


def _drop_foreign_keys(tables: Table, name: str) -> tuple[Table, tuple[str, ...]]:
    """Return the tables without the keys of [algorithm] and [clients.ID.algorithm] that `name` lacks, and these keys.

    Raises:
        LookupError: there is no such algorithm.
    """
    known = {"name", *list_setting_types(name)}
    clients = tables.get("clients")
    places = [("algorithm",), *(("clients", i, "algorithm") for i in (clients if isinstance(clients, dict) else ()))]
    dropped = []
    for place in places:
        table: Any = tables
        for step in place:
            table = table.get(step) if isinstance(table, dict) else None
        foreign = [k for k in table if k not in known] if isinstance(table, dict) else []
        if foreign:
            dropped += [".".join((*place, k)) for k in foreign]
            tables = _replace(tables, place, {k: v for k, v in table.items() if k in known})
    return tables, tuple(dropped)


def _replace(tables: Table, path: Sequence[str], value: Table) -> Table:
    head, *rest = path
    return {**tables, head: _replace(tables[head], rest, value) if rest else value}


def dump_config(config: Config) -> str:
    """Return the configuration as TOML, with the value of every key. `load_config` returns an equal configuration."""
    return tomli_w.dumps(_convert_plain(config.model_dump()))


def _convert_plain(value: Any) -> Any:
    if isinstance(value, Schedule):
        return asdict(value)
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
