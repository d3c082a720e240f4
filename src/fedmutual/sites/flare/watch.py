"""The server's process: it records the connected sites, restarts jobs that ended early, and answers leads' commands."""

import base64
import hashlib
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey, RunStatus
from nvflare.apis.storage import DATA, WORKSPACE
from nvflare.fuel.f3.sfm.sfm_endpoint import SfmEndpoint
from nvflare.fuel.hci.conn import Connection
from nvflare.fuel.hci.reg import CommandModuleSpec, CommandSpec

import fedmutual
from fedmutual.errors import RunError
from fedmutual.files import FORMAT, write_json
from fedmutual.rundir.checkpoint import read_checkpoint
from fedmutual.sites.consent import list_runs
from fedmutual.sites.flare import progress, workspace
from fedmutual.sites.flare.access_control import guard
from fedmutual.sites.flare.progress import OVER, Connections, Outcome, change_progress, print_line, read_progress
from fedmutual.sites.schema import WORK_FOLDER
from fedmutual.sites.server_journal import read_gone

_TICK = 0.5
_TO_START = (RunStatus.SUBMITTED.value, RunStatus.APPROVED.value, RunStatus.DISPATCHED.value)
_KEYS_OF_ONE_JOB = (  # keys of a job's meta that the next job does not inherit
    *("job_id", "status", "schedule_count", "last_schedule_time"),
    *("schedule_history", "job_clients", "result_location"),
)
_WRITE_TIME = 5.0  # seconds that FLARE may take to write the files of a job
_MOST_REPLACED, _REPLACED_TIME = 3, 300.0  # warn after so many replaced connections of a site in so many seconds
_FIRST, _LONGEST = 2.0, 60.0  # seconds before a job is restarted: doubled while no round succeeds


