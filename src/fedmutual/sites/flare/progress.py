"""The progress file of a federation at the server. `submit` and `status` show it; the server restarts jobs by it."""

import time
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from fedmutual.errors import RunError
from fedmutual.events import Evaluated, Event, Noted, PhaseDone, Replied, RoundDone, Started
from fedmutual.files import Table, read_json, write_json
from fedmutual.rundir.record_files import check_record
from fedmutual.rundir.text import TimeLeft, format_scores
from fedmutual.sites.contract import Contract
from fedmutual.sites.state_files import StateRecord

FILE = "progress.json"
_NOTES = 20  # notes in the file, the newest ones
_FIX = "restore a copy of the file, or delete the file and submit the federation again; the saved rounds are not lost"


class Outcome(StrEnum):
    """How a job of the server stands: it runs, is done, or ended for one of these reasons."""

    RUNNING = "running"
    DONE = "done"
    AGAIN = "again"  # it ended so that the next job has other sites
    SHORT = "short"  # too few sites answered
    BROKEN = "broken"  # a process died
    FAILED = "failed"  # a restart would fail again
    STOPPED = "stopped"


_Count = Annotated[int, Field(ge=0)]


class _NoteRecord(StateRecord):
    text: str
    first: int
    last: int


class _Traffic(StateRecord):
    """Bytes of all rounds."""

    up: _Count = 0
    down: _Count = 0


class _Limits(StateRecord):
    """The keys of the contract by which the server restarts jobs."""

    quorum: _Count
    wait: float = Field(allow_inf_nan=False)  # in seconds
    retries: _Count


def _drop_lines(notes: Any) -> Any:
    """Return notes without those of older servers, which were lines of text."""
    return [note for note in notes if not isinstance(note, str)] if isinstance(notes, list) else notes


class _ProgressRecord(StateRecord):
    """The content of FILE. The keys with a default are missing in files of older servers."""

    format: int
    name: str = ""
    job: str
    submitted: str
    old: tuple[str, ...] = ()
    outcome: Outcome
    said: str = ""
    round: _Count = 0
    rounds: _Count = 0
    contract: str = ""
    sites: tuple[str, ...]
    within: tuple[str, ...] = Field((), alias="in")
    scores: str = ""
    left: str = ""
    bytes: _Traffic = _Traffic()
    notes: Annotated[list[_NoteRecord], BeforeValidator(_drop_lines)] = Field([])
    tries: _Count = 0
    limits: _Limits
    began: float = Field(0.0, allow_inf_nan=False)  # seconds since the epoch


class ProgressFile:
    """An observer that rewrites the progress file after each event. Raises RunError if the file cannot be written."""

    def __init__(self, folder: Path, contract: Contract, job: str) -> None:
        self._folder, self._time_left = folder, TimeLeft()
        self._answered = set[str]()  # sites that answered in this phase
        previous: Table = {}
        with suppress(RunError):  # damaged: this file replaces it, and no result depends on it
            previous = read_progress(folder) or {}
        is_restart = previous.get("job") == job  # else a lead submitted the job
        self._state: dict[str, Any] = {
            "format": 1,
            "name": contract.name,
            "job": job,
            "submitted": previous["submitted"] if is_restart else job,
            "old": previous["old"] if is_restart else [],
            "outcome": Outcome.RUNNING,
            "said": "",
            "round": previous.get("round", 0),
            "rounds": contract.config.rounds,
            "contract": contract.imprint,
            "sites": list(contract.sites.names),
            "in": [],
            "scores": previous.get("scores", ""),
            "left": "",
            "bytes": previous.get("bytes", {"up": 0, "down": 0}),
            "notes": previous.get("notes", []),
            "tries": previous["tries"] if is_restart else 0,
            "limits": {
                "quorum": contract.quorum,
                "wait": contract.sites.wait,
                "retries": contract.sites.retries,
            },
            "began": time.time(),
        }

    def begin(self, sites: tuple[str, ...]) -> None:
        """Write the sites of the job."""
        self._state["in"] = list(sites)
        self._write()

    def end(self, outcome: Outcome, reason: str) -> None:
        """Write the outcome of the job. reason: one sentence."""
        self._state |= {"outcome": outcome, "said": reason, "left": ""}
        self._write()

    def __call__(self, event: Event) -> None:
        """Write the state of the federation after an event."""
        match event:
            case Started():
                self._time_left.start(event)
                return
            case Noted():
                self._add_note(event)
            case Replied():
                self._answered = {event.client} | (self._answered if event.answered > 1 else set())
                return
            case PhaseDone():
                self._state["in"] = sorted(self._answered)
                traffic = {"up": event.up, "down": event.down}
                self._state["bytes"] = {k: self._state["bytes"][k] + sum(traffic[k].values()) for k in traffic}
            case Evaluated():
                self._state["scores"] = format_scores(event.scores)
            case RoundDone():
                self._state |= {"round": event.round, "left": self._time_left.estimate_after(event.round), "tries": 0}
            case _:
                return
        self._write()

    def _add_note(self, event: Noted) -> None:
        """Add a note as the last one. A note with the text of an earlier note extends its rounds."""
        notes = {n["text"]: n for n in self._state["notes"]}
        first = notes.pop(event.text, {"first": event.round})["first"]
        self._state["notes"] = [*notes.values(), {"text": event.text, "first": first, "last": event.round}][-_NOTES:]

    def _write(self) -> None:
        write_json(self._folder / FILE, self._state)


def format_notes(note: dict[str, Any]) -> str:
    """Return a note as a line: "round 2 to round 7: site 'west' is left out: it is not connected"."""
    first, last = note["first"], note["last"]
    start, end = (f"round {r}" if r > 0 else "the start" for r in (first, last))
    return f"{end if start == end else f'{start} to {end}'}: {note['text']}"


def read_progress(folder: Path) -> dict[str, Any] | None:
    """Return the content of the progress file, with all keys; None if there is no file.

    A damaged file is not treated as absent: the server would restart no job of the federation, remove the archive of its
    job, and tell leads that the federation was never started.

    Raises:
        RunError: the file is damaged, lacks a key, has a value of another type, or is of another format.
    """
    path = folder / FILE
    if not path.exists():
        return None
    return check_record(path, _ProgressRecord, read_json(path, _FIX), _FIX).model_dump(mode="json", by_alias=True)


def change_progress(folder: Path, **changes: Any) -> None:
    """Change keys of the progress file, while no job runs. Without a progress file nothing is written.

    Raises:
        RunError: as `read_progress`, or the file cannot be written.
    """
    state = read_progress(folder)
    if state is not None:
        write_json(folder / FILE, state | changes)
