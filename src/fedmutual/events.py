"""The events of a run, which observers receive. Observers read, they do not steer."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedmutual.core import Message, Work
from fedmutual.scores import Scores

Visit = Callable[..., Iterator[tuple[str, Any]]]
"""Runs a function in the process of each client, and yields (client id, result), as `engines.base.Simulation.visit`."""


@dataclass(frozen=True)
class _OfRun:
    """What happens in a run."""

    # which run of `fedmutual.compare`, as in `Comparison.runs`: (method, seed), with split.folds (method, seed, fold); of
    # `federate` and `run` (), with split.folds (fold,)
    run: tuple[str | int, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class Started(_OfRun):
    """The run begins or resumes: `done` of `rounds` rounds are complete."""

    done: int
    rounds: int
    clients: tuple[str, ...]
    notes: tuple[str, ...]  # remarks for the user on these settings and data, one sentence each
    choices: tuple[str, ...] = ()  # the engine that "auto" chose, the pretrained weights that were loaded


@dataclass(frozen=True)
class Replied(_OfRun):
    """A client has finished its half of a phase. Rounds count from 1; 0 is the start."""

    round: int
    phase: str
    client: str
    answered: int  # clients that have, in this phase
    expected: int


@dataclass(frozen=True)
class Noted(_OfRun):
    """A remark for the user; the text is equal if the remark repeats in another round."""

    round: int  # 0 is the start
    text: str


@dataclass(frozen=True)
class PhaseDone(_OfRun):
    """All replies of a phase arrived and were combined. Rounds count from 1; 0 is the start."""

    round: int
    phase: str
    down: Mapping[str, int]  # bytes of the tensors sent to each client
    up: Mapping[str, int]  # and by each
    train: Mapping[str, Mapping[str, float]]  # mean of each loss term, over the clients that disclose all
    work: Mapping[str, Work] = field(default_factory=dict)  # of each client in a simulation; of no real site


@dataclass(frozen=True)
class Score:
    """The score of one model on one set of rows, as sent in the second channel."""

    model: str  # "global", "personal", or "meme" where no complete global model exists
    client: str | None  # the client with these rows; None for the federation's test set
    data: str  # "test", "validation", "holdout"
    values: Scores


@dataclass(frozen=True)
class Evaluated(_OfRun):
    """The scores of the models after a round; rounds count from 1. `train` has the mean of each loss term, by client."""

    round: int
    train: Mapping[str, Mapping[str, float]]
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class RoundDone(_OfRun):
    """A round is complete: the time to save the state. Round 0 is the start.

    `server` is the server's state. `visit` runs a function at each client; None: the clients are real sites.
    """

    round: int
    rounds: int
    server: Message
    visit: Visit | None


@dataclass(frozen=True)
class Failed(_OfRun):
    """The run stops before its last round. `round` counts from 1."""

    round: int
    problem: BaseException


@dataclass(frozen=True)
class Finished(_OfRun):
    """All rounds are complete."""

    rounds: int


Event = Started | Replied | Noted | PhaseDone | Evaluated | RoundDone | Failed | Finished
Observer = Callable[[Event], None]
