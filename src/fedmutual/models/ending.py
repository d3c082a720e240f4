"""Networks that end in probabilities, where losses take logits."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

_FACTORS, _TOLERANCE = (10.0, -10.0), 1e-4  # factors of all weights; tolerance of a sum of probabilities


@torch.no_grad()
def find_ending(net: nn.Module, examples: Tensor) -> Literal["softmax", "sigmoid"] | None:
    """Return the function that a network seems to end in; None: logits.

    Softmax: the outputs [B, C, ...] for these examples sum to 1. Sigmoid: they lie in (0, 1), and stay there if all weights
    are multiplied by 10 or by -10.
    """
    was_training = net.training
    outputs = net.eval()(examples)
    ending: Literal["softmax", "sigmoid"] | None = None
    if ((outputs >= 0) & (outputs <= 1)).all():
        if outputs.shape[1] > 1 and ((outputs.sum(1) - 1).abs() < _TOLERANCE).all():
            ending = "softmax"
        elif ((outputs > 0) & (outputs < 1)).all() and all(_stays_in_range(net, examples, factor) for factor in _FACTORS):
            ending = "sigmoid"
    net.train(was_training)
    return ending


def _stays_in_range(net: nn.Module, examples: Tensor, factor: float) -> bool:
    """Return whether a network's outputs lie in [0, 1] with all weights multiplied by a factor."""
    outputs = functional_call(net, {name: factor * p for name, p in net.named_parameters()}, (examples,))
    return bool(((outputs >= 0) & (outputs <= 1)).all())
