"""Resolve the conflict of two gradients: change one so that it does not undo the other.

A gradient is a message, name -> tensor of any shape; all its tensors together are one vector, and a name that only one of
the two has is zero in the other. No function branches on values, so each works under vmap. Sums are in double precision.
"""

import torch
from torch import Tensor

from fedmutual.core import Message


def project(g_pub: Message, g_loc: Message) -> Message:
    """Return the nearest gradient to g_pub that does not point against g_loc, with the names, types and shapes of both.

    FedH2L, eq. 15: min ||g - g_pub||^2 over <g, g_loc> >= 0. Its dual has one unknown, v >= 0, so that in closed form
    g = g_pub + v g_loc with v = max(0, -<g_pub, g_loc>) / <g_loc, g_loc>; g_loc = 0 asks for nothing.

    >>> project({"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([-2.0, 0.0])})
    {'w': tensor([0., 1.])}

    Raises:
        ValueError: a name has two shapes.
    """
    pub, loc = _flatten_pair(g_pub, g_loc)
    return _restore_names(_remove_component(pub, loc), g_pub, g_loc)


def pcgrad(g_pub: Message, g_loc: Message) -> Message:
    """Return the sum of both gradients, each without its component against the other; otherwise as `project`.

    Yu et al., Gradient Surgery for Multi-Task Learning, 2020, https://arxiv.org/abs/2001.06782, Algorithm 1 for two tasks.

    >>> pcgrad({"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([-2.0, 0.0])})
    {'w': tensor([-1.,  2.])}

    Raises:
        ValueError: a name has two shapes.
    """
    pub, loc = _flatten_pair(g_pub, g_loc)
    return _restore_names(_remove_component(pub, loc) + _remove_component(loc, pub), g_pub, g_loc)


def conflict(g_pub: Message, g_loc: Message) -> Tensor:
    """Return 1.0 if the gradients' inner product is negative, so that `project` changes g_pub, else 0.0: a tensor [].

    Raises:
        ValueError: a name has two shapes.
    """
    pub, loc = _flatten_pair(g_pub, g_loc)
    return (_compute_inner_product(pub, _scale_to_unit(loc)) < 0).to(torch.get_default_dtype())


def _remove_component(g: Tensor, wall: Tensor) -> Tensor:
    """Return g [P] without its component against the wall [P]."""
    wall = _scale_to_unit(wall)
    square = _compute_inner_product(wall, wall).clamp(min=0.25)  # at least that, unless the wall is 0
    v = (-_compute_inner_product(g, wall)).clamp(min=0) / square
    return g + v * wall


def _scale_to_unit(vector: Tensor) -> Tensor:
    """Return the vector [P] scaled so that its largest entry is at least 1/2 and no square underflows; zero stays zero.

    The scale is a power of two, which rounds nothing, so vectors at a right angle stay so.
    """
    largest = vector.abs().amax()
    return vector / torch.where(largest == 0, 1, largest / torch.frexp(largest).mantissa)


def _compute_inner_product(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product of a [P] and b [P], a tensor []."""
    return (a * b).sum()


def _flatten_pair(g_pub: Message, g_loc: Message) -> tuple[Tensor, Tensor]:
    """Return both gradients as float64 vectors [P] over the names of `_merge_tensors`."""
    tensors = _merge_tensors(g_pub, g_loc)
    for name in g_pub.keys() & g_loc.keys():
        pub_shape, loc_shape = tuple(g_pub[name].shape), tuple(g_loc[name].shape)
        if pub_shape != loc_shape:
            raise ValueError(f"{name!r} has shape {pub_shape} in one gradient, {loc_shape} in the other")
    pub, loc = (
        torch.cat([(g[name] if name in g else torch.zeros_like(t)).flatten() for name, t in tensors.items()]).double()
        for g in (g_pub, g_loc)
    )
    return pub, loc


def _restore_names(vector: Tensor, g_pub: Message, g_loc: Message) -> Message:
    """Return a vector [P] as a message."""
    tensors = _merge_tensors(g_pub, g_loc)
    parts = torch.split(vector, [t.numel() for t in tensors.values()])
    return {name: part.view(t.shape).to(t.dtype) for (name, t), part in zip(tensors.items(), parts, strict=True)}


def _merge_tensors(g_pub: Message, g_loc: Message) -> Message:
    """Return a tensor for each name in either gradient, for its shape and type.

    The order does not depend on that of g_loc, so that sums have equal bits after a resume, which restores g_loc in the
    order of a file.
    """
    return g_pub | {name: g_loc[name] for name in sorted(g_loc.keys() - g_pub.keys())}