class Watch(FLComponent):  # type: ignore[misc]
    """Checks every federation of the state folder, twice a second."""

    def __init__(self) -> None:
        super().__init__()
        self._stop, self._has_leftovers = threading.Event(), threading.Event()
        self._has_leftovers.set()
        self._due: dict[str, float] = {}
        self._missing_since: dict[str, float] = {}
        self._connected: Connections = {}
        self._replaced: dict[str, list[float]] = {}  # site -> when its new connection replaced an open one
        self._errors: dict[Path, str] = {}  # folder of a federation -> the error of its last check
        self._state = Path()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Start and end with the server."""
        if event_type == EventType.SYSTEM_START:
            work = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
            self._state = Path(workspace.read_pointer(work)["state"])
            guard(SfmEndpoint, "add_connection", self.note_connection)
            threading.Thread(target=self._run, args=(fl_ctx.get_engine(),), daemon=True, name="watch").start()
        elif event_type in (EventType.JOB_COMPLETED, EventType.JOB_ABORTED):
            self._has_leftovers.set()
        elif event_type == EventType.SYSTEM_END:
            self._stop.set()

    def _run(self, engine: Any) -> None:
        self._register_commands(engine)
        try:  # jobs of an earlier server process, which FLARE would show as running for ever
            with engine.new_context() as fl_ctx:
                engine.job_runner.update_unfinished_jobs(fl_ctx)
            for file in self._state.glob(f"*/{progress.FILE}"):
                with suppress(RunError):  # damaged: `check_federations` prints it
                    if (read_progress(file.parent) or {}).get("outcome") == Outcome.RUNNING:
                        change_progress(file.parent, outcome=Outcome.BROKEN, said="the server started again")
        except Exception as problem:
            self.logger.error(f"watch: {type(problem).__name__}: {problem}")
        while not self._stop.wait(_TICK):
            try:
                connected, alive = list_connected(engine)
                if progress.read_connected(self._state)[:2] != (connected, alive):
                    progress.write_connected(self._state, connected, alive, self._connected)
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
        """Register the command of leads, after FLARE has registered its own."""
        while not self._stop.wait(_TICK):
            server = getattr(engine.server, "admin_server", None)
            if server is not None:
                server.cmd_reg.register_module_spec(make_lead_command(self._state, engine))
                server.cmd_reg.cmd_map.clear()  # else `finalize` keeps only the earlier commands
                server.cmd_reg.finalize()
                return

    def _print_changes(self, connected: Connections) -> None:
        """Print which sites have connected or disconnected."""
        for site in sorted(set(connected) | set(self._connected)):
            if connected.get(site) != self._connected.get(site):
                again = " again" if site in self._connected else ""
                print_line(f"site {site!r} is {f'connected{again}' if site in connected else 'disconnected'}")
        self._connected = connected

    def note_connection(self, endpoint: Any, connection: Any) -> None:
        """Warn if connections of a site replace each other: FLARE keeps one of each participant, and closes the older one.

        endpoint: FLARE's record of a participant, before it gets the new connection.
        """
        site, now = str(endpoint.endpoint.name), time.monotonic()
        if not endpoint.connections or not re.fullmatch("[A-Za-z0-9-]+", site):  # leads and jobs have other names
            return
        times = self._replaced[site] = [*(at for at in self._replaced.get(site, ()) if at > now - _REPLACED_TIME), now]
        if len(times) == _MOST_REPLACED:
            print_line(
                f"site {site!r} connected {_MOST_REPLACED} times in {_REPLACED_TIME:.0f} s while its earlier connection was "
                "open: two processes use its kit and break each other's connections, or its network is unstable; ask its "
                "operator to end all processes but one",
                "warning",
            )

    def check_federations(self, engine: Any, state: Path, alive: Connections) -> bool:
        """Check each federation in the server's folder, and return whether all checks were possible.

        A progress file that is damaged or cannot be written does not stop the checks of other federations. Each of these
        errors is printed and logged once.
        """
        errors: dict[Path, str] = {}
        for file in state.glob(f"*/{progress.FILE}"):
            try:
                self._check_federation(engine, file.parent, alive)
            except RunError as problem:
                errors[file.parent] = str(problem)
        for folder, error in errors.items():
            if self._errors.get(folder) != error:
                print_line(error, "error", folder.name)
                self.logger.error(f"watch: {error}")
        self._errors = errors
        return not errors

    def _check_federation(self, engine: Any, folder: Path, alive: Connections) -> None:
        state = read_progress(folder)
        if state is None or state["outcome"] in OVER:
            self._due.pop(folder.name, None)
            return
        with engine.new_context() as fl_ctx:
            manager = engine.get_component(SystemComponents.JOB_MANAGER)
            job = manager.get_job(state["job"], fl_ctx)
            is_running = state["job"] in engine.run_processes or state["job"] in engine.job_runner.running_jobs
            if job is None and not is_running:  # the state came from another host, or FLARE lost files
                if time.monotonic() > self._missing_since.setdefault(folder.name, time.monotonic()) + _WRITE_TIME:
                    why = "this server has saved rounds of the federation, but no job; submit the federation again"
                    self._give_up(folder, Outcome.STOPPED, why)
                return
            self._missing_since.pop(folder.name, None)
            if not is_running and job.meta.get(JobMetaKey.STATUS.value) not in _TO_START:
                self._restart(manager, job, folder, state, alive, fl_ctx)

    def _give_up(self, folder: Path, outcome: Outcome, reason: str) -> None:
        """End a federation that is not restarted. Raises RunError if the progress file cannot be written."""
        change_progress(folder, outcome=outcome, said=reason)
        print_line(f"{folder.name}: {reason}", "warning", folder.name)
        self._has_leftovers.set()

    def _restart(
        self, manager: Any, job: Any, folder: Path, state: dict[str, Any], alive: Connections, fl_ctx: FLContext
    ) -> None:
        """Restart a job if its pause is over and enough sites are connected; give up after too many tries.

        Raises RunError where the progress file is damaged or cannot be written; then no new job is left.
        """
        if (folder / progress.STOP).exists():
            self._give_up(folder, Outcome.STOPPED, "stopped by hand")
            return
        is_planned, limits = state["outcome"] == Outcome.AGAIN, state["limits"]
        tries = 0 if is_planned else state["tries"]
        if tries >= limits["retries"]:
            self._give_up(folder, Outcome.FAILED, f"restarted {tries} times without success: {state['said']}")
            return
        pause = 0.0 if is_planned else min(_FIRST * 2 ** min(tries, 10), _LONGEST)
        now = time.monotonic()
        due = self._due.setdefault(folder.name, now + pause)
        awaited = [i for i in state["sites"] if state["joins"].get(i, 1) <= state["round"] + 1]
        sites = set(awaited) - read_gone(folder).keys()
        is_complete = sites <= set(alive) or now > due + limits["wait"]
        if now < due or not is_complete or len(sites & set(alive) - {*state["evaluators"]}) < limits["quorum"]:
            return
        change_progress(folder)  # a file that cannot be written is noticed before FLARE can start the new job
        meta = manager.clone(job.job_id, {k: v for k, v in job.meta.items() if k not in _KEYS_OF_ONE_JOB}, fl_ctx)
        new_job = meta[JobMetaKey.JOB_ID.value]
        try:
            change_progress(folder, job=new_job, old=[job.job_id], outcome=Outcome.RUNNING, tries=tries + 1)
        except RunError:
            manager.delete(new_job, fl_ctx)
            raise
        self._due.pop(folder.name, None)
        what = f"{folder.name}: {state['said']}: restarted after round {state['round']}"
        print_line(what, "warning", folder.name)
        for old_job in state["old"]:  # not the last job, which FLARE may still be writing
            manager.delete(old_job, fl_ctx)

    def _remove_leftovers(self, engine: Any) -> None:
        """Empty the archives of finished jobs that will not be restarted, and remove their folders.

        FLARE's record of a job is kept, because a lead reads there how the job ended.
        """
        states = [read_progress(file.parent) or {} for file in self._state.glob(f"*/{progress.FILE}")]
        unfinished = {state["job"] for state in states if state["outcome"] not in OVER}
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
        workspace.remove_job_folders(self._state / WORK_FOLDER, unfinished)


def _find_job(engine: Any, name: str) -> str | None:
    """Return the id of a federation's waiting or running job, or None."""
    with engine.new_context() as fl_ctx:
        manager = engine.get_component(SystemComponents.JOB_MANAGER)
        jobs = manager.get_jobs_by_status([RunStatus(s) for s in (*_TO_START, RunStatus.RUNNING.value)], fl_ctx)
    return next((str(job.job_id) for job in jobs if job.meta.get(JobMetaKey.JOB_NAME.value) == name), None)


