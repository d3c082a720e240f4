"""Clients with the same architecture are stepped together: networks are stacked, the phase's loss runs under vmap. For GPUs.

Clients with a different batch size step in a sub-stack; clients without a batch are unchanged. Where vmap does not support a
network (active dropout, for example), clients step one after the other; the log says so once.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any

import torch

from fedmutual.core import At, Client, Message, Phase, Spec
from fedmutual.engines.base import Replies, Reply, participate, release_reply
from fedmutual.engines.cuda_streams import InterleavedSteps, PhaseResult, find_device
from fedmutual.engines.group import Group, PhaseInput, describe_tensors, identify_loss, list_inputs, plan_batches
from fedmutual.engines.inprocess import InProcess
from fedmutual.engines.stack import group_alike
from fedmutual.models.copying import copy_networks
from fedmutual.stepping import rate

STEPS = 5  # steps of a trial that are timed, after the same number of steps to warm up


class Stacked(InProcess):
    """Clients in this process; those with one architecture step together. Results differ from other engines by rounding."""

    def __init__(self, clients: Iterable[Client], compile: bool = False, turns: bool = False) -> None:
        """compile: use torch.compile. turns: step clients in turns, not as one stack."""
        super().__init__(clients)
        self._stacker = Stacker(self._clients.values(), compile, turns)

    def train(self, phase: Phase, at: At, inboxes: Mapping[str, Message], declared: Spec) -> Replies:
        """As `Engine.train`; clients with one architecture run the phase together."""
        for client, reply in self._stacker.train(list_inputs(self._clients, phase, at, inboxes, declared)):
            yield client.id, reply()

    def take_remarks(self) -> list[str]:
        """As `Engine.take_remarks`."""
        return self._stacker.take_remarks()


class Stacker:
    """Runs a phase of many clients together; the clients may belong to several runs."""

    def __init__(self, clients: Iterable[Client], compile: bool = False, turns: bool = False) -> None:
        self._turns = turns
        self._remarks: list[str] = []
        remarks = self._remarks if compile else None
        trainable = [c for c in clients if c.optimizers.keys() == c.nets.keys() and c.privacy is None]  # no net is frozen
        self._groups = [Group(group, remarks) for group in group_alike(trainable) if len(group) > 1]
        self._modes: dict[Any, StepMode] = {}

    def train(self, parts: Sequence[PhaseInput]) -> Iterator[tuple[Client, Callable[[], Reply]]]:
        """Run a phase of each client; yield (client, function that returns the reply).

        The function raises Diverged, Refused or the exception of the client's phase.
        """
        remaining = {id(part.client): part for part in parts}
        for group in self._groups:
            here = [remaining[id(client)] for client in group.clients if id(client) in remaining]
            for together in _group_by_key(here):
                mode = self._choose_mode(group, together)
                steps = group.begin(together) if mode is StepMode.STACKED else None
                if steps is None and mode is not StepMode.TURNS:
                    continue
                for part in together:
                    del remaining[id(part.client)]
                yield from _run_in_turns(together) if steps is None else group.run(together, steps)
        for part in remaining.values():
            yield part.client, partial(participate, part.client, part.phase, part.inbox, part.declared, part.at)

    def take_remarks(self) -> list[str]:
        """As `Engine.take_remarks`."""
        remarks = list(self._remarks)
        self._remarks.clear()
        return remarks

    def _choose_mode(self, group: "Group", parts: Sequence[PhaseInput]) -> "StepMode":
        """Return how these clients step in this phase; tried once on copies of the clients."""
        if len(parts) < 2:
            return StepMode.ALONE
        key = (id(group), identify_loss(parts[0]))
        if key not in self._modes:
            self._modes[key] = self._try_mode(parts)
        return self._modes[key]

    def _try_mode(self, parts: Sequence[PhaseInput]) -> "StepMode":
        """Return how to step. Times do not decide, so that equal runs have equal bits; a remark may suggest turns."""
        remark = f"clients {', '.join(dict.fromkeys(p.client.id for p in parts))} step one after the other, not stacked"
        try:
            check_stackable(parts[:2])
        except Exception as problem:  # whatever a network's or an algorithm's code may do
            why = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            self._remarks.append(f"{remark}: vmap refuses ({why[:200]})")
            return StepMode.ALONE
        if self._turns:
            return StepMode.TURNS
        stacked, in_turns = (find_device(parts).type == "cuda" and time_steps(parts)) or (0.0, 0.0)
        if stacked > in_turns:
            self._remarks.append(
                f"a step of all clients took {1e3 * stacked:.2g} ms stacked and {1e3 * in_turns:.2g} ms in turns; "
                "engine.turns = true can make this run faster"
            )
        return StepMode.STACKED


class StepMode(Enum):
    """How clients with one architecture run a phase."""

    STACKED = auto()
    TURNS = auto()  # one step of each client in turn, each client on its own CUDA stream
    ALONE = auto()  # one client after the other


def _run_in_turns(parts: Sequence[PhaseInput]) -> Iterator[tuple[Client, Callable[[], Reply]]]:
    for part, result in InterleavedSteps(parts).take():
        yield part.client, partial(_make_reply, part, result)


def _make_reply(part: PhaseInput, result: PhaseResult | Exception) -> Reply:
    if isinstance(result, Exception):
        raise result
    return release_reply(part.client, part.phase, *result, part.inbox, part.declared)


def _group_by_key(parts: Sequence[PhaseInput]) -> list[list[PhaseInput]]:
    """Return groups that can step together: equal losses, learning rates, and shapes of memories."""
    groups: dict[Any, list[PhaseInput]] = {}
    for part in parts:
        key = (identify_loss(part), rate(part.phase, part.client, part.at), describe_tensors(part.client.memory))
        groups.setdefault(key, []).append(part)
    return list(groups.values())


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
