"""The ledger of a site for its operator: one line for each message that left the site, summed up over rounds."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from fedmutual.core import Message
from fedmutual.errors import RunError
from fedmutual.sites.journal import FILE, OLD_LEDGER, Journal
from fedmutual.sites.protocol import WORK, SiteAnswer
from fedmutual.sites.site_settings import read_site_file

Line = Mapping[str, Any]
"""One message that left the site: its round and phase, receiver, tensors with their digests, values and bytes."""


def record_sent(
    journal: Journal, answer: SiteAnswer, message: Message, content: bytes, to: str, unmasked: str | None = None
) -> None:
    """Record a message and its receiver before the message leaves. unmasked: SHA-256 of the words before masking.

    Raises RunError where the journal cannot be written.
    """
    values = {"train": dict(answer.train), "scores": [vars(s) for s in answer.scores], "remarks": list(answer.remarks)}
    line = {
        "round": answer.order.round + 1,
        "phase": answer.order.phase + 1,
        "what": answer.order.kind,
        **({"attempt": answer.order.attempt} if answer.order.attempt else {}),
        "to": to,
        "tensors": [
            {"name": k, "dtype": str(v.dtype).removeprefix("torch."), "shape": list(v.shape), "bytes": v.nbytes}
            | {"sha256": hashlib.sha256(v.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()}
            for k, v in sorted(message.items())
        ],
        **({"unmasked_sha256": unmasked} if unmasked else {}),
        "told": {k: v for k, v in values.items() if v} | ({"problem": answer.problem} if answer.problem else {}),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    journal.write("INSERT INTO sent (line) VALUES (?)", (json.dumps(line),))


def find_ledger(path: Path) -> Path:
    """Return the folder of a ledger. path: this folder, a site.toml, or the state folder that contains one ledger.

    Raises RunError where there is no ledger, or more than one, or the folder cannot be read; ConfigError for site.toml.
    """
    try:
        folder = path if path.is_dir() else read_site_file(path).state
        if any((folder / name).is_file() for name in (FILE, OLD_LEDGER)):
            return folder
        below = sorted({file.parent for name in (FILE, OLD_LEDGER) for file in folder.glob(f"*/{name}")})
    except OSError as problem:
        raise _make_error(path, problem) from None
    if len(below) > 1:
        raise RunError(f"{folder}: the site took part in {len(below)} federations; name one: {', '.join(map(str, below))}")
    if not below:
        raise RunError(
            f"{folder}: there is no {FILE}: nothing left this site, or it is not the state folder of a site; name the "
            "site.toml, or the folder that its 'state.folder' names"
        )
    return below[0]


def read_ledger(folder: Path) -> list[Line]:
    """Return all messages that left a site, in order, also of a state folder of version 0.2 and before.

    Raises RunError where the ledger cannot be read, or a line is damaged.
    """
    path = folder / (FILE if (folder / FILE).exists() else OLD_LEDGER)
    try:
        # a last line without an end is of no message that left
        texts = path.read_bytes().split(b"\n")[:-1] if path.name == OLD_LEDGER else []
    except OSError as problem:
        raise _make_error(path, problem) from None
    if path.name == FILE:
        with closing(Journal(folder, read_only=True)) as journal:
            texts = [text for (text,) in journal.read("SELECT line FROM sent ORDER BY number")]
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
            _describe_message(lines[-1])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # RecursionError: nested brackets
            raise RunError(
                f"{path}: line {number} does not have the form that `fedmutual site` writes; restore the file from a backup"
            ) from None
    return lines


def summarise_ledger(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return one row for each kind of message, over consecutive rounds with equal kinds and numbers of messages.

    Keys of a row: "first" and "last" (rounds from 1; 0 is the start), "what", "to", "messages", "tensors" and "size" (of one
    message: their number and bytes), "beside" (kinds of values), "bytes" (of all messages, with words and headers).
    """
    rows, current, shape, last = list[dict[str, Any]](), list[dict[str, Any]](), list[Any](), -1
    for round, group in groupby(sorted(lines, key=_get_round), _get_round):
        kinds: dict[Any, list[Line]] = {}
        for line in group:
            kinds.setdefault(_describe_message(line), []).append(line)
        before, shape = shape, [(kind, len(of)) for kind, of in kinds.items()]
        if round != last + 1 or shape != before:
            current = [
                {"first": round, "what": what, "to": to, "messages": 0, "bytes": 0}
                | {"tensors": len(tensors), "size": sum(size for *_, size in tensors), "beside": beside}
                for what, to, tensors, beside, _ in kinds
            ]
            rows += current
        for row, of in zip(current, kinds.values(), strict=True):
            row["last"], row["messages"] = round, row["messages"] + len(of)
            row["bytes"] += sum(line["bytes"] for line in of)
        last = round
    return rows


def count_totals(lines: Sequence[Line]) -> dict[str, dict[str, int]]:
    """Return receiver -> {"messages": their number, "tensors": the bytes of tensors, "bytes": the bytes of all content}."""
    totals: dict[str, dict[str, int]] = {}
    for line in lines:
        to = totals.setdefault(line["to"], {"messages": 0, "tensors": 0, "bytes": 0})
        to["messages"] += 1
        to["tensors"] += sum(t["bytes"] for t in line["tensors"])
        to["bytes"] += line["bytes"]
    return dict(sorted(totals.items()))


def _get_round(line: Line) -> int:
    return int(line["round"])


def _describe_message(line: Line) -> tuple[str, str, tuple[Any, ...], tuple[str, ...], int]:
    """Return what equal messages have in common: (what they are, receiver, tensors, kinds of values, phase)."""
    tensors = tuple((t["name"], t["dtype"], tuple(map(int, t["shape"])), int(t["bytes"])) for t in line["tensors"])
    values, names = dict(line["told"]), {"train": "losses"}
    problem = values.pop("problem", "")
    int(line["bytes"]), _get_round(line)
    if problem:
        what = f"no message: {problem}"
    elif line["what"] != WORK:
        what = "scores" if values else "scored at the site, nothing sent"
    else:
        what = f"phase {line['phase']}{'' if tensors else ', done'}"
    attempt_note = f", attempt {line['attempt']}" if line.get("attempt") else ""
    return what + attempt_note, line["to"], tensors, tuple(names.get(k, k) for k in values), line["phase"]


def _make_error(path: Path, problem: OSError) -> RunError:
    """Return the error for a ledger or its folder that cannot be read: a site closes its state folder to other users."""
    return RunError(
        f"{problem.filename or path}: cannot be read ({problem.strerror or problem}); correct the cause, or give the "
        "command as the user who runs the site"
    )
