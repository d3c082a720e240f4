"""Optimisers of torch as this package uses them: copied for other parameters, and set back to their first state."""

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from fedmutual.settings import COMMON_OPTIMIZERS

OPTIMIZERS = {k.lower(): v for k, v in vars(torch.optim).items() if isinstance(v, type) and v is not Optimizer}
"""The optimisers of torch.optim, by their names in small letters."""

COMMON = tuple(OPTIMIZERS[name] for name in COMMON_OPTIMIZERS)
"""Optimisers whose state a stack can hold, and of which one call may step several networks."""


def skip_dynamo(*functions: Callable[..., Any]) -> None:
    """Let torch call its functions, which torch.compile must not compile, without an import of `torch._dynamo`.

    The import takes longer than that of torch itself. torch keeps the function that it calls in `__dynamo_disable`; where a
    version of torch does not, nothing changes.
    """
    for function in functions:
        plain = inspect.unwrap(function)
        vars(plain).setdefault("__dynamo_disable", plain)


skip_dynamo(Optimizer.add_param_group, Optimizer.state_dict, Optimizer.load_state_dict, Optimizer.zero_grad)


def take_optimizer_step(optimizer: Optimizer) -> None:
    """Take a step of an optimiser that has its gradients, as `optimizer.step()`.

    `Optimizer.step` of a common optimiser would import `torch._dynamo` only to stop compiling there. It is called where a
    user has registered hooks of steps.
    """
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # of this optimiser
    if type(optimizer) not in COMMON or any((*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)):
        optimizer.step()
        return
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def make_optimizer_alike(optimizer: Optimizer, params: Iterable[Tensor]) -> Optimizer:
    """Return an optimiser of equal type and settings for other parameters, without state."""
    kind: Any = type(optimizer)
    settings = {k: v for k, v in optimizer.defaults.items() if k in _list_parameters(kind)}
    copied: Optimizer = kind(list(params), **settings)
    return copied


@cache
def _list_parameters(kind: type[Optimizer]) -> frozenset[str]:
    return frozenset(inspect.signature(kind).parameters)


def reset_state(optimizer: Optimizer) -> None:
    """Make an optimiser as never stepped."""
    if type(optimizer) not in COMMON or optimizer.defaults.get("dampening"):  # its first state may be other than zeros
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
