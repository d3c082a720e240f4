"""Copies of networks, even if they hold tensors of a forward pass, or objects that cannot be copied."""

import copy
from contextlib import suppress
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def copy_networks(networks: T, share_objects: bool = False) -> T:
    """Return a deep copy of a network, or of a container with networks and their optimisers.

    A network may store tensors of a forward pass, such as an activation or the `weight` of torch.nn.utils.weight_norm. They
    are copied without their graph, which torch cannot copy.

    share_objects: whether the copy holds the same objects where they cannot be copied, for example locks, threads and open
        files; if False, such an object is an error.

    Raises:
        Exception: any error that an object raises because it cannot be copied.
    """
    modules = [module for net in tree_leaves(networks) if isinstance(net, nn.Module) for module in net.modules()]
    values = tree_leaves([vars(module) for module in modules])
    known: dict[int, Any] = {id(t): t.detach().clone() for t in values if isinstance(t, Tensor) and not t.is_leaf}
    try:
        return copy.deepcopy(networks, dict(known))  # deepcopy adds to the dictionary, also if it fails
    except Exception:
        if not share_objects:
            raise
    known |= {id(v): v for v in values if not isinstance(v, Tensor | nn.Module) and not _can_copy(v)}
    return copy.deepcopy(networks, known)


def _can_copy(value: object) -> bool:
    with suppress(Exception):  # an object of a user's class may raise any error
        copy.deepcopy(value)
        return True
    return False
