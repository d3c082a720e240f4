"""Which of a meme's shared tensors may equal one of the personal net's: the boundary would else refuse them."""

from collections.abc import Mapping

import torch
from torch import nn

from fedmutual.boundary import constant


def twins(nets: Mapping[str, nn.Module], shared: tuple[str, ...]) -> frozenset[str]:
    """The meme's shared tensors that equal one of the personal net's by right.

    Those that start equal, unless all their elements are: every BatchNorm starts with ones and zeros. And, where both
    nets begin with a BatchNorm of the input, its running statistics: they tell of the same inputs, not of a net.
    """
    if not {"personal", "meme"} <= nets.keys():
        return frozenset()
    personal, meme = (nets[n].state_dict() for n in ("personal", "meme"))
    same = {k for k in shared if not constant(meme[k]) and any(_same(v, meme[k]) for v in personal.values())}
    both = _of_input(personal).keys() & _of_input(meme).keys()
    return frozenset(same | (both & set(shared)))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _of_input(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The running statistics of a BatchNorm before which a net has no other tensor."""
    first = next(iter(state), "").rpartition(".")[0]
    own = [k for k in state if k.rpartition(".")[0] == first]
    return {k: state[k] for k in own if k.endswith(("running_mean", "running_var"))}
