"""Faults in a federation of real sites, and their cost. Writes benchmarks/results/faults.json.

    uv run python benchmarks/faults.py kills [--times 5]
    uv run python benchmarks/faults.py losses [--times 5]     # as root: a disk is filled, which is a tmpfs

Each is one federation of three sites (small networks on the digits, FML) on this machine, with faults at random times and
in random order. `kills`: processes that end and cost no site a round; at the end all models must have the bits of a run in
one process without faults. `losses`: faults that may cost a site some rounds. For each fault: the rounds that the site and
others missed, seconds from the fault to the next saved round, seconds from its repair to a round with the site, and
whether the site answered one round with two different messages.
"""

import argparse
import json
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from common import command, machine, versions

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import fedmutual  # noqa: E402
from fedmutual.config import parse_config  # noqa: E402
from fedmutual.sites.ledger import read_ledger  # noqa: E402
from log_lines import read_lines  # noqa: E402
from loopback import LEAD, Loopback, loopback  # noqa: E402
from wards import COMMON, SITES, together  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
LIES = {"NaN": "a reply with NaN", "shape": "a reply with another shape", "old": "a reply for an old round"}
KILLS = ("site's job", "server's job", "server")
LOSSES = (
    *("site", "site stopped for a minute", "site's job stopped for a minute", "disk full for 15 s"),
    *("connection cut for 15 s", "connection dead without a word for 15 s", *LIES.values()),
)
OPEN = {**COMMON, "rounds": 100_000}  # it is stopped by hand
COSTS = (
    *("rounds the site missed", "rounds others missed"),
    *("seconds to a saved round", "seconds from the mend to a round with the site"),
)
DEADLINE, STEADY, PATIENCE = 20.0, 6.0, 240.0
OWN = {"north": {"personal": "mlp"}, "south": {"personal": "liar:Own"}, "west": {"personal": "mlp"}}
SMALL = {i: {**tables, "model": OWN[i]} for i, tables in SITES.items()}
LIAR = """
'''The network of a site whose next answer, once the file "lie" is there, is a lie.'''
import dataclasses
from pathlib import Path

import torch
from fedmutual.sites import protocol, site_runtime

HERE = Path(__file__).parent
honest = site_runtime.SiteRuntime.carry_out


def lied(content, how):
    said, message = protocol.read_answer(content)
    name = next(iter(message))
    if how == "NaN":
        message[name] = message[name] * torch.nan
    elif how == "shape":
        message[name] = message[name][:-1]
    else:
        said = dataclasses.replace(said, order=dataclasses.replace(said.order, round=said.order.round - 1))
    return protocol.pack_message(said, message)


def carry_out(self, content):
    answer, lie = honest(self, content), HERE / "lie"
    if lie.exists() and protocol.read_order(content)[0].kind == protocol.WORK:
        answer = lied(answer, lie.read_text())
        lie.rename(HERE / "lied")
    return answer


site_runtime.SiteRuntime.carry_out = carry_out


def Own(shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, classes))
"""


