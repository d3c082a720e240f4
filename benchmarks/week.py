"""A week of a federation in ten minutes: five sites over mutual TLS on this machine, with all that happens to sites.

    uv run python benchmarks/week.py

West joins late, east leaves, registry only evaluates, south is killed three times, north has a clock that is 240 s late and
is stopped for ten rounds; the server is stopped once and killed once. At each point `fedmutual status` must show the
expected word for each site. At the end, for each site: rounds that it missed while it was away; rounds that it lost
otherwise; and rounds that it answered in two ways. All models must have the bits of a federation in this process, without
network and faults, in which the same sites are absent in the same rounds. Writes benchmarks/results/week.json, and the
tables of docs/sites.md.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import command, machine, versions
from faults import ROOT, ledger, twice

import fedmutual
from fedmutual.events import Event, RoundDone
from fedmutual.sites.ledger import read_ledger
from fedmutual.sites.protocol import WORK, Order
from loopback import LEAD, Loopback, loopback
from wards import COMMON, MLPS, Federation, same

PAGE = ROOT / "docs" / "sites.md"  # has the tables
RESULTS = ROOT / "benchmarks" / "results" / "week.json"
JOINS, LATE, JOBS = 40, 240, 12  # round; seconds; forked jobs of each process (see `forked.start`)
OPEN = {**COMMON, "rounds": 100_000, "training": {"local_epochs": 4, "batch_size": 32}}  # a lead stops the federation
SITES = {**MLPS, "east": MLPS["north"], "registry": MLPS["north"]}
TRAINERS = ("north", "south", "west", "east")
ROLES: dict[str, Any] = {"joins": {"west": JOINS}, "evaluators": ["registry"], "quorum": 2, "baseline": True}
WORDS = {**dict.fromkeys(TRAINERS, "takes part"), "registry": "evaluates"}
SKEWED = """#!{python} -PE
import runpy, sys, time
now = time.time
time.time = lambda: now() - {late}
sys.executable = __file__  # FLARE starts the jobs with it
sys.argv = sys.argv[4:]  # after -P -E -m
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Week:
    """The federation, the checks so far, and from which round on which site was away."""

    def __init__(self, fed: Loopback) -> None:
        self.fed, self.checks, self.away = fed, list[dict[str, Any]](), list[tuple[str, int]]()
        self._changed = time.monotonic()  # when a process was last started, stopped or killed

    @property
    def round(self) -> int:
        """The last saved round."""
        return int(self.fed.progress()["round"])

    def start(self, *names: str) -> None:
        """Start processes; that of north with a late clock."""
        self._changed = time.monotonic()
        for name in names:
            if name != "north":
                self.fed.start(name, jobs=JOBS)
                continue
            python, log = self.fed.folder / "late-python", self.fed.folder / "north.log"
            python.write_text(SKEWED.format(python=sys.executable, late=LATE))
            python.chmod(0o700)
            words = ["-P", "-E", "-m", "fedmutual", "site", "--kit", self.fed.folder / "kits" / "north"]
            with log.open("ab") as out:
                self.fed.processes[name] = subprocess.Popen(
                    [python, *words, "--config", self.fed.configs[name]],
                    cwd=self.fed.folder,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )

    def restart(self, name: str) -> None:
        """Start a site again, and wait until the server has begun another job for it: until then words may be old."""
        job = self.fed.progress()["job"]
        self.start(name)
        self.fed.wait(lambda: self.fed.progress()["job"] != job, 240, f"a job with {name}")

    def stop(self, name: str) -> None:
        """Stop a process as an operator does, by SIGTERM, and wait for its end."""
        self._changed = time.monotonic()
        self.fed.processes[name].send_signal(signal.SIGTERM)
        self.fed.wait(lambda: self.fed.processes[name].poll() is not None, 30, f"{name} ends")
        if name != "server":
            self.away.append((name, max(list_answered(self.fed, name)) + 1))

    def kill(self, name: str) -> None:
        """Kill a process by SIGKILL."""
        self._changed = time.monotonic()
        if name != "server":
            self.away.append((name, self.round + 1))
        self.fed.kill(name)

    def read_words(self) -> dict[str, str]:
        """Return how each site stands, by `fedmutual status`; {} where the server does not answer."""
        try:
            shown = self.fed.cli("status", self.fed.file, "--kit", self.fed.folder / "kits" / LEAD)
        except AssertionError:
            return {}
        return dict(re.findall(r"^  (\w+): ([a-z ]+)", shown, re.MULTILINE))

    def check(self, step: str, seconds: float = 240, **expected: str) -> None:
        """Wait until `status` shows the expected words, and note those that it shows at last."""
        wanted, began, seen = WORDS | expected, time.monotonic(), list[dict[str, str]]()
        while (not seen or seen[-1] != wanted) and time.monotonic() < began + seconds:
            words = self.read_words()
            seen += [words] if seen[-1:] != [words] else []
            time.sleep(0.5)
        self.note(step, wanted, seen)

    def note(self, step: str, wanted: dict[str, str], seen: list[dict[str, str]]) -> None:
        """Note the words of a step: the expected, the last, and those before."""
        before = {i: list(dict.fromkeys(words.get(i, "no answer") for words in seen[:-1])) for i in SITES}
        changed = {i: words for i, words in before.items() if set(words) - {wanted.get(i)}}
        check = {"step": step, "round": self.round, "expected": wanted, "shown": seen[-1], "right": seen[-1] == wanted}
        self.checks.append({**check, "before": changed, "seconds": round(time.monotonic() - self._changed, 1)})
        print(self.checks[-1], flush=True)

    def pass_rounds(self, count: int) -> None:
        """Wait until so many further rounds are saved."""
        self.fed.round(self.round + count, 300)


