"""Append lines to the logs of a run, and remove the lines of rounds that are not saved."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from fedmutual.errors import RunError
from fedmutual.files import write_bytes
from fedmutual.rundir.file_names import LEDGER, METRICS


def rewind(path: Path, keep: Callable[[int], bool]) -> None:
    """Remove the lines of rounds that are not kept, and an incomplete last line.

    keep: whether the lines of a round stay.

    Raises:
        RunError: a line is damaged, or the file cannot be read or written.
    """
    text = _read_text(path)
    if text is None:
        return
    remaining_lines = []
    complete = text.split("\n")[:-1]  # text after the last line end is an incomplete line
    for number, text in enumerate(complete, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        round = line.get("round") if isinstance(line, dict) else None
        if type(round) is not int:  # True is an int, too
            raise RunError(f"{path}: line {number} is damaged; restore the file, or start a new run in another folder")
        if keep(round):
            remaining_lines.append(text + "\n")
    write_bytes(path, "".join(remaining_lines).encode())


def append_lines(path: Path, lines: Iterable[str], sync: bool = False) -> None:
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


def sync_logs(folder: Path) -> None:
    """Wait until the disk has all lines of a run's logs: after a power failure no saved round may lack its lines.

    Raises:
        RunError: a log cannot be written.
    """
    for path in (folder / METRICS, folder / LEDGER, *(folder / "clients").glob(f"*/{METRICS}")):
        if path.is_file():
            append_lines(path, (), sync=True)


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
