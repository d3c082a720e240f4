"""Tables whose keys are those of a class: [algorithm] and [clients.ID.algorithm] have the fields of the algorithm's own
dataclass, and [optimizer] the arguments of the optimiser.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter
from torch import Tensor
from torch.optim import Optimizer

from fedmutual import fitting, tasks
from fedmutual.aggregation import Aggregation
from fedmutual.algorithms import ALGORITHMS
from fedmutual.algorithms.registry import METHODS, Method
from fedmutual.config.keys import Moving, Table, list_effects, read_effect
from fedmutual.config.schema import (
    OWN,
    ClientData,
    ClientOptimizer,
    Config,
    DataConfig,
    OptimizerConfig,
    PartitionConfig,
    TrainingConfig,
)
from fedmutual.core import SCORED_MODELS, Algorithm, Recipe, Role, Setting, get_target_kind
from fedmutual.errors import ConfigError, UserError, format_error, join_words, suggest_name
from fedmutual.optimizers import OPTIMIZERS, make_optimizer_alike
from fedmutual.settings import COMMON_OPTIMIZERS
from fedmutual.user_code import plugins

EVERYWHERE = frozenset({"task", *Recipe._fields, *fitting.KEYS})
"""The keys of [training] that all algorithms have, besides those that an algorithm reads itself (`core.from_training`)."""
_MACHINE = ("fused", "foreach", "capturable", "differentiable")  # arguments of an optimiser that change no result
_UNUSABLE = {"lbfgs": "computes a loss several times in a step", "sparseadam": "needs sparse gradients"}
ALONE = "0"  # the id of the client in the federation of one client with data of its own
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def make_algorithm(config: Config) -> Algorithm:
    """Return the configured algorithm, with the settings of the federation.

    Raises:
        ConfigError: there is no such algorithm, `algorithm()` of its class raises an error or does not return an Algorithm,
            or `Algorithm.scores` has an unknown name.
    """
    name, types = config.algorithm["name"], _list_types_of_kind(_find_kind(config))
    rule = Aggregation(config.server.aggregate, config.server.trim, config.server.sum)
    rules = {k: rule for k, kind in types.items() if kind is Aggregation}
    try:
        algorithm = _find_kind(config)(**read_client_settings(config), **rules).algorithm()
    except UserError:
        raise
    except Exception as problem:  # a user's own may fail in any way
        raise ConfigError(f"key 'algorithm.name': algorithm() of {name!r} raised {format_error(problem)}") from problem
    if not isinstance(algorithm, Algorithm):
        wrong = f"returned {type(algorithm).__name__}, but must return a fedmutual.core.Algorithm"
        raise ConfigError(f"key 'algorithm.name': algorithm() of {name!r} {wrong}")
    if unknown := [model for model in algorithm.scores if model not in SCORED_MODELS]:
        known = join_words([repr(model) for model in SCORED_MODELS])
        raise ConfigError(f"key 'algorithm.name': {name!r} names {unknown[0]!r} in `scores`; `scores` may hold {known}")
    return algorithm


def read_client_settings(config: Config, client: str | None = None) -> Table:
    """Return the algorithm's settings as typed values: of the federation, or only those that a client sets for itself.

    Raises:
        ConfigError: there is no such task, or a module cannot be imported.
        LookupError: there is no such algorithm.
    """
    config_part, kind = config if client is None else config.get_client_config(client), _find_kind(config)
    types, training = _list_types_of_kind(kind), config_part.training.model_dump(exclude_none=True)
    where = "training.task" if client is None else f"clients.{client}.training.task"
    settings = {k: v for k, v in training.items() if k in list_training_fields(kind)}
    settings |= {k: v for k, v in config_part.algorithm.items() if k in types and k != "name"}
    return {k: tasks.make_task(v, where) if k == "task" else validate_setting(types[k], v) for k, v in settings.items()}


def list_setting_types(name: str) -> dict[str, Any]:
    """Return the keys that [algorithm] may have besides `name`, with their types.

    Raises:
        LookupError, ConfigError: as `find_algorithm`.
    """
    kind = find_algorithm(name)
    from_elsewhere = list_training_fields(kind)
    return {k: t for k, t in _list_types_of_kind(kind).items() if k not in from_elsewhere and t is not Aggregation}


def list_training_fields(kind: Any) -> dict[str, Any]:
    """Return the fields of an algorithm class that keys of [training] set (`core.from_training`), with their defaults."""
    return {f.name: f.default for f in fields(kind) if f.metadata.get("from") == "training"}


def list_tunable_settings(config: Config) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the settings that `compare --tune` tries: name -> (value of the federation, values to try).

    A setting that changes over the rounds is not tuned.
    """
    settings = {f: list_tried_values(f) for f in fields(_find_kind(config))}
    tunable = {f.name: (config.algorithm.get(f.name, f.default), tried) for f, tried in settings.items() if tried}
    return {k: (value, tried) for k, (value, tried) in tunable.items() if isinstance(value, int | float)}


