"""The state of a federation: the files that the processes of the server, of a job and of a lead exchange; console lines."""

import os
import re
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fedmutual.errors import RunError
from fedmutual.events import Evaluated, Event, Noted, PhaseDone, Replied, RoundDone, Started
from fedmutual.files import FORMAT, JSON_LOGS, make_log_line, read_json, write_json
from fedmutual.rundir.checkpoint import make_file_name
from fedmutual.rundir.file_names import CHECKPOINT, CONFIG, ENVIRONMENT, LEDGER, LOG, METRICS, PARTITION, SERVER, SUMMARY
from fedmutual.rundir.logs import AllRuns, format_scores
from fedmutual.rundir.record_files import check_record
from fedmutual.sites.contract import Contract
from fedmutual.sites.protocol import clean_text
from fedmutual.sites.schema import CLOCK_FILE, WORK_FOLDER
from fedmutual.sites.server_journal import read_gone

FILE, CONNECTED, STOP = "progress.json", "connected.json", "stop.json"
COMMAND = "fedmutual_lead"  # of a lead in FLARE's admin interface; `watch.make_lead_command`
ERROR = "error"  # the key of an answer that has only the text of an error
_FILES = (CONFIG, ENVIRONMENT, PARTITION, SUMMARY, CHECKPOINT, METRICS, LEDGER, LOG)
_MODEL = rf"{SERVER}/round-[0-9]{{1,18}}\.safetensors"
_NOTES = 20  # notes in the file, the newest ones
_FIRST, _LONGEST = 60.0, 3600.0  # seconds until a job is restarted again for the same connection: doubled each time
_FIX = "restore a copy of the file, or delete the file and submit the federation again; the saved rounds are not lost"

Connections = Mapping[str, str]
"""Connected sites: site -> id of the connection. A restarted site has another id."""

Text = Annotated[str, AfterValidator(clean_text)]  # safe to print on a console
_Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
_SEEN = TypeAdapter(dict[str, tuple[Seconds, bool]])
_SITES = TypeAdapter(dict[str, tuple[str, bool]])  # site -> id of the connection, and whether its heartbeat is in time


class Outcome(StrEnum):
    """How a job of the server stands: it runs, is done, or ended for one of these reasons."""

    RUNNING = "running"
    DONE = "done"
    AGAIN = "again"  # it ended so that the next job has other sites
    SHORT = "short"  # too few sites answered
    BROKEN = "broken"  # a process died
    FAILED = "failed"  # a restart would fail again
    STOPPED = "stopped"

    @property
    def label(self) -> str:
        """The word for people: a job that ended is restarted by the server, or as soon as enough sites are connected."""
        return {Outcome.AGAIN: "restarting", Outcome.BROKEN: "restarting", Outcome.SHORT: "paused"}.get(self, self.value)


OVER = (Outcome.DONE, Outcome.FAILED, Outcome.STOPPED)  # the server restarts no job after these


class _Note(BaseModel):
    text: Text
    first: int
    last: int


class Progress(BaseModel):
    """The content of FILE, and what a lead reads of it. The keys with a default are missing in files of older servers."""

    model_config = ConfigDict(strict=True)
    format: int
    name: Text = ""
    job: Text
    submitted: Text
    old: tuple[Text, ...] = ()
    outcome: Outcome
    said: Text = ""
    round: _Count = 0
    rounds: _Count = 0
    contract: Text = ""
    sites: tuple[Text, ...]
    within: tuple[Text, ...] = Field(default=(), alias="in")
    evaluators: tuple[Text, ...] = ()
    joins: dict[Text, _Count] = {}  # as in the contract
    late: tuple[Text, ...] = ()  # connected sites that missed a deadline and have sent nothing since
    outside: tuple[Text, ...] = ()  # connected sites that are not in the job, which is restarted for them
    scores: Text = ""
    left: Text = ""
    bytes: dict[Literal["up", "down"], _Count] = Field(default={"up": 0, "down": 0}, min_length=2)  # of all rounds
    notes: list[_Note] = []
    tries: _Count = 0
    rejoined: dict[str, tuple[str, _Count, Seconds]] = {}  # site -> the last restart for it: connection, times, time
    limits: dict[Literal["quorum", "wait", "retries"], _Count | Seconds] = Field(min_length=3)
    began: Seconds = 0.0  # seconds since the epoch


