"""A component of the server's process that records the connected sites and restarts jobs that ended early."""

import hashlib
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.apis.storage import DATA, WORKSPACE

from fedmutual.errors import RunError
from fedmutual.sites.flare import leftovers, presence, progress, workspace
from fedmutual.sites.flare.admin_commands import LeadCommands
from fedmutual.sites.flare.console import print_line
from fedmutual.sites.flare.progress import Outcome

_TICK = 0.5
_FINAL = (Outcome.DONE, Outcome.FAILED, Outcome.STOPPED)
_TO_START = (RunStatus.SUBMITTED.value, RunStatus.APPROVED.value, RunStatus.DISPATCHED.value)
_KEYS_OF_ONE_JOB = (  # keys of a job's meta that the next job does not inherit
    *("job_id", "status", "schedule_count", "last_schedule_time"),
    *("schedule_history", "job_clients", "result_location"),
)
_WRITE_TIME = 5.0  # seconds that FLARE may take to write the files of a job
_FIRST, _LONGEST = 2.0, 60.0  # seconds before a job is restarted: doubled while no round succeeds


class Watch(FLComponent):  # type: ignore[misc]
    """Checks every federation of the state folder, twice a second."""

    def __init__(self) -> None:
        super().__init__()
        self._stop, self._has_leftovers = threading.Event(), threading.Event()
        self._has_leftovers.set()
        self._due: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self._connected: presence.Sites = {}
        self._errors: dict[Path, str] = {}  # folder of a federation -> the error of its last check
        self._state = Path()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Start and end with the server."""
        if event_type == EventType.SYSTEM_START:
            work = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
            self._state = Path(workspace.read_pointer(work)["state"])
            threading.Thread(target=self._run, args=(fl_ctx.get_engine(),), daemon=True, name="watch").start()
        elif event_type in (EventType.JOB_COMPLETED, EventType.JOB_ABORTED):
            self._has_leftovers.set()
        elif event_type == EventType.SYSTEM_END:
            self._stop.set()

    def _run(self, engine: Any) -> None:
        self._register_commands(engine)
        self._close_old_jobs(engine)
        while not self._stop.wait(_TICK):
            try:
                connected, alive = list_connected(engine), list_alive(engine)
                if (presence.read_connected(self._state), presence.read_alive(self._state)) != (connected, alive):
                    presence.write_members(self._state, connected, connected.keys() - alive.keys())
                self._print_changes(connected)
                all_checked = self.check_federations(engine, self._state, alive)
                # A federation with a damaged progress file may still need the archive of its job.
                if self._has_leftovers.is_set() and all_checked:
                    self._has_leftovers.clear()
                    self._remove_leftovers(engine)
            except Exception as problem:  # an error in one check must not end the watch
                self._has_leftovers.set()
                self.logger.error(f"watch: {type(problem).__name__}: {problem}")

    def _register_commands(self, engine: Any) -> None:
        """Register fedmutual's commands, after FLARE has registered its own."""
        while not self._stop.wait(_TICK):
            server = getattr(engine.server, "admin_server", None)
            if server is not None:
                list_sites, find_job = (lambda: sorted(list_connected(engine))), partial(_find_job, engine)
                server.cmd_reg.register_module(LeadCommands(self._state, list_sites, find_job))
                server.cmd_reg.cmd_map.clear()  # else `finalize` keeps only the earlier commands
                server.cmd_reg.finalize()
                return

    def _close_old_jobs(self, engine: Any) -> None:
        """Mark the jobs of an earlier server process as ended; FLARE would show them as running for ever."""
        try:
            with engine.new_context() as fl_ctx:
                engine.job_runner.update_unfinished_jobs(fl_ctx)
        except Exception as problem:
            self.logger.error(f"watch: {type(problem).__name__}: {problem}")

    def _print_changes(self, connected: presence.Sites) -> None:
        """Print which sites have connected or disconnected."""
        for site in sorted(set(connected) | set(self._connected)):
            if connected.get(site) != self._connected.get(site):
                again = " again" if site in self._connected else ""
                print_line(f"site {site!r} is {f'connected{again}' if site in connected else 'disconnected'}")
        self._connected = connected

    def check_federations(self, engine: Any, state: Path, alive: presence.Sites) -> bool:
        """Check each federation in the server's folder, and return whether all checks were possible.

        A federation whose progress file is damaged or cannot be written does not stop the checks of the others. Each of
        these errors is printed and logged once.
        """
        errors: dict[Path, str] = {}
        for file in state.glob(f"*/{progress.FILE}"):
            try:
                self._check_federation(engine, file.parent, alive)
            except RunError as problem:
                errors[file.parent] = str(problem)
        for folder, error in errors.items():
            if self._errors.get(folder) != error:
                print_line(error)
                self.logger.error(f"watch: {error}")
        self._errors = errors
        return not errors

    def _check_federation(self, engine: Any, folder: Path, alive: presence.Sites) -> None:
        state = progress.read_progress(folder)
        if state is None or state["outcome"] in _FINAL:
            self._due.pop(folder.name, None)
            return
        with engine.new_context() as fl_ctx:
            manager = engine.get_component(SystemComponents.JOB_MANAGER)
            job = manager.get_job(state["job"], fl_ctx)
            is_running = state["job"] in engine.run_processes or state["job"] in engine.job_runner.running_jobs
            if job is None and not is_running:
                self.stop_without_job(folder)
                return
            self._missing_since.pop(folder.name, None)
            if is_running or job.meta.get(JobMetaKey.STATUS.value) in _TO_START:
                return
            self._restart(manager, job, folder, state, alive, fl_ctx)

    def stop_without_job(self, folder: Path) -> None:
        """Mark a federation as stopped that has no job for 5 s: its state came from another host, or FLARE lost files.

        Raises:
            RunError: the progress file is damaged or cannot be written.
        """
        if time.monotonic() > self._missing_since.setdefault(folder.name, time.monotonic()) + _WRITE_TIME:
            reason = "this server has no job of it, only saved rounds; submit it again"
            progress.change_progress(folder, outcome=Outcome.STOPPED, said=reason)  # an error here is printed once
            print_line(f"{folder.name}: {reason}")
            self._has_leftovers.set()

    def _remove_leftovers(self, engine: Any) -> None:
        """Empty the archives of finished jobs that will not be restarted, and remove their folders.

        FLARE's record of a job is kept, because a lead reads there how the job ended.
        """
        states = [progress.read_progress(file.parent) or {} for file in self._state.glob(f"*/{progress.FILE}")]
        unfinished = {state["job"] for state in states if state["outcome"] not in _FINAL}
        unfinished |= {*engine.run_processes, *engine.job_runner.running_jobs}
        with engine.new_context() as fl_ctx:
            manager = engine.get_component(SystemComponents.JOB_MANAGER)
            store = engine.get_component(manager.job_store_id)
            for job in manager.get_all_jobs(fl_ctx):
                if str(job.meta.get(JobMetaKey.STATUS.value)) in _TO_START:
                    unfinished.add(job.job_id)
                elif job.job_id not in unfinished:
                    parts = store.list_components_of_object(manager.job_uri(job.job_id))
                    for part in {DATA, WORKSPACE} & {*parts}:
                        store.update_object(manager.job_uri(job.job_id), b"", part)
        leftovers.remove_folders(self._state / workspace.FOLDER, unfinished)

    def _restart(
        self, manager: Any, job: Any, folder: Path, state: dict[str, Any], alive: presence.Sites, fl_ctx: FLContext
    ) -> None:
        """Restart a job if its pause is over and enough sites are connected; give up after too many tries.

        Raises:
            RunError: the progress file is damaged or cannot be written; then no new job is left.
        """
        if presence.is_stop_requested(folder):
            progress.change_progress(folder, outcome=Outcome.STOPPED, said="stopped by hand")
            self._has_leftovers.set()
            return
        tries = 0 if state["outcome"] == Outcome.AGAIN else state["tries"]
        limits = state["limits"]
        if tries >= limits["retries"] and state["outcome"] != Outcome.SHORT:
            progress.change_progress(
                folder, outcome=Outcome.FAILED, said=f"restarted {tries} times without success: {state['said']}"
            )
            print_line(f"{folder.name}: restarted {tries} times without success; not restarted again")
            self._has_leftovers.set()
            return
        pause = 0.0 if state["outcome"] == Outcome.AGAIN else min(_FIRST * 2 ** min(tries, 10), _LONGEST)
        due = self._due.setdefault(folder.name, time.monotonic() + pause)
        is_waiting_over = time.monotonic() > due + limits["wait"]
        missing = set(state["sites"]) - set(alive)
        if (
            time.monotonic() < due
            or (missing and not is_waiting_over)
            or len(set(state["sites"]) & set(alive)) < limits["quorum"]
        ):
            return
        progress.change_progress(folder)  # a file that cannot be written is noticed before FLARE can start the new job
        meta = manager.clone(job.job_id, {k: v for k, v in job.meta.items() if k not in _KEYS_OF_ONE_JOB}, fl_ctx)
        new_job = meta[JobMetaKey.JOB_ID.value]
        try:
            progress.change_progress(folder, job=new_job, old=[job.job_id], outcome=Outcome.RUNNING, tries=tries + 1)
        except RunError:
            manager.delete(new_job, fl_ctx)
            raise
        self._due.pop(folder.name, None)
        print_line(f"{folder.name}: {state['outcome']} ({state['said']}), restarted after round {state['round']}")
        for old_job in state["old"]:  # not the last job, which FLARE may still be writing
            manager.delete(old_job, fl_ctx)


def _find_job(engine: Any, name: str) -> str | None:
    """Return the id of a federation's waiting or running job, or None."""
    with engine.new_context() as fl_ctx:
        manager = engine.get_component(SystemComponents.JOB_MANAGER)
        jobs = manager.get_jobs_by_status([RunStatus(s) for s in (*_TO_START, RunStatus.RUNNING.value)], fl_ctx)
    return next((str(job.job_id) for job in jobs if job.meta.get(JobMetaKey.JOB_NAME.value) == name), None)


def list_connected(engine: Any, since: float = 0.0) -> presence.Sites:
    """Return the sites with a heartbeat since a time: site -> id of the connection. since: in seconds since the epoch."""
    clients = [c for c in engine.get_clients() if c.last_connect_time >= since]
    return {c.name: hashlib.sha256(c.token.encode()).hexdigest()[:12] for c in clients}


def list_alive(engine: Any) -> presence.Sites:
    """Return the sites whose heartbeat is not overdue, as `list_connected`; a job would start without the other sites."""
    return list_connected(engine, time.time() - 2.5 * workspace.HEARTBEAT)
