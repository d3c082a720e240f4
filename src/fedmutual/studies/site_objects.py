"""The caller's objects as a configuration: the data and the network of each participant, and the method, by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config import Config, make_algorithm, merge_overrides, parse_config
from fedmutual.core import Schedule
from fedmutual.data.objects import make_memory_source, name_columns
from fedmutual.errors import ConfigError, UserError, format_error, warn_user
from fedmutual.in_memory import PREFIX, hold_objects
from fedmutual.losses import Classification
from fedmutual.models.copying import copy_networks

KEYS = {
    "rounds": "rounds",
    "seed": "seed",
    "name": "name",
    "batch_size": "training.batch_size",
    "local_epochs": "training.local_epochs",
    "local_steps": "training.local_steps",
    "task": "training.task",
    "lr": "optimizer.lr",
    "loss": "training.loss",
    "optimizer": "optimizer.name",
    "engine": "engine.name",
    "device": "engine.device",
}
"""Argument of `federate` and `compare` -> the key of the configuration."""
ENGINES = ("auto", "inprocess", "stacked")
"""The engines that can hold objects of this process."""

# keys of [data] that say how objects are read
_ARGUMENTS = {"data.name": "train", "data.label": "label", "model.personal": "model"}  # key -> argument of Site
_READING = ("drop", "group_by", "text", "tokenizer", "words", "length", "columns", "replace", "date_format", "mean", "std")

Model = nn.Module | str | Callable[..., nn.Module]


@dataclass(frozen=True, kw_only=True)
class Site:
    """One participant: its data and its network.

    train: a torch Dataset of (x, y); a pair (x, y) of arrays, tensors or DataFrames; or a DataFrame with `label`.
    test: test rows in one of these forms; None: a fifth of `train` is held out. label: the column of the targets of a
    DataFrame, or a list of columns: of 0 and 1 (several labels of one example), of numbers, or of the time and the event.
    model: the personal network of the participant: an nn.Module with its first weights, a name of `fedmutual list models`,
    or a function of (shape, classes) that makes a network; None: the shared architecture.
    settings: keys of this participant alone, for example {"optimizer.lr": 0.01}; `data.columns` has the kinds of a
    DataFrame's columns.
    """

    train: Any
    test: Any = None
    label: str | Sequence[str] | None = None
    model: Model | None = None
    settings: Mapping[str, Any] | None = None


@contextmanager
def hold_sites(
    sites: Mapping[str, Site],
    shared: Model | None,
    *methods: Any,
    settings: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    **functions: Any,
) -> Iterator[tuple[dict[str, Any], dict[str, dict[str, Any]]]]:
    """Keep the caller's objects during the block; yield the objects by name, and the table of each client.

    settings: keys for all sites, of which some say how text and series are read. functions: arguments of `KEYS` that may be
    functions or objects, such as a loss.

    Raises:
        ConfigError: `sites` is no dictionary of `Site` by name, or is empty; a model is not in a form of `Site.model`; or a
            site has a setting that one of its arguments sets.
        DataError: the data of a site cannot be used.
    """
    if not isinstance(sites, Mapping) or not sites or not all(isinstance(site, Site) for site in sites.values()):
        raise ConfigError("argument 'sites' must be a dictionary of fedmutual.Site by name, as {'north': Site(train=...)}")
    objects: dict[str, Any] = {}
    for kind in (type(m) for m in methods if not isinstance(m, str)):
        if objects.setdefault(f"method.{kind.__name__}", kind) is not kind:
            raise ConfigError(f"argument 'methods': two classes have the name {kind.__name__!r}; rename one")
    objects |= {name: function for name, function in functions.items() if callable(function)}
    if (task := functions.get("task")) is not None and not isinstance(task, str | type):
        objects["task"] = lambda: task
    tables: dict[str, dict[str, Any]] = {}
    of_data = {key: value for key, value in (settings or {}).items() if key.startswith("data.")}
    common = merge_overrides({}, of_data).get("data", {})
    batch_size = batch_size or (settings or {}).get("training.batch_size")
    for site_name, site in sites.items():
        table, place = merge_overrides({}, site.settings or {}), f"site {site_name!r}"
        label = name_columns(site.label)
        model = None if site.model is None else _name_model(site.model, f"model.{site_name}")
        values = {"data.name": f"{PREFIX}data.{site_name}", "data.label": label, "model.personal": model}
        values = {key: value for key, value in values.items() if value is not None}
        merged = merge_overrides(table, values)
        for key, value in values.items():
            head, name = key.split(".")
            if table.get(head, {}).get(name, value) != value:
                raise ConfigError(
                    f"{place}: its argument {_ARGUMENTS[key]!r} already sets the key {key!r}; remove the key from its "
                    "settings"
                )
        if isinstance(site.train, DataLoader) and (size := site.train.batch_size) is not None:
            training = merged.setdefault("training", {})
            if isinstance(training, dict) and "batch_size" not in training:  # of another value `parse_config` says why
                training["batch_size"] = size
                if batch_size not in (None, size):
                    others = f"'training.batch_size' is {batch_size} for the other sites"
                    warn_user(f"{place}: its DataLoader has batches of {size}, and {others}")
        data = {**common, **table.get("data", {})}
        reading = {key: value for key, value in data.items() if key in _READING}
        data_config = parse_config({"data": {"name": f"{PREFIX}data", **reading}}, place).data
        source = make_memory_source(site.train, site.test, label, place, data_config)
        objects[f"data.{site_name}"] = lambda source=source: source
        if site.model is not None:
            objects[f"model.{site_name}"] = _make_factory(site.model, f"model of {place}")
        if tables.setdefault(str(site_name), merged) is not merged:
            raise ConfigError(f"argument 'sites': two sites have the name {str(site_name)!r}; rename one")
    if shared is not None:
        objects["shared"] = _make_factory(shared, "argument 'shared'")
    with hold_objects(objects):
        try:
            yield objects, tables
        except UserError as problem:  # the caller knows the objects, but not these names
            problem.args = tuple(a.replace(PREFIX, "") if isinstance(a, str) else a for a in problem.args)
            raise


def _make_factory(model: Model, place: str) -> Any:
    """Return a function that makes a new network at each call: copies of an nn.Module."""
    if isinstance(model, nn.Module):
        try:
            original = copy_networks(model).cpu()
        except Exception as problem:  # a module may hold objects of any kind
            raise ConfigError(
                f"{place} cannot be copied for each participant ({format_error(problem)}); give a function that makes a new "
                "network at each call, as lambda: Net()"
            ) from problem
        return lambda: copy_networks(original)
    if isinstance(model, str) or callable(model):
        return model
    raise ConfigError(f"{place} is {type(model).__name__}; give an nn.Module, a function that makes one, or a name")


def _name_model(model: Model, name: str) -> str:
    return model if isinstance(model, str) else f"{PREFIX}{name}"


def make_config(
    sites: Mapping[str, Mapping[str, Any]],
    method: Any,
    shared: Model | None,
    arguments: Mapping[str, Any],
    settings: Mapping[str, Any] | None,
) -> Config:
    """Return the configuration of a federation of objects.

    sites: table of each client. method: an algorithm's name, or an instance of one. shared: the shared network.
    arguments: by `KEYS`, None where unset. settings: further keys, dotted.

    Raises:
        UserError: an argument cannot be used.
    """
    values = {k: str(v) if k == "device" else v for k, v in arguments.items() if v is not None}
    if isinstance(lr := values.get("lr"), Schedule):
        values["lr"] = lr.record()
    elif callable(lr) or hasattr(lr, "get_last_lr"):
        raise ConfigError(
            f"argument 'lr' is {type(lr).__name__}; give a number, or a schedule over the rounds, as "
            "{'start': 0.1, 'end': 0.0, 'shape': 'cosine'}"
        )
    if isinstance(optimizer := values.get("optimizer"), Optimizer):
        kind = type(optimizer).__name__
        raise ConfigError(
            f"argument 'optimizer' is {kind} for one network, and each network needs its own; give the class, "
            f"torch.optim.{kind}, or a function of the parameters and lr"
        )
    objects = {k for k, v in values.items() if callable(v) or (k == "task" and not isinstance(v, str))}
    overrides = {KEYS[k]: f"{PREFIX}{k}" if k in objects else v for k, v in values.items()}
    if shared is not None:
        overrides["model.shared"] = _name_model(shared, "shared")
    name, given, defaults = _describe_method(method)
    given["algorithm.name"] = name
    clients = {"clients": {i: dict(table) for i, table in sites.items()}}
    _refuse_second_values(merge_overrides({}, given), merge_overrides({}, overrides))
    _refuse_second_values(merge_overrides(clients, given | overrides), merge_overrides({}, settings or {}))
    config = parse_config(clients, "federate", defaults | given | overrides | dict(settings or {}))
    if (engine := config.engine.name) not in ENGINES:
        place = "argument 'engine'" if "engine" in values else "key 'engine.name'"
        raise ConfigError(f"{place}: {engine!r} cannot hold objects of this process; use {', '.join(ENGINES)}")
    if engine == "auto":
        is_on_gpu = config.engine.device.startswith(("auto", "cuda")) and torch.cuda.is_available()
        engine = "stacked" if is_on_gpu and config.privacy.nets == "none" else "inprocess"  # stacks clip no single example
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"name": engine})})
    if shared is None and {"global", "proxy"} & set(make_algorithm(config).scores):
        raise ConfigError(f"method {config.algorithm['name']!r} shares a network; give it as the argument 'shared'")
    return config


def _refuse_second_values(first: Mapping[str, Any], second: Mapping[str, Any], above: str = "") -> None:
    """Raise ConfigError if a key has two different values in two nested tables. above: the dotted key of the tables."""
    for key in (k for k in first if k in second):
        a, b = first[key], second[key]
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            _refuse_second_values(a, b, f"{above}{key}.")
        elif a != b:
            is_method = f"{above}{key}" == "algorithm.name"  # it has a value also where the caller gives none
            fix = "give the method as an argument, and remove the key" if is_method else "give one of them"
            raise ConfigError(f"key '{above}{key}' has two values, {a!r} and {b!r}; {fix}")


def _describe_method(method: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the name of an algorithm, the keys that its instance sets, and those for which it has the class's default."""
    if isinstance(method, str):
        return method, {}, {}
    if not is_dataclass(method) or isinstance(method, type) or not hasattr(method, "algorithm"):
        raise ConfigError(
            f"argument 'method': {method!r} is no algorithm; give a name ({', '.join(ALGORITHMS)}) or an instance, as "
            "fedmutual.algorithms.FML(alpha=0.5)"
        )
    kind = type(method)
    known = {kind: name for name, kind in reversed(ALGORITHMS.items())}  # the first name of a class has no keys of [model]
    set_keys: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for f in (f for f in fields(method) if f.init):
        value, origin = getattr(method, f.name), f.metadata.get("from")
        value = value.record() if isinstance(value, Schedule) else value
        if f.name == "task" and origin == "training":
            if type(value) is not Classification:
                raise ConfigError(f"{kind.__name__} has a task; give the task as the argument 'task', not in the method")
        elif origin == "training":
            (defaults if value == f.default else set_keys)[f"training.{f.name}"] = value
        elif value != f.default and origin is None:
            set_keys[f"algorithm.{f.name}"] = value
        elif value != f.default:
            raise ConfigError(f"argument 'method': {kind.__name__}({f.name}=...) has no effect; leave it out")
    return known.get(kind, f"{PREFIX}method.{kind.__name__}"), set_keys, {k: v for k, v in defaults.items() if v is not None}
