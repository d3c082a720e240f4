"""Networks by name: ours, torchvision's, and "module:factory". Their first weights come from a given stream only."""

from collections.abc import Callable
from copy import deepcopy
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from fedmutual.errors import ConfigError, said
from fedmutual.models import own, published
from fedmutual.models.cnn1 import cnn1
from fedmutual.models.cnn2 import cnn2
from fedmutual.models.lenet5 import lenet5
from fedmutual.models.mlp import mlp
from fedmutual.models.parts import too_small
from fedmutual.models.resnet18 import resnet18

__all__ = ["NAMES", "build"]

_OURS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": mlp,
    "lenet5": lenet5,
    "cnn1": cnn1,
    "cnn2": cnn2,
    "resnet18": resnet18,
}

NAMES: dict[str, str] = {
    "mlp": "two hidden layers of 200 units; any shape",
    "lenet5": "two 5x5 convolutions (6, 16), then 120 and 84 units; images from 12 x 12",
    "cnn1": "two 3x3 convolutions (6, 16), then 120 units; images from 4 x 4",
    "cnn2": "three 3x3 convolutions of 128 channels, one layer after them; images from 8 x 8",
    "resnet18": "residual network in its form for CIFAR (3x3 stem, no max pooling); images of any size",
}
"""Our networks and what they are. torchvision's come by their names there, one's own as "module:factory"."""


def build(name: str, shape: tuple[int, ...], classes: int, rng: torch.Generator, key: str = "model.shared") -> nn.Module:
    """The network `name`, new, for examples of `shape` ((C, H, W) or (F,)): [B, *shape] float32 -> logits [B, classes].

    rng: where its first weights come from; neither it nor the global streams are moved.
    key: the key of the configuration that names the network, for messages.

    Raises:
        ConfigError: there is no such network, it cannot be made, or it does not take these examples to these classes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng.initial_seed())  # not torch.manual_seed, which moves GPUs' streams too
        try:
            net = _make(name, shape, classes, key)
            _check(net, name, shape, classes)
        except ValueError as problem:
            raise ConfigError(f"key {key!r}: network {name!r} {problem}") from problem
    return net.train()


def _make(name: str, shape: tuple[int, ...], classes: int, key: str) -> nn.Module:
    if name in _OURS:
        return _OURS[name](shape, classes)
    if ":" in name:
        return own.make(name, shape, classes, key)
    if name in published.names():
        return published.make(name, shape, classes)
    near = get_close_matches(name.lower(), [*_OURS, *published.names()], 1)
    mend = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_OURS)}, torchvision's, and 'module:factory'"
    raise ConfigError(f"key {key!r}: there is no network {name!r}; {mend}")


def _check(net: nn.Module, name: str, shape: tuple[int, ...], classes: int) -> None:
    """A forward in eval mode; a forward and a backward in training mode, on a copy, so that the net is as it was."""
    with torch.no_grad():
        _forward(net.eval(), name, shape, classes, "")
    output = _forward(deepcopy(net).train(), name, shape, classes, " in training mode")
    if output.requires_grad:
        try:
            torch.autograd.backward([output.sum()])
        except Exception as problem:
            raise ValueError(f"cannot be trained: {said(problem)}") from problem


def _forward(net: nn.Module, name: str, shape: tuple[int, ...], classes: int, mode: str) -> Tensor:
    """The output for two examples of zeros, if it is logits [2, classes]."""
    try:
        output = net(torch.zeros(2, *shape))
    except Exception as problem:  # whatever a network's code may raise
        raise ValueError(_misfit(name, shape, problem, mode)) from problem
    if not isinstance(output, Tensor):
        kind = type(output).__name__
        raise ValueError(f"gives {kind} as output{mode}, and a tensor of logits [batch, {classes}] is wanted")
    if output.shape != (2, classes):
        mend = "; let its factory take the argument `classes`" if ":" in name else ""
        got = f"gives outputs {list(output.shape)}{mode}"
        raise ValueError(f"{got} for 2 examples of {classes} classes, not [2, {classes}]{mend}")
    return output


def _misfit(name: str, shape: tuple[int, ...], problem: Exception, mode: str) -> str:
    least = 1 if name in _OURS or ":" in name else published.least(name)
    if min(shape[-2:]) < least:
        return too_small(shape, least)
    return f"does not take examples of shape {shape}{mode}: {said(problem)}"
