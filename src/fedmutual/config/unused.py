"""Keys without effect, by the conditions (`OnlyIf`) that the keys declare.

A file that contradicts itself gives an error. Keys that the algorithm or the engine of a run does not use give a remark and
no error: methods may share a file.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from fedmutual.config.keys import Section, read_effect
from fedmutual.config.methods import find_algorithm, has_aggregation, list_training_fields
from fedmutual.config.schema import OWN, Config, DataConfig, TrainingConfig
from fedmutual.config.sites import has_own_data
from fedmutual.errors import ConfigError, format_count
from fedmutual.settings import OnlyIf

_UNREAD = OnlyIf("algorithm", remark="algorithm {name!r} has no such field")  # of keys of [training]
Unmet = tuple[str, OnlyIf, Any]  # a set key, the first of its conditions that is false, the value of the deciding key


def check_effects(config: Config, source: str, prefix: str = "") -> None:
    """Raise ConfigError if another key deprives a set key of its effect. Defaults are allowed: a dump has all keys.

    `check_data_effects` checks the conditions on [data] when data are read, because clients may set keys of [data].

    prefix: only keys that begin so are checked.
    """
    unmet = _list_unmet(config, lambda c: "." in c.key and not c.remark and not c.key.startswith("data."))
    _refuse((one for one in unmet if one[0].startswith(prefix)), f"{source}: ")


def check_data_effects(data: DataConfig) -> None:
    """Raise ConfigError if `data.name` deprives a set key of [data] of its effect."""
    _refuse(_list_unmet(Config(data=data), lambda c: c.key.startswith("data.")), "")


def describe_unused_keys(config: Config, scores: Sequence[str], pooled: bool) -> Iterator[str]:
    """Return one sentence for each reason why set keys have no effect.

    scores: the scored models of the algorithm, as `Algorithm.scores`. pooled: whether one network learns from all data.
    """
    traits = (*scores, *(["averaged"] if has_aggregation(config) else []), *([] if pooled else ["federated"]))
    unmet = list(_list_unmet(config, lambda c: bool(c.remark) and c.key != "engine", {"algorithm": traits}))
    read = {"task", *list_training_fields(find_algorithm(config.algorithm["name"]))}  # reading data needs the task, too
    unread = tuple(f"training.{name}" for name in TrainingConfig.model_fields if name not in read)
    known = {key for key, _, _ in unmet}
    set_keys = (key for key, _, _ in _list_set_keys(config) if key not in known)
    return _describe(config, [*unmet, *((key, _UNREAD, None) for key in set_keys if key.endswith(unread))])


def describe_unused_engine_keys(config: Config, engine: str) -> Iterator[str]:
    """Return a sentence about the set keys that the engine does not use, if there are any."""
    names = (engine, config.engine.name)  # `auto` uses keys to choose an engine
    return _describe(config, _list_unmet(config, lambda c: c.key == "engine", {"engine": names}))


def _refuse(unmet: Iterable[Unmet], source: str) -> None:
    for key, condition, value in unmet:
        raise ConfigError(f"{source}key {key!r} has no effect {_describe_conflict(condition, value)}; remove it")


def _describe_conflict(condition: OnlyIf, value: Any) -> str:
    if condition.values == (None,):
        return f"without {condition.key!r}" if condition.negated else f"with {condition.key}"
    return f"with {condition.key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"


def _describe(config: Config, unmet: Iterable[Unmet]) -> Iterator[str]:
    """Yield one sentence for each reason, with its first three keys."""
    keys_by_reason: dict[str, list[str]] = {}
    for key, condition, value in unmet:
        reason = condition.remark.format(name=config.algorithm["name"], value=value)
        keys_by_reason.setdefault(reason, []).append(key)
    for reason, keys in keys_by_reason.items():
        more = f" and {format_count(len(keys) - 3, 'more key')}" if len(keys) > 3 else ""
        yield f"{reason}, so {', '.join(map(repr, keys[:3]))}{more} {'has' if len(keys) == 1 else 'have'} no effect"


def _list_unmet(
    config: Config, is_relevant: Callable[[OnlyIf], bool], known: Mapping[str, Sequence[Any]] = MappingProxyType({})
) -> Iterator[Unmet]:
    """Yield the set keys without effect. known: the values of "algorithm" or "engine", for conditions on these."""
    settings = fields(find_algorithm(config.algorithm["name"]))
    values = {f"algorithm.{f.name}": (config.algorithm.get(f.name, f.default),) for f in settings} | {
        "clients.ID.data": (has_own_data(config) or None,),
        "data.name": (config.data.name, OWN if ":" in config.data.name else config.data.name),
        **known,
    }
    set_settings = [f for f in settings if f.name in config.algorithm]
    for key, own_value, only_if in (
        *_list_set_keys(config),
        *((f"algorithm.{f.name}", config.algorithm[f.name], f.metadata.get("only_if", ())) for f in set_settings),
    ):
        for condition in filter(is_relevant, only_if):
            actual = values.get(condition.key) or (attrgetter(condition.key)(config),)
            if (not condition.of or own_value in condition.of) and not condition.holds(actual):
                yield key, condition, actual[0]
                break


def _list_set_keys(table: Section, prefix: str = "") -> Iterator[tuple[str, Any, tuple[OnlyIf, ...]]]:
    """Yield (dotted key, value, conditions) of each key of the schema that does not have its default."""
    for name, spec in type(table).model_fields.items():
        value = getattr(table, name)
        if isinstance(value, Section):
            yield from _list_set_keys(value, f"{prefix}{name}.")
        elif name == "clients" and isinstance(value, dict):
            for client, client_config in value.items():
                yield from _list_set_keys(client_config, f"clients.{client}.")
        elif value != spec.default:
            yield f"{prefix}{name}", value, read_effect(type(table), name).only_if or ()
