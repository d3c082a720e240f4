"""Refuse a configuration that contradicts itself, and say in one sentence what is wrong with a key.

Keys without effect are found by the conditions (`OnlyIf`) that keys declare. A file that contradicts itself gives an error.
Keys that the algorithm or the engine of a run does not use give a remark and no error: methods may share a file.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from pydantic import ValidationError

from fedmutual.algorithms import ALGORITHMS
from fedmutual.algorithms.registry import METHODS
from fedmutual.config.keys import FEDERATED, Section, find_table, read_effect
from fedmutual.config.methods import (
    EVERYWHERE,
    find_algorithm,
    has_aggregation,
    is_pooled,
    list_keys,
    list_optimizer_arguments,
    list_setting_types,
    list_training_fields,
    make_algorithm,
    make_optimizer,
    read_client_settings,
    validate_setting,
)
from fedmutual.config.schema import (
    OWN,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    has_own_data,
)
from fedmutual.core import Setting
from fedmutual.errors import ConfigError, format_count, join_words
from fedmutual.fitting import BALANCED
from fedmutual.losses import Classification
from fedmutual.settings import COMMON_OPTIMIZERS, MOST_SUMMED, OnlyIf

_NEEDS = {"shards": "classes_per_client", "dirichlet": "alpha", "file": "file"}
_KNOWN = "give numbers that are known without these rows"
# key -> (the values that void the guarantee of privacy, or () if each value does; the reason; the fix)
_LEAKS: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "engine.name": (
        ("stacked",),
        "= 'stacked' trains clients together and cannot clip each example's gradient",
        "use 'auto', 'inprocess', 'processes' or 'cluster'",
    ),
    "engine.precision": (
        (),
        "rounds gradients after their norm is computed, so that the clipping bound would not hold",
        "use 'float32'",
    ),
    "split.folds": ((), "trains several models on a row, whose costs epsilon does not add", "remove it"),
    "records.patience": ((), "ends the run by scores that epsilon does not count", "remove it"),
    "records.keep_best": ((), "chooses a model by scores that epsilon does not count", "use the last round's model"),
    "training.patience": ((), "stops by the loss on private rows, which epsilon does not count", "remove it"),
    "training.class_weights": ((BALANCED,), "counts private rows, which epsilon does not count", _KNOWN),
    "data.mean": ((FEDERATED,), "comes from private rows, which epsilon does not count", f"{_KNOWN}, in [data]"),
}
_UNREAD = OnlyIf("algorithm", remark="algorithm {name!r} has no such field")  # of keys of [training]
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
_INNER = ("function-", "tuple[", "is-instance", "union", "float", "Schedule", "dataclass")  # pydantic's own steps in a path
S = TypeVar("S", bound=Section)
_Unmet = tuple[str, OnlyIf, Any]  # a set key, the first of its conditions that is false, the value of the deciding key


def check_config(config: Config, source: str) -> None:
    """Raise ConfigError, with the reason and the fix, if keys contradict each other or lack another key."""
    _refuse(_list_contradictions(config), source)


def check_model(config: Config, source: str) -> None:
    """Raise ConfigError if keys of [model] contradict each other, or another key deprives one of its effect."""
    _refuse(_list_model_contradictions(config), source)
    _refuse((f for f in _list_ineffective(config) if f.startswith("key 'model.")), source)


def check_scored(config: Config, source: str) -> None:
    """Raise ConfigError if the scores that a comparison needs are not computed."""
    if config.records.evaluate_on != "all":
        raise ConfigError(
            f"{source}: records.evaluate_on = {config.records.evaluate_on!r} leaves out the validation and test scores that "
            "are compared; remove it"
        )


def check_data_effects(data: DataConfig) -> None:
    """Raise ConfigError if `data.name` deprives a set key of [data] of its effect."""
    for fault in _list_ineffective(Config(data=data), of_data=True):
        raise ConfigError(fault)


def check_methods(config: Config, given: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError if a key of [algorithm] or of a client is wrong, or a key of [model] undoes the algorithm's preset.

    given: [model] without the preset.
    """
    _refuse(_list_wrong_settings(config), source)
    name, default = config.algorithm["name"], ModelConfig()
    for key, value in METHODS[name].model.items() if name in METHODS else ():
        if key in given and getattr(config.model, key) == getattr(default, key):
            shown = list(value) if isinstance(value, tuple) else value
            wrong = f"key 'model.{key}' = {getattr(default, key)!r} undoes what algorithm {name!r} sets ({shown!r})"
            raise ConfigError(f"{source}: {wrong}; remove the key")


