"""Copies of networks, even if they hold tensors of a forward pass or objects that cannot be copied; their descriptions."""

import copy
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class BoundHook(TypeError):
    """A hook is a function that refers to a layer of its network: that of a copy would act on the original."""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copy_networks(networks: T, share_objects: bool = False) -> T:
    """Return a deep copy of a network, or of a container with networks and their optimisers.

    A network may store tensors of a forward pass, such as an activation or the `weight` of torch.nn.utils.weight_norm. They
    are copied without their graph, which torch cannot copy.

    share_objects: whether the copy holds the same objects where they cannot be copied, for example locks, threads and open
        files; if False, such an object is an error. An object that holds a tensor or a network beside a lock always is.

    Raises:
        BoundHook: a hook of a network refers to the network.
        Exception: any error that an object raises because it cannot be copied.
    """
    modules = [module for net in tree_leaves(networks) if isinstance(net, nn.Module) for module in net.modules()]
    for module, hook in ((m, hook) for m in modules for kind in _HOOKS for hook in getattr(m, kind).values()):
        cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        if any(isinstance(cell, nn.Module) and cell in modules for cell in cells):
            raise BoundHook(f"a hook of its layer {type(module).__name__} refers to a layer of the original network")
    values = tree_leaves([vars(module) for module in modules])
    known: dict[int, Any] = {id(t): t.detach().clone() for t in values if isinstance(t, Tensor) and not t.is_leaf}
    try:
        return copy.deepcopy(networks, dict(known))  # deepcopy adds to the dictionary, also if it fails
    except Exception:
        shared = [v for v in values if not isinstance(v, Tensor | nn.Module) and not _can_copy(v)]
        if not share_objects or any(_holds_tensors(v, set()) for v in shared):
            raise
    return copy.deepcopy(networks, known | {id(v): v for v in shared})


def _can_copy(value: object) -> bool:
    with suppress(Exception):  # an object of a user's class may raise any error
        copy.deepcopy(value)
        return True
    return False


def _holds_tensors(value: object, seen: set[int]) -> bool:
    """Return whether a tensor or a network is in an object, its attributes or its items."""
    if isinstance(value, Tensor | nn.Module):
        return True
    if id(value) in seen or isinstance(value, type | ModuleType):
        return False
    seen.add(id(value))
    parts = [*getattr(value, "__dict__", {}).values()]
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        parts += value
    return any(_holds_tensors(part, seen) for part in parts)


def describe_network(net: nn.Module) -> Any:
    """Return what networks that differ only in the values of their tensors have in common."""
    named = (*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False))
    first: dict[int, int] = {}  # tensor -> its first position; tied tensors have one position
    tensors = [
        (k, t.dtype, tuple(t.shape), t.device, t.requires_grad, first.setdefault(id(t), n)) for n, (k, t) in enumerate(named)
    ]
    modules = []
    for name, module in net.named_modules():
        others = {k: v for k, v in vars(module).items() if k not in ("training", "_parameters", "_buffers", "_modules")}
        modules.append((name, type(module), tuple((k, describe_value(v)) for k, v in sorted(others.items()))))
    return tuple(tensors), tuple(modules)


def describe_value(value: Any) -> Any:
    """Return a plain value with its type; for another object its identity, so that it equals only itself."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(describe_value, value))
    if isinstance(value, dict | set | frozenset) and not value:
        return type(value)
    return id(value)
