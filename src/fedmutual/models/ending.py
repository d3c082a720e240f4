"""Networks that end in probabilities, where losses take logits."""

from typing import Literal

import torch
from torch import nn

_EXAMPLES, _SPREAD, _TOLERANCE = 8, 3.0, 1e-4


@torch.no_grad()
def find_ending(net: nn.Module, shape: tuple[int, ...]) -> Literal["softmax", "sigmoid"] | None:
    """Return the function that a network seems to end in, from its outputs [B, C, ...] for random examples; None: logits."""
    was_training = net.training
    generator = torch.Generator().manual_seed(0)
    outputs = net.eval()(_SPREAD * torch.randn(_EXAMPLES, *shape, generator=generator))
    net.train(was_training)
    if not ((outputs >= 0) & (outputs <= 1)).all():
        return None
    if outputs.shape[1] > 1 and ((outputs.sum(1) - 1).abs() < _TOLERANCE).all():
        return "softmax"
    return "sigmoid" if ((outputs > 0) & (outputs < 1)).all() else None
