"""Count the gradient steps and training examples of a client from the configuration and the numbers of rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from fedmutual.algorithms.agree import Silent
from fedmutual.algorithms.fedh2l import Local, Mutual
from fedmutual.algorithms.fedmd import Announce, Digest, Revisit, Transfer
from fedmutual.algorithms.local import LocalEpochs
from fedmutual.config import Config, is_pooled, make_algorithm
from fedmutual.core import Algorithm, Phase
from fedmutual.federation.networks import POOLED
from fedmutual_papers.result import Budget

PARTS = ("private", "own public", "public")


@dataclass(frozen=True)
class ClientRows:
    """The numbers of rows for one client: its private rows, its own public rows, and the public rows of all clients."""

    private: int
    own_public: int
    public: int

    def count(self, parts: tuple[str, ...]) -> int:
        """Return the number of rows in the named parts of `PARTS`; "public" already contains "own public"."""
        sizes = dict(zip(PARTS, (self.private, self.own_public, self.public), strict=True))
        return sum(sizes[part] for part in PARTS if part in parts and not (part == "own public" and "public" in parts))


@dataclass(frozen=True)
class ArmWork:
    """The number of gradient steps, and the number of examples in these steps."""

    steps: float
    examples: float

    def __add__(self, other: "ArmWork") -> "ArmWork":
        return ArmWork(self.steps + other.steps, self.examples + other.examples)

    def __mul__(self, times: float) -> "ArmWork":
        return ArmWork(self.steps * times, self.examples * times)


NO_WORK = ArmWork(0, 0)


def count_budget(config: Config, private: Mapping[str, int], public: Mapping[str, int]) -> Budget | None:
    """Return the mean over clients of the gradient steps of a client's model and of the examples in these steps.

    private, public: client id -> number of rows. A step that trains two networks, as in FML, counts once. Return None if
    the algorithm has a phase with an unknown number of steps, such as a phase of the user's algorithm.
    """
    algorithm = make_algorithm(config)
    if is_pooled(config):
        private, public = {POOLED: sum(private.values()) + sum(public.values())}, {}
    public_rows = sum(public.values())
    clients = [
        _count_client_work(config, algorithm, ClientRows(n, public.get(i, 0), public_rows), len(private))
        for i, n in private.items()
    ]
    known_work = [work for work in clients if work is not None]
    if len(known_work) < len(clients) or not known_work:
        return None
    return Budget(steps=fmean(work.steps for work in known_work), examples=fmean(work.examples for work in known_work))


def _count_client_work(config: Config, algorithm: Algorithm, rows: ClientRows, clients: int) -> ArmWork | None:
    rows = replace(rows, private=rows.count(algorithm.trains_on))  # what a phase calls private
    start = [_count_phase_work(phase, rows, clients, True) for phase in algorithm.start]
    rounds = [_count_phase_work(phase, rows, clients, False) for phase in algorithm.phases]
    if None in (*start, *rounds):
        return None
    taking_part = max(1, round(config.engine.participation * clients)) / clients
    once = sum((work for work in start if work), NO_WORK)
    each = sum((work for work in rounds if work), NO_WORK)
    return once + each * (config.rounds * taking_part)


def _count_phase_work(phase: Phase, rows: ClientRows, clients: int, start: bool) -> ArmWork | None:
    """Return the work of a client in one execution of a phase; None if it is unknown."""
    match phase:
        case Silent():
            return NO_WORK
        case Local():
            return _count_steps(phase.local_steps, rows.private, phase.batch_size)
        case Mutual():
            if clients < 2:
                return NO_WORK
            pairs = min(math.ceil(phase.pairs * clients - 1e-9), clients // 2)
            partners, share = (clients - 1, 1.0) if phase.peers == "all" else (1, 2 * pairs / clients)
            return ArmWork(1, partners * phase.public_batch) * share
        case Transfer():
            return _count_passes(phase.transfer_epochs, rows.public, phase.batch_size)
        case Revisit() if start:
            return _count_passes(phase.transfer_epochs, rows.private, phase.batch_size)
        case Digest():
            return ArmWork(phase.digest_steps, phase.digest_steps * phase.public_batch)
        case Announce():
            return NO_WORK
        case LocalEpochs() if phase.local_steps is not None:
            return _count_steps(phase.local_steps, rows.private, phase.batch_size)
        case LocalEpochs():
            return _count_passes(phase.local_epochs, rows.private, phase.batch_size)
    return None


def _count_steps(steps: int, rows: int, batch: int) -> ArmWork:
    return ArmWork(steps, steps * min(batch, rows))


def _count_passes(epochs: int, rows: int, batch: int) -> ArmWork:
    """Return the work of `epochs` passes; a last batch of a single row joins the batch before it."""
    leaves_one_row = rows > batch > 1 and rows % batch == 1
    return ArmWork(epochs * (math.ceil(rows / batch) - leaves_one_row), epochs * rows)
