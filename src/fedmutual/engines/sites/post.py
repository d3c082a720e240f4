"""Orders to sites and their answers, as bytes: named tensors in safetensors form, a few words in the header, no pickle."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Protocol, TypeVar

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedmutual.boundary import Refused, check_declared
from fedmutual.core import Message, Spec
from fedmutual.records.events import Score

WORK, EXAM = "work", "exam"
LONGEST = 500  # characters that another says in one sentence
ATTEMPTS = 3  # how often, in the life of a federation, its server may go back and ask with other tensors
T = TypeVar("T")
Finite = Annotated[float, Field(allow_inf_nan=False)]
Words = Annotated[str, AfterValidator(lambda text: plain(text))]  # for a console and a log
Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class Order:
    """What a site is to do: its half of a phase, or to score its networks after a round."""

    kind: str  # WORK or EXAM
    round: Annotated[int, Field(ge=-1, lt=2**63)]  # from 0; -1 in the start
    phase: Count  # its number in the round, or in the start
    senders: tuple[str, ...] | None = None  # whose messages of the phase before count, where sites send to each other
    asked: tuple[str, ...] | None = None  # and who does this phase too, so that messages go to no others
    attempt: Count = 0  # raised by the server, at most to ATTEMPTS, when it goes back to an earlier round

    @property
    def said(self) -> str:
        """In words."""
        return "the start" if self.round < 0 else f"round {self.round + 1}"


@dataclass(frozen=True)
class Told(Score):
    """A score that a site tells, of its own rows: as a log can have it."""

    values: dict[str, Finite | Count | list[Finite | None] | None]


@dataclass(frozen=True)
class Answer:
    """What a site says beside the tensors of its message."""

    order: Order
    train: Mapping[str, Finite] = field(default_factory=dict)  # mean of each loss term, if it tells
    scores: tuple[Told, ...] = ()  # of an exam, if it tells
    up: Count | None = None  # bytes that it sent to other sites, not by the server
    down: Count | None = None  # and had from them
    remarks: tuple[Words, ...] = ()  # whose messages it left out, and why
    problem: Words | None = None  # why there is no message, in words that hold no data and no path
    accused: tuple[str, ...] = ()  # whose public seed sets are other ones, if that is the problem
    diverged: bool = False  # whether the problem is that its loss or its weights are no longer finite


class Post(Protocol):
    """Carries them. What it is made of, the loop does not know."""

    def there(self) -> tuple[str, ...]:
        """The sites that can be asked now."""
        ...

    def late(self) -> tuple[str, ...]:
        """Those of them that did not answer in time and have not been heard of since: asked, and not waited for."""
        ...

    def ask(self, orders: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes]]:
        """Send each site its order -> (site, answer) as they come; those that have not answered in time are left out."""
        ...


def wrong(message: Message, declared: Spec, sender: str) -> str | None:
    """Why a message is of no use, in one clause; None if it is."""
    try:
        check_declared(message, declared, sender)
    except Refused as problem:
        return f"its message is refused, for {problem.tensor!r}: {problem.why}"
    odd = next((k for k, t in message.items() if t.is_floating_point() and not torch.isfinite(t).all()), None)
    return None if odd is None else f"its message holds numbers in {odd!r} that are not finite"


def plain(text: str) -> str:
    """What another says in words, without what would move a cursor or begin a line, and not for ever."""
    return "".join(c if c.isprintable() else "?" for c in text[:LONGEST]) + ("..." if len(text) > LONGEST else "")


class Garbled(ValueError):
    """Bytes that are no order and no answer."""


def packed(what: Order | Answer, tensors: Message) -> bytes:
    """As bytes."""
    return save({k: v.contiguous() for k, v in tensors.items()}, metadata={"fedmutual": json.dumps(asdict(what))})


def order(content: bytes) -> tuple[Order, Message]:
    """An order and its tensors. Raises Garbled."""
    return _opened(content, _ORDER, "names no order")


def answer(content: bytes) -> tuple[Answer, Message]:
    """An answer and its tensors. Raises Garbled."""
    return _opened(content, _ANSWER, "says something else than an answer")


_ORDER, _ANSWER = TypeAdapter(Order), TypeAdapter(Answer)


def _opened(content: bytes, kind: TypeAdapter[T], otherwise: str) -> tuple[T, Message]:
    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        words = header["__metadata__"]["fedmutual"]
        return kind.validate_json(words, strict=True), tensors
    except ValidationError as problem:
        found = problem.errors(include_input=False, include_url=False)[0]  # what it says instead may be anything
        at = plain(".".join(map(str, found["loc"]))) or found["type"]
        raise Garbled(f"its header {otherwise} ({at})") from None
    except (SafetensorError, ValueError, KeyError, TypeError) as problem:
        raise Garbled(f"it is no message in safetensors form ({type(problem).__name__})") from None
