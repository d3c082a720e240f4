"""For whom a job is begun anew: a site that is connected and not in it. In vain for one, then not at once again for it."""

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedmutual.files import write_json

FILE = "comers.json"
_FIRST, _LONGEST = 60.0, 3600.0  # seconds until a job is begun anew once more for the same connection: doubled each time


def list_due_sites(folder: Path, out: Mapping[str, str], inside: Collection[str], now: float | None = None) -> list[str]:
    """For which of the sites that are out a job is worth beginning anew now; that it was is written down.

    out: site -> its connection, as in `members.Sites`. inside: who takes part, which ends what was in vain for it.
    """
    now, before = time.time() if now is None else now, _read(folder)
    tried = {i: found for i, found in before.items() if i not in inside}
    found = sorted(i for i, connection in out.items() if _waited(tried.get(i), connection, now))
    for i in found:
        times = tried[i]["times"] + 1 if i in tried and tried[i]["connection"] == out[i] else 1
        tried[i] = {"connection": out[i], "times": times, "at": now}
    if tried != before:
        write_json(folder / FILE, {"format": 1, "tried": tried})
    return found


def _waited(last: Mapping[str, Any] | None, connection: str, now: float) -> bool:
    if last is None or last["connection"] != connection:
        return True
    pause: float = min(_FIRST * 2 ** min(last["times"] - 1, 10), _LONGEST)
    return now >= float(last["at"]) + pause


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        found: dict[str, dict[str, Any]] = json.loads((folder / FILE).read_text(encoding="utf-8"))["tried"]
        return found
    except FileNotFoundError:
        return {}
