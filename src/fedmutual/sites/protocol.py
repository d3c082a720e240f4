"""Orders to sites and their answers, as bytes: named tensors in the safetensors format with a JSON header, no pickle.

`sizes` has the largest sizes, which are checked before the bytes are parsed. The requests to a user's own workers are in
`engines.workers`: they are pickled functions and networks, which a site must refuse.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedmutual.boundary import Refused, check_declared
from fedmutual.core import Message, Spec
from fedmutual.events import Score
from fedmutual.rundir.schema import ClassScores

Place = tuple[int, int]
"""A round and a phase; the scores of a round have the number after its last phase."""
WORK: Literal["work"] = "work"
EVALUATE: Literal["evaluate"] = "evaluate"
LONGEST_TEXT = 500  # the most characters of another party's sentence
_NAMED = 100  # the most characters of the name of a score or a loss
_SCORES, _CLASSES = 64, 2**16  # the most scores of an answer, and values of a score; the most numbers of a value
ATTEMPTS = 3  # how often in the life of a federation its server may go back and send other tensors
_ABOUT = {f.name for f in fields(Score)} - {"values"}  # beside its values, in a line of metrics.jsonl
LEAVES = "it leaves the federation"  # the problem in the last answer of a site
T = TypeVar("T")
Finite = Annotated[float, Field(allow_inf_nan=False)]
Words = Annotated[str, AfterValidator(lambda text: clean_text(text))]  # for a console and a log
Name = Annotated[Words, Field(max_length=_NAMED)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class Order:
    """What a site is to do: its half of a phase, or to score its networks after a round."""

    kind: Literal["work", "evaluate"]
    round: Annotated[int, Field(ge=-1, lt=2**63)]  # from 0; -1 in the start
    phase: Count  # its number in the round, or in the start
    senders: tuple[str, ...] | None = None  # among peers: the sites whose messages of the previous phase count
    asked: tuple[str, ...] | None = None  # among peers: the sites that do this phase, and so the receivers of messages
    attempt: Count = 0  # raised by the server, at most to ATTEMPTS, when it goes back: see `site_journal`

    @property
    def round_name(self) -> str:
        """Return "the start", or "round 3", counted from 1."""
        return "the start" if self.round < 0 else f"round {self.round + 1}"


@dataclass(frozen=True)
class ReleasedScore(Score):
    """A score that a site sends, of its own rows, in a form that a log can hold."""

    model: Name
    client: Name | None
    data: Name
    values: Annotated[
        dict[Name, Finite | Count | Annotated[list[Finite | None], Field(max_length=_CLASSES)] | None],
        Field(max_length=_SCORES),
        AfterValidator(lambda values: _check_values(values)),
    ]


@dataclass(frozen=True)
class SiteAnswer:
    """The answer of a site, without the tensors of its message."""

    order: Order
    train: Mapping[Name, Finite] = field(default_factory=dict)  # the mean of each loss term that the site discloses
    scores: Annotated[tuple[ReleasedScore, ...], Field(max_length=_SCORES)] = ()  # the scores that the site discloses
    up: Count | None = None  # bytes that the site sent to other sites
    down: Count | None = None  # bytes of other sites' messages that the site used
    remarks: tuple[Words, ...] = ()  # which messages of other sites the site left out, and why
    problem: Words | None = None  # why there is no message, without data and paths
    accused: tuple[str, ...] = ()  # the sites with another public seed set, if that is the problem


class Transport(Protocol):
    """The transport of orders and answers between the server and the sites."""

    def list_connected(self) -> tuple[str, ...]:
        """Return the connected sites."""

    def list_late(self) -> tuple[str, ...]:
        """Return the connected sites that missed a deadline and have sent nothing since. They get orders without waiting."""

    def ask(self, orders: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes]]:
        """Send each site its order, and yield (site, answer) in the order of arrival, until the deadline in seconds."""


def find_message_fault(message: Message, declared: Spec, sender: str) -> str | None:
    """Return in one clause why a message cannot be used, or None where it can be used."""
    try:
        check_declared(message, declared, sender)
    except Refused as problem:
        return clean_text(f"its message is refused because of {problem.tensor!r}: {problem.why}")
    bad_name = next((k for k, t in sorted(message.items()) if not torch.isfinite(t).all()), None)
    return None if bad_name is None else f"its message holds numbers in {bad_name!r} that are not finite"


def clean_text(text: str) -> str:
    """Return another party's text with "?" for each unprintable character, cut after `LONGEST_TEXT` characters."""
    return "".join(c if c.isprintable() else "?" for c in text[:LONGEST_TEXT]) + ("..." if len(text) > LONGEST_TEXT else "")


