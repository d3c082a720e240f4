"""What a participant may know of its federation: read from its own state folder; by a lead, from the server.

Nothing is written, and no running process is disturbed. A site reads its own scores, privacy budget and ledger; the server
and a lead read what sites disclosed.
"""

import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedmutual.config import Config, read_dumped, read_tables
from fedmutual.privacy.budget import PrivacyBudget
from fedmutual.rundir.file_names import CONFIG, LEDGER, METRICS
from fedmutual.rundir.folder import is_locked
from fedmutual.rundir.record_files import read_records
from fedmutual.rundir.schema import Evaluation, LedgerLine
from fedmutual.sites import journal
from fedmutual.sites.consent import list_runs
from fedmutual.sites.flare import progress
from fedmutual.sites.flare.kits import FEDERATION, Kit
from fedmutual.sites.flare.progress import Outcome, format_notes
from fedmutual.sites.flare.session import ServerLost, Session
from fedmutual.sites.journal import Journal
from fedmutual.sites.ledger import Line, count_totals, read_ledger, summarise_ledger
from fedmutual.sites.protocol import WORK, Place
from fedmutual.sites.schema import PRIVACY_FOLDER
from fedmutual.sites.server_journal import LEFT

Facts = dict[str, Any]
"""What is known now, by the names that `read_site` and `read_server` give; a missing key is not known to this role."""

Score = tuple[int, str, str, str, Mapping[str, Any]]
"""The scores of a model: round, site, model, rows ("validation"), and values by name."""

# the states of a site, for the server and leads: the first whose rule applies; docs/sites.md has the rules
SITE_WORDS = "left", "excluded", "joins later", "lost", "paused", "late", "restarting", "evaluates", "waiting", "takes part"
LEFT_WORD, EXCLUDED, JOINS, LOST, PAUSED, LATE, RESTARTING, EVALUATES, WAITING, PRESENT = SITE_WORDS


class Monitor(AbstractContextManager["Monitor"]):
    """Reads the facts of one participant. Use it in a `with` statement: a lead's session is closed at the end."""

    def __init__(self, kit: Kit, state: Path | None, name: str | None = None) -> None:
        """state: the folder of a site or the server. name: of the federation; None: the one written last, or the kit's."""
        self.kit, self._state, self._name = kit, state, name
        self._session: Session | None = None
        self._copies = tempfile.TemporaryDirectory()  # a lead's copies of the scores and bytes, as the server has them
        self._copied: tuple[str, str, int] | None = None

    def __exit__(self, *_: object) -> None:
        self._close_session()
        self._copies.cleanup()

    def read(self) -> Facts:
        """Return what is known now. Raises UserError where a file is damaged or cannot be read."""
        about = {"role": self.kit.kind, "name": self.kit.name, "certificate_days": self.kit.days, "at": time.time()}
        if self._state is None:
            return about | self._read_lead()
        read = read_site if self.kit.kind == "site" else read_server
        free = shutil.disk_usage(next(path for path in (self._state, *self._state.parents) if path.exists())).free
        return about | {"disk_free_bytes": free} | read(self.kit, self._state, self._name)

    def is_alive(self) -> bool:
        """Return whether the process of the site or server runs; of a lead: whether the server answers."""
        return bool(self._read_lead()["alive"]) if self._state is None else is_locked(self._state)

    def _read_lead(self) -> Facts:
        tables = {} if self._name else read_tables(self.kit.folder / FEDERATION)
        name = self._name or str(tables.get("name", Config().name))
        names = [run for run, _ in list_runs(name, tables)]
        folder = Path(self._copies.name)
        try:
            if self._session is None:
                self._session = Session(self.kit, timeout=2.0)
            for name in reversed(names):  # of several folds the last one that has begun, else the first
                sent = time.time()
                status = self._session.status(name)
                ahead = None if status["time"] is None else status["time"] - (sent + time.time()) / 2
                if (recorded := status["progress"]) is not None:
                    break
            if recorded is not None and self._copied != (name, recorded["job"], recorded["round"]):
                for file in (METRICS, LEDGER):  # the server may have none yet, and here may be those of another fold
                    (folder / file).unlink(missing_ok=True)
                self._session.fetch(name, folder, (METRICS, LEDGER))
                self._copied = name, recorded["job"], recorded["round"]
        except ServerLost as problem:
            self._close_session()
            return {"federation": names[0], "others": [], "alive": False, "state": "no answer", "reason": str(problem)}
        about: Facts = {"federation": name, "others": [], "alive": True, "clock_ahead_seconds": ahead}
        return about | describe_progress(status, folder)

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = None


def find_federation(state: Path, file: str, name: str | None) -> tuple[Path | None, list[str]]:
    """Return the folder of a federation in a state folder, and the names of the others. file: that each of them has.

    name: of the federation; None: the one that was written last.
    """
    folders = {path.parent.name: path.parent for path in state.glob(f"*/{file}")}
    folder = folders.get(name) if name else max(folders.values(), key=lambda f: _find_write_time(f / file), default=None)
    return folder, sorted(folders.keys() - {folder.name if folder else ""})


