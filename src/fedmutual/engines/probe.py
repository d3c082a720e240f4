"""Try a phase on copies of clients: whether vmap supports it, and whether stacked steps are faster."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fedmutual.engines.cuda_streams import InterleavedSteps, find_device
from fedmutual.engines.group import Group, PhaseInput, plan_batches
from fedmutual.models.copying import copy_networks

STEPS = 5  # steps that are timed, after the same number of steps to warm up


def check_stackable(parts: Sequence[PhaseInput]) -> None:
    """Take the first step of copies of these clients, stacked. Raise what vmap raises if vmap does not support the phase."""
    copies = _copy_parts(parts)
    steps = Group([part.client for part in copies]).begin(copies)
    if steps is not None:
        steps.take(plan_batches(copies), most=1)
        steps.read_curves()


def time_steps(parts: Sequence[PhaseInput]) -> tuple[float, float] | None:
    """Return the seconds of a step of all clients: (stacked, in turns).

    None if the phase has too few steps to measure, or if a client cannot step in turns.
    """
    copies = _copy_parts(parts)
    steps = Group([part.client for part in copies]).begin(copies)
    if steps is None:
        return None
    device, plans = find_device(parts), plan_batches(copies)
    together = _time_second_call(device, lambda: steps.take(plans, most=STEPS))
    if min(steps.took) < 2 * STEPS:
        return None
    turns, failed = InterleavedSteps(_copy_parts(parts)), list[object]()
    apart = _time_second_call(device, lambda: failed.extend(turns.take(STEPS)))  # a client that ends so early failed
    return None if failed else (together / STEPS, apart / STEPS)


def _time_second_call(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of the second call of `work`."""
    seconds = 0.0
    for _ in range(2):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        seconds = time.perf_counter() - start
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy_parts(parts: Sequence[PhaseInput]) -> list[PhaseInput]:
    """Return copies of the clients, so that trial steps change nothing."""
    copies = []
    for part in parts:
        nets, optimizers = copy_networks((part.client.nets, part.client.optimizers), share_objects=True)
        client = replace(part.client, nets=nets, optimizers=optimizers, memory=dict(part.client.memory))
        copies.append(part._replace(client=client))
    return copies
