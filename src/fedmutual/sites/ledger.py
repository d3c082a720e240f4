"""The ledger of a site for its operator: all messages that left the site, summed up over rounds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from fedmutual.errors import RunError
from fedmutual.sites.protocol import EVALUATE
from fedmutual.sites.sent_log import LEFT, make_read_error, read_sent_messages
from fedmutual.sites.site_settings import read_site_file

Line = Mapping[str, Any]
"""One message that left the site, as `SentLog` recorded it."""


@dataclass(frozen=True)
class Kind:
    """Messages with equal names, shapes and kinds of content; their values may differ."""

    phase: int
    order_kind: str  # WORK or EVALUATE
    to: str
    tensors: tuple[tuple[str, str, tuple[int, ...], int], ...]  # name, dtype, shape, bytes
    value_kinds: tuple[str, ...]  # kinds of values beside them
    problem: str  # said instead of a message; else empty
    attempt: int = 0  # above 0 once the server went back

    @property
    def bytes(self) -> int:
        """Return the bytes of the tensors."""
        return sum(size for *_, size in self.tensors)


@dataclass(frozen=True)
class Row:
    """Messages of one kind in consecutive rounds."""

    first: int  # round, counted from 1; 0 is the start
    last: int
    kind: Kind
    messages: int
    bytes: int  # of all of them, words and headers too


def find_ledger(path: Path) -> Path:
    """Return the folder of a ledger. path: this folder, a site.toml, or the state folder that contains one ledger.

    Raises:
        RunError: there is no ledger, or more than one, or the folder cannot be read.
        ConfigError: site.toml is invalid.
    """
    try:
        folder = path if path.is_dir() else read_site_file(path).state
        if (folder / LEFT).is_file():
            return folder
        below = sorted(file.parent for file in folder.glob(f"*/{LEFT}"))
    except OSError as problem:
        raise make_read_error(path, problem) from None
    if len(below) > 1:
        raise RunError(f"{folder}: the site took part in {len(below)} federations; name one: {', '.join(map(str, below))}")
    if not below:
        raise RunError(f"{folder}: there is no {LEFT}: nothing left this site, or it is not the state folder of a site")
    return below[0]


def read_ledger(folder: Path) -> list[Line]:
    """Return all messages that left, in order. Raises RunError as `read_sent_messages`."""
    lines = read_sent_messages(folder)
    for number, line in enumerate(lines, 1):
        try:
            _make_kind(line)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RunError(
                f"{folder / LEFT}: line {number} does not have the form that `fedmutual site` writes; restore the file "
                "from a backup"
            ) from None
    return lines


def summarise_ledger(lines: Iterable[Line]) -> list[Row]:
    """Return one row for each kind of message, over consecutive rounds with equal kinds of messages."""
    rounds = [(round, _count_kinds(of)) for round, of in groupby(sorted(lines, key=_get_round), _get_round)]
    return [
        Row(same[0][0], same[-1][0], kind, sum(of[kind][0] for _, of in same), sum(of[kind][1] for _, of in same))
        for same in _group_equal_rounds(rounds)
        for kind in same[0][1]
    ]


def count_totals(lines: Sequence[Line]) -> dict[str, dict[str, int]]:
    """Return receiver -> {"messages": their number, "tensors": the bytes of tensors, "bytes": the bytes of all content}."""
    totals: dict[str, dict[str, int]] = {}
    for line in lines:
        to = totals.setdefault(line["to"], {"messages": 0, "tensors": 0, "bytes": 0})
        to["messages"] += 1
        to["tensors"] += sum(t["bytes"] for t in line["tensors"])
        to["bytes"] += line["bytes"]
    return dict(sorted(totals.items()))


_Round = tuple[int, dict[Kind, tuple[int, int]]]  # its number; kind -> messages, bytes


def _count_kinds(lines: Iterable[Line]) -> dict[Kind, tuple[int, int]]:
    counts: dict[Kind, tuple[int, int]] = {}
    for line in lines:
        kind = _make_kind(line)
        messages, size = counts.get(kind, (0, 0))
        counts[kind] = (messages + 1, size + line["bytes"])
    return counts


def _group_equal_rounds(rounds: Sequence[_Round]) -> Iterable[list[_Round]]:
    """Yield groups of consecutive rounds with equal kinds of messages and equal counts."""
    run: list[_Round] = []
    for round, kinds in rounds:
        if run and (round != run[-1][0] + 1 or _list_message_counts(kinds) != _list_message_counts(run[-1][1])):
            yield run
            run = []
        run.append((round, kinds))
    if run:
        yield run


def _list_message_counts(kinds: Mapping[Kind, tuple[int, int]]) -> list[tuple[Kind, int]]:
    return [(kind, messages) for kind, (messages, _) in kinds.items()]


def _get_round(line: Line) -> int:
    return int(line["round"])


def _make_kind(line: Line) -> Kind:
    tensors = tuple((t["name"], t["dtype"], tuple(map(int, t["shape"])), int(t["bytes"])) for t in line["tensors"])
    values = dict(line["told"])
    problem = values.pop("problem", "")
    int(line["bytes"]), _get_round(line)
    words = {"train": "losses", "scores": "scores", "remarks": "remarks"}
    value_kinds = tuple(words.get(k, k) for k in values)
    return Kind(line["phase"], line["what"], line["to"], tensors, value_kinds, problem, int(line.get("attempt", 0)))


def describe_message(kind: Kind) -> str:
    """Return the phase, the scores, or the problem of a kind of message, as the ledger lists it."""
    attempt_note = f", attempt {kind.attempt}" if kind.attempt else ""
    if kind.problem:
        return f"no message: {kind.problem}{attempt_note}"
    if kind.order_kind == EVALUATE:
        return f"{'scores' if kind.value_kinds else 'scored at the site, nothing sent'}{attempt_note}"
    return f"phase {kind.phase}{'' if kind.tensors else ', done'}{attempt_note}"