def list_tried_values(setting: Field[Any]) -> tuple[Any, ...]:
    """Return the values of a setting that `compare --tune` tries: those of its `core.setting`, or those of a method with it.

    A class derived from a method's class has the method's settings, unless it declares them again.
    """
    tuned = [m.tune[setting.name] for n, m in METHODS.items() if setting.name in m.tune and setting in fields(ALGORITHMS[n])]
    return tuple(setting.metadata.get("tune") or (tuned[0] if tuned else ()))


def has_aggregation(config: Config) -> bool:
    """Return whether the configured algorithm combines replies by the rule of [server]."""
    return Aggregation in _list_types_of_kind(_find_kind(config)).values()


def find_optimizer(name: str) -> Any:
    """Return a class of torch.optim by its name in small letters, or the user's "module:factory".

    Raises:
        ConfigError: there is no such optimiser, or a step of a client cannot use it.
    """
    if ":" in name:
        return plugins.load(name, "optimizer.name")
    if name in _UNUSABLE:
        raise ConfigError(f"key 'optimizer.name': {name!r} {_UNUSABLE[name]}, and cannot train here; use 'adam' or 'sgd'")
    if name not in OPTIMIZERS:
        fix = suggest_name(name, OPTIMIZERS, f"there are {', '.join(OPTIMIZERS)}, and your own as 'module:factory'")
        raise ConfigError(f"key 'optimizer.name': there is no optimiser {name!r}; {fix}")
    return OPTIMIZERS[name]


def list_optimizer_arguments(name: str) -> frozenset[str]:
    """Return the arguments of an optimiser of torch that [optimizer] takes besides its keys.

    Raises:
        ConfigError: as `find_optimizer`.
    """
    arguments = inspect.signature(find_optimizer(name)).parameters.keys()
    return frozenset(arguments - OptimizerConfig.model_fields.keys() - {"params", *_MACHINE})


def make_optimizer(
    table: OptimizerConfig, own: ClientOptimizer | None, params: Sequence[Tensor], fused: bool = False
) -> Optimizer:
    """Return the optimiser of parameters, with a learning rate of 0: each phase sets it. own: the client's own settings.

    fused: one call for all parameters, of the optimisers that have it among the first three.

    Raises:
        ConfigError: as `find_optimizer`; or the optimiser refuses its arguments or these parameters.
    """
    kind, extra = find_optimizer(table.name), table.model_extra or {}
    values = {**dict(table), **{k: v for k, v in dict(own or ()).items() if v is not None}}
    try:
        takes = {"momentum", "weight_decay", "amsgrad"} & inspect.signature(kind).parameters.keys() | extra.keys()
        arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in takes and v is not None}
        if fused and table.name in COMMON_OPTIMIZERS:
            arguments["fused"] = True
        optimizer = kind(params, lr=0.0, **arguments)
        if table.name not in COMMON_OPTIMIZERS:
            make_optimizer_alike(optimizer, params)  # as each round does, of a network that begins anew
    except Exception as problem:  # torch raises several types, and a user's factory any
        raise ConfigError(f"key 'optimizer.name': {table.name!r} cannot be made: {format_error(problem)}") from None
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"key 'optimizer.name': {table.name!r} returned {type(optimizer).__name__}, no optimiser")
    return optimizer


def list_keys() -> Iterator[str]:
    """Yield every dotted key of a configuration without those of clients, such as "optimizer.lr"."""
    yield from list_effects(Config)
    yield from ("algorithm.name", *sorted({f"algorithm.{k}" for name in ALGORITHMS for k in list_setting_types(name)}))


def set_local_steps(config: Config) -> Config:
    """Return the configuration with `training.local_steps` set if the algorithm counts steps instead of epochs."""
    steps = list_training_fields(_find_kind(config)).get("local_steps")
    if not isinstance(steps, int) or config.training.local_steps is not None:
        return config
    return config.model_copy(update={"training": config.training.model_copy(update={"local_steps": steps})})


def describe_method(config: Config) -> dict[str, Any]:
    """Return the description of the configured algorithm for reports, as environment.json stores it.

    `title`: the name in tables; `preset`: the keys of [model] that the algorithm's name has set; `role`: as `find_method`.
    """
    method = find_method(config.algorithm["name"])
    keys = tuple(f"model.{key}" for key, value in method.model.items() if getattr(config.model, key) == value)
    return {"title": method.title, "preset": keys, "role": method.role}


def find_method(name: str) -> Method:
    """Return what comparisons, tuning and [model] know of an algorithm; of a user's own, what the class declares.

    Raises:
        LookupError, ConfigError: as `find_algorithm`.
    """
    if name in METHODS:
        return METHODS[name]
    kind = find_algorithm(name)
    role = vars(kind).get("role")  # a class inherits no role; a field of this name is a setting
    return Method(name, str(getattr(kind, "title", kind.__name__)), role if isinstance(role, Role) else Role())


