"""How far a federation is, in a file at the server: what `submit` and `status` show, and what the watch goes by."""

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from fedmutual.events import Evaluated, Event, Noted, PhaseDone, Replied, RoundDone, Started
from fedmutual.files import write_json
from fedmutual.rundir.text import TimeLeft, scores_line
from fedmutual.sites.contract import Contract

FILE = "progress.json"
_NOTES = 20  # the last ones


class Outcome(StrEnum):
    """What became of a job."""

    RUNNING = "running"
    DONE = "done"
    AGAIN = "again"  # it ended so that the next one has other sites
    SHORT = "short"  # too few sites answered
    BROKEN = "broken"  # a process died
    FAILED = "failed"  # it would fail again
    STOPPED = "stopped"


class Progress:
    """Observer: rewrites the file."""

    def __init__(self, folder: Path, contract: Contract, job: str) -> None:
        self._folder, self._left = folder, TimeLeft()
        self._spoke = set[str]()  # who did its part of this phase
        before = read_progress(folder) or {}
        again = before.get("job") == job  # the server began it anew; else somebody submitted it
        self._now: dict[str, Any] = {
            "format": 1,
            "name": contract.name,
            "job": job,
            "submitted": before["submitted"] if again else job,
            "old": before.get("old", []) if again else [],
            "outcome": Outcome.RUNNING,
            "said": "",
            "round": before.get("round", 0),
            "rounds": contract.config.rounds,
            "contract": contract.imprint,
            "sites": list(contract.sites.names),
            "in": [],
            "scores": before.get("scores", ""),
            "left": "",
            "bytes": before.get("bytes", {"up": 0, "down": 0}),
            "notes": [n for n in before.get("notes", []) if isinstance(n, dict)],  # older servers had lines
            "tries": before.get("tries", 0) if again else 0,
            "limits": {
                "quorum": contract.quorum,
                "wait": contract.sites.wait,
                "retries": contract.sites.retries,
            },
            "began": time.time(),
        }

    def begin(self, there: tuple[str, ...]) -> None:
        """The job has these sites."""
        self._now["in"] = list(there)
        self._write()

    def end(self, outcome: Outcome, said: str) -> None:
        """The job is over."""
        self._now |= {"outcome": outcome, "said": said, "left": ""}
        self._write()

    def __call__(self, event: Event) -> None:
        """Note what is new."""
        match event:
            case Started():
                self._left.start(event)
                return
            case Noted():
                self._note(event)
            case Replied():
                self._spoke = {event.client} | (self._spoke if event.answered > 1 else set())
                return
            case PhaseDone():
                self._now["in"] = sorted(self._spoke)
                ways = {"up": event.up, "down": event.down}
                self._now["bytes"] = {k: self._now["bytes"][k] + sum(ways[k].values()) for k in ways}
            case Evaluated():
                self._now["scores"] = scores_line(event.scores)
            case RoundDone():
                self._now |= {"round": event.round, "left": self._left.after(event.round), "tries": 0}
            case _:
                return
        self._write()

    def _note(self, event: Noted) -> None:
        """What came up before is the same note, of more rounds, and the last one."""
        notes = {n["text"]: n for n in self._now["notes"]}
        first = notes.pop(event.text, {"first": event.round})["first"]
        self._now["notes"] = [*notes.values(), {"text": event.text, "first": first, "last": event.round}][-_NOTES:]

    def _write(self) -> None:
        write_json(self._folder / FILE, self._now)


def format_notes(note: dict[str, Any]) -> str:
    """ "round 2 to round 7: site 'west' is left out: it is not there"."""
    first, last = note["first"], note["last"]
    begun, now = (f"round {r}" if r > 0 else "the start" for r in (first, last))
    return f"{now if begun == now else f'{begun} to {now}'}: {note['text']}"


def read_progress(folder: Path) -> dict[str, Any] | None:
    """What the file says; None where there is none."""
    try:
        found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return found
    except FileNotFoundError:
        return None


def change_progress(folder: Path, **what: Any) -> None:
    """Change some of it, while no job runs."""
    found = read_progress(folder)
    if found is not None:
        write_json(folder / FILE, found | what)
