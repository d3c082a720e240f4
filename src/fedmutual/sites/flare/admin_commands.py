"""Commands of leads in the server's process: the status of a federation, stopping, and its results."""

import base64
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.fuel.hci.conn import Connection
from nvflare.fuel.hci.reg import CommandModule, CommandModuleSpec, CommandSpec
from nvflare.fuel.hci.server.authz import PreAuthzReturnCode
from nvflare.fuel.hci.server.constants import ConnProps

import fedmutual
from fedmutual.errors import RunError
from fedmutual.rundir.checkpoint import read_checkpoint
from fedmutual.sites.flare import presence, progress
from fedmutual.sites.flare.admin_protocol import AGAIN, ERROR, RESULT, STATUS, STOP, list_result_files
from fedmutual.sites.flare.progress import Outcome
from fedmutual.sites.schema import WORK_FOLDER


class LeadCommands(CommandModule):  # type: ignore[misc]
    """fedmutual's commands in FLARE's admin interface, for leads only."""

    def __init__(self, state: Path, list_sites: Callable[[], list[str]], find_job: Callable[[str], str | None]) -> None:
        """state: the server's folder. list_sites: returns the connected sites. find_job: returns the unfinished job of a
        federation, or None.
        """
        self._state, self._list_sites, self._find_job = state, list_sites, find_job

    def get_spec(self) -> CommandModuleSpec:
        """Return the commands; each command takes the name of a federation."""
        handlers = {STATUS: self._send_status, STOP: self._stop, RESULT: self._send_result, AGAIN: self._allow_restart}
        specs = [
            CommandSpec(name, name, f"{name} FEDERATION", partial(_answer, handler), _check_lead)
            for name, handler in handlers.items()
        ]
        return CommandModuleSpec("fedmutual", specs)

    def _send_status(self, conn: Connection, args: list[str]) -> None:
        state = progress.read_progress(self._state / args[1]) if _has_federation(args) else None
        stops = state is not None and presence.is_stop_requested(self._state / args[1])
        job = self._find_job(args[1]) if _has_federation(args) else None
        answer = {"there": self._list_sites(), "progress": state, "stops": stops, "job": job}
        conn.append_dict({**answer, "version": fedmutual.__version__})

    def _stop(self, conn: Connection, args: list[str]) -> None:
        folder = self._state / args[1] if _has_federation(args) else None
        state = progress.read_progress(folder) if folder else None
        if folder is None or state is None:
            conn.append_dict({"progress": None})
            return
        presence.request_stop(folder)
        conn.append_dict({"progress": state})

    def _allow_restart(self, conn: Connection, args: list[str]) -> None:
        """Forget an earlier stop request: the federation will be submitted now."""
        if _has_federation(args) and (self._state / args[1]).is_dir():
            presence.forget_stop(self._state / args[1])
        conn.append_dict({})

    def _send_result(self, conn: Connection, args: list[str]) -> None:
        """Send a result file; without the name of a file, the list of result files."""
        folder = self._state / args[1] if _has_federation(args) else None
        state = progress.read_progress(folder) if folder else None
        if folder is None or state is None:
            conn.append_dict({"files": []})
            return
        saved = read_checkpoint(folder)
        files = list_result_files(folder, saved.round if saved else None)
        if len(args) > 2:
            path = files.get(args[2])
            body = base64.b64encode(path.read_bytes()).decode() if path else ""
            conn.append_dict({"body": body, "outcome": Outcome(state["outcome"])})
            return
        conn.append_dict({"files": sorted(files)})


def _answer(handler: Callable[[Connection, list[str]], None], conn: Connection, args: list[str]) -> None:
    """Answer a command, with the error where a file of the server is damaged or cannot be written.

    FLARE would answer with an error of its own, which a lead treats as a lost connection, and logs in again.
    """
    try:
        handler(conn, args)
    except RunError as problem:
        conn.append_dict({ERROR: str(problem)})


def _has_federation(args: list[str]) -> bool:
    """Return whether the first argument is the name of a federation, and not a path to another folder."""
    return len(args) > 1 and Path(args[1]).name == args[1] and args[1] not in ("", ".", "..", WORK_FOLDER)


def _check_lead(conn: Connection, args: list[str]) -> Any:
    """Return OK for a lead, by the role in the certificate; else an error."""
    if conn.get_prop(ConnProps.USER_ROLE, "") == "lead":
        return PreAuthzReturnCode.OK
    conn.append_error("only a lead may give this command")
    return PreAuthzReturnCode.ERROR
