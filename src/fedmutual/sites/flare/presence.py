"""The connected sites, and a requested stop: files that the server's process writes for the job's process."""

from collections.abc import Collection, Mapping
from pathlib import Path

from fedmutual.errors import RunError
from fedmutual.files import write_json
from fedmutual.sites.state_files import StateRecord, read_state_record, write_state_record

PRESENCE, STOP = "there.json", "stop.json"


Sites = Mapping[str, str]
"""Connected sites: site -> id of the connection. A restarted site has another id."""


class _PresenceRecord(StateRecord):
    """The content of PRESENCE."""

    sites: dict[str, str]
    silent: tuple[str, ...] = ()


def write_members(folder: Path, sites: Sites, silent: Collection[str] = ()) -> None:
    """Write the connected sites. silent: connected sites whose heartbeat is overdue.

    Raises:
        RunError: the file cannot be written.
    """
    write_state_record(folder / PRESENCE, _PresenceRecord(sites=dict(sites), silent=tuple(sorted(silent))))


def read_connected(folder: Path) -> Sites:
    """Return the connected sites. A site whose connection was cut stays in the result until FLARE notices."""
    return _read_members(folder).sites


def read_alive(folder: Path) -> Sites:
    """Return the connected sites whose heartbeat is not overdue: a job is restarted only for these sites."""
    members = _read_members(folder)
    return {i: connection for i, connection in members.sites.items() if i not in members.silent}


def _read_members(folder: Path) -> _PresenceRecord:
    """Return the content of PRESENCE, without sites if the file is missing or damaged.

    The server compares the file with its connections twice a second, and writes it again where they differ.
    """
    try:
        members = read_state_record(folder / PRESENCE, _PresenceRecord)
    except RunError:
        members = None
    return members or _PresenceRecord(sites={})


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