def _check_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a score. Raises ValueError if a report cannot read them, or if a name is reserved."""
    if _ABOUT & values.keys():
        raise ValueError("a value has a name that is reserved: client, model or data")
    ClassScores.model_validate(values)
    return values


class MalformedMessage(ValueError):
    """The bytes are neither an order nor an answer."""


class TooFew(RuntimeError):
    """Too few sites answered in a round, or a stage of a secure sum. The round begins again when enough sites are back."""


class Limit(NamedTuple):
    """The largest size of a message in bytes, as `sizes` computes it: of its header, and of its tensors."""

    header: int
    tensors: int


def pack_message(what: Order | SiteAnswer, tensors: Message) -> bytes:
    """Return an order or an answer with its tensors as bytes in the safetensors format."""
    return save({k: v.contiguous() for k, v in tensors.items()}, metadata={"fedmutual": json.dumps(asdict(what))})


def digest_order(order: Order, tensors: Message) -> str:
    """Return the digest of an order in hex, without the other receivers and the attempt, which do not change the work."""
    about = {key: value for key, value in asdict(replace(order, asked=None)).items() if key != "attempt"}
    content = save({k: v.contiguous() for k, v in tensors.items()}, metadata={"fedmutual": json.dumps(about)})
    return hashlib.sha256(content).hexdigest()


def read_order(content: bytes, limit: Limit | None = None) -> tuple[Order, Message]:
    """Return (order, tensors). Raises MalformedMessage where the bytes are no order, or are longer than the limit."""
    return _parse_message(content, _ORDER, "names no order", limit)


def read_answer(content: bytes, limit: Limit | None = None) -> tuple[SiteAnswer, Message]:
    """Return (answer, tensors). Raises MalformedMessage where the bytes are no answer, or are longer than the limit."""
    return _parse_message(content, _ANSWER, "says something else than an answer", limit)


_ORDER, _ANSWER = TypeAdapter(Order), TypeAdapter(SiteAnswer)


def _parse_message(content: bytes, kind: TypeAdapter[T], otherwise: str, limit: Limit | None) -> tuple[T, Message]:
    try:
        words = _read_words(content, limit)
        return kind.validate_json(words, strict=True), load(content)
    except ValidationError as problem:
        error = problem.errors(include_input=False, include_url=False)[0]  # without the input, which may be any text
        at = clean_text(".".join(map(str, error["loc"]))) or error["type"]
        raise MalformedMessage(f"its header {otherwise} ({at})") from None
    except MalformedMessage:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as problem:
        raise MalformedMessage(f"it is no message in safetensors form ({type(problem).__name__})") from None


def _read_words(content: bytes, limit: Limit | None) -> str:
    """Return the text of a message's header, after a check of its sizes.

    Two parsers read the header, this one and that of safetensors. A header that they could read in two ways is refused: one
    with a repeated name, or with a key that one parser skips.
    """
    if not isinstance(content, bytes):
        raise TypeError("no bytes")
    size, rest = int.from_bytes(content[:8], "little"), len(content) - 8
    if limit is not None and size > limit.header:
        raise MalformedMessage(f"its header has {size:,} bytes, and {limit.header:,} are enough")
    if limit is not None and rest > size + limit.tensors:
        raise MalformedMessage(f"its tensors have {rest - size:,} bytes, and {limit.tensors:,} are declared")
    header = parse_strict_json(content[8 : 8 + size])
    if not isinstance(header, dict):
        raise TypeError("no table")
    tables = [(_KEYS.get(name, _TENSOR), table) for name, table in header.items()]
    if not all(isinstance(table, dict) and table.keys() == keys for keys, table in tables):
        raise ValueError("other keys than a message has")
    words = header["__metadata__"]["fedmutual"]
    if not isinstance(words, str):
        raise TypeError("no text")
    return words


_KEYS, _TENSOR = {"__metadata__": {"fedmutual"}}, {"dtype", "shape", "data_offsets"}


def parse_strict_json(text: str | bytes) -> Any:
    """Return the value of a JSON text of another participant.

    Raises ValueError where the text is no JSON, has NaN or Infinity, or repeats a key: another parser might take the other
    value. Raises RecursionError where values are nested too deep.
    """
    return json.loads(text, object_pairs_hook=_make_table, parse_constant=_refuse_constant)


def _make_table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key twice")
    return table


def _refuse_constant(name: str) -> None:
    raise ValueError(name)