def list_connected(engine: Any) -> tuple[Connections, Connections]:
    """Return the connected sites, and those whose heartbeat is not overdue; a job would start without the other sites."""
    clients, since = engine.get_clients(), time.time() - 2.5 * workspace.HEARTBEAT
    connected = {c.name: hashlib.sha256(c.token.encode()).hexdigest()[:12] for c in clients}
    return connected, {c.name: connected[c.name] for c in clients if c.last_connect_time >= since}


def make_lead_command(state: Path, engine: Any) -> CommandModuleSpec:
    """Return the command COMMAND for FLARE's admin interface, which only leads may give. state: the server's folder."""

    def answer(conn: Connection, words: list[str]) -> None:
        try:
            conn.append_dict(_carry_out(state, engine, *[*words[1:4], "", "", ""][:3]))
        except RunError as problem:  # FLARE would answer with an error that a lead treats as a lost connection
            conn.append_dict({progress.ERROR: str(problem)})

    usage = f"{progress.COMMAND} start|status|stop|result FEDERATION [FILE]"
    return CommandModuleSpec("fedmutual", [CommandSpec(progress.COMMAND, "fedmutual's commands of leads", usage, answer)])


def _carry_out(state: Path, engine: Any, what: str, name: str, file: str) -> dict[str, Any]:
    """Return the answer to a lead. Raises RunError where a file of the server is damaged or cannot be written."""
    if Path(name).name != name or name in ("", "..", WORK_FOLDER):  # it could be a path to another folder
        raise RunError("the command does not name a federation")
    folder = state / name
    stop = folder / progress.STOP
    if what == "start":  # the federation will be submitted now
        stop.unlink(missing_ok=True)
        return {}
    known = read_progress(folder)
    if what == "status":
        about = {"job": _find_job(engine, name), "version": fedmutual.__version__}
        return progress.read_status(state, name) | about | {"connected": sorted(list_connected(engine)[0])}
    if what == "stop":
        contracts = workspace.read_pointer(state / WORK_FOLDER)["contracts"] if known is None else ()
        agreed = {run for contract in contracts for run, _ in list_runs(contract["name"], contract["tables"])}
        if known is not None or name in agreed:  # one of several runs may not have begun
            write_json(stop, {"format": FORMAT})
        return {"progress": known}
    saved = None if known is None else read_checkpoint(folder)
    paths = {} if known is None else progress.list_result_files(folder, saved.round if saved else None)
    if not file:
        return {"files": sorted(paths)}
    return {"body": base64.b64encode(paths[file].read_bytes()).decode() if file in paths else ""}
