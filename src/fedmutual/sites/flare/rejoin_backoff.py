"""For which sites a job is restarted: connected sites that are not in it. Exponential backoff per connection."""

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from fedmutual.errors import RunError
from fedmutual.sites.state_files import StateRecord, read_state_record, write_state_record

FILE = "comers.json"
_FIRST, _LONGEST = 60.0, 3600.0  # seconds until a job is restarted again for the same connection: doubled each time


class _Restart(StateRecord):
    """The last restart of the job for a site."""

    connection: str
    times: int  # restarts for this connection
    at: float  # seconds since the epoch


class _RestartRecord(StateRecord):
    """The content of FILE."""

    tried: dict[str, _Restart]  # site -> its last restart


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
        times = tried[i].times + 1 if i in tried and tried[i].connection == out[i] else 1
        tried[i] = _Restart(connection=out[i], times=times, at=now)
    if tried != before:
        write_state_record(folder / FILE, _RestartRecord(tried=tried))
    return due


def _has_waited(last: _Restart | None, connection: str, now: float) -> bool:
    if last is None or last.connection != connection:
        return True
    pause: float = min(_FIRST * 2 ** min(last.times - 1, 10), _LONGEST)
    return now >= last.at + pause


def _read_attempts(folder: Path) -> dict[str, _Restart]:
    """Return the last restarts; none if the file is missing or damaged.

    The file only delays restarts. So a damaged file is ignored: an error would end the job.
    """
    try:
        record = read_state_record(folder / FILE, _RestartRecord)
    except RunError:
        record = None
    return record.tried if record else {}
