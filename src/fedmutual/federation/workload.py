"""How much work a client has in a run: steps and floating-point operations, by which an engine is chosen."""

from typing import NamedTuple

import torch
from torch import nn

_STEP, _RATE = 6e-4, 4e10  # a rough guess of a core: seconds that any step takes, floating-point operations a second


class Workload(NamedTuple):
    """What a client does in a run."""

    steps: float
    flops: float

    @property
    def seconds(self) -> float:
        """About how long it takes a core; only ever compared."""
        return self.steps * _STEP + self.flops / _RATE


def count_flops(net: nn.Module, shape: tuple[int, ...]) -> float:
    """Floating-point operations of a forward of one example; 0 where they cannot be counted."""
    from torch.utils.flop_counter import FlopCounterMode  # it takes Triton along, and workers do not count

    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            net.eval()(torch.zeros(2, *shape))
    except Exception:  # a user's network; it is an estimate only
        return 0.0
    return float(counter.get_total_flops()) / 2
