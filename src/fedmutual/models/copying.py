"""Copies of networks, also of those that hold tensors of a forward pass; descriptions of networks."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copy_networks(networks: T) -> T:
    """Return a deep copy of a network, or of a container with networks and their optimisers.

    A network may store tensors of a forward pass, such as an activation or the `weight` of torch.nn.utils.weight_norm. They
    are copied without their graph, which torch cannot copy.

    Raises:
        TypeError: a hook of a network refers to a layer of it: the hook of the copy would act on the original.
        Exception: any error that an object raises because it cannot be copied, such as a lock or an open file.
    """
    modules = [module for net in tree_leaves(networks) if isinstance(net, nn.Module) for module in net.modules()]
    for module, hook in ((m, hook) for m in modules for kind in _HOOKS for hook in getattr(m, kind).values()):
        cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        if any(isinstance(cell, nn.Module) and cell in modules for cell in cells):
            raise TypeError(f"a hook of its layer {type(module).__name__} refers to a layer of the original network")
    values = tree_leaves([vars(module) for module in modules])
    known: dict[int, Any] = {id(t): t.detach().clone() for t in values if isinstance(t, Tensor) and not t.is_leaf}
    return copy.deepcopy(networks, known)


def copy_or_make(net: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """Return a copy of a network, or a new one if it cannot be copied. make: makes another network like it."""
    try:
        return copy_networks(net)
    except Exception:  # a network may hold objects of any kind
        return make()


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
