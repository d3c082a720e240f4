"""What a run spends on training: gradient steps and examples of a client, counted from its configuration and its rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from fedmutual.algorithms.agree import Silent
from fedmutual.algorithms.fedh2l import Local, Mutual
from fedmutual.algorithms.fedmd import Announce, Digest, Revisit, Transfer
from fedmutual.algorithms.local import LocalEpochs
from fedmutual.config import Config, make_algorithm
from fedmutual.core import Algorithm, Phase
from fedmutual.report.comparison import POOLED
from fedmutual.reproduce.result import Budget

PARTS = ("private", "own public", "public")


@dataclass(frozen=True)
class Rows:
    """How many rows a client trains on: its private ones, its own public ones, and all clients' public ones."""

    private: int
    own_public: int
    public: int

    def of(self, parts: tuple[str, ...]) -> int:
        """Rows of several parts together; all public rows hold the client's own."""
        sizes = dict(zip(PARTS, (self.private, self.own_public, self.public), strict=True))
        return sum(sizes[part] for part in PARTS if part in parts and not (part == "own public" and "public" in parts))


@dataclass(frozen=True)
class Work:
    """Gradient steps, and the examples that they see."""

    steps: float
    examples: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.steps + other.steps, self.examples + other.examples)

    def __mul__(self, times: float) -> "Work":
        return Work(self.steps * times, self.examples * times)


NO_WORK = Work(0, 0)


def count_budget(config: Config, private: Mapping[str, int], public: Mapping[str, int]) -> Budget | None:
    """The gradient steps of a client's own model and the examples that they see, in the mean over clients.

    A client with two networks, as FML's, takes each step with both. private, public: rows of each client. None where the
    algorithm has a phase whose steps are not known here, as one's own may.
    """
    algorithm = make_algorithm(config)
    if config.algorithm["name"] == POOLED:
        private, public = {POOLED: sum(private.values()) + sum(public.values())}, {}
    given = sum(public.values())
    clients = [_of_client(config, algorithm, Rows(n, public.get(i, 0), given), len(private)) for i, n in private.items()]
    known = [work for work in clients if work is not None]
    if len(known) < len(clients) or not known:
        return None
    return Budget(steps=fmean(work.steps for work in known), examples=fmean(work.examples for work in known))


def _of_client(config: Config, algorithm: Algorithm, rows: Rows, clients: int) -> Work | None:
    rows = replace(rows, private=rows.of(algorithm.trains_on))  # what a phase calls private
    start = [_of_phase(phase, rows, clients, True) for phase in algorithm.start]
    rounds = [_of_phase(phase, rows, clients, False) for phase in algorithm.phases]
    if None in (*start, *rounds):
        return None
    taking_part = max(1, round(config.engine.participation * clients)) / clients
    once = sum((work for work in start if work), NO_WORK)
    each = sum((work for work in rounds if work), NO_WORK)
    return once + each * (config.rounds * taking_part)


def _of_phase(phase: Phase, rows: Rows, clients: int, start: bool) -> Work | None:
    """A client's work in one phase, once; None where it is not known."""
    match phase:
        case Silent():
            return NO_WORK
        case Local():
            return _steps(phase.local_steps, rows.private, phase.batch_size)
        case Mutual():
            if clients < 2:
                return NO_WORK
            pairs = min(math.ceil(phase.pairs * clients - 1e-9), clients // 2)
            partners, share = (clients - 1, 1.0) if phase.peers == "all" else (1, 2 * pairs / clients)
            return Work(1, partners * phase.public_batch) * share
        case Transfer():
            return _passes(phase.transfer_epochs, rows.public, phase.batch_size)
        case Revisit() if start:
            return _passes(phase.transfer_epochs, rows.private, phase.batch_size)
        case Digest():
            return Work(phase.digest_steps, phase.digest_steps * phase.public_batch)
        case Announce():
            return NO_WORK
        case LocalEpochs() if phase.local_steps is not None:
            return _steps(phase.local_steps, rows.private, phase.batch_size)
        case LocalEpochs():
            return _passes(phase.local_epochs, rows.private, phase.batch_size)
    return None


def _steps(steps: int, rows: int, batch: int) -> Work:
    return Work(steps, steps * min(batch, rows))


def _passes(epochs: int, rows: int, batch: int) -> Work:
    """Passes over all rows; a single row that is left joins the batch before it."""
    alone = rows > batch > 1 and rows % batch == 1
    return Work(epochs * (math.ceil(rows / batch) - alone), epochs * rows)
