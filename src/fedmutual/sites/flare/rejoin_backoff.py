"""For which sites a job is restarted: connected sites that are not in it. Exponential backoff per connection."""

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedmutual.files import write_json

FILE = "comers.json"
_FIRST, _LONGEST = 60.0, 3600.0  # seconds until a job is restarted again for the same connection: doubled each time


def list_due_sites(folder: Path, out: Mapping[str, str], inside: Collection[str], now: float | None = None) -> list[str]:
    """Return the sites for which the job is restarted now, and record the restart.

    out: connected sites that are not in the job, each with its connection. inside: the sites in the job, whose earlier
    restarts are forgotten. now: seconds since the epoch.

    Raises:
        RunError: the record cannot be written.
    """
    now, before = time.time() if now is None else now, _read_attempts(folder)
    tried = {i: restart for i, restart in before.items() if i not in inside}
    due = sorted(i for i, connection in out.items() if _has_waited(tried.get(i), connection, now))
    for i in due:
        times = tried[i]["times"] + 1 if i in tried and tried[i]["connection"] == out[i] else 1
        tried[i] = {"connection": out[i], "times": times, "at": now}
    if tried != before:
        write_json(folder / FILE, {"format": 1, "tried": tried})
    return due


def _has_waited(last: Mapping[str, Any] | None, connection: str, now: float) -> bool:
    if last is None or last["connection"] != connection:
        return True
    pause: float = min(_FIRST * 2 ** min(last["times"] - 1, 10), _LONGEST)
    return now >= float(last["at"]) + pause


def _read_attempts(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        tried: dict[str, dict[str, Any]] = json.loads((folder / FILE).read_text(encoding="utf-8"))["tried"]
        return tried
    except FileNotFoundError:
        return {}