def _refuse(faults: Iterable[str], source: str) -> None:
    for fault in faults:
        raise ConfigError(f"{source}: {fault}")


def _list_contradictions(config: Config) -> Iterator[str]:
    """Yield a sentence for each contradiction, with the fix."""
    partition, own_data, name = config.partition, has_own_data(config), config.algorithm["name"]
    if (needed := _NEEDS.get(partition.kind)) and getattr(partition, needed) is None:
        yield f"partition.kind = {partition.kind!r} needs the key 'partition.{needed}'"
    nets, clients = len(config.model.personal or ()), len(config.clients) if own_data else partition.clients
    if partition.kind not in ("domains", "file") and nets not in (0, 1, clients):
        yield f"key 'model.personal' names {nets} networks for {clients} clients; name one for all, or one for each"
    for client, client_config in config.clients.items() if own_data else ():
        if not client_config.data.model_dump(exclude_none=True):
            yield f"client {client!r} has no data of its own, and others have; give it a table [clients.{client}.data]"
    if own_data and is_pooled(config):
        yield f"algorithm {name!r} pools one data set, and clients have data of their own here"
    yield from _list_model_contradictions(config)
    yield from _list_ineffective(config)
    if config.server.sum == "fixed" and partition.clients > MOST_SUMMED:
        most = f"adds at most {MOST_SUMMED} clients, and partition.clients is {partition.clients}"
        yield f"server.sum = 'fixed' {most}; remove 'server.sum'"
    if config.split.folds is not None and config.split.fold is not None and config.split.fold >= config.split.folds:
        yield f"split.fold = {config.split.fold}: the folds are numbered from 0 to {config.split.folds - 1}"
    yield from _list_optimizer_faults(config)
    yield from _list_score_contradictions(config)
    yield from _list_scaling_contradictions(config)
    if config.privacy.nets != "none":
        yield from _list_leaks(config)


def _list_model_contradictions(config: Config) -> Iterator[str]:
    model = config.model
    if any(not one.strip(".") for one in model.part or ()):
        yield "key 'model.part' has an entry that names no module"
    if model.part is not None and model.start == "server":
        yield "model.start = 'server' needs a complete shared model, and 'model.part' shares a part; remove one of them"
    if model.pretrained is not None and model.weights is not None:
        fix = "remove one (a client's own network may have 'clients.ID.model.pretrained')"
        yield f"'model.pretrained' and 'model.weights' both set the first weights of the shared network; {fix}"


def _list_optimizer_faults(config: Config) -> Iterator[str]:
    """Yield why torch refuses the settings of an optimiser. A user's own is tried when the clients are made."""
    optimizer = config.optimizer
    if ":" in optimizer.name:
        return
    try:
        named = list_optimizer_arguments(optimizer.name)
        for key in (optimizer.model_extra or {}).keys() - named:
            yield format_unknown_key(f"optimizer.{key}", [*OptimizerConfig.model_fields, *named], list_keys())
        is_plain = optimizer.name in COMMON_OPTIMIZERS and not optimizer.model_extra  # its keys have ranges that torch takes
        for own in () if is_plain else (None, *(client.optimizer for client in config.clients.values())):
            make_optimizer(optimizer, own, [torch.zeros(1, 1, requires_grad=True)])
    except ConfigError as problem:
        yield str(problem)


