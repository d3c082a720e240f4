"""What a lead may ask the server: how far a federation is, to stop it, and what came of it. In the server's process."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvflare.fuel.hci.conn import Connection
from nvflare.fuel.hci.reg import CommandModule, CommandModuleSpec, CommandSpec
from nvflare.fuel.hci.server.authz import PreAuthzReturnCode
from nvflare.fuel.hci.server.constants import ConnProps

import fedmutual
from fedmutual.rundir.checkpoint import committed
from fedmutual.sites.flare import presence, progress
from fedmutual.sites.flare.admin_protocol import AGAIN, RESULT, STATUS, STOP, list_results
from fedmutual.sites.flare.progress import Outcome
from fedmutual.sites.schema import WORK_FOLDER


class Desk(CommandModule):  # type: ignore[misc]
    """Commands beside FLARE's own, for leads only."""

    def __init__(self, state: Path, there: Callable[[], list[str]], queued: Callable[[str], str | None]) -> None:
        """state: the server's folder. there: who is connected. queued: the job of a federation that is not over, if any."""
        self._state, self._there, self._queued = state, there, queued

    def get_spec(self) -> CommandModuleSpec:
        """The commands; each takes the federation's name."""
        handlers = {STATUS: self._status, STOP: self._stop, RESULT: self._result, AGAIN: self._again}
        specs = [CommandSpec(name, name, f"{name} FEDERATION", do, _lead) for name, do in handlers.items()]
        return CommandModuleSpec("fedmutual", specs)

    def _status(self, conn: Connection, args: list[str]) -> None:
        found = progress.read_progress(self._state / args[1]) if _named(args) else None
        stops = found is not None and presence.is_stop_requested(self._state / args[1])
        about = {"stops": stops, "job": self._queued(args[1]) if _named(args) else None, "version": fedmutual.__version__}
        conn.append_dict({"there": self._there(), "progress": found, **about})

    def _stop(self, conn: Connection, args: list[str]) -> None:
        folder = self._state / args[1] if _named(args) else None
        found = progress.read_progress(folder) if folder else None
        if folder is None or found is None:
            conn.append_dict({"progress": None})
            return
        presence.request_stop(folder)
        conn.append_dict({"progress": found})

    def _again(self, conn: Connection, args: list[str]) -> None:
        """A federation is about to be submitted: it is not stopped any more."""
        if _named(args) and (self._state / args[1]).is_dir():
            presence.forget_stop(self._state / args[1])
        conn.append_dict({})

    def _result(self, conn: Connection, args: list[str]) -> None:
        """A file of what came of it; without a name, which files there are."""
        folder = self._state / args[1] if _named(args) else None
        found = progress.read_progress(folder) if folder else None
        if folder is None or found is None:
            conn.append_dict({"files": []})
            return
        saved = committed(folder)
        files = list_results(folder, saved.round if saved else None)
        if len(args) > 2:
            path = files.get(args[2])
            body = base64.b64encode(path.read_bytes()).decode() if path else ""
            conn.append_dict({"body": body, "outcome": Outcome(found["outcome"])})
            return
        conn.append_dict({"files": sorted(files)})


def _named(args: list[str]) -> bool:
    """Whether a federation is named, and no other folder."""
    return len(args) > 1 and Path(args[1]).name == args[1] and args[1] not in ("", ".", "..", WORK_FOLDER)


def _lead(conn: Connection, args: list[str]) -> Any:
    """Whether who asks is a lead, by the role in its certificate."""
    if conn.get_prop(ConnProps.USER_ROLE, "") == "lead":
        return PreAuthzReturnCode.OK
    conn.append_error("only a lead may ask this")
    return PreAuthzReturnCode.ERROR