def list_answered(fed: Loopback, name: str) -> set[int]:
    """Return the rounds, from 1, that a site trained and answered, from its own ledger."""
    lines = read_ledger(fed.configs[name].parent / "state" / fed.name)
    return {line["round"] for line in lines if line["what"] == WORK and line["tensors"]}


def run_steps(week: Week) -> None:
    """Cause each event of the week, and check the words of status after it."""
    fed, later = week.fed, {"west": "joins later"}
    week.start("server", "north", "south", "east", "registry")
    fed.submit()
    fed.round(3, 300)
    week.check("the federation runs; west is not there yet", **later)
    week.start("west")
    week.check("west is connected, before its first round", 20, **later)
    fed.round(JOINS + 2, 300)
    week.check(f"west takes part, from round {JOINS} on")
    clock = fed.cli("doctor", "--kit", fed.folder / "kits" / "north", "--config", fed.configs["north"])
    print(*(line for line in clock.splitlines() if "clock" in line), sep="\n")
    week.pass_rounds(10)
    week.kill("south")
    time.sleep(1)  # as a unit with Restart=always would
    week.restart("south")
    week.check("south was killed, and started again after 1 s")
    week.pass_rounds(10)
    week.stop("server")
    week.note("the server is stopped", {}, [week.read_words()])
    week.start("server")
    week.check("the server was started again")
    week.pass_rounds(10)
    week.kill("south")
    week.check("south was killed again", south="late")
    week.check("it stays away for more than a minute", south="lost")
    week.restart("south")
    week.check("south was started again")
    week.pass_rounds(10)
    week.stop("north")
    week.check("north is stopped", north="paused")
    week.pass_rounds(10)
    week.check("ten rounds later", north="paused")
    week.restart("north")
    week.check("north was started again")
    week.pass_rounds(10)
    fed.cli("leave", "--kit", fed.folder / "kits" / "east", "--config", fed.configs["east"], "--state", "keep")
    gone = {"east": "left"}
    week.check("east has left", **gone)
    week.pass_rounds(10)
    week.kill("server")
    week.start("server")
    week.check("the server was killed, and started again", **gone)
    week.pass_rounds(10)
    week.kill("south")
    week.restart("south")
    week.check("south was killed a third time, and started again", **gone)
    week.pass_rounds(10)
    fed.cli("stop", fed.file, "--kit", fed.folder / "kits" / LEAD)
    fed.wait(lambda: fed.progress()["outcome"] == "stopped", 60, "the end")
    week.check("a lead stopped the federation", **{**dict.fromkeys(TRAINERS, "waiting"), **gone})


