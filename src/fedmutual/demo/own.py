"""Networks of one's own: any callable that takes the shape of an example and the number of classes."""

import math

from torch import nn


def linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return one linear layer: x [B, *shape] -> logits [B, classes]. In a configuration: "fedmutual.demo.own:linear"."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def wide(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a network with one hidden layer of 400 tanh units: x [B, *shape] -> logits [B, classes].

    In a configuration: "fedmutual.demo.own:wide".
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 400), nn.Tanh(), nn.Linear(400, classes))
