"""Lines that a run appends: its scores and its bytes. Without wall times, so that a resumed run's are the same bytes."""

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
    """Observer: a line per evaluation."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS

    def __call__(self, event: Event) -> None:
        """Append the scores."""
        if isinstance(event, Evaluated):
            scores = [{"model": s.model, "client": s.client, "data": s.data, **s.values} for s in event.scores]
            append(self._path, [_line({"round": event.round, "train": event.train, "scores": scores})])


class Ledger:
    """Observer: a line per round, phase and client with the bytes of the tensors that went down to it and up from it.

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
                    _line({**about, "client": i, "down": event.down[i], "up": up, **_work(event, i)})
                    for i, up in event.up.items()
                ),
            )


def _work(event: PhaseDone, client: str) -> dict[str, int | None]:
    """The steps and forward passes of a client's phase; nothing of a real site."""
    work = event.work.get(client)
    return {} if work is None else {"steps": work.steps, "forwards": work.forwards}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a log; none where there is no log yet.

    Raises:
        RunError: a line is no JSON, or the file cannot be read: the file and the line.
    """
    lines = []
    for number, text in enumerate((_read(path) or "").splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except (ValueError, RecursionError):
            raise RunError(f"{path}: line {number} is damaged; start the run anew in another folder") from None
    return lines


def rewind(path: Path, keep: Callable[[int], bool]) -> None:
    """Take out the lines of rounds that were not saved; a half-written last line goes with them.

    Raises:
        RunError: as `read_lines`.
    """
    text = _read(path)
    if text is None:
        return
    kept = []
    whole = text.split("\n")[:-1]  # what follows the last line end was cut off by a kill
    for number, text in enumerate(whole, 1):
        try:
            round = json.loads(text)["round"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RunError(f"{path}: line {number} is damaged; start the run anew in another folder") from None
        if keep(round):
            kept.append(text + "\n")
    write_bytes(path, "".join(kept).encode())


def append(path: Path, lines: Iterable[str], sync: bool = False) -> None:
    """Append lines to a log. sync: until the disk has them.

    Raises:
        RunError: it cannot be written.
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
    """Open a log, and no file elsewhere: who made a folder that a run goes on in may have put a link there."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def stays_scored(round: int, saved: int | None, every: int, rounds: int) -> bool:
    """Whether scores of a round stay on resume: it is not done again, and was not scored for being the last of fewer."""
    return saved is not None and round <= saved and (round % every == 0 or round == rounds)


def settle(folder: Path) -> None:
    """Until the disk has all lines of a run's logs: after a power failure nothing tells that a saved round lacks them."""
    for path in (folder / METRICS, folder / LEDGER, *(folder / "clients").glob(f"*/{METRICS}")):
        if path.is_file():
            with path.open("ab") as file:
                os.fsync(file.fileno())


def _read(path: Path) -> str | None:
    """The text of a log; None where there is none."""
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
        raise RunError(f"{path}: line {number} is damaged; start the run anew in another folder") from None


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, allow_nan=False)
