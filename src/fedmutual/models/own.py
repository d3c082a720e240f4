"""A user's own network: "module:factory" is called with what it asks for of the data's shape and number of classes."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedmutual import plugins
from fedmutual.errors import said

_KEYWORDS = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def make(name: str, shape: tuple[int, ...], classes: int, key: str, more: Mapping[str, Any] | None = None) -> nn.Module:
    """Call the factory, a function or a class, with those of these arguments that it names.

    `shape` or `input_shape`: the shape of one example; `classes` or `num_classes`: how many outputs are wanted; and those
    of `more`.

    Raises:
        ConfigError: the factory does not import.
        ValueError: it cannot be called, fails, or returns no torch.nn.Module.
    """
    factory = plugins.load(name, key)
    if isinstance(factory, nn.Module) or not callable(factory):
        kind = type(factory).__name__
        raise ValueError(f"is a ready {kind}; name a function or class that makes a new torch.nn.Module at each call")
    given = {"shape": shape, "input_shape": shape, "classes": classes, "num_classes": classes, **(more or {})}
    try:
        net = factory(**_asked_for(factory, given))
    except Exception as problem:  # a user's factory may fail in any way
        raise ValueError(f"cannot be made: {said(problem)}") from problem
    if not isinstance(net, nn.Module):
        raise ValueError(f"returned {type(net).__name__}, and a torch.nn.Module is wanted")
    return net


def _asked_for(factory: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the signature names. ``**kwargs`` names nothing: it may be passed on to anything."""
    signature = inspect.signature(factory)
    asked = {k: v for k, v in given.items() if k in signature.parameters and signature.parameters[k].kind in _KEYWORDS}
    try:
        signature.bind(**asked)
    except TypeError as problem:
        raise TypeError(f"{problem} (fedmutual gives it {', '.join(given)}; give the others a default)") from None
    return asked
