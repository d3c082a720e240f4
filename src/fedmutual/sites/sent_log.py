"""The log of messages that left a site: one line for each message, with the shape, bytes and digest of each tensor."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedmutual.core import Message
from fedmutual.errors import RunError
from fedmutual.rundir.record_files import append_lines
from fedmutual.sites.protocol import SiteAnswer

LEFT = "left.jsonl"


class SentLog:
    """The record of each message that leaves a site."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEFT

    def record(self, answer: SiteAnswer, message: Message, content: bytes, to: str, unmasked: str | None = None) -> None:
        """Record a message and its receiver before the message leaves. unmasked: SHA-256 of the words before masking.

        Raises:
            RunError: the log cannot be written.
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
        append_lines(self._path, [json.dumps(line)], sync=True)


def read_sent_messages(folder: Path) -> list[Mapping[str, Any]]:
    """Return all messages that left a site, in order. An incomplete last line, after a kill, is of no message that left.

    Raises:
        RunError: the log cannot be read, or a line is damaged.
    """
    path, lines = folder / LEFT, []
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise make_read_error(path, problem) from None
    for number, text in enumerate(content.split(b"\n")[:-1], 1):
        try:
            lines.append(json.loads(text))
        except (ValueError, RecursionError):  # RecursionError: thousands of nested brackets
            raise RunError(
                f"{path}: line {number} does not have the form that `fedmutual site` writes; restore the file from a backup"
            ) from None
    return lines


def make_read_error(path: Path, problem: OSError) -> RunError:
    """Return the error for a log or its folder that cannot be read: a site closes its state folder to other users."""
    return RunError(
        f"{problem.filename or path}: cannot be read ({problem.strerror or problem}); correct the cause, or give the "
        "command as the user who runs the site"
    )