def _list_score_contradictions(config: Config) -> Iterator[str]:
    """Yield a sentence for each key that needs rows without scores. A partition file is checked when it is read."""
    records, has_holdout = config.records, config.split.holdout or config.partition.kind == "file"
    for key, what in (("best_by", "choose by"), ("evaluate_on", "score on")):
        if getattr(records, key) == "holdout" and not has_holdout:
            fix = f"set 'split.holdout', for example to 0.1, or remove 'records.{key}'"
            yield f"records.{key} = 'holdout' needs rows to {what}; {fix}"
    if records.evaluate_on == "holdout" and records.best_by in ("validation", "test"):
        reason = "chooses by rows that records.evaluate_on = 'holdout' leaves unscored"
        yield f"records.best_by = {records.best_by!r} {reason}; remove one of the two"


def _list_scaling_contradictions(config: Config) -> Iterator[str]:
    """Yield a sentence unless data.mean and data.std are "federated" for all clients, or for none."""
    if (config.data.mean == FEDERATED) != (config.data.std == FEDERATED):
        yield "'data.mean' and 'data.std' come from the same sums; set both to 'federated', or none"
    for client, client_config in config.clients.items():
        for key in ("mean", "std"):
            value = getattr(client_config.data, key)
            if value is not None and FEDERATED in (value, config.data.mean):
                place = "'federated' is for all clients at once, in [data]; remove the client's key"
                yield f"key 'clients.{client}.data.{key}' has no place here: {place}"


def _list_leaks(config: Config) -> Iterator[str]:
    """Yield a sentence for each key that voids the guarantee of privacy or is missing."""
    if config.privacy.sigma is None:
        fix = "`fedmutual privacy FILE.toml --epsilon 4` computes one"
        yield f"privacy.nets = {config.privacy.nets!r} needs the key 'privacy.sigma', the noise multiplier; {fix}"
    for key, value, _ in _list_set_keys(config):
        name = ".".join(key.split(".")[-2:])
        values, why, fix = _LEAKS.get(name, ((None,), "", ""))
        if not values or value in values or (name == "data.mean" and key.startswith("clients.")):
            yield f"key {key!r} {why}; with privacy.nets {fix}"


def _list_wrong_settings(config: Config) -> Iterator[str]:
    """Yield a sentence for each key of [algorithm] and [clients.ID.algorithm] that is wrong or missing."""
    name = config.algorithm.get("name")
    if not isinstance(name, str):
        yield f"key 'algorithm.name' must name an algorithm: {', '.join(ALGORITHMS)}"
        return
    try:
        kind, known = find_algorithm(name), list_setting_types(name)
    except LookupError as problem:
        yield f"key 'algorithm.name': {problem}"
        return
    for client in (None, *config.clients):
        table = config.algorithm if client is None else config.clients[client].algorithm
        where = "algorithm" if client is None else f"clients.{client}.algorithm"
        for key, value in table.items():
            if key == "name" and client is None:
                continue
            if key not in known:
                yield describe_foreign_key(where, key, [name])
            if client is not None and known[key] != Setting:  # numbers in a client's own loss; the rest all must agree on
                yield f"key '{where}.{key}' is for the whole federation only; remove it"
            try:
                validate_setting(known[key], value)
            except ValidationError as problem:
                yield _format_validation_error(problem, f"{where}.{key}")
        settings = read_client_settings(config) | read_client_settings(config, client)
        for field in fields(kind):
            if field.name in known and field.name not in settings and field.default is field.default_factory is MISSING:
                yield f"key 'algorithm.{field.name}' is missing: {name!r} has no default for it"
        try:
            kind(**settings)
        except Exception as problem:  # a value out of range, a missing setting, or any error of a user's class
            key, _, why = str(problem).partition(" ")
            yield f"key '{where}.{key}' {why}" if key in known else f"key {where!r}: {problem}"


