"""The connected sites, and a requested stop: files that the server's process writes for the job's process."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from fedmutual.files import write_json

PRESENCE, STOP = "there.json", "stop.json"


Sites = Mapping[str, str]
"""Connected sites: site -> id of the connection. A restarted site has another id."""


def write_members(folder: Path, sites: Sites, silent: Collection[str] = ()) -> None:
    """Write the connected sites. silent: connected sites whose heartbeat is overdue.

    Raises:
        RunError: the file cannot be written.
    """
    write_json(folder / PRESENCE, {"format": 1, "sites": dict(sites), "silent": sorted(silent)})


def read_connected(folder: Path) -> Sites:
    """Return the connected sites. A site whose connection was cut stays in the result until FLARE notices."""
    return _read_members(folder)[0]


def read_alive(folder: Path) -> Sites:
    """Return the connected sites whose heartbeat is not overdue: a job is restarted only for these sites."""
    sites, silent = _read_members(folder)
    return {i: connection for i, connection in sites.items() if i not in silent}


def _read_members(folder: Path) -> tuple[dict[str, str], list[str]]:
    try:
        members = json.loads((folder / PRESENCE).read_text(encoding="utf-8"))
        return members["sites"], members.get("silent", [])
    except FileNotFoundError:
        return {}, []


def request_stop(folder: Path) -> None:
    """Write the file that asks the server in this folder to stop after the current round.

    Raises:
        RunError: the file cannot be written.
    """
    write_json(folder / STOP, {"format": 1})


def is_stop_requested(folder: Path) -> bool:
    """Return whether a lead requested a stop after the current round."""
    return (folder / STOP).exists()


def forget_stop(folder: Path) -> None:
    """Forget a requested stop, because the federation is submitted again."""
    (folder / STOP).unlink(missing_ok=True)