def count_rounds(week: Week) -> list[dict[str, Any]]:
    """Return for each site that trains the rounds that it did, missed and lost."""
    lines, last, rows = ledger(week.fed), week.round, []
    for name in TRAINERS:
        counted, answered = {x["round"] for x in lines if x["client"] == name and x["up"]}, list_answered(week.fed, name)
        end = max(counted) if name == "east" else last
        missed = set(range(JOINS if name == "west" else 1, end + 1)) - counted
        away = set[int]()
        for first in (first for site, first in week.away if site == name):
            first += first in counted  # it was killed after its answer
            away |= set(range(first, min((r for r in counted if r >= first), default=end + 1)))
        state = week.fed.configs[name].parent / "state" / week.fed.name
        figures = {"done": len(counted), "away": len(missed & away), "lost": sorted(missed - away), "repeated": twice(state)}
        rows.append({"site": name, **figures, "answers that the server did not get": sorted(answered - counted)})
    return rows


def replay(week: Week, folder: Path) -> bool:
    """Return whether all models are those of a federation in this process in which the same sites are absent."""
    fed, last = week.fed, week.round
    counted = {(x["round"], x["client"]) for x in ledger(fed) if x["up"]}
    answered = {(r, i) for i in TRAINERS for r in list_answered(fed, i)}
    federation = Federation(folder, {**OPEN, "rounds": last}, SITES, **{**ROLES, "baseline": False})
    transport = federation.transport

    def change(site: str, order: Order, content: bytes) -> list[bytes]:
        return [] if order.kind == WORK and (order.round + 1, site) not in counted else [content]

    def leave_out(event: Event) -> None:
        if isinstance(event, RoundDone):
            transport.away = {i for i in TRAINERS if (event.round + 1, i) not in answered | counted}

    transport.change = change
    transport.away = {i for i in TRAINERS if (1, i) not in answered}
    federation.run(leave_out)
    models = [
        (fedmutual.Run(fed.folder / "server" / fed.name).global_model(), fedmutual.Run(federation.server).global_model())
    ]
    for i in TRAINERS:
        site = fedmutual.Run(fed.configs[i].parent / "state" / fed.name)
        models.append((site.personal_model(i), fedmutual.Run(federation[i].folder).personal_model(i)))
    return all(same(one.state_dict(), other.state_dict()) for one, other in models)


def format_words(words: dict[str, str]) -> str:
    """Return the words of the sites that neither take part nor evaluate."""
    named = [f"{i}: {word}" for i, word in words.items() if word != WORDS[i]]
    return ", ".join(named) or ("all take part" if words else "no answer")


def write_tables(checks: list[dict[str, Any]], sites: list[dict[str, Any]]) -> None:
    """Replace the tables of the page."""
    lines = [
        "| round | what happens | expected words | shown words | seconds after the last start or end of a process |",
        "|---|---|---|---|---|",
    ]
    for c in checks:
        words = format_words(c["expected"]), format_words(c["shown"])
        lines.append(f"| {c['round']} | {c['step']} | {' | '.join(words)} | {c['seconds']:.0f} |")
    lines += [
        "",
        "| site | rounds done | missed while it was away | lost otherwise | answered in two ways |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {s['site']} | {s['done']} | {s['away']} | {len(s['lost'])} | {s['repeated']} |" for s in sites]
    first, end = "<!-- the week: made by benchmarks/week.py -->", "<!-- end of the week -->"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(first)
    PAGE.write_text("\n".join((before + first, *lines, end + rest.partition(end)[2])), encoding="utf-8")


def main() -> None:
    """Run the week, count, and compare."""
    torch.set_num_threads(1)
    work, began = Path(tempfile.mkdtemp()), time.monotonic()
    with loopback(work / "fed", OPEN, SITES, deadline=20.0, wait=120.0, **ROLES) as fed:
        week = Week(fed)
        run_steps(week)
    seconds = round(time.monotonic() - began)
    sites, equal = count_rounds(week), replay(week, work / "one")
    notes = [note for note in week.fed.progress()["notes"] if "shortened" in note["text"]]
    about = {"command": command("week.py"), "machine": machine(), "versions": versions("nvflare"), "seconds": seconds}
    figures = {"rounds": week.round, "all models bit for bit those without faults": equal, "sites": sites, "notes": notes}
    RESULTS.write_text(json.dumps({**about, **figures, "checks": week.checks}, indent=1) + "\n")
    write_tables(week.checks, sites)
    print(figures)
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