def describe_unused_keys(config: Config, scores: Sequence[str], pooled: bool) -> Iterator[str]:
    """Return one sentence for each reason why set keys have no effect.

    scores: the scored models of the algorithm, as `Algorithm.scores`. pooled: whether one network learns from all data.
    """
    traits = (*scores, *(["averaged"] if has_aggregation(config) else []), *([] if pooled else ["federated"]))
    traits += ("public",) if make_algorithm(config).public is not None else ()
    unmet = list(_list_unmet(config, lambda c: bool(c.remark) and c.key != "engine", {"algorithm": traits}))
    read = list_training_fields(find_algorithm(config.algorithm["name"])).keys() | EVERYWHERE
    unread = tuple(f"training.{name}" for name in TrainingConfig.model_fields if name not in read)
    known = {key for key, _, _ in unmet}
    set_keys = (key for key, _, _ in _list_set_keys(config) if key not in known)
    yield from _describe_reasons(config, [*unmet, *((key, _UNREAD, None) for key in set_keys if key.endswith(unread))])
    yield from _describe_other_defaults(config)


def _describe_other_defaults(config: Config) -> Iterator[str]:
    """Yield a sentence for each default of an algorithm's class that the default of a key of [training] replaces."""
    for name, default in list_training_fields(find_algorithm(config.algorithm["name"])).items():
        used, value = TrainingConfig.model_fields[name].default, getattr(config.training, name)
        if name == "task":
            default = used if type(default) is Classification else type(default).__name__
        if used is not None and value == used != default:
            yield (
                f"algorithm {config.algorithm['name']!r} has the default {default!r} of {name!r}, but this run takes "
                f"{value!r}, the default of 'training.{name}'; set the key if you want another value"
            )


def describe_unused_engine_keys(config: Config, engine: str) -> Iterator[str]:
    """Return a sentence about the set keys that the engine does not use, if there are any."""
    names = (engine, config.engine.name)  # `auto` uses keys to choose an engine
    return _describe_reasons(config, _list_unmet(config, lambda c: c.key == "engine", {"engine": names}))


def _describe_reasons(config: Config, unmet: Iterable[_Unmet]) -> Iterator[str]:
    """Yield one sentence for each reason, with its first three keys."""
    keys_by_reason: dict[str, list[str]] = {}
    for key, condition, value in unmet:
        reason = condition.remark.format(name=config.algorithm["name"], value=value)
        keys_by_reason.setdefault(reason, []).append(key)
    for reason, keys in keys_by_reason.items():
        more = f" and {format_count(len(keys) - 3, 'more key')}" if len(keys) > 3 else ""
        yield f"{reason}, so {', '.join(map(repr, keys[:3]))}{more} {'has' if len(keys) == 1 else 'have'} no effect"


def _list_ineffective(config: Config, of_data: bool = False) -> Iterator[str]:
    """Yield a sentence for each set key that another key deprives of its effect. Defaults are allowed: a dump has all keys.

    of_data: by conditions on [data] or by all others. The former are checked when data are read: clients may set [data].
    """
    unmet = _list_unmet(config, lambda c: "." in c.key and not c.remark and c.key.startswith("data.") == of_data)
    for key, condition, value in unmet:
        reason = f"with {condition.key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        if condition.values == (None,):
            reason = f"without {condition.key!r}" if condition.negated else f"with {condition.key}"
        yield f"key {key!r} has no effect {reason}; remove it"


