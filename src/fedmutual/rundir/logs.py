"""Append the scores and bytes of a run to its logs. Lines hold no times, so that a resumed run writes equal lines."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedmutual.errors import RunError
from fedmutual.events import Evaluated, Event, PhaseDone
from fedmutual.files import write_bytes
from fedmutual.rundir.file_names import LEDGER, METRICS


class Metrics:
    """Observer: writes a line per evaluation to metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS

    def __call__(self, event: Event) -> None:
        """Append the scores."""
        if isinstance(event, Evaluated):
            scores = [{"model": s.model, "client": s.client, "data": s.data, **s.values} for s in event.scores]
            append(self._path, [_format_line({"round": event.round, "train": event.train, "scores": scores})])


class Ledger:
    """Observer: writes a line per round, phase and client to ledger.jsonl: the bytes that the client received and sent.

    In a simulation the line also holds the client's gradient steps and forward passes.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER

    def __call__(self, event: Event) -> None:
        """Append the bytes."""
        if isinstance(event, PhaseDone):
            about = {"round": event.round, "phase": event.phase}
            append(
                self._path,
                (
                    _format_line({**about, "client": i, "down": event.down[i], "up": up, **_list_work(event, i)})
                    for i, up in event.up.items()
                ),
            )


def _list_work(event: PhaseDone, client: str) -> dict[str, int | None]:
    """Return the gradient steps and forward passes of a client's phase; empty for a real site."""
    work = event.work.get(client)
    return {} if work is None else {"steps": work.steps, "forwards": work.forwards}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return all lines of a log; none before the log exists.

    Raises:
        RunError: a line is not JSON, or the file cannot be read.
    """
    lines = []
    for number, text in enumerate((_read_text(path) or "").splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except (ValueError, RecursionError):
            raise RunError(
                f"{path}: line {number} is damaged; restore the file, or start a new run in another folder"
            ) from None
    return lines


def rewind(path: Path, keep: Callable[[int], bool]) -> None:
    """Remove the lines of rounds that are not kept, and an incomplete last line.

    keep: whether the lines of a round stay.

    Raises:
        RunError: as `read_lines`.
    """
    text = _read_text(path)
    if text is None:
        return
    remaining_lines = []
    complete = text.split("\n")[:-1]  # text after the last line end is an incomplete line
    for number, text in enumerate(complete, 1):
        try:
            round = json.loads(text)["round"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RunError(
                f"{path}: line {number} is damaged; restore the file, or start a new run in another folder"
            ) from None
        if keep(round):
            remaining_lines.append(text + "\n")
    write_bytes(path, "".join(remaining_lines).encode())


def append(path: Path, lines: Iterable[str], sync: bool = False) -> None:
    """Append lines to a log. sync: return after the lines are on the disk.

    Raises:
        RunError: the log cannot be written.
    """
    try:
        with open(path, "a", encoding="utf-8", opener=_open_no_link) as file:
            file.write("".join(f"{line}\n" for line in lines))
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except OSError as problem:
        raise RunError(f"{path}: cannot be written ({problem.strerror or problem})") from None


def _open_no_link(path: str, flags: int) -> int:
    """Open a log, but follow no symbolic link: a folder from somebody else could hold a link to another file."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def is_scored_on_resume(round: int, saved: int | None, every: int, rounds: int) -> bool:
    """Return whether the scores of a round stay on resume: the round is saved, and a run of `rounds` evaluates it."""
    return saved is not None and round <= saved and (round % every == 0 or round == rounds)


def settle(folder: Path) -> None:
    """Wait until the disk has all lines of a run's logs: after a power failure no saved round may lack its lines."""
    for path in (folder / METRICS, folder / LEDGER, *(folder / "clients").glob(f"*/{METRICS}")):
        if path.is_file():
            with path.open("ab") as file:
                os.fsync(file.fileno())


def _read_text(path: Path) -> str | None:
    """Return the text of a log; None if there is no log."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as problem:
        raise RunError(f"{path}: cannot be read ({problem.strerror or problem})") from None
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        number = content.count(b"\n", 0, problem.start) + 1
        raise RunError(f"{path}: line {number} is damaged; restore the file, or start a new run in another folder") from None


def _format_line(content: dict[str, Any]) -> str:
    return json.dumps(content, allow_nan=False)
