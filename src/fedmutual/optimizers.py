"""Optimisers of torch as this package uses them: copied for other parameters, and set back to their first state."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from fedmutual.settings import COMMON_OPTIMIZERS

OPTIMIZERS = {k.lower(): v for k, v in vars(torch.optim).items() if isinstance(v, type) and v is not Optimizer}
"""The optimisers of torch.optim, by their names in small letters."""

COMMON = tuple(OPTIMIZERS[name] for name in COMMON_OPTIMIZERS)
"""Optimisers that take a state of zeros as never stepped, and of which one call may step several networks."""


def make_optimizer_alike(optimizer: Optimizer, params: Iterable[Tensor]) -> Optimizer:
    """Return an optimiser of equal type and settings for other parameters, without state."""
    kind: Any = type(optimizer)
    settings = {k: v for k, v in optimizer.defaults.items() if k in inspect.signature(kind).parameters}
    copied: Optimizer = kind(list(params), **settings)
    return copied


def reset_state(optimizer: Optimizer) -> None:
    """Make an optimiser as never stepped."""
    if type(optimizer) not in COMMON:  # its first state may be other numbers than zeros
        optimizer.state = make_optimizer_alike(optimizer, [p for g in optimizer.param_groups for p in g["params"]]).state
        return
    for state in optimizer.state.values():
        for remembered in state.values():
            remembered.zero_()  # new tensors in every round would leave holes in the memory


def descend(optimizer: Optimizer, losses: Iterable[Tensor], schedule: LRScheduler | None = None) -> None:
    """Take one step of the optimiser, and of its schedule, for each loss [], which is computed after the step before."""
    for loss in losses:
        optimizer.zero_grad()
        torch.autograd.backward([loss])
        optimizer.step()
        if schedule is not None:
            schedule.step()
