"""Copies of networks, also of those that a forward pass has changed or that hold objects which cannot be copied."""

import copy
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def copy_networks(networks: T, share: bool = False) -> T:
    """Return a deep copy of a network, or of a container with networks and their optimisers.

    A tensor that a forward pass computed and the network keeps, such as the `weight` of torch.nn.utils.weight_norm or an
    activation, is copied without its graph: torch cannot copy the graph.

    share: whether the copy holds the same objects where they cannot be copied, for example locks, threads and open files;
    without `share` such an object is an error.

    Raises:
        Exception: any exception of an object that cannot be copied.
    """
    modules = [module for net in tree_leaves(networks) if isinstance(net, nn.Module) for module in net.modules()]
    values = tree_leaves([vars(module) for module in modules])
    known: dict[int, Any] = {id(t): t.detach().clone() for t in values if isinstance(t, Tensor) and not t.is_leaf}
    try:
        return copy.deepcopy(networks, dict(known))  # deepcopy adds to the dictionary, also if it fails
    except Exception:
        if not share:
            raise
    known |= {id(v): v for v in values if not isinstance(v, Tensor | nn.Module) and not _can_copy(v)}
    return copy.deepcopy(networks, known)


def _can_copy(value: object) -> bool:
    with suppress(Exception):  # an object of a user's class may raise any error
        copy.deepcopy(value)
        return True
    return False