class ProgressFile:
    """An observer that rewrites the progress file after each event. Raises RunError if the file cannot be written."""

    def __init__(self, folder: Path, contract: Contract, job: str) -> None:
        self.folder, self._time_left = folder, AllRuns(1)
        self._answered = set[str]()  # sites that answered in this phase
        previous: dict[str, Any] = {}
        with suppress(RunError):  # damaged: this file replaces it, and no result depends on it
            previous = read_progress(folder) or {}
        keys = ["round", "scores", "bytes", "notes"]
        if previous.get("job") == job:  # a restart; else a lead submitted the job
            keys += ["submitted", "old", "tries", "rejoined"]
        new = Progress(
            format=FORMAT,
            name=contract.name,
            job=job,
            submitted=job,
            outcome=Outcome.RUNNING,
            rounds=contract.config.rounds,
            contract=contract.imprint,
            sites=contract.sites.names,
            evaluators=contract.sites.evaluators,
            joins=contract.sites.joins,
            limits={"quorum": contract.quorum, "wait": contract.sites.wait, "retries": contract.sites.retries},
            began=time.time(),
        ).model_dump(mode="json", by_alias=True)
        self._state: dict[str, Any] = new | {key: value for key, value in previous.items() if key in keys}

    def change(self, **changes: Any) -> None:
        """Change keys of the file."""
        self._state |= changes
        write_json(self.folder / FILE, self._state)

    def begin(self, sites: tuple[str, ...]) -> None:
        """Write the sites of the job."""
        self.change(**{"in": list(sites)})

    def note_absent(self, outside: Collection[str], late: Collection[str]) -> None:
        """Write which connected sites are not in the job, and which missed a deadline, if that is new."""
        new = {"outside": sorted(outside), "late": sorted(late)}
        if new != {key: self._state[key] for key in new}:
            self.change(**new)

    def end(self, outcome: Outcome, reason: str) -> None:
        """Write the outcome of the job. reason: one sentence."""
        self.change(outcome=outcome, said=reason, left="")

    def __call__(self, event: Event) -> None:
        """Write the state of the federation after an event."""
        state = self._state
        match event:
            case Started():
                self._time_left.start(1, event.done / event.rounds)
            case Noted():  # a note with the text of an earlier note extends its rounds
                notes = {n["text"]: n for n in state["notes"]}
                first = notes.pop(event.text, {"first": event.round})["first"]
                self.change(notes=[*notes.values(), {"text": event.text, "first": first, "last": event.round}][-_NOTES:])
            case Replied():
                self._answered = {event.client} | (self._answered if event.answered > 1 else set())
            case PhaseDone():
                traffic = {"up": event.up, "down": event.down}
                total = {k: state["bytes"][k] + sum(traffic[k].values()) for k in traffic}
                self.change(**{"in": sorted(self._answered), "bytes": total})
            case Evaluated():
                self.change(scores=format_scores(event.scores))
            case RoundDone():
                self._time_left.reach(1, event.round / event.rounds)
                self.change(round=event.round, left=self._time_left.format_time_left(), tries=0)

    def list_due_sites(self, outside: Connections, inside: Collection[str], now: float) -> list[str]:
        """Return the sites for which the job is restarted now, and record the restart: exponential backoff a connection.

        outside: connected sites that are not in the job. inside: the sites in the job, whose earlier restarts are forgotten.
        now: seconds since the epoch.
        """
        restarts, due = {i: last for i, last in self._state["rejoined"].items() if i not in inside}, []
        for site, connection in sorted(outside.items()):
            previous, times, at = restarts.get(site, ("", 0, 0.0))
            times = times if previous == connection else 0
            if times == 0 or now >= at + min(_FIRST * 2 ** min(times - 1, 10), _LONGEST):
                restarts[site] = [connection, times + 1, now]
                due.append(site)
        if restarts != self._state["rejoined"]:
            self.change(rejoined=restarts)
        return due


def format_notes(note: dict[str, Any]) -> str:
    """Return a note as a line: "round 2 to round 7: site 'west' is left out: it is not connected"."""
    start, end = (f"round {r}" if r > 0 else "the start" for r in (note["first"], note["last"]))
    return f"{end if start == end else f'{start} to {end}'}: {note['text']}"


