"""Presets: keys of [model] that the name of an algorithm sets if they are unset, and that leave with the name."""

from collections.abc import Mapping
from typing import Any

from fedmutual.algorithms.registry import METHODS
from fedmutual.config.keys import Table
from fedmutual.config.schema import Config, ModelConfig
from fedmutual.errors import ConfigError


def apply_preset(config: Config) -> Config:
    """Return the configuration with the keys of its algorithm's preset, if these keys have their defaults."""
    return _replace_model(
        config, {k: v for k, v in _list_preset_keys(config).items() if getattr(config.model, k) == _get_default(k)}
    )


def remove_preset(config: Config) -> Config:
    """Return the configuration without the keys that `apply_preset` set, before the algorithm is replaced."""
    return _replace_model(
        config, {k: _get_default(k) for k, v in _list_preset_keys(config).items() if getattr(config.model, k) == v}
    )


def drop_preset(tables: Table) -> Table:
    """Return the tables of a file without the keys that the preset of their algorithm set."""
    algorithm, model = tables.get("algorithm"), tables.get("model")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
    if name not in METHODS or not isinstance(model, Mapping):
        return tables
    preset = METHODS[name].model
    return {**tables, "model": {k: v for k, v in model.items() if k not in preset or not _is_equal(v, preset[k])}}


def check_preset(config: Config, tables: Table, source: str) -> None:
    """Raise ConfigError if a key is set to its default, which would undo the preset."""
    model = tables.get("model")
    for key, value in _list_preset_keys(config).items():
        if isinstance(model, Mapping) and key in model and getattr(config.model, key) == _get_default(key):
            raise ConfigError(
                f"{source}: key 'model.{key}' = {_get_default(key)!r} undoes what makes algorithm "
                f"{config.algorithm['name']!r}, which sets it to "
                f"{_format_shown(value)}; remove it"
            )


def _list_preset_keys(config: Config) -> Mapping[str, Any]:
    name = config.algorithm["name"]
    return METHODS[name].model if name in METHODS else {}


def _get_default(key: str) -> Any:
    return getattr(ModelConfig(), key)


def _replace_model(config: Config, keys: Mapping[str, Any]) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update=keys)}) if keys else config


def _is_equal(given: Any, preset: Any) -> bool:
    listed = tuple(given) if isinstance(given, list) else (given,)
    return bool(listed == preset if isinstance(preset, tuple) else given == preset)


def _format_shown(value: Any) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)
