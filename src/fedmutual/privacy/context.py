"""The digest of all inputs of a phase's answer. The keys of sampling and noise are derived from this digest.

Two answers with equal noise must be equal, because otherwise their difference would contain no noise. So whatever changes an
answer changes the digest: the received message, the state, the rows, the settings, the networks and the code.
"""

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmutual import numerics
from fedmutual.core import PLAIN, At, Client, Data, Message, Phase, Schedule
from fedmutual.errors import ConfigError
from fedmutual.fitting import Fitted
from fedmutual.optimizers import COMMON
from fedmutual.privacy.sampling import Units
from fedmutual.rundir.checkpoint import collect_client_state
from fedmutual.tasks import UserTask
from fedmutual.user_code import plugins

_SHIPPED = ("fedmutual", "torch", "torchvision")  # the code of these packages is named by `numerics.VERSION`
_DEPTH = 20  # of attributes in attributes
_PLAIN = (int, float, str, bool, tuple, type(None))


def digest_phase(phase: Phase, client: Client, inbox: Message, at: At, noise: tuple[object, ...]) -> str:
    """Return a hex digest of the phase, the client's state, the message that the client received, and the code.

    noise: all settings of the noise and a digest of the rows, as values with an unambiguous `repr`.
    """
    groups = {n: [{k: v for k, v in g.items() if k != "params"} for g in o.param_groups]
              for n, o in client.optimizers.items()}  # fmt: skip
    kind = type(phase)
    about = (
        (kind.__module__, kind.__qualname__, _list_settings(phase, at), at.seed, at.round, at.phase, client.id, groups),
        noise,
        _describe_code(phase, client),
        *([] if client.recipe == PLAIN else [client.recipe]),
    )
    digest = hashlib.sha256(repr(about).encode())
    state = {k: v for k, v in collect_client_state(client).items() if not k.startswith("privacy.")}
    for name, tensors in (("inbox", inbox), ("state", state)):
        _add_tensors(digest, name, tensors)
    return digest.hexdigest()


def digest_rows(rows: Data, units: Units) -> str:
    """Return a hex digest of all rows, their groups and the kind of augmentation.

    Raises:
        DataError: a row cannot be read.
    """
    augment = type(getattr(rows, "augment", None))
    digest = hashlib.sha256(b"" if units.codes is None else units.codes.tobytes())
    digest.update(f"{augment.__module__}.{augment.__qualname__}".encode())
    for batch in rows.rows(torch.split(torch.arange(len(rows)), 1024)):
        for k, part in enumerate(batch):
            named = {str(k): part} if isinstance(part, Tensor) else {f"{k}.{name}": t for name, t in part.items()}
            _add_tensors(digest, "rows", named)
    return digest.hexdigest()


def _list_settings(phase: Phase, at: At) -> list[tuple[str, str]]:
    """Return (name, text) of each setting in this round, independent of the number of rounds."""
    settings = {f.name: getattr(phase, f.name) for f in fields(phase)}  # type: ignore[arg-type]
    values = {k: at.number(v) if isinstance(v, Schedule) else v for k, v in settings.items()}
    return [(k, _describe_setting(v)) for k, v in sorted(values.items())]


def _describe_setting(value: object) -> str:
    """Return a text that every process has alike: not that of an object of a user's class, which may hold its address."""
    if isinstance(value, Fitted):
        settings = {f.name: getattr(value, f.name) for f in fields(value) if f.repr and f.name != "task"}
        return repr((_describe_setting(value.task), settings))
    return repr(value) if isinstance(value, _PLAIN) or is_dataclass(value) else _name_class(type(value))


def _describe_code(phase: Phase, client: Client) -> tuple[object, ...]:
    """Return the layers of all networks, and the code of their classes, of the optimisers and of the task.

    Networks of different layers can have equal names and shapes of weights, and optimisers equal settings.
    """
    kinds: set[type] = {type(module) for net in client.nets.values() for module in net.modules()}
    kinds |= {type(optimizer) for optimizer in client.optimizers.values()} - {*COMMON}  # those differ in their settings
    kinds |= {type(phase), type(task := getattr(phase, "task", None))}
    losses: list[str] = []
    while isinstance(task, Fitted | UserTask):
        if isinstance(task, Fitted) and task.call is not None:
            losses.append(_describe_loss(task.call, kinds))
        kinds.add(type(task := task.task))
    nets = tuple((name, repr(net), _name_class(type(net))) for name, net in sorted(client.nets.items()))
    return numerics.VERSION, nets, sorted({_name_class(kind) for kind in kinds}), _digest_modules(kinds), *losses


def _describe_loss(value: Any, kinds: set[type], depth: int = 0) -> str:
    """Return a text of a user's loss, or of a value that it holds, alike in every process.

    A loss holds the arguments of a functools.partial, attributes, defaults, and the values of closures. Their classes and
    functions are added to `kinds`.

    Raises:
        ConfigError: a value holds itself.
    """
    if depth > _DEPTH:
        fix = "with privacy.nets give a loss whose attributes are numbers, tensors and lists"
        raise ConfigError(f"key 'training.loss': the loss holds an object that refers to itself or is too deep; {fix}")
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return repr((value.dtype, value.tolist()))
    if isinstance(value, partial):
        value = (value.func, value.args, value.keywords)
    elif inspect.ismethod(value):
        value = (value.__func__, value.__self__)
    elif isinstance(value, CodeType):  # it holds constants alone, so that its depth does not count
        value, depth = (value.co_code, value.co_names, value.co_consts), 0
    describe = partial(_describe_loss, kinds=kinds, depth=depth + 1)
    if isinstance(value, Mapping):
        return repr(sorted((str(name), describe(part)) for name, part in value.items()))
    if isinstance(value, tuple | list):
        return repr([*map(describe, value)])
    if isinstance(value, set | frozenset):
        return repr(sorted(map(describe, value)))
    is_function, is_named = inspect.isfunction(value), isinstance(value, type) or inspect.isroutine(value)
    kinds.add(value if isinstance(value, type) or is_function else type(value))
    attributes = {} if is_named else getattr(value, "__dict__", {})
    if is_function:  # with the code, because all lambdas of a module have one name
        attributes = {name: getattr(value, name) for name in ("__code__", "__defaults__", "__kwdefaults__")}
        attributes |= inspect.getclosurevars(value).nonlocals
    name = repr((getattr(value, "__module__", ""), value.__qualname__)) if is_named else _name_class(type(value))
    if attributes or is_named:
        return repr((name, describe(attributes)))
    return name if " at 0x" in repr(value) else repr(value)  # an address is of one process


def _digest_modules(kinds: Iterable[type]) -> list[tuple[str, str]]:
    """Return (first part of the module's name, digest of the code) for each class that a user wrote."""
    tops = {plugins.get_top_name(kind.__module__) for kind in kinds} - set(_SHIPPED)
    return [(top, _digest_module(top)) for top in sorted(tops)]


@lru_cache
def _digest_module(top: str) -> str:
    """Return the digest of a module's code as this process imported it; "" for a module of Python, or without a file."""
    spec = None if plugins.is_of_python(top) else plugins.find_spec_on_path(top)
    return plugins.digest(spec) if plugins.has_file(spec) else ""


def _name_class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _add_tensors(digest: "hashlib._Hash", title: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().to("cpu").contiguous().reshape(-1)
        digest.update(repr((title, name, plain.dtype, tuple(tensor.shape))).encode())
        digest.update(plain.view(torch.uint8).numpy().data)