class Pipe:
    """A connection to the server that can be cut and joined again."""

    def __init__(self, port: int) -> None:
        self._port, self._open, self._pairs, self._lost = port, True, list[socket.socket](), set[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close the open connections, and accept no new one."""
        self._open = False
        for end in self._pairs:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def swallow(self) -> None:
        """Drop all data on the open connections without closing them, and accept no new one."""
        self._open = False
        self._lost |= set(self._pairs)
        self._pairs.clear()

    def join(self) -> None:
        """Accept connections again."""
        self._open = True

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                if not self._open:
                    raise OSError
                far = socket.create_connection(("127.0.0.1", self._port), 5)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            self._pairs += [near, far]
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=(a, b), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(65536):
                if source not in self._lost:
                    sink.sendall(content)
        if source not in self._lost:
            for end in (source, sink):
                end.close()


class Seen:
    """The time at which each round was saved, and whether site south was in it; a thread watches continuously."""

    def __init__(self, fed: Loopback) -> None:
        self._fed, self.rounds = fed, list[tuple[float, int, bool]]()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            with suppress(OSError, ValueError, KeyError):
                progress = self._fed.progress()
                if progress and (not self.rounds or progress["round"] != self.rounds[-1][1]):
                    self.rounds.append((time.monotonic(), progress["round"], "south" in progress["in"]))
            time.sleep(0.02)

    def steady(self, since: float) -> bool:
        """Return whether rounds were saved for a while, all with south in them."""
        if time.monotonic() < since + STEADY:
            return False
        late = [is_in for at, _, is_in in self.rounds if at > time.monotonic() - STEADY]
        return len(late) >= 3 and all(late)

    def next(self, before: float) -> float:
        """Return the seconds from a time to the next saved round."""
        return next(at for at, _, _ in self.rounds if at > before) - before

    def back(self, before: float) -> float:
        """Return the seconds from a time to the first round from which south is in every round; 0 if always."""
        after = [(at, is_in) for at, _, is_in in self.rounds if at > before]
        gap = max((k for k, (_, is_in) in enumerate(after) if not is_in), default=None)
        return 0.0 if gap is None else after[gap + 1][0] - before


def hurt(fed: Loopback, kind: str, pipe: Pipe) -> None:
    """Cause the fault, and repair it as a person or systemd would."""
    south = fed.configs["south"].parent
    if kind in ("site's job", "server's job"):
        fed.kill_job("south" if kind == "site's job" else "server")
    elif kind in ("site", "server"):
        name = "south" if kind == "site" else "server"
        fed.kill(name)
        time.sleep(1)  # as a unit with Restart=always would
        fed.start(name)
    elif kind == "site stopped for a minute":
        fed.freeze("south", signal.SIGSTOP)
        time.sleep(60)
        fed.freeze("south", signal.SIGCONT)
    elif kind == "site's job stopped for a minute":
        jobs = fed.job("south")
        for process in jobs:
            process.suspend()
        time.sleep(60)
        for process in jobs:
            process.resume()
    elif kind.startswith("connection"):
        pipe.cut() if kind == "connection cut for 15 s" else pipe.swallow()
        time.sleep(15)
        pipe.join()
    elif kind == "disk full for 15 s":
        with suppress(OSError), (south / "state" / "filler").open("wb") as file:
            while True:
                file.write(b"\0" * 65536)
                file.flush()
        time.sleep(15)
        (south / "state" / "filler").unlink()
    else:
        (south / "lie").write_text(next(k for k, lie in LIES.items() if lie == kind))
        fed.wait((south / "lied").exists, 60, "a lie")
        (south / "lied").unlink()


def one(fed: Loopback, seen: Seen, kind: str, pipe: Pipe) -> dict[str, Any]:
    """Cause one fault and return its cost."""
    time.sleep(random.uniform(0, 3))
    before, again = fed.progress()["round"], fed.log("server").count("begun again")
    began = time.monotonic()
    hurt(fed, kind, pipe)
    mended = time.monotonic()
    fed.wait(lambda: seen.steady(mended), PATIENCE, f"steady rounds after: {kind}")
    out = [(line["round"], line["client"]) for line in ledger(fed) if line["round"] > before and not line["up"]]
    return {
        "fault": kind,
        "in round": before + 1,
        "rounds the site missed": sum(i == "south" for _, i in out),
        "rounds others missed": sum(i != "south" for _, i in out),
        "seconds to a saved round": round(seen.next(began), 1),
        "seconds from the mend to a round with the site": round(seen.back(mended), 1),
        "jobs begun": fed.log("server").count("begun again") - again,
    }


def ledger(fed: Loopback) -> list[dict[str, Any]]:
    """Return the bytes sent down and up, from the server's ledger."""
    return list(read_lines(fed.folder / "server" / "wards" / "ledger.jsonl"))


def federation(kinds: tuple[str, ...], fills: bool, times: int, work: Path) -> None:
    """Cause all faults of some kinds in one federation; write each result when the fault is over."""
    south = work / "fed" / "south"
    (south / "state").mkdir(parents=True)
    if fills:  # a small disk, which can be filled
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", south / "state"], check=True)
    try:
        with loopback(work / "fed", OPEN, SMALL, modules={"liar": LIAR}, deadline=DEADLINE, wait=120.0) as fed:
            pipe = Pipe(fed.port)
            kit = fed.folder / "kits" / "south" / "startup" / "fed_client.json"
            kit.write_text(kit.read_text().replace(f":{fed.port}", f":{pipe.port}"))
            fed.start("server", *SMALL)
            fed.submit()
            fed.round(3, 300)
            seen = Seen(fed)
            for _ in range(times):
                for kind in random.sample(kinds, len(kinds)):
                    record("faults", one(fed, seen, kind, pipe))
            fed.cli("stop", fed.file, "--kit", fed.folder / "kits" / LEAD)
            fed.wait(lambda: fed.progress()["outcome"] == "stopped", PATIENCE, "the end")
            record("ends", {"faults": list(kinds), "times": times, **ended(fed, work)})
    finally:
        if fills:
            subprocess.run(["umount", "-l", south / "state"], check=False)


def ended(fed: Loopback, work: Path) -> dict[str, Any]:
    """Return the state of the models at the end."""
    last = fed.progress()["round"]
    missed = sum(not line["up"] for line in ledger(fed))
    state = {"rounds": last, "missed, by all sites": missed}
    for i in SMALL:
        mine = fedmutual.Run(fed.configs[i].parent / "state" / "wards")
        state[f"rounds answered in two ways by {i}"] = twice(mine.folder)
        state[f"{i}'s own model is of round"] = mine.round
    if not missed:
        sys.path.insert(0, str(fed.configs["south"].parent))
        run = fedmutual.run(parse_config(together({**OPEN, "rounds": last}, SMALL)), work / "one")
        state["all models bit for bit those of one process"] = fed.alike(run)
    return state


def twice(folder: Path) -> int:
    """Return the number of rounds for which a site sent two different messages, which means that it trained twice."""
    sent: dict[tuple[int, int], set[str]] = {}
    for line in read_ledger(folder):
        if line["what"] == "work" and line["tensors"]:
            sent.setdefault((line["round"], line["phase"]), set()).add(json.dumps(line["tensors"]))
    return sum(len(contents) > 1 for contents in sent.values())


def record(what: str, result: dict[str, Any]) -> None:
    """Add to the results."""
    print(result, flush=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["commands"] = list(dict.fromkeys([*results.get("commands", []), command("faults.py")]))
    results["machine"], results["versions"] = machine(), versions("nvflare")
    results[what] = [*results.get(what, []), result]
    faults = results.get("faults", [])
    results["summary"] = {k: summary(of) for k in (*KILLS, *LOSSES) if (of := [f for f in faults if f["fault"] == k])}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def summary(faults: list[dict[str, Any]]) -> dict[str, Any]:
    """Return for one kind of fault the number of faults, and the minimum, median and maximum of each figure."""
    figures: dict[str, Any] = {"times": len(faults)}
    for key in COSTS:
        figures[key] = [f(x[key] for x in faults) for f in (min, statistics.median, max)]
    return figures


def main() -> None:
    """Run the requested kinds of faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["kills", "losses"])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--only", help="faults of these, with commas between")
    given = parser.parse_args()
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp())
    kinds = KILLS if given.what == "kills" else LOSSES
    federation(tuple(given.only.split(",")) if given.only else kinds, given.what == "losses", given.times, work)
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
