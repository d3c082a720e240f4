"""Estimate the work of a client in a run, in steps and floating-point operations; the choice of engine uses it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

_STEP, _RATE = 6e-4, 4e10  # a rough guess of a core: seconds that any step takes, floating-point operations a second


class Workload(NamedTuple):
    """The estimated work of one client in a run: local steps, and the floating-point operations of all of these steps."""

    steps: float
    flops: float
    bytes: float = 0.0  # of weights and optimiser states; not of buffers and the memory that an algorithm keeps

    @property
    def seconds(self) -> float:
        """Estimated seconds on one core; use it only to compare workloads."""
        return self.steps * _STEP + self.flops / _RATE


class NetworkCost(NamedTuple):
    """The cost of a network, or of several networks together: operations of a forward pass, and the number of parameters."""

    flops: float  # of a forward pass of one example; 0 if not known
    parameters: int


def measure_network(net: nn.Module, examples: Tensor) -> NetworkCost:
    """Return the cost of a network. examples: inputs [B, ...]."""
    return NetworkCost(count_flops(net, examples), sum(p.numel() for p in net.parameters()))


def count_flops(net: nn.Module, examples: Tensor) -> float:
    """Return the floating-point operations of a forward pass of one example; 0 if they cannot be counted."""
    from torch.utils.flop_counter import FlopCounterMode  # this import loads Triton, which worker processes do not need

    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            net.eval()(examples)
    except Exception:  # a user's network may fail in any way, and this is only an estimate
        return 0.0
    return float(counter.get_total_flops()) / len(examples)
