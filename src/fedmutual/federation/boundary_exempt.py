"""Find the meme's shared tensors that may equal a tensor of the personal net; the leak check lets these pass."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedmutual.boundary import is_constant


def find_exempt_tensors(nets: Mapping[str, nn.Module], shared: tuple[str, ...], shape: tuple[int, ...]) -> frozenset[str]:
    """Return the names of the meme's shared tensors that may legitimately equal a tensor of the personal net.

    A shared tensor is exempt in three cases. First, all shared tensors start equal to those of the personal net: then
    all are exempt. Second, the tensor alone starts equal and is not constant; a constant tensor (the ones and zeros of
    a BatchNorm) is not exempt alone. Third, both nets normalise the input itself and the tensor is a running statistic
    of that layer: the statistic describes the inputs, not a net.

    shape: the shape of one input example.
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
    """Return the names of the running statistics of layers that normalise the net's input directly."""
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
