"""Real sites on one machine: what a fault costs, and what a round costs. Writes benchmarks/results/sites.json as it goes.

    uv run python benchmarks/sites.py faults [--times 5] [--only site,server]
    uv run python benchmarks/sites.py rounds

Faults come at a random moment of a federation of three sites (small networks on the digits). Of each: rounds that a
site missed, seconds from the fault to the next saved round, and whether all models are bit for bit those of a run in one
process that nothing happened to.
"""

import argparse
import json
import os
import platform
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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import fedmutual  # noqa: E402
from fedmutual.config import parse_config  # noqa: E402
from loopback import Loopback, loopback  # noqa: E402
from wards import COMMON, SEEDED, SITES, same, together, with_data  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "sites.json"
MLPS = {i: {**own, "model": {"personal": "mlp"}} for i, own in SITES.items()}
LIES = {"NaN": "a reply with NaN", "shape": "a reply with another shape", "old": "a reply for an old round"}
DEADLINE = 20.0


class Pipe:
    """A connection to the server that can be cut, and joined again."""

    def __init__(self, port: int) -> None:
        self._port, self._open, self._pairs = port, True, list[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close what is open, and take nothing new."""
        self._open = False
        for end in self._pairs:
            end.close()
        self._pairs.clear()

    def join(self) -> None:
        """Take connections again."""
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
                threading.Thread(target=_carry, args=(a, b), daemon=True).start()


def _carry(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(65536):
            sink.sendall(content)
    for end in (source, sink):
        end.close()


def hurt(fed: Loopback, kind: str, pipe: Pipe) -> None:
    """Do it, and mend it where a person or systemd would."""
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
    elif kind == "connection cut for 15 s":
        pipe.cut()
        time.sleep(15)
        pipe.join()
    elif kind == "disk full for 15 s":
        state = fed.configs["south"].parent / "state"
        with suppress(OSError), (state / "filler").open("wb") as file:
            while True:
                file.write(b"\0" * 65536)
                file.flush()
        time.sleep(15)
        (state / "filler").unlink()
    else:
        (fed.configs["south"].parent / "lie").write_text(next(k for k, lie in LIES.items() if lie == kind))


FAULTS = (
    *("site's job", "site", "server's job", "server"),
    *("site stopped for a minute", "connection cut for 15 s", "disk full for 15 s", *LIES.values()),
)
ROUNDS = dict.fromkeys(FAULTS, 60) | {FAULTS[4]: 500, FAULTS[5]: 300, FAULTS[6]: 200}  # so that it can come back


LIAR = """
'''The network of a site whose next answer, once the file "lie" is there, is a lie.'''
import dataclasses
from pathlib import Path

import torch
from fedmutual.engines.sites import half, post

HERE = Path(__file__).parent
honest = half.Half.do


def lied(content, how):
    said, message = post.answer(content)
    name = next(iter(message))
    if how == "NaN":
        message[name] = message[name] * torch.nan
    elif how == "shape":
        message[name] = message[name][:-1]
    else:
        said = dataclasses.replace(said, order=dataclasses.replace(said.order, round=said.order.round - 1))
    return post.packed(said, message)


def do(self, content):
    answer, lie = honest(self, content), HERE / "lie"
    if lie.exists() and post.order(content)[0].kind == post.WORK:
        answer = lied(answer, lie.read_text())
        lie.rename(HERE / "lied")
    return answer


half.Half.do = do


def Own(shape, classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, classes))
"""


def fault(kind: str, work: Path, rounds: int) -> dict[str, Any]:
    """One federation with one fault."""
    common = {**COMMON, "rounds": rounds}
    sites = MLPS
    if kind in LIES.values():
        sites = {**MLPS, "south": {**MLPS["south"], "model": {"personal": "liar:Own"}}}
        south = work / "fed" / "south"
        south.mkdir(parents=True)
        (south / "liar.py").write_text(LIAR)
        sys.path.insert(0, str(south))
    run = fedmutual.run(parse_config(together(common, sites)), work / "one")
    with loopback(work / "fed", common, sites, deadline=DEADLINE, wait=120.0) as fed:
        pipe = Pipe(fed.port)
        kit = fed.folder / "kits" / "south" / "startup" / "fed_client.json"
        kit.write_text(kit.read_text().replace(f":{fed.port}", f":{pipe.port}"))
        if kind.startswith("disk full"):
            small(fed.configs["south"].parent / "state")
        fed.start("server", *MLPS)
        fed.submit()
        fed.round(2, 300)
        time.sleep(random.uniform(0, 3))
        before, began = fed.progress()["round"], time.monotonic()
        hurt(fed, kind, pipe)
        fed.wait(lambda: fed.progress()["round"] > before or fed.progress()["outcome"] == "done", 240, "a round")
        to_next = time.monotonic() - began
        fed.done(600)
        found = measured(fed, run, before)
        if kind.startswith("disk full"):
            subprocess.run(["umount", "-l", fed.configs["south"].parent / "state"], check=False)
    return {"fault": kind, "in round": before + 1, "seconds to a saved round": round(to_next, 1), **found}


def measured(fed: Loopback, run: fedmutual.Run, before: int) -> dict[str, Any]:
    """What was lost."""
    ledger = [json.loads(line) for line in (fed.folder / "server" / "wards" / "ledger.jsonl").open()]
    missed = sorted(line["round"] for line in ledger if line["client"] == "south" and not line["up"])
    server = fedmutual.Run(fed.folder / "server" / "wards")
    equal = same(server.global_model().state_dict(), run.global_model().state_dict())
    for i in MLPS:
        mine = fedmutual.Run(fed.configs[i].parent / "state" / "wards").personal_model(i)
        equal &= same(mine.state_dict(), run.personal_model(i).state_dict())
    others = sorted(line["round"] for line in ledger if line["client"] != "south" and not line["up"])
    return {
        "rounds the site missed": missed,
        "rounds others missed": others,
        "back in": not missed or missed[-1] < run.config.rounds,
        "bits of an untouched run": equal,
        "begun anew": fed.log("server").count("begun again"),
    }


def small(folder: Path) -> None:
    """A file system of a few megabytes, which can be filled."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=True)