def _list_unmet(
    config: Config, is_relevant: Callable[[OnlyIf], bool], known: Mapping[str, Sequence[Any]] = MappingProxyType({})
) -> Iterator[_Unmet]:
    """Yield the set keys without effect. known: the values of "algorithm" or "engine", for conditions on these."""
    settings = fields(find_algorithm(config.algorithm["name"]))
    named = {"data.name": config.data.name, "optimizer.name": config.optimizer.name}
    values = {f"algorithm.{f.name}": (config.algorithm.get(f.name, f.default),) for f in settings} | {
        "clients.ID.data": (has_own_data(config) or None,),
        **{key: (name, OWN if ":" in name else name) for key, name in named.items()},
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
        elif value is not None and value != spec.default:
            yield f"{prefix}{name}", value, read_effect(type(table), name).only_if or ()


def parse_table(kind: type[S], table: Any, source: str, prefix: str = "") -> S:
    """Return the checked table. prefix: the name of the table; "": a complete file.

    Raises:
        ConfigError: in one sentence, what is wrong with which key of the source.
    """
    try:
        return kind.model_validate(table)
    except ValidationError as problem:
        raise ConfigError(f"{source}: {_format_validation_error(problem, prefix, kind)}") from None


def _format_validation_error(error: ValidationError, prefix: str, kind: type[Section] = Config) -> str:
    """Return the first fault that pydantic found as one sentence. prefix: the dotted key of the checked value or table."""
    problem = error.errors()[0]
    steps = [str(p) for p in problem["loc"]]
    chosen = {len(steps) - 1} if problem["type"] == "extra_forbidden" else set()  # names that users choose
    chosen |= {n for n in range(1, len(steps)) if steps[:n] in (["clients"], ["data", "labels"], ["data", "columns"])}
    place = [step for n, step in enumerate(steps) if n in chosen or not step.startswith(_INNER)]
    key = ".".join([prefix, *place] if prefix else place)
    shown_value = problem["input"] if isinstance(problem["input"], dict) else json.dumps(problem["input"], default=str)
    if problem["type"] == "extra_forbidden":
        own_keys = (f"{prefix}.{k}" if prefix else k for k in kind.model_fields if kind is not Config)
        return format_unknown_key(key, _list_keys_at(place[:-1], kind), [*list_keys(), *own_keys])
    if problem["type"] == "missing":
        return f"the key {key!r} is missing"
    if problem["type"] in _WANTED:
        return f"key {key!r} must be {_WANTED[problem['type']]}, not {shown_value}"
    if problem["type"] == "value_error":
        return f"key {key!r}: {problem['ctx']['error']}"
    message = re.sub(r"^\w+ should", "must", problem["msg"]).partition(" after validation")[0]
    return f"key {key!r} {message[0].lower()}{message[1:]}, not {shown_value}"


def format_unknown_key(key: str, known: Iterable[str], everywhere: Iterable[str]) -> str:
    """Return "unknown key ..." with the most similar key: of one equal name, else of the table, else of all tables."""
    table, _, last = key.rpartition(".")
    known, everywhere = list(known), [k for k in everywhere if k != key]
    equal = [k for k in everywhere if k.rpartition(".")[2] == last]
    near = equal if len(equal) == 1 else []
    near = near or [f"{table}.{k}" if table else k for k in difflib.get_close_matches(last, known, 1)]
    near = near or [k for k in everywhere if key.endswith(f".{k}") and "." in k]
    for like in ([last], difflib.get_close_matches(last, {k.rpartition(".")[2] for k in everywhere}, 1, 0.75)):
        near = near or [k for k in everywhere if k.rpartition(".")[2] in like]
    if near:
        return f"unknown key {key!r}; did you mean {' or '.join(repr(k) for k in near)}?"
    return f"unknown key {key!r}; there {'is' if len(known) == 1 else 'are'} {', '.join(map(repr, known)) or 'none'}"


def describe_foreign_key(where: str, key: str, names: Sequence[str]) -> str:
    """Return the message about a key that none of these algorithms has: the algorithm of a run, or all compared ones."""
    owners, is_single = [a for a in ALGORITHMS if key in list_setting_types(a)], len(names) == 1
    if owners:
        these = f"algorithm is {names[0]!r}" if is_single else f"methods are {', '.join(names)}"
        return f"key '{where}.{key}' is a setting of {join_words(owners)}, and the {these}; remove it"
    known = dict.fromkeys(k for name in names for k in list_setting_types(name))
    these = f"algorithm {names[0]!r}" if is_single else f"algorithms {', '.join(names)}"
    return f"{format_unknown_key(f'{where}.{key}', known, list_keys())} (of {these})"


def _list_keys_at(path: Iterable[str], kind: type[Section]) -> Iterable[str]:
    """Return the keys of the table at a path."""
    steps = iter(path)
    for name in steps:
        if name not in kind.model_fields:  # a position in a list of tables
            continue
        annotation = kind.model_fields[name].annotation
        kind = find_table(annotation) or kind
        if "dict[" in str(annotation):
            next(steps, None)  # the name of a client or a column
    return kind.model_fields
