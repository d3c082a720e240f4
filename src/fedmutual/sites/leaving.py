"""How a site leaves a federation: `fedmutual leave` writes the wish, and the site's processes carry it out.

The job answers the next round's order with its last message, `protocol.LEAVES`, and closes the ledger. When the server has
taken this message, the site's process ends. Then the state is wiped, if this was wished.
"""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel

from fedmutual.errors import RunError
from fedmutual.files import FORMAT, read_json, write_bytes, write_json
from fedmutual.rundir.file_names import LOCK, SUMMARY
from fedmutual.rundir.folder import is_locked, lock_folder
from fedmutual.rundir.record_files import check_record
from fedmutual.sites.journal import FILE, OLD_LEDGER, Journal
from fedmutual.sites.ledger import read_ledger
from fedmutual.sites.schema import WORK_FOLDER

_FILE = "leave.json"
_TICK = 0.5


class Leave(BaseModel):
    """The operator's wish that the site leaves a federation: the content of `_FILE` in the site's state folder."""

    format: int = FORMAT
    runs: tuple[str, ...]  # the names of the federation's runs
    wipe: bool  # whether only the ledgers stay
    is_told: bool = False  # whether the server has taken the site's last message


def read_leave(state: Path) -> Leave | None:
    """Return the wish to leave in a site's state folder. Raises RunError where the file is damaged."""
    fix = "delete the file, and give `fedmutual leave` again"
    return check_record(state / _FILE, Leave, read_json(state / _FILE, fix), fix) if (state / _FILE).exists() else None


def write_leave(state: Path, leave: Leave) -> None:
    """Write the wish to leave. Raises RunError where the file cannot be written."""
    write_json(state / _FILE, leave.model_dump(mode="json"))


def is_to_leave(state: Path, run: str) -> bool:
    """Return whether the operator wishes that the site leaves the federation of a run. Raises RunError as `read_leave`."""
    leave = read_leave(state)
    return leave is not None and run in leave.runs


def has_left(state: Path, runs: Collection[str]) -> bool:
    """Return whether a site has left the federation of these runs. Raises RunError as `read_leave`."""
    leave = read_leave(state)
    return leave is not None and leave.is_told and not set(leave.runs).isdisjoint(runs)


def note_told(state: Path) -> None:
    """Note that the server has taken the site's last message. Raises RunError as `read_leave`, `write_leave`."""
    leave = read_leave(state)
    if leave is not None and not leave.is_told:
        write_leave(state, leave.model_copy(update={"is_told": True}))


def has_answered(state: Path, run: str) -> bool:
    """Return whether the site's last message of a run is in its journal. Raises RunError where the journal is damaged."""
    with closing(Journal(state / run, read_only=True)) as journal:
        return journal.get_fact("left", int) is not None


def begin_leave(state: Path, runs: tuple[str, ...], wipe: bool) -> bool:
    """Write the operator's wish that the site leaves, and return whether the server needs no message about it.

    It needs none where it has taken the last message, or all rounds are done. Raises RunError where a file is damaged or
    cannot be written.
    """
    is_told = has_left(state, runs) or all((state / run / SUMMARY).exists() for run in runs)
    if not is_told and not is_locked(state):  # killed after the last message, the site cannot start again to send it
        is_told = any(has_answered(state, run) for run in runs)
    write_leave(state, Leave(runs=runs, wipe=wipe, is_told=is_told))
    return is_told


def close_state(state: Path) -> None:
    """End what `leave` began, when no process of the site runs: wipe the state, if this was wished.

    The ledger stays as `OLD_LEDGER`, and so does the folder of the privacy budget: it counts for the data, in every
    federation. Raises RunError where a file cannot be read, written or removed.
    """
    leave = read_leave(state)
    if leave is None or not leave.wipe:
        return
    for folder in (state / run for run in leave.runs if (state / run / FILE).exists()):
        with lock_folder(folder, "still works with this state", "end that process", patience=20.0):
            Journal(folder).close()  # a killed process may have left lines in the log beside it, which is removed first
            lines = [json.dumps(line) + "\n" for line in read_ledger(folder)]
            write_bytes(folder / OLD_LEDGER, "".join(lines).encode())
            try:
                others = [path for path in folder.iterdir() if path.name not in (OLD_LEDGER, FILE, LOCK)]
                for path in (*others, folder / FILE):  # the journal last: it has the ledger
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as problem:
                why, fix = problem.strerror or problem, "make it writable, and give `fedmutual leave` again"
                raise RunError(f"{problem.filename or folder}: cannot be removed ({why}); {fix}") from None
    shutil.rmtree(state / WORK_FOLDER, ignore_errors=True)


def end_in_time(last: datetime, has_left: Callable[[], bool] = lambda: False) -> threading.Thread:
    """End this process by SIGTERM when the site has left, or when its certificate ends. Returns at once.

    last: the end of the certificate; later no connection could be opened, and the process would try for ever.
    """

    def wait() -> None:
        while not has_left() and datetime.now(UTC) <= last:
            time.sleep(_TICK)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=wait, daemon=True, name="end")
    thread.start()
    return thread
