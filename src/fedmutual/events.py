"""What happens in a run, told to observers. Observers look, they do not steer."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Concatenate, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from fedmutual.core import Client, Message, Work
from fedmutual.scores import Scores

R = TypeVar("R")


class Visit(Protocol):
    """Runs a function where each client lives, with arguments of that client's own -> (client's id, result) as they end."""

    def __call__(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]]
    ) -> Iterator[tuple[str, R]]:
        """As `engines.base.Engine.each`."""
        ...


@dataclass(frozen=True)
class Started:
    """The run begins, or goes on: `done` of `rounds` rounds are behind it."""

    done: int
    rounds: int
    clients: tuple[str, ...]
    notes: tuple[str, ...]  # one sentence each: what a user should know of these settings and data


@dataclass(frozen=True)
class Replied:
    """A client has done its half of a phase. Rounds count from 1; 0 is the start."""

    round: int
    phase: str
    client: str
    answered: int  # clients that have, in this phase
    expected: int


@dataclass(frozen=True)
class Noted:
    """Something that a user should know came up: words that are the same if it comes up again in another round."""

    round: int  # 0 is the start
    text: str


@dataclass(frozen=True)
class PhaseDone:
    """A phase is over."""

    round: int
    phase: str
    down: Mapping[str, int]  # bytes of the tensors sent to each client
    up: Mapping[str, int]  # and by each
    train: Mapping[str, Mapping[str, float]]  # mean of each loss term, of those who tell all
    work: Mapping[str, Work] = field(default_factory=dict)  # of each client in a simulation; of no real site


Share = Annotated[float, Field(ge=0, le=1)]


class Known(BaseModel):
    """The scores of a classifier, as `report`, which imports nothing of this, reads them; others are not looked at.

    Shares are in [0, 1]; None where a score is undefined.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    accuracy: Share | None = None
    examples: int | None = None
    loss: float | None = None
    balanced_accuracy: Share | None = None
    auroc: Share | None = None
    majority: Share | None = None
    recall: tuple[Share | None, ...] | None = None  # one a class


@dataclass(frozen=True)
class Score:
    """One model scored on one set of rows: what the second channel tells."""

    model: str  # "global", "personal", or "meme" where no complete global model exists
    client: str | None  # whose rows; None for the federation's test set
    data: str  # "test", "validation", "holdout"
    values: Scores


@dataclass(frozen=True)
class Evaluated:
    """The models after a round, scored."""

    round: int
    train: Mapping[str, Mapping[str, float]]
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class RoundDone:
    """A round is over: the moment to save what must be kept."""

    round: int
    rounds: int
    server: Message
    visit: Visit


@dataclass(frozen=True)
class Failed:
    """The run stops before its end."""

    round: int
    problem: BaseException


@dataclass(frozen=True)
class Finished:
    """All rounds are done."""

    rounds: int


Event = Started | Replied | Noted | PhaseDone | Evaluated | RoundDone | Failed | Finished
Observer = Callable[[Event], None]