def _find_write_time(path: Path) -> float:
    """Return when a file, or a database's log of changes beside it, was written last; 0 where there is neither."""
    times = [0.0]
    for file in (path, path.with_name(f"{path.name}-wal")):
        with suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times)


def read_site(kit: Kit, state: Path, name: str | None) -> Facts:
    """Return what a site knows: its place in the rounds, its own scores, its budget, what left it, what is asked next."""
    folder, others = find_federation(state, journal.FILE, name)
    facts: Facts = {"federation": folder.name if folder else name or "", "others": others, "alive": is_locked(state)}
    if facts["alive"]:
        facts["clock_ahead_seconds"] = progress.read_clock(state)
    if folder is None or not (folder / CONFIG).exists():
        return facts | {"state": "waiting" if facts["alive"] else "stopped", "reason": "no federation has begun here"}
    config = read_dumped(folder / CONFIG)
    with closing(Journal(folder, read_only=True)) as records:
        begun = records.get_fact("begun", tuple[int, Place, str])
        left = records.get_fact("left", int) is not None
        done = bool(begun and records.read("SELECT 1 FROM phases WHERE round = ? AND phase = ?", *begun[1]))
    lines = read_ledger(folder)
    rows, rounds, has_job = summarise_ledger(lines), config.rounds, is_locked(folder)
    place = begun[1] if begun else (-1, -1)
    is_over = place[0] + 1 >= rounds and done and not has_job
    state_word = "takes part" if has_job else "done" if is_over else "waiting"
    state_word = LEFT_WORD if left else state_word if facts["alive"] else "stopped"
    own = (
        (e.round, kit.name, row.model, row.data, row.values)
        for e in read_records(folder / METRICS, Evaluation)
        for row in e.rows
    )
    shared = (
        (line["round"], kit.name, score["model"], score["data"], score["values"])
        for line in lines
        for score in line["told"].get("scores", ())
    )
    facts |= {
        "state": state_word,
        "reason": _SITE_SENTENCES["done" if is_over else state_word],
        "round": place[0] + 1,
        "rounds": rounds,
        "phase": _name_step(lines, place, done) if begun and not is_over else "",
        "seen": _find_write_time(folder / journal.FILE) if begun else None,
        "missed": find_missed_rounds(
            {line["round"] for line in lines if line["tensors"] or line["told"]}, place[0] + (not done)
        ),
        "problems": [f"round {line['round']}: {line['told']['problem']}" for line in lines if line["told"].get("problem")],
        "own_scores": group_scores(own),
        "scores": group_scores(shared),
        "left": rows,
        "totals": count_totals(lines),
        "next": _find_next(rows, place[0] + 1, rounds, done),
    }
    privacy = config.privacy
    if privacy.nets != "none" and privacy.epsilon is not None and privacy.delta is not None:
        ledger = state / PRIVACY_FOLDER / "ledger"  # the budget is over all ledgers in the folder
        budget = PrivacyBudget(ledger, config.name, privacy.unit, privacy.epsilon, privacy.delta)
        facts |= {"epsilon_spent": budget.spent, "epsilon_limit": privacy.epsilon}
    return facts


_SITE_SENTENCES = {
    LEFT_WORD: "this site left the federation, and its ledger is closed",
    "stopped": "the site's process does not run; `fedmutual site` resumes",
    "takes part": "its job carries out the server's orders",
    "waiting": "the site's process runs, and waits for a job of the server",
    "done": "all rounds are done",
}


def _name_step(lines: Iterable[Line], place: Place, done: bool) -> str:
    """Return the step of a place in words; the place of scores has the number after the last phase."""
    phases = [line["phase"] for line in lines if line["what"] == WORK and line["to"] == "server"]
    step = f"phase {place[1] + 1}" if not phases or place[1] < max(phases) or place[0] < 0 else "scores"
    return f"{step} done, waits for the server" if done else f"{step} in progress"


def _find_next(rows: list[Facts], round: int, rounds: int, done: bool) -> list[Facts]:
    """Return the kinds of messages that are asked for next, as those of the round before: rows of `summarise_ledger`."""
    current, previous = ([row for row in rows if row["first"] <= r <= row["last"]] for r in (round, round - 1))
    if len(previous) > len(current):
        return previous[len(current) :]
    return [] if round >= rounds and done else current


def find_missed_rounds(present: Collection[int], last: int) -> list[tuple[int, int]]:
    """Return the rounds from 1 to `last` that are not present, as ranges (first, last)."""
    marks = [0, *sorted(r for r in present if 0 < r <= last), last + 1]
    return [(a + 1, b - 1) for a, b in pairwise(marks) if b - a > 1]


