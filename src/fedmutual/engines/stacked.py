"""Clients with the same architecture are stepped together: networks are stacked, the phase's loss runs under vmap. For GPUs.

Where vmap does not support a network (active dropout, for example), clients step one after the other; the log says so once.
Several runs can share one stack of all their clients.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NoReturn

from fedmutual.core import At, Client, Message, Phase, Spec
from fedmutual.engines.base import Make, Replies, Reply, participate
from fedmutual.engines.graphs import Graphs, Work
from fedmutual.engines.group import Group, PhaseInput, describe_tensors, identify_loss, list_inputs
from fedmutual.engines.inprocess import InProcess
from fedmutual.engines.loop import PhaseOrder, RunPhase
from fedmutual.engines.stack import group_alike
from fedmutual.errors import shorten_error
from fedmutual.models.copying import copy_networks
from fedmutual.stepping import rate

Training = Generator[PhaseOrder, RunPhase, None]
"""A run: yields the order of each phase, and receives a function that runs the phase."""


class Stacked(InProcess):
    """Clients in this process; those with one architecture step together. Results differ from other engines by rounding."""

    def __init__(self, make: Make, ids: Sequence[str], stacker: "Stacker") -> None:
        """stacker: several engines may share it; all of them are made before the first phase."""
        super().__init__(make, ids)
        self.clients, self.stacker, self._seen = self._store.clients, stacker, 0
        stacker.clients += self.clients.values()

    def train(self, phase: Phase, at: At, inboxes: Mapping[str, Message], declared: Spec) -> Replies:
        """As `Engine.train`; clients with one architecture run the phase together."""
        for part, reply in self.stacker.train(list_inputs(self.clients, phase, at, inboxes, declared)):
            yield part.client.id, reply()

    def take_remarks(self) -> list[str]:
        """As `Engine.take_remarks`: engines that share a stacker have all remarks in common."""
        new = self.stacker.remarks[self._seen :]
        self._seen += len(new)
        return new


class Stacker:
    """Runs a phase of many clients together; the clients may belong to several runs.

    obstacle: why no stack can hold the clients, as a clause for the user; "": stacks can.
    capture: captures the steps of a stack, as `make_capture` returns it; None: steps are not captured.
    """

    def __init__(self, obstacle: str = "", capture: Callable[[Work], Work] | None = None) -> None:
        self._obstacle, self._capture = obstacle, capture
        self.clients: list[Client] = []
        self.remarks: list[str] = []
        self._is_stackable: dict[Any, bool] = {}

    @cached_property
    def _groups(self) -> list[Group]:
        """The stacks, made at the first phase: of clients without a frozen net, without noise, and without an obstacle."""
        if self._obstacle:
            self.remarks.append(f"{self._obstacle}, and step one after the other")
            return []
        trainable = [c for c in self.clients if c.privacy is None and c.optimizers.keys() == c.nets.keys()]
        groups = [group for group in group_alike(trainable) if len(group) > 1 and self._can_copy(group)]
        graphs = [None if self._capture is None else Graphs(self.remarks, self._capture) for _ in groups]
        return [Group(group, of_group) for group, of_group in zip(groups, graphs, strict=True)]

    def train(self, parts: Sequence[PhaseInput]) -> Iterator[tuple[PhaseInput, Callable[[], Reply]]]:
        """Run a phase of each client; yield (part, function that returns the reply).

        The function raises Diverged, Refused or the exception of the client's phase.
        """
        remaining = {id(part.client): part for part in parts}
        for group in self._groups:
            here = [remaining[id(client)] for client in group.clients if id(client) in remaining]
            for together in _group_by_key(here):
                stepping = group.begin(together) if self._can_stack(group, together) else None
                if stepping is not None:
                    for part in together:
                        del remaining[id(part.client)]
                    yield from stepping.run()
        for part in remaining.values():
            yield part, partial(participate, part.client, part.phase, part.inbox, part.declared, part.at)

    def _can_stack(self, group: Group, parts: Sequence[PhaseInput]) -> bool:
        """Return whether these clients train in this phase as one stack, not one after the other.

        Whether vmap supports the phase is tried once, on copies of two clients. Times do not decide, so that equal runs have
        equal bits.
        """
        if len(parts) < 2:
            return False
        key = id(group), identify_loss(parts[0])
        if key not in self._is_stackable:
            try:
                check_stackable(parts[:2])
                self._is_stackable[key] = True
            except Exception as problem:  # whatever a network's or an algorithm's code may do
                self._remark_unstacked([part.client for part in parts], "vmap refuses", problem)
                self._is_stackable[key] = False
        return self._is_stackable[key]

    def _can_copy(self, clients: Sequence[Client]) -> bool:
        try:
            copy_networks(clients[0].nets)
        except Exception as problem:  # a network may hold objects of any kind
            self._remark_unstacked(clients, "their networks cannot be copied", problem)
            return False
        return True

    def _remark_unstacked(self, clients: Sequence[Client], why: str, problem: Exception) -> None:
        names = ", ".join(dict.fromkeys(client.id for client in clients))
        self.remarks.append(f"clients {names} step one after the other, not stacked: {why} ({shorten_error(problem)})")


def _group_by_key(parts: Sequence[PhaseInput]) -> list[list[PhaseInput]]:
    """Return groups that can step together: equal losses, learning rates, and shapes of memories."""
    groups: dict[Any, list[PhaseInput]] = {}
    for part in parts:
        key = (identify_loss(part), rate(part.phase, part.client, part.at), describe_tensors(part.client.memory))
        groups.setdefault(key, []).append(part)
    return list(groups.values())


def check_stackable(parts: Sequence[PhaseInput]) -> None:
    """Take the first step of copies of these clients, stacked. Raise what vmap raises if vmap does not support the phase."""
    copies = []
    for part in parts:
        nets, optimizers = copy_networks((part.client.nets, part.client.optimizers))
        client = replace(part.client, nets=nets, optimizers=optimizers, memory=dict(part.client.memory))
        copies.append(part._replace(client=client))
    stepping = Group([part.client for part in copies]).begin(copies)
    if stepping is not None:
        stepping.take(most=1)
        stepping.read_curves()


def _raise(problem: Exception) -> NoReturn:
    raise problem


def train_together(engines: Sequence[Stacked], trainings: Sequence[Training]) -> list[BaseException | None]:
    """Train several runs to their end, without threads; return the exception of each run, None for a finished run.

    Each run is a generator that stops where it needs its clients, and its engine shares the stacks of the others. When all
    runs have stopped, the phases of all their clients are run together.

    Raises:
        KeyboardInterrupt: the user stopped all runs with Ctrl-C.
    """
    left = dict(enumerate(trainings))
    problems: dict[int, BaseException] = {}
    runners: dict[int, RunPhase] = {}
    stop: KeyboardInterrupt | None = None
    while left:
        orders: dict[int, PhaseOrder] = {}
        for n, training in list(left.items()):
            try:
                if stop is not None:
                    training.throw(stop)
                orders[n] = training.send(runners[n]) if n in runners else next(training)
            except StopIteration:
                del left[n]
            except BaseException as problem:
                problems[n] = problem
                del left[n]
                if isinstance(problem, KeyboardInterrupt):
                    stop = problem
        if orders and stop is None:
            try:
                runners = _run_phases(engines, orders)
            except KeyboardInterrupt as interrupt:
                stop = interrupt
    if stop is not None:
        raise stop
    return [problems.get(n) for n in range(len(engines))]


def _run_phases(engines: Sequence[Stacked], orders: Mapping[int, PhaseOrder]) -> dict[int, RunPhase]:
    """Run a phase of each run, all clients together; return for each run a function that yields its replies."""
    replies: dict[int, Callable[[], Reply]] = {}  # by the identity of the client
    try:
        parts = {n: list_inputs(engines[n].clients, *order) for n, order in orders.items()}
        for part, reply in engines[0].stacker.train([part for of_run in parts.values() for part in of_run]):
            replies[id(part.client)] = reply
    except Exception as problem:  # in a step of all clients: every run fails
        return dict.fromkeys(orders, partial(_raise, problem))
    return {n: partial(_call_in_order, of_run, replies) for n, of_run in parts.items()}


def _call_in_order(parts: Sequence[PhaseInput], replies: Mapping[int, Callable[[], Reply]]) -> Replies:
    for part in parts:
        yield part.client.id, replies[id(part.client)]()
