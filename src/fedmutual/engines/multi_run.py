"""Train several runs together: runs that differ in seed, split, setting or method share one stack of all their clients.

Each run is a generator that stops where it needs its clients. When all runs have stopped, the phases of all their clients
are run together.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial

from fedmutual.core import Client
from fedmutual.engines.base import Replies, Reply
from fedmutual.engines.group import list_inputs
from fedmutual.engines.inprocess import InProcess
from fedmutual.engines.loop import PhaseOrder, RunPhase
from fedmutual.engines.stacked import Stacker

Training = Generator[PhaseOrder, RunPhase, None]
"""A run: yields the order of each phase, and receives a function that runs the phase."""


class RunScheduler:
    """Trains several runs together in one process, without threads: clients of all runs with one architecture step together.

    Each run is a generator that yields its phases; the scheduler runs the phases of all runs, and sends the replies back.
    """

    def __init__(self, federations: Sequence[Sequence[Client]], compile: bool = False, turns: bool = False) -> None:
        self._stacker = Stacker([client for clients in federations for client in clients], compile, turns)
        self._engines = [RunEngine(self, clients) for clients in federations]
        self._unread: dict[RunEngine, list[str]] = {engine: [] for engine in self._engines}

    def train(self, works: Sequence[Callable[["RunEngine"], Training]]) -> list[BaseException | None]:
        """Train each run with its engine to its end; return the exception of each run, None for a finished run.

        Raises:
            KeyboardInterrupt: the user stopped all runs with Ctrl-C.
        """
        trainings = {engine: work(engine) for engine, work in zip(self._engines, works, strict=True)}
        problems: dict[RunEngine, BaseException] = {}
        replies: dict[RunEngine, RunPhase] = {}
        stop: KeyboardInterrupt | None = None
        while trainings:
            phases: dict[RunEngine, PhaseOrder] = {}
            for engine, training in list(trainings.items()):
                try:
                    if stop is not None:
                        training.throw(stop)
                    phases[engine] = training.send(replies[engine]) if engine in replies else next(training)
                except StopIteration:
                    del trainings[engine]
                except BaseException as problem:
                    problems[engine] = problem
                    del trainings[engine]
                    if isinstance(problem, KeyboardInterrupt):
                        stop = problem
            if phases and stop is None:
                try:
                    replies = self._run_phases(phases)
                except KeyboardInterrupt as interrupt:
                    stop = interrupt
        if stop is not None:
            raise stop
        return [problems.get(engine) for engine in self._engines]

    def read_remarks(self, engine: "RunEngine") -> list[str]:
        """As `Engine.take_remarks`: every run receives all remarks, because the runs share their stacks."""
        remarks = self._stacker.take_remarks()
        for each in self._engines:
            self._unread[each] += remarks
        unread, self._unread[engine] = self._unread[engine], []
        return unread

    def _run_phases(self, phases: Mapping["RunEngine", PhaseOrder]) -> dict["RunEngine", RunPhase]:
        """Run a phase of each run, all clients together -> a function for each run that returns its replies."""
        run_of = {id(client): engine for engine in phases for client in engine.clients.values()}
        replies: dict[RunEngine, dict[str, Callable[[], Reply]]] = {engine: {} for engine in phases}
        try:
            parts = [part for engine, order in phases.items() for part in list_inputs(engine.clients, *order)]
            for client, reply in self._stacker.train(parts):
                replies[run_of[id(client)]][client.id] = reply
        except Exception as problem:  # in a step of all clients: every run fails
            return dict.fromkeys(phases, partial(_raise, problem))
        return {engine: partial(_call_in_order, replies[engine], phases[engine].inboxes) for engine in phases}


class RunEngine(InProcess):
    """The engine of one of several runs that are trained together. It holds the clients of its run only."""

    def __init__(self, scheduler: RunScheduler, clients: Sequence[Client]) -> None:
        super().__init__(clients)
        self._scheduler = scheduler

    @property
    def clients(self) -> Mapping[str, Client]:
        """Return the clients of this run, by id."""
        return self._clients

    def take_remarks(self) -> list[str]:
        """As `Engine.take_remarks`."""
        return self._scheduler.read_remarks(self)


def _call_in_order(replies: Mapping[str, Callable[[], Reply]], clients: Iterable[str]) -> Replies:
    for id in clients:
        yield id, replies[id]()


def _raise(problem: Exception) -> Replies:
    raise problem
