"""Several federations stepped as one: runs that differ in seed, split, alpha or method, over one stack of all their clients.

Each run goes on in a thread of its own, but only one at a time: the baton is passed where a run waits for its clients.
When all wait, their phases are done at once.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, TypeVar

from fedmutual.core import Client
from fedmutual.engines.base import Reply, participate
from fedmutual.engines.inprocess import InProcess
from fedmutual.engines.stacked import Stacker

R = TypeVar("R")
Asked = Mapping[str, tuple[Any, ...]]


class RunScheduler:
    """The meeting point of several runs."""

    def __init__(self, federations: Sequence[Sequence[Client]], compile: bool = False) -> None:
        self._stacker = Stacker([client for clients in federations for client in clients], compile)
        self._baton = threading.Condition()
        self._asked: dict[ScheduledRun, Asked] = {}
        self._answers: dict[ScheduledRun, dict[str, Callable[[], Reply]] | Exception] = {}
        self.lanes = [ScheduledRun(self, clients) for clients in federations]
        self._open = set(self.lanes)
        self._unsaid: dict[ScheduledRun, list[str]] = {lane: [] for lane in self.lanes}
        self._stopped = False

    def run(self, works: Sequence[Callable[["ScheduledRun"], None]]) -> list[BaseException | None]:
        """Do each work with its lane as engine, until all have ended -> what each raised. A stop by hand stops all."""
        problems: list[BaseException | None] = [None] * len(works)

        def go(number: int) -> None:
            with self._baton:
                try:
                    if not self._stopped:
                        works[number](self.lanes[number])
                except BaseException as problem:
                    problems[number] = problem
                    self._stopped |= isinstance(problem, KeyboardInterrupt)
                finally:
                    self._leave(self.lanes[number])

        threads = [threading.Thread(target=go, args=(n,), daemon=True) for n in range(len(works))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # a signal: it comes to the main thread only
            self._stopped = True  # before the baton, which a lane that waits for no other holds to its end
            with self._baton:
                self._baton.notify_all()
            for thread in threads:
                thread.join()
            raise
        return problems

    def meet(self, lane: "ScheduledRun", asked: Asked) -> dict[str, Callable[[], Reply]]:
        """Wait until all open lanes ask for a phase, which is then done for all -> this one's replies."""
        self._asked[lane] = asked
        while lane not in self._answers:
            if self._stopped:
                raise KeyboardInterrupt
            if self._asked.keys() >= self._open:
                self._answer()
                self._baton.notify_all()
            else:
                self._baton.wait()
        answer = self._answers.pop(lane)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def remarks(self, lane: "ScheduledRun") -> list[str]:
        """As `Engine.remarks`: what concerns some clients of the stacks is said to all lanes."""
        said = self._stacker.remarks()
        for each in self.lanes:
            self._unsaid[each] += said
        left, self._unsaid[lane] = self._unsaid[lane], []
        return left

    def _answer(self) -> None:
        asked, self._asked = self._asked, {}
        whose = {id(client): lane for lane in asked for client in lane.clients}
        everyone = [(lane.client(i), given) for lane, arguments in asked.items() for i, given in arguments.items()]
        answers: dict[ScheduledRun, dict[str, Callable[[], Reply]]] = {lane: {} for lane in asked}
        try:
            for client, reply in self._stacker.participate(everyone):
                answers[whose[id(client)]][client.id] = reply
            self._answers |= answers
        except Exception as problem:  # of a step that is common: every lane's
            self._answers |= dict.fromkeys(asked, problem)

    def _leave(self, lane: "ScheduledRun") -> None:
        self._open.discard(lane)
        self._asked.pop(lane, None)
        self._baton.notify_all()


class ScheduledRun(InProcess):
    """What one of the runs takes for its engine."""

    def __init__(self, lanes: RunScheduler, clients: Sequence[Client]) -> None:
        super().__init__(clients)
        self._lanes = lanes

    @property
    def clients(self) -> Sequence[Client]:
        """Its clients."""
        return list(self._clients.values())

    def client(self, id: str) -> Client:
        """One of them."""
        return self._clients[id]

    def each(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]]
    ) -> Iterator[tuple[str, R]]:
        """As `Engine.each`; a phase is done together with the other lanes'."""
        if do is not participate:
            yield from super().each(do, arguments)
            return
        replies = self._lanes.meet(self, arguments)
        for id in arguments:
            yield id, replies[id]()  # type: ignore[misc]  # R is Reply

    def remarks(self) -> list[str]:
        """As `Engine.remarks`."""
        return self._lanes.remarks(self)
