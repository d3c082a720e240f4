"""Networks for model.shared = "wide:h400": F-h-h-C, as fedmutual's MLP with h hidden units in place of 200."""

import math
from collections.abc import Callable

from torch import nn


def __getattr__(name: str) -> Callable[..., nn.Module]:
    if not (name.startswith("h") and name[1:].isdigit()):
        raise AttributeError(name)
    hidden = int(name[1:])

    def make(shape: tuple[int, ...], classes: int) -> nn.Module:
        features, middle = nn.Linear(math.prod(shape), hidden), nn.Linear(hidden, hidden)
        return nn.Sequential(nn.Flatten(), features, nn.ReLU(), middle, nn.ReLU(), nn.Linear(hidden, classes))

    return make
