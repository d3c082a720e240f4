"""Which of a meme's shared tensors may equal one of the personal net's: the boundary would else refuse them."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedmutual.boundary import is_constant


def find_exempt_tensors(nets: Mapping[str, nn.Module], shared: tuple[str, ...], shape: tuple[int, ...]) -> frozenset[str]:
    """The meme's shared tensors that equal one of the personal net's by right, where an input has the given shape.

    Those that start equal; of which such as have all elements equal, like every BatchNorm's ones and zeros, only where
    all that is shared starts equal, for then they may also go on so. And, where both nets normalise the very input, the
    running statistics of that: they tell of the same inputs, not of a net.
    """
    if not {"personal", "meme"} <= nets.keys():
        return frozenset()
    personal, meme = (nets[n].state_dict() for n in ("personal", "meme"))
    if all(k in personal and _same(personal[k], meme[k]) for k in shared):
        return frozenset(shared)
    same = {k for k in shared if not is_constant(meme[k]) and any(_same(v, meme[k]) for v in personal.values())}
    if _of_input(nets["personal"], shape):
        same |= _of_input(nets["meme"], shape) & set(shared)
    return frozenset(same)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


@torch.no_grad()
def _of_input(net: nn.Module, shape: tuple[int, ...]) -> set[str]:
    """The running statistics that a net keeps of its input as it comes, wherever it declares them."""
    tried, found = copy.deepcopy(net).eval(), set[str]()
    norms = {name: m for name, m in tried.named_modules() if isinstance(m, _NormBase) and m.running_mean is not None}
    if not norms:
        return found
    x = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)).to(next(tried.buffers()).device)

    def look(name: str, given: Tensor) -> None:
        if given.numel() == x.numel() and torch.equal(given.flatten(), x.flatten()):
            found.update((f"{name}.running_mean", f"{name}.running_var"))

    for name, module in norms.items():
        module.register_forward_pre_hook(lambda _, given, name=name: look(name, given[0]))
    with torch.random.fork_rng():
        tried(x)
    return found
