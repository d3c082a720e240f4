"""In the server's process: who is connected, and a job that ended before its time is begun again. Nobody need be there."""

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

from fedmutual.sites.flare import leftovers, presence, progress, workspace
from fedmutual.sites.flare.admin_commands import Desk
from fedmutual.sites.flare.console import print_line
from fedmutual.sites.flare.progress import Outcome

_TICK = 0.5
_FINAL = (Outcome.DONE, Outcome.FAILED, Outcome.STOPPED)
_TO_START = (RunStatus.SUBMITTED.value, RunStatus.APPROVED.value, RunStatus.DISPATCHED.value)
_OF_ONE_JOB = (  # keys of a job's meta that the next one does not inherit
    *("job_id", "status", "schedule_count", "last_schedule_time"),
    *("schedule_history", "job_clients", "result_location"),
)
_HALF_WRITTEN = 5.0  # seconds that a job's files may be so
_FIRST, _LONGEST = 2.0, 60.0  # seconds before a job is begun again: doubled while no round succeeds


class Watch(FLComponent):  # type: ignore[misc]
    """Looks at every federation of the state folder, twice a second."""

    def __init__(self) -> None:
        super().__init__()
        self._over, self._untidy = threading.Event(), threading.Event()
        self._untidy.set()
        self._due: dict[str, float] = {}
        self._gone: dict[str, float] = {}
        self._there: presence.Sites = {}
        self._state = Path()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Begin and end with the server."""
        if event_type == EventType.SYSTEM_START:
            work = Path(fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir())
            self._state = Path(workspace.read_pointer(work)["state"])
            threading.Thread(target=self._run, args=(fl_ctx.get_engine(),), daemon=True, name="watch").start()
        elif event_type in (EventType.JOB_COMPLETED, EventType.JOB_ABORTED):
            self._untidy.set()
        elif event_type == EventType.SYSTEM_END:
            self._over.set()

    def _run(self, engine: Any) -> None:
        self._open(engine)
        self._bury(engine)
        while not self._over.wait(_TICK):
            try:
                there, heard = _connected(engine), _heard(engine)
                if (presence.read_connected(self._state), presence.read_alive(self._state)) != (there, heard):
                    presence.write_members(self._state, there, there.keys() - heard.keys())
                self._tell(there)
                for file in self._state.glob(f"*/{progress.FILE}"):
                    self._look(engine, file.parent, heard)
                if self._untidy.is_set():
                    self._untidy.clear()
                    self._tidy(engine)
            except Exception as problem:  # the watch must not die of what one look met
                self._untidy.set()
                self.logger.error(f"watch: {type(problem).__name__}: {problem}")

    def _open(self, engine: Any) -> None:
        """Our commands beside FLARE's, once its own are there."""
        while not self._over.wait(_TICK):
            server = getattr(engine.server, "admin_server", None)
            if server is not None:
                there, queued = (lambda: sorted(_connected(engine))), partial(_queued, engine)
                server.cmd_reg.register_module(Desk(self._state, there, queued))
                server.cmd_reg.cmd_map.clear()  # it was made of those before
                server.cmd_reg.finalize()
                return

    def _bury(self, engine: Any) -> None:
        """Jobs that a server which is no more was running: FLARE would take them for running, or about to, for ever."""
        try:
            with engine.new_context() as fl_ctx:
                engine.job_runner.update_unfinished_jobs(fl_ctx)
        except Exception as problem:
            self.logger.error(f"watch: {type(problem).__name__}: {problem}")

    def _tell(self, there: presence.Sites) -> None:
        """Who came and who went, on the server's console."""
        for site in sorted(set(there) | set(self._there)):
            if there.get(site) != self._there.get(site):
                again = " again" if site in self._there else ""
                print_line(f"site {site!r} is {f'there{again}' if site in there else 'gone'}")
        self._there = there

    def _look(self, engine: Any, folder: Path, heard: presence.Sites) -> None:
        found = progress.read_progress(folder)
        if found is None or found["outcome"] in _FINAL:
            self._due.pop(folder.name, None)
            return
        with engine.new_context() as fl_ctx:
            manager = engine.get_component(SystemComponents.JOB_MANAGER)
            job = manager.get_job(found["job"], fl_ctx)
            busy = found["job"] in engine.run_processes or found["job"] in engine.job_runner.running_jobs
            if job is None and not busy:
                self._missing(folder)
                return
            self._gone.pop(folder.name, None)
            if busy or job.meta.get(JobMetaKey.STATUS.value) in _TO_START:
                return
            self._again(manager, job, folder, found, heard, fl_ctx)

    def _missing(self, folder: Path) -> None:
        """The server's state came from another host, or FLARE's part of it is lost: there is no job to begin anew."""
        if time.monotonic() > self._gone.setdefault(folder.name, time.monotonic()) + _HALF_WRITTEN:
            said = "this server has no job of it, only what was saved; submit it once more"
            print_line(f"{folder.name}: {said}")
            progress.change_progress(folder, outcome=Outcome.STOPPED, said=said)
            self._untidy.set()

    def _tidy(self, engine: Any) -> None:
        """Empty the archives of jobs that are over, and of which no federation is begun again; remove their folders.

        FLARE's record of a job stays: a lead asks it how the job ended.
        """
        states = [progress.read_progress(file.parent) or {} for file in self._state.glob(f"*/{progress.FILE}")]
        wanted = {state["job"] for state in states if state["outcome"] not in _FINAL}
        wanted |= {*engine.run_processes, *engine.job_runner.running_jobs}
        with engine.new_context() as fl_ctx:
            manager = engine.get_component(SystemComponents.JOB_MANAGER)
            store = engine.get_component(manager.job_store_id)
            for job in manager.get_all_jobs(fl_ctx):
                if str(job.meta.get(JobMetaKey.STATUS.value)) in _TO_START:
                    wanted.add(job.job_id)
                elif job.job_id not in wanted:
                    held = store.list_components_of_object(manager.job_uri(job.job_id))
                    for part in {DATA, WORKSPACE} & {*held}:
                        store.update_object(manager.job_uri(job.job_id), b"", part)
        leftovers.remove_folders(self._state / workspace.FOLDER, wanted)

    def _again(
        self, manager: Any, job: Any, folder: Path, found: dict[str, Any], heard: presence.Sites, fl_ctx: FLContext
    ) -> None:
        """Begin a job again, when it is time."""
        if presence.is_stop_requested(folder):
            progress.change_progress(folder, outcome=Outcome.STOPPED, said="stopped by hand")
            self._untidy.set()
            return
        tries = 0 if found["outcome"] == Outcome.AGAIN else found["tries"]
        limits = found["limits"]
        if tries >= limits["retries"] and found["outcome"] != Outcome.SHORT:
            print_line(f"{folder.name}: begun {tries} times in vain, given up")
            progress.change_progress(folder, outcome=Outcome.FAILED, said=f"begun {tries} times in vain: {found['said']}")
            self._untidy.set()
            return
        pause = 0.0 if found["outcome"] == Outcome.AGAIN else min(_FIRST * 2 ** min(tries, 10), _LONGEST)
        due = self._due.setdefault(folder.name, time.monotonic() + pause)
        late = time.monotonic() > due + limits["wait"]
        missing = set(found["sites"]) - set(heard)
        if time.monotonic() < due or (missing and not late) or len(set(found["sites"]) & set(heard)) < limits["quorum"]:
            return
        self._due.pop(folder.name, None)
        print_line(f"{folder.name}: {found['outcome']} ({found['said']}), begun again after round {found['round']}")
        meta = manager.clone(job.job_id, {k: v for k, v in job.meta.items() if k not in _OF_ONE_JOB}, fl_ctx)
        for old in found["old"]:  # not the last one, which FLARE may still be writing
            manager.delete(old, fl_ctx)
        new = {"job": meta[JobMetaKey.JOB_ID.value], "old": [job.job_id]}
        progress.change_progress(folder, **new, outcome=Outcome.RUNNING, tries=tries + 1)


def _queued(engine: Any, name: str) -> str | None:
    """The job of a federation that is to start, or runs."""
    with engine.new_context() as fl_ctx:
        manager = engine.get_component(SystemComponents.JOB_MANAGER)
        jobs = manager.get_jobs_by_status([RunStatus(s) for s in (*_TO_START, RunStatus.RUNNING.value)], fl_ctx)
    return next((str(job.job_id) for job in jobs if job.meta.get(JobMetaKey.JOB_NAME.value) == name), None)


def _connected(engine: Any, since: float = 0.0) -> presence.Sites:
    """Of whom there was a sign of life since a time."""
    found = [c for c in engine.get_clients() if c.last_connect_time >= since]
    return {c.name: hashlib.sha256(c.token.encode()).hexdigest()[:12] for c in found}


def _heard(engine: Any) -> presence.Sites:
    """Without those whose sign of life is overdue: a job would begin without them."""
    return _connected(engine, time.time() - 2.5 * workspace.HEARTBEAT)
