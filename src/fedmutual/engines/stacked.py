"""Clients with the same architecture are stepped together: networks are stacked, the phase's loss runs under vmap. For GPUs.

Clients with a different batch size step in a sub-stack; clients without a batch are unchanged. Clients
are stepped one after the other where vmap does not support a network (active dropout, for example) or is slower on the
device; the log says so once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any, Concatenate, TypeVar

from fedmutual.core import At, Client, Message, Phase, Spec
from fedmutual.engines.base import Reply, participate, release_reply
from fedmutual.engines.cuda_streams import Done, InterleavedSteps, find_device
from fedmutual.engines.group import Group, PhaseInput, describe_tensors, identify_loss
from fedmutual.engines.inprocess import InProcess
from fedmutual.engines.probe import check_stackable, time_steps
from fedmutual.engines.stack import group_alike
from fedmutual.stepping import own, rate

R = TypeVar("R")


class Stacked(InProcess):
    """Clients in this process, those of one architecture as one. Results differ from the other engines' by rounding."""

    def __init__(self, clients: Iterable[Client], compile: bool = False) -> None:
        super().__init__(clients)
        self._stacker = Stacker(self._clients.values(), compile)

    def each(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]]
    ) -> Iterator[tuple[str, R]]:
        """As `Engine.each`; a phase is done by all clients alike at once."""
        if do is not participate:
            yield from super().each(do, arguments)
            return
        asked: list[tuple[Client, tuple[Any, ...]]] = [(self._clients[i], given) for i, given in arguments.items()]
        for client, reply in self._stacker.participate(asked):
            yield client.id, reply()  # type: ignore[misc]  # R is Reply

    def remarks(self) -> list[str]:
        """As `Engine.remarks`."""
        return self._stacker.remarks()


class Stacker:
    """Phases of many clients at once, be they of one federation or of several."""

    def __init__(self, clients: Iterable[Client], compile: bool = False) -> None:
        self._remarks: list[str] = []
        said = self._remarks if compile else None
        whole = [c for c in clients if c.optimizers.keys() == c.nets.keys() and c.privacy is None]  # no net is frozen
        self._groups = [Group(group, said) for group in group_alike(whole) if len(group) > 1]
        self._how: dict[Any, StepMode] = {}

    def participate(self, asked: Sequence[tuple[Client, tuple[Any, ...]]]) -> Iterator[tuple[Client, Callable[[], Reply]]]:
        """As `base.participate` of each client with its arguments -> (client, its reply or the exception, when called)."""
        left = {id(client): (client, given) for client, given in asked}
        for group in self._groups:
            parts = [_part(*left[id(client)]) for client in group.clients if id(client) in left]
            for together in _by_key(parts):
                how = self._chosen(group, together)
                begun = group.begin(together) if how is StepMode.STACKED else None
                if begun is None and how is not StepMode.TURNS:
                    continue
                for part in together:
                    del left[id(part.client)]
                yield from _in_turns(together) if begun is None else group.run(together, begun)
        for client, given in left.values():
            yield client, partial(participate, client, *given)

    def remarks(self) -> list[str]:
        """As `Engine.remarks`."""
        said = list(self._remarks)
        self._remarks.clear()
        return said

    def _chosen(self, group: "Group", parts: Sequence[PhaseInput]) -> "StepMode":
        """How these clients do this phase: tried once, on copies."""
        if len(parts) < 2:
            return StepMode.ALONE
        key = (id(group), identify_loss(parts[0]))
        if key not in self._how:
            self._how[key] = self._tried(parts)
        return self._how[key]

    def _tried(self, parts: Sequence[PhaseInput]) -> "StepMode":
        """Stacked if vmap takes the phase, and on a GPU if it is not slower: large convolutions fill one without it."""
        who = f"clients {', '.join(dict.fromkeys(p.client.id for p in parts))} step one after the other, not stacked"
        try:
            check_stackable(parts[:2])
        except Exception as problem:  # whatever a network's or an algorithm's code may do
            why = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            self._remarks.append(f"{who}: vmap refuses ({why[:200]})")
            return StepMode.ALONE
        together, apart = (find_device(parts).type == "cuda" and time_steps(parts)) or (0.0, 0.0)
        if together <= apart:
            return StepMode.STACKED
        self._remarks.append(
            f"{who}: it takes {1e3 * apart:.2g} ms for a step of all, each on a stream of its own, and stacked "
            f"{1e3 * together:.2g} ms (measured)"
        )
        return StepMode.TURNS


class StepMode(Enum):
    """How clients alike do a phase."""

    STACKED = auto()
    TURNS = auto()  # step by step in turns, each on a stream of its own
    ALONE = auto()  # one client after the other


def _in_turns(parts: Sequence[PhaseInput]) -> Iterator[tuple[Client, Callable[[], Reply]]]:
    for part, done in InterleavedSteps(parts).take():
        yield part.client, partial(_reply, part, done)


def _reply(part: PhaseInput, done: Done | Exception) -> Reply:
    if isinstance(done, Exception):
        raise done
    return release_reply(part.client, part.phase, *done, part.inbox, part.declared)


def _part(client: Client, given: tuple[Phase, Message, Spec, At]) -> PhaseInput:
    phase, inbox, declared, at = given
    return PhaseInput(client, own(phase, client), inbox, declared, at)


def _by_key(parts: Sequence[PhaseInput]) -> list[list[PhaseInput]]:
    """Those that are stepped as one, which takes one learning rate and memories of one form besides."""
    groups: dict[Any, list[PhaseInput]] = {}
    for part in parts:
        key = (identify_loss(part), rate(part.phase, part.client, part.at), describe_tensors(part.client.memory))
        groups.setdefault(key, []).append(part)
    return list(groups.values())