def a_round(name: str, work: Path, common: dict[str, Any], sites: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Seconds a round over the network, and in one process, in one run of this script."""
    folder, rounds = work / name.replace(" ", "-"), common["rounds"]
    run = fedmutual.run(parse_config(together(common, sites)), folder / "one")
    with loopback(folder / "fed", common, sites, **given) as fed:
        if "public" in given:
            for i in sites:
                fed.cli("data", "give", fed.file, "--site", fed.configs[i], "-o", fed.folder / "public")
        fed.start("server", *sites)
        fed.submit()
        fed.round(1, 900)
        first, began = fed.progress()["round"], time.monotonic()
        fed.round(rounds, 3600)
        took = time.monotonic() - began
        fed.done()
        notes = fed.progress()["notes"]
    each, alone = took / (rounds - first), run.summary["seconds"] / rounds
    about = {"what": name, "rounds": rounds, "notes": notes}
    return about | {"seconds a round": round(each, 3), "in one process": round(alone, 3)}


def rounds(work: Path) -> list[dict[str, Any]]:
    """FML on the digits with three architectures; FedH2L; a shared model of 50 MB."""
    found = [a_round("FML, three architectures", work, {**COMMON, "rounds": 10}, SITES)]
    sites = with_data(work)
    there = {"public": {"folder": str(work / "FedH2L" / "fed" / "public")}}
    h2l = {**SEEDED, "rounds": 200, "records": {"evaluate_every": 50}}
    found.append(a_round("FedH2L", work, h2l, {i: own | there for i, own in sites.items()}, public="public"))
    (work / "big.py").write_text(BIG)
    sys.path.insert(0, str(work))
    big = {**COMMON, "rounds": 3, "model": {"shared": "big:Big"}, "records": {"evaluate_every": 3}}
    os.environ["PYTHONPATH"] = str(work)
    found.append(a_round("FML, 50 MB shared", work, big, MLPS))
    return found


BIG = """
from torch import nn

def Big(shape, classes):
    wide = nn.Linear(3400, 3600)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3400), nn.ReLU(), wide, nn.ReLU(), nn.Linear(3600, classes))
"""


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["faults", "rounds"])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--only", default=",".join(FAULTS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for time_ in range(given.times if given.what == "faults" else 1):
        for kind in given.only.split(",") if given.what == "faults" else ("rounds",):
            work = Path(tempfile.mkdtemp())
            try:
                done = rounds(work) if kind == "rounds" else [fault(kind, work, ROUNDS[kind])]
            except AssertionError as problem:
                done = [{"fault": kind, "failed": str(problem)[:300]}]
                print(problem)
            record(given.what, done)
            print(time_ + 1, *done, sep="\n")
            shutil.rmtree(work, ignore_errors=True)


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all times that a fault was tried."""
    ended = [f for f in found if "failed" not in f]
    seconds = [f["seconds to a saved round"] for f in ended]
    missed = [len(f["rounds the site missed"]) for f in ended]
    if not ended:
        return {"times": len(found), "ended": 0}
    return {
        "times": len(found),
        "ended": len(ended),
        "seconds to a saved round": {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)},
        "rounds that the site missed": {"median": statistics.median(missed), "least": min(missed), "most": max(missed)},
        "times it came back": sum(f["back in"] for f in ended),
        "times another site missed a round": sum(bool(f["rounds others missed"]) for f in ended),
        "times bit for bit an untouched run, of those where no round was missed": [
            sum(f["bits of an untouched run"] for f in ended if not f["rounds the site missed"]),
            sum(not f["rounds the site missed"] for f in ended),
        ],
    }


def record(what: str, done: list[dict[str, Any]]) -> None:
    """Add to the results."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept["machine"] = f"{platform.machine()}, {torch.multiprocessing.cpu_count()} cores, other work on them"
    kept["versions"] = {n: __import__("importlib.metadata").metadata.version(n) for n in ("fedmutual", "nvflare", "torch")}
    kept[what] = (kept.get(what, []) if what == "faults" else []) + done
    kept["summary"] = {kind: summary([f for f in kept.get("faults", []) if f["fault"] == kind]) for kind in FAULTS}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
