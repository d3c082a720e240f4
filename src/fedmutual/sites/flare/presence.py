"""Who is connected, and whether somebody said stop: files in the state folder, from the server's process to the job's."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from fedmutual.files import write_json

THERE, STOP = "there.json", "stop.json"


Sites = Mapping[str, str]
"""Who is connected: site -> what tells this connection from an earlier one, before the site was started anew."""


def write_members(folder: Path, sites: Sites, silent: Collection[str] = ()) -> None:
    """Write down who is connected, and whose sign of life is overdue."""
    write_json(folder / THERE, {"format": 1, "sites": dict(sites), "silent": sorted(silent)})


def read_connected(folder: Path) -> Sites:
    """Who is connected, as far as the server knows: a connection that was cut is one of these for a while."""
    return _read(folder)[0]


def read_alive(folder: Path) -> Sites:
    """Who is connected and gave a sign of life just now: whom it is worth to begin a job anew for."""
    sites, silent = _read(folder)
    return {i: seen for i, seen in sites.items() if i not in silent}


def _read(folder: Path) -> tuple[dict[str, str], list[str]]:
    try:
        found = json.loads((folder / THERE).read_text(encoding="utf-8"))
        return found["sites"], found.get("silent", [])
    except FileNotFoundError:
        return {}, []


def request_stop(folder: Path) -> None:
    """Say stop: the rounds end after the one that is under way."""
    write_json(folder / STOP, {"format": 1})


def is_stop_requested(folder: Path) -> bool:
    """Whether somebody did."""
    return (folder / STOP).exists()


def forget_stop(folder: Path) -> None:
    """Somebody submits it again."""
    (folder / STOP).unlink(missing_ok=True)