def find_adapt_rival(name: str) -> str | None:
    """Return the algorithm whose shared model `adapt` fine-tunes for comparison with a newcomer that learns by `name`.

    None: the class of `name` does not declare that a newcomer can learn by it.

    Raises:
        LookupError, ConfigError: as `find_algorithm`.
    """
    rival: str | None = vars(find_algorithm(name)).get("adapt_rival")
    return rival


def is_pooled(config: Config) -> bool:
    """Return whether one network learns from the data of all clients in one place."""
    return find_method(config.algorithm["name"]).pooled


def _find_kind(config: Config) -> Any:
    return find_algorithm(config.algorithm["name"])


def find_algorithm(name: str) -> Any:
    """Return the class of an algorithm, by its name in this package or by "module:Class".

    Raises:
        LookupError: there is no such algorithm, or the object is not the class of an algorithm.
        ConfigError: the module may not be imported, cannot be imported, or lacks the name.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" not in name:
        fix = suggest_name(name, ALGORITHMS, f"there are {', '.join(ALGORITHMS)}, and your own as 'module:Class'")
        raise LookupError(f"there is no algorithm {name!r}; {fix}")
    kind = plugins.load(name, "algorithm.name")
    if not (is_dataclass(kind) and isinstance(kind, type) and hasattr(kind, "algorithm")):
        raise LookupError(f"{name!r} is not an algorithm: it must be a frozen dataclass derived from fedmutual.core.Phase")
    field_names, own = {f.name for f in fields(kind)}, vars(kind)
    annotated = [k for k, hint in own.get("__annotations__", {}).items() if "ClassVar" not in str(hint)]
    if "__dataclass_fields__" not in own and (undecorated := [k for k in annotated if k not in field_names]):
        raise LookupError(
            f"{name!r} has a field {undecorated[0]!r} that no key can set, because the class lacks its decorator; write "
            "@dataclass(frozen=True, kw_only=True) above it"
        )
    if "role" not in field_names and not isinstance(own.get("role", Role()), Role):
        raise LookupError(f"`role` of {name!r} must be a fedmutual.core.Role, such as Role(position=1)")
    named = TrainingConfig.model_fields.keys()
    for field in sorted((named & field_names) ^ list_training_fields(kind).keys()):
        fix = f"there is no key 'training.{field}'; [training] has {', '.join(named)}"
        if field in named:
            fix = f"rename it, or write fedmutual.core.from_training(...), so that the key 'training.{field}' sets it"
        raise LookupError(f"{name!r} has a field {field!r}: {fix}")
    try:
        _list_types_of_kind(kind)
    except Exception as problem:  # an annotation may be any expression
        raise LookupError(f"the fields of {name!r} have a type that cannot be resolved: {problem}") from None
    return kind


def make_client_config(config: Config, client: str) -> Config:
    """Return the configuration of a client with data of its own: one client has all rows of these data.

    A client with a task of its own does not inherit the common keys of other targets, such as the classes; one whose source
    has no columns of labels does not inherit data.label.

    Raises:
        ConfigError: there is no such task.
    """
    client_config, common = config.clients[client], config.data.model_dump()
    task = client_config.training.task
    if task:
        kind = get_target_kind(tasks.make_task(task, f"clients.{client}.training.task"))
        others = {"classes", "labels"} if kind != "classes" else set()
        others |= {key for key, of in (("uncertain", "labels"), ("times", "times")) if kind != of}
        common = {k: v for k, v in common.items() if k not in others}
    source, conditions = client_config.data.name, read_effect(DataConfig, "label").only_if or ()
    if source is not None and not all(one.holds((OWN if ":" in source else source,)) for one in conditions):
        del common["label"]
    data = common | client_config.data.model_dump(exclude_none=True)
    training = config.training.model_copy(update={"task": task or config.training.task})
    return config.model_copy(
        update={
            "data": DataConfig.model_validate(data),
            "partition": PartitionConfig(clients=1, examples=config.partition.examples),
            "training": training,
            "clients": {ALONE: client_config.model_copy(update={"data": ClientData()})},
        }
    )


@cache
def _list_types_of_kind(kind: Any) -> dict[str, Any]:
    """Return the type of each setting of an algorithm class. Resolving types takes 0.2 ms, and pages check many files."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind) if f.metadata.get("from") != "run"}


def validate_setting(kind: Any, value: Any) -> Any:
    """Return a value of [algorithm] as its type. Raises pydantic's ValidationError for a value of another type."""
    moving = {Setting: Moving, Setting | None: Moving | None}
    return _make_adapter(moving.get(kind, kind)).validate_python(tuple(value) if isinstance(value, list) else value)


@cache
def _make_adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the validator of a type. It is cached, because it takes a millisecond, and pages check many configurations."""
    return TypeAdapter(kind, config=_STRICT)