def read_server(kit: Kit, state: Path, name: str | None) -> Facts:
    """Return what the server knows: the progress, the sites, disclosed scores and bytes."""
    folder, others = find_federation(state, progress.FILE, name)
    facts: Facts = {"federation": folder.name if folder else name or "", "others": others, "alive": is_locked(state)}
    status = progress.read_status(state, facts["federation"])
    if not facts["alive"]:
        stopped = {"state": "stopped", "reason": "the server's process does not run; `fedmutual server` resumes"}
        return facts | describe_progress(status | {"connected": []}, folder or state) | stopped
    facts |= describe_progress(status, folder or state)
    if folder is not None and facts["state"] == "running" and facts["round"] < facts["rounds"]:
        with closing(Journal(folder, read_only=True)) as records:
            ((latest,),) = records.read("SELECT max(phase) FROM orders")
            phase = 1 if latest is None or records.get_fact("round") != facts["round"] else latest + 1
        facts["phase"] = f"phase {phase} of round {facts['round'] + 1} in progress"
    return facts


def describe_progress(status: Mapping[str, Any], folder: Path) -> Facts:
    """Return the facts of a federation at the server. status: as `read_status`. folder: has the scores and the bytes."""
    recorded = status["progress"]
    if recorded is None:
        here = f"connected: {', '.join(status['connected']) or 'nobody'}"
        return {"state": "waiting", "reason": f"no lead has submitted the federation; {here}"}
    word = Outcome(recorded["outcome"]).label
    reason = (recorded["left"] or "its rounds are under way") if word == "running" else recorded["said"]
    if status["stops"] and word == "running":
        reason += "; a lead has asked for a stop after this round"
    lines = list(read_records(folder / LEDGER, LedgerLine))
    exchanged = {line.round for line in lines if line.up}  # of other rounds nothing tells who was there
    sites = []
    for site in describe_sites(status):
        i = site["site"]
        sent = {line.round for line in lines if line.client == i and line.up}
        before = range(recorded["round"] + 1 if i in recorded["evaluators"] else recorded["joins"].get(i, 1))
        missed = find_missed_rounds(sent | {*before} | (set(range(recorded["round"] + 1)) - exchanged), recorded["round"])
        traffic = {way: sum(getattr(line, way) for line in lines if line.client == i) for way in ("up", "down")}
        sites.append(site | traffic | {"missed": missed})
    scores = (
        (e.round, row.client or "all sites", row.model, row.data, row.values)
        for e in read_records(folder / METRICS, Evaluation)
        for row in e.rows
    )
    return {
        "state": word,
        "reason": reason,
        "round": recorded["round"],
        "rounds": recorded["rounds"],
        "sites": sites,
        "notes": [format_notes(note) for note in reversed(recorded["notes"])],
        "bytes": recorded["bytes"],
        "scores": group_scores(scores),
    }


def describe_sites(status: Mapping[str, Any]) -> Iterator[Facts]:
    """Yield for each site of the recorded progress: "site", "state", "seen", "why". status: as `read_status`.

    "state": a word of SITE_WORDS. "seen": seconds since the last heartbeat, 0 where it is in time, None where it is not
    known. "why": the last note of the server on the site.
    """
    recorded, connected, gone = status["progress"], status["connected"], status["gone"] or {}
    outcome, newest_first = Outcome(recorded["outcome"]), recorded["notes"][::-1]
    seen, now = status["seen"] or {}, status["time"] or time.time()
    for site in recorded["sites"]:
        first = recorded["joins"].get(site, 1)
        if site in gone:
            word = LEFT_WORD if gone[site] == LEFT else EXCLUDED
        elif first > 1 and first > recorded["round"] + (site in recorded["in"]):
            word = JOINS
        elif site not in connected:
            word = PAUSED if seen.get(site, (0.0, False))[1] else LOST
        elif site in seen:
            word = LATE
        elif outcome.label == "restarting" or site in recorded["outside"]:
            word = RESTARTING
        elif site in recorded["late"]:
            word = LATE
        elif site in recorded["evaluators"]:
            word = EVALUATES
        elif outcome != Outcome.RUNNING:
            word = WAITING
        else:
            word = PRESENT if site in recorded["in"] else PAUSED
        why = gone.get(site) or next((format_notes(note) for note in newest_first if repr(site) in note["text"]), "")
        past = now - seen[site][0] if site in seen else 0.0 if site in connected else None
        yield {"site": site, "state": word, "seen": past, "why": why}


def group_scores(scores: Iterable[Score]) -> dict[tuple[str, str, str], dict[str, dict[int, float]]]:
    """Return (model, rows, name of the score) -> site -> round -> value, of the main score of each model and kind of rows.

    The main score is the accuracy; without an accuracy the first number that is no loss.
    """
    grouped: dict[tuple[str, str, str], dict[str, dict[int, float]]] = {}
    for round, site, model, data, values in scores:
        numbers = {k: v for k, v in values.items() if isinstance(v, int | float) and k not in ("examples", "majority")}
        name = "accuracy" if "accuracy" in numbers else next((k for k in numbers if k != "loss"), "loss")
        if name in numbers:
            grouped.setdefault((model, data, name), {}).setdefault(site, {})[round] = float(numbers[name])
    return grouped