def read_progress(folder: Path) -> dict[str, Any] | None:
    """Return the content of the progress file, with all keys; None if there is no file.

    A damaged file raises RunError, and is not treated as absent: the server would restart no job of the federation, remove
    the archive of its job, and tell leads that the federation was never started.
    """
    path = folder / FILE
    if not path.exists():
        return None
    return check_record(path, Progress, read_json(path, _FIX), _FIX).model_dump(mode="json", by_alias=True)


def change_progress(folder: Path, **changes: Any) -> None:
    """Change keys of the progress file, while no job runs. Without a progress file nothing is written.

    Raises RunError as `read_progress`, or where the file cannot be written.
    """
    state = read_progress(folder)
    if state is not None:
        write_json(folder / FILE, state | changes)


def write_connected(folder: Path, connected: Connections, alive: Collection[str], before: Collection[str] = ()) -> None:
    """Write the connected sites into the server's folder. alive: those whose heartbeat is not overdue.

    before: the sites that were connected to this process of the server; the file may be of an earlier process.
    """
    sites, now = {i: (connection, i in alive) for i, connection in connected.items()}, time.time()
    # a site that tells the server that it ends is gone at once; the heartbeat of any other is overdue before
    _, earlier, seen = read_connected(folder)
    seen |= {i: (now, i in before and i not in connected) for i in earlier}
    seen = {i: at for i, at in seen.items() if i not in alive}
    write_json(folder / CONNECTED, {"format": FORMAT, "sites": sites, "seen": seen})


def read_connected(folder: Path) -> tuple[Connections, Connections, dict[str, tuple[float, bool]]]:
    """Return the connected sites; those of them whose heartbeat is not overdue; and when the others were last seen.

    A site whose connection was cut counts as connected until FLARE notices, and a job is restarted only for a site with
    heartbeats. Last seen: site -> (since when it has no heartbeat, seconds since the epoch; whether it told the server that
    it ends). There are no sites if the file is missing or damaged: the server compares the file with its connections twice a
    second, and writes it again where they differ.
    """
    try:
        content = read_json(folder / CONNECTED)
        sites, seen = _SITES.validate_python(content.get("sites")), _SEEN.validate_python(content.get("seen", {}))
    except (RunError, ValidationError):
        return {}, {}, {}
    alive = {i: connection for i, (connection, is_alive) in sites.items() if is_alive}
    return {i: connection for i, (connection, _) in sites.items()}, alive, seen


def read_status(state: Path, name: str) -> dict[str, Any]:
    """Return the status of a federation, for a lead or for the server's operator. state: the server's folder.

    "connected" and "seen": the connected sites, and when the others were last seen, as `read_connected`. "progress": as
    `read_progress`. "stops": whether a lead has asked for a stop. "time": this host's clock. "gone": as `read_gone`.
    """
    folder, (connected, _, seen) = state / name, read_connected(state)
    about = {"progress": read_progress(folder), "stops": (folder / STOP).exists(), "gone": read_gone(folder)}
    return about | {"connected": sorted(connected), "seen": seen, "time": time.time()}


def read_clock(state: Path) -> float | None:
    """Return the seconds by which the server's clock is ahead of a site's; None before the first job."""
    with suppress(RunError, KeyError, TypeError, ValueError):
        return float(read_json(state / WORK_FOLDER / CLOCK_FILE)["ahead"])
    return None


def list_result_files(folder: Path, round: int | None) -> dict[str, Path]:
    """Return the files that a lead may fetch: name -> path. round: of the saved shared model; None: no model is saved."""
    names = (*_FILES, *([] if round is None else [f"{SERVER}/{make_file_name(round)}"]))
    return {name: folder / name for name in names if (folder / name).is_file()}


def is_result(name: str) -> bool:
    """Return whether a name is the name of a result file. A lead writes no other file, whatever name a server sends."""
    return name in _FILES or re.fullmatch(_MODEL, name) is not None


def name_lines(federation: str) -> None:
    """From now on name this federation in the lines of this process, if they are JSON: one of several runs of a contract."""
    if JSON_LOGS in os.environ:
        os.environ[JSON_LOGS] = federation


def print_line(line: object, level: str = "info", federation: str = "") -> None:
    """Print a line with the time on the console of this host's operator. The line is not logged and not sent.

    level, federation: as for `make_log_line`, if lines are JSON.
    """
    is_json = JSON_LOGS in os.environ
    print(make_log_line(str(line), level, federation) if is_json else f"{time.strftime('%H:%M:%S')}  {line}", flush=True)
