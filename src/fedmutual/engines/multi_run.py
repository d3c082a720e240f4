"""Train several runs together: runs that differ in seed, split, setting or method share one stack of all their clients.

Each run has a thread, and one thread works at a time. A run that needs its clients waits. When all runs wait, the phases of
all their clients are run together.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, TypeVar

from fedmutual.core import Client
from fedmutual.engines.base import Reply, participate
from fedmutual.engines.inprocess import InProcess
from fedmutual.engines.stacked import Stacker

R = TypeVar("R")
Arguments = Mapping[str, tuple[Any, ...]]


class RunScheduler:
    """Runs the clients of several runs together."""

    def __init__(self, federations: Sequence[Sequence[Client]], compile: bool = False) -> None:
        self._stacker = Stacker([client for clients in federations for client in clients], compile)
        self._turn = threading.Condition()
        self._waiting: dict[ScheduledRun, Arguments] = {}
        self._replies: dict[ScheduledRun, dict[str, Callable[[], Reply]] | Exception] = {}
        self.runs = [ScheduledRun(self, clients) for clients in federations]
        self._open = set(self.runs)
        self._unread: dict[ScheduledRun, list[str]] = {run: [] for run in self.runs}
        self._stopped = False

    def run(self, works: Sequence[Callable[["ScheduledRun"], None]]) -> list[BaseException | None]:
        """Call each work with its run as the engine -> the exception of each; None: finished. Ctrl-C stops all runs."""
        problems: list[BaseException | None] = [None] * len(works)

        def go(number: int) -> None:
            with self._turn:
                try:
                    if not self._stopped:
                        works[number](self.runs[number])
                except BaseException as problem:
                    problems[number] = problem
                    self._stopped |= isinstance(problem, KeyboardInterrupt)
                finally:
                    self._leave(self.runs[number])

        threads = [threading.Thread(target=go, args=(n,), daemon=True) for n in range(len(works))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # a signal: it comes to the main thread only
            self._stopped = True  # before the lock, which a run that does not wait holds until it ends
            with self._turn:
                self._turn.notify_all()
            for thread in threads:
                thread.join()
            raise
        return problems

    def meet(self, run: "ScheduledRun", arguments: Arguments) -> dict[str, Callable[[], Reply]]:
        """Wait until all runs ask for a phase, run the phases of all -> the replies of this run's clients."""
        self._waiting[run] = arguments
        while run not in self._replies:
            if self._stopped:
                raise KeyboardInterrupt
            if self._waiting.keys() >= self._open:
                self._run_phases()
                self._turn.notify_all()
            else:
                self._turn.wait()
        replies = self._replies.pop(run)
        if isinstance(replies, Exception):
            raise replies
        return replies

    def remarks(self, run: "ScheduledRun") -> list[str]:
        """As `Engine.remarks`: every run receives all remarks, because the runs share their stacks."""
        remarks = self._stacker.remarks()
        for each in self.runs:
            self._unread[each] += remarks
        unread, self._unread[run] = self._unread[run], []
        return unread

    def _run_phases(self) -> None:
        waiting, self._waiting = self._waiting, {}
        run_of = {id(client): run for run in waiting for client in run.clients}
        work = [(run.client(i), values) for run, arguments in waiting.items() for i, values in arguments.items()]
        replies: dict[ScheduledRun, dict[str, Callable[[], Reply]]] = {run: {} for run in waiting}
        try:
            for client, reply in self._stacker.participate(work):
                replies[run_of[id(client)]][client.id] = reply
            self._replies |= replies
        except Exception as problem:  # in a step of all clients: every run fails
            self._replies |= dict.fromkeys(waiting, problem)

    def _leave(self, run: "ScheduledRun") -> None:
        self._open.discard(run)
        self._waiting.pop(run, None)
        self._turn.notify_all()


class ScheduledRun(InProcess):
    """The engine of one of several runs that are trained together."""

    def __init__(self, scheduler: RunScheduler, clients: Sequence[Client]) -> None:
        super().__init__(clients)
        self._scheduler = scheduler

    @property
    def clients(self) -> Sequence[Client]:
        """Return the clients of this run."""
        return list(self._clients.values())

    def client(self, id: str) -> Client:
        """Return the client of this run with this id."""
        return self._clients[id]

    def each(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]]
    ) -> Iterator[tuple[str, R]]:
        """As `Engine.each`; a phase is run together with the phases of the other runs."""
        if do is not participate:
            yield from super().each(do, arguments)
            return
        replies = self._scheduler.meet(self, arguments)
        for id in arguments:
            yield id, replies[id]()  # type: ignore[misc]  # R is Reply

    def remarks(self) -> list[str]:
        """As `Engine.remarks`."""
        return self._scheduler.remarks(self)
