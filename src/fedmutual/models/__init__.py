"""Networks by name: ours, torchvision's, and "module:factory". Their first weights come from a given stream only."""

from collections.abc import Callable
from copy import deepcopy
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from fedmutual.errors import ConfigError, said
from fedmutual.models import own, pretrained, published
from fedmutual.models.cnn1 import cnn1
from fedmutual.models.cnn2 import cnn2
from fedmutual.models.lenet5 import lenet5, lenet5_tanh
from fedmutual.models.mlp import mlp
from fedmutual.models.parts import too_small
from fedmutual.models.pretrained import Weights
from fedmutual.models.resnet18 import resnet18, resnet18_gn

__all__ = ["NAMES", "Weights", "build", "weights"]

_OURS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": mlp,
    "lenet5": lenet5,
    "lenet5-tanh": lenet5_tanh,
    "cnn1": cnn1,
    "cnn2": cnn2,
    "resnet18": resnet18,
    "resnet18-gn": resnet18_gn,
}

NAMES: dict[str, str] = {
    "mlp": "two hidden layers of 200 units; any shape",
    "lenet5": "two 5x5 convolutions (6, 16), then 120 and 84 units; images from 12 x 12",
    "lenet5-tanh": "the same with tanh and average pooling, nearer to that of 1998; images from 12 x 12",
    "cnn1": "two 3x3 convolutions (6, 16), then 120 units; images from 4 x 4",
    "cnn2": "three 3x3 convolutions of 128 channels, one layer after them; images from 8 x 8",
    "resnet18": "residual network in its form for CIFAR (3x3 stem, no max pooling); images of any size; "
    "torchvision's own is torchvision:resnet18",
    "resnet18-gn": "the same with GroupNorm in the place of BatchNorm, as privacy.nets needs it",
}
"""Our networks and what they are. torchvision's come by their names there, one's own as "module:factory"."""


def build(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    rng: torch.Generator,
    key: str = "model.shared",
    weights: Weights | None = None,
) -> nn.Module:
    """The network `name`, new, for examples of `shape` ((C, H, W) or (F,)): [B, *shape] float32 -> logits [B, classes].

    rng: where its first weights come from; neither it nor the global streams are moved.
    key: the key of the configuration that names the network, for messages.
    weights: loaded into all of it but the head: the tensors whose shape depends on the number of classes.

    Raises:
        ConfigError: there is no such network, it cannot be made, it does not take these examples to these classes, or the
            weights do not fit it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng.initial_seed())  # not torch.manual_seed, which moves GPUs' streams too
        try:
            net = _make(name, shape, classes, key)
            _check(net, name, shape, classes)
            if weights is not None and weights.state is not None:
                pretrained.fill(net, weights, _head(net, name, shape, classes, key), name)
        except ValueError as problem:
            raise ConfigError(f"key {key!r}: network {name!r} {problem}") from problem
    return net.train()


def weights(source: str, name: str, key: str) -> Weights:
    """What the network `name` begins with, by "imagenet", a file or a folder. Errors as `pretrained.find`."""
    return pretrained.find(source, name, _published(name), key)


def _make(name: str, shape: tuple[int, ...], classes: int, key: str) -> nn.Module:
    if name in _OURS:
        return _OURS[name](shape, classes)
    theirs = _published(name)
    if theirs is not None:
        return published.make(theirs, shape, classes)
    if name.startswith(published.PREFIX):  # not to be imported as somebody's own "module:factory"
        near = get_close_matches(name.removeprefix(published.PREFIX).lower(), published.names(), 1)
        mend = f"did you mean {published.PREFIX + near[0]!r}?" if near else "see `fedmutual list models`"
        raise ConfigError(f"key {key!r}: torchvision has no network {name!r}; {mend}")
    if ":" in name:
        return own.make(name, shape, classes, key)
    near = get_close_matches(name.lower(), [*_OURS, *published.names()], 1)
    mend = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_OURS)}, torchvision's, and 'module:factory'"
    raise ConfigError(f"key {key!r}: there is no network {name!r}; {mend}")


def _published(name: str) -> str | None:
    """torchvision's name of a network, if it is one of torchvision's."""
    return None if name in _OURS else published.name(name)


def _head(net: nn.Module, name: str, shape: tuple[int, ...], classes: int, key: str) -> set[str]:
    """The names of the tensors that the number of classes makes: those whose shape is another with one class more."""
    own_code = _published(name) is None and ":" in name
    with torch.device("cpu" if own_code else "meta"):  # without weights to draw, where no user's code wants any
        other = _make(name, shape, classes + 1, key)
    if own_code:
        with torch.no_grad():
            other.eval()(torch.zeros(2, *shape))  # layers that take their shapes from their first input
    shapes = {k: v.shape for k, v in other.state_dict().items()}
    return {k for k, v in net.state_dict().items() if shapes.get(k) != v.shape}


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
        mend = "; let its factory take the argument `classes`" if _published(name) is None and ":" in name else ""
        got = f"gives outputs {list(output.shape)}{mode}"
        raise ValueError(f"{got} for 2 examples of {classes} classes, not [2, {classes}]{mend}")
    return output


def _misfit(name: str, shape: tuple[int, ...], problem: Exception, mode: str) -> str:
    theirs = _published(name)
    least = 1 if theirs is None else published.least(theirs)
    if min(shape[-2:]) < least:
        return too_small(shape, least)
    return f"does not take examples of shape {shape}{mode}: {said(problem)}"
