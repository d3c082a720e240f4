"""Steps on copies of clients, before any is stacked: does vmap take the phase, and is it faster together."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fedmutual.engines.cuda_streams import InterleavedSteps, find_device
from fedmutual.engines.group import Group, PhaseInput, plan_batches

STEPS = 5  # that are timed, after as many to warm up


def check_stackable(parts: Sequence[PhaseInput]) -> None:
    """The first step of copies of these clients; raises what vmap raises."""
    copies = _copies(parts)
    steps = Group([part.client for part in copies]).begin(copies)
    if steps is not None:
        steps.take(plan_batches(copies), most=1)
        steps.curves()


def time_steps(parts: Sequence[PhaseInput]) -> tuple[float, float] | None:
    """Seconds that a step of all takes: stacked, and in turns. None where a phase has too few steps to tell."""
    copies = _copies(parts)
    steps = Group([part.client for part in copies]).begin(copies)
    if steps is None:
        return None
    device, plans = find_device(parts), plan_batches(copies)
    together = _timed(device, lambda: steps.take(plans, most=STEPS))
    if min(steps.took) < 2 * STEPS:
        return None
    turns = InterleavedSteps(_copies(parts))
    apart = _timed(device, lambda: list(turns.take(STEPS)))
    return together / STEPS, apart / STEPS


def _timed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds of a piece of work when it is done the second time."""
    seconds = 0.0
    for _ in range(2):
        _finish(device)
        begun = time.perf_counter()
        work()
        _finish(device)
        seconds = time.perf_counter() - begun
    return seconds


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copies(parts: Sequence[PhaseInput]) -> list[PhaseInput]:
    """Of clients, that may be stepped in vain."""
    copies = []
    for part in parts:
        nets, optimizers = copy.deepcopy((part.client.nets, part.client.optimizers))
        client = replace(part.client, nets=nets, optimizers=optimizers, memory=dict(part.client.memory))
        copies.append(part._replace(client=client))
    return copies
