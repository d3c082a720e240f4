"""The arguments of `federate` and `compare` as a configuration, and errors about keys as errors about arguments."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config import Config, list_keys, parse_config
from fedmutual.core import Schedule
from fedmutual.errors import ConfigError, DataError, RunError
from fedmutual.in_memory import PREFIX

KEYS = {
    "rounds": "rounds",
    "seed": "seed",
    "name": "name",
    "batch_size": "training.batch_size",
    "local_epochs": "training.local_epochs",
    "local_steps": "training.local_steps",
    "task": "training.task",
    "lr": "optimizer.lr",
    "optimizer": "optimizer.name",
    "engine": "engine.name",
    "device": "engine.device",
}
"""Argument -> the key of the configuration."""
ENGINES = ("auto", "inprocess", "stacked")
"""The engines that can hold objects of this process."""

_ARGUMENTS = {key: argument for argument, key in KEYS.items()}
_CLIENT = re.compile(r"(?:key )?'?clients\.([^\s']+?)\.(data|model)\.\w+'?")
_KEY = re.compile(r"(?:keys? )?'(\w+(?:\.\w+)*)'|\b(\w+\.\w+)\b")
_FLAG = re.compile(r"--([a-z]+)\b")
_NETWORK = re.compile(rf"(?:the )?network '{re.escape(PREFIX)}[^']*'")
_OBJECT = re.compile(rf"'?{re.escape(PREFIX)}(\w+)\.?([^\s':]*)'?")
_RENAMES = re.compile(r"(?<=data\.labels = )\{[^}]*\}")  # a TOML table
_FLAG_ARGUMENTS = {"out": "out=...", "resume": "resume=True"}
_FACTORY = "; let its factory take the argument `classes`"


def make_config(
    sites: Mapping[str, Mapping[str, Any]], method: Any, arguments: Mapping[str, Any], settings: Mapping[str, Any]
) -> Config:
    """Return the configuration of a federation of objects.

    sites: table of each client. method: an algorithm's name, or an instance of one. arguments: by `KEYS`, None where unset.
    settings: further keys, dotted.

    Raises:
        UserError: an argument cannot be used.
    """
    overrides = {KEYS[k]: v for k, v in arguments.items() if v is not None} | dict(settings)
    if arguments.get("engine") not in (None, *ENGINES):
        raise ConfigError(
            f"argument 'engine': {arguments['engine']!r} starts other processes, which do not hold these objects; use "
            f"one of {', '.join(ENGINES)}"
        )
    if arguments.get("engine") in (None, "auto"):
        import torch

        on_gpu = arguments.get("device") in (None, "auto", "cuda") and torch.cuda.is_available()
        overrides["engine.name"] = "stacked" if on_gpu else "inprocess"
    algorithm, training = describe_method(method)
    overrides |= {f"training.{k}": v for k, v in training.items() if f"training.{k}" not in overrides}
    return parse_config({"algorithm": algorithm, "clients": dict(sites)}, "federate", overrides)


def describe_method(method: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tables [algorithm] and [training] that an algorithm's name or instance stands for.

    Raises:
        ConfigError: `method` is neither a name nor an instance.
    """
    if isinstance(method, str):
        return {"name": method}, {}
    name = (
        next((n for n, kind in ALGORITHMS.items() if kind is type(method)), None)
        or f"{PREFIX}method.{type(method).__name__}"
    )
    if not is_dataclass(method) or isinstance(method, type) or not hasattr(method, "algorithm"):
        raise ConfigError(
            f"argument 'method': {method!r} is no algorithm; give a name ({', '.join(ALGORITHMS)}) or an instance, as "
            "fedmutual.algorithms.FML(alpha=0.5)"
        )
    changed = {f.name: v for f in fields(method) if f.init and (v := getattr(method, f.name)) != f.default}
    tables = {k: asdict(v) if isinstance(v, Schedule) else v for k, v in changed.items()}
    origins = {f.name: f.metadata.get("from") for f in fields(method)}
    training = {k: v for k, v in tables.items() if origins[k] == "training" and k != "task"}
    return {"name": name, **{k: v for k, v in tables.items() if origins[k] is None}}, training


@contextmanager
def translate_errors() -> Iterator[None]:
    """Within, raise errors about keys, files and flags as errors about arguments, with an equal type.

    Raises:
        ConfigError, DataError, RunError: the block raises an error of this type.
    """
    try:
        yield
    except (ConfigError, DataError, RunError) as problem:
        raise type(problem)(translate(str(problem))) from None


def translate(sentence: str) -> str:
    """Return an error's sentence with arguments in the place of keys, and without flags of the command line."""
    sentence = sentence.removeprefix("federate: ").replace(_FACTORY, "; give it an output for each class")
    if sentence.startswith("unknown key"):
        sentence = f"argument 'settings': {sentence}"
    sentence = _CLIENT.sub(lambda m: f"{'model' if m[2] == 'model' else 'train'} of site {m[1]!r}", sentence)
    sentence = _NETWORK.sub("the network", sentence)
    sentence = _OBJECT.sub(lambda m: f"{m[1]} of site {m[2]!r}" if m[1] in ("data", "model") else m[2] or m[1], sentence)
    known = set(list_keys())
    sentence = _RENAMES.sub(lambda m: _format_dict(m[0]), sentence)
    sentence = _KEY.sub(lambda m: _name_argument(key) if (key := m[1] or m[2]) in known else m[0], sentence)
    return _FLAG.sub(lambda m: _FLAG_ARGUMENTS.get(m[1], f"{m[1]}=..."), sentence)


def _format_dict(table: str) -> str:
    """Return an inline table of TOML as a dictionary of Python; a table that cannot be read, unchanged."""
    try:
        return repr(tomllib.loads(f"table = {table}")["table"])
    except tomllib.TOMLDecodeError:  # a name holds "}"
        return table


def _name_argument(key: str) -> str:
    if key in _ARGUMENTS:
        return f"argument {_ARGUMENTS[key]!r}"
    table, _, name = key.partition(".")
    if table == "algorithm":
        return f"method's {name!r}" if name != "name" else "argument 'method'"
    if key == "model.shared":
        return "argument 'shared'"
    return f"settings[{key!r}]"
