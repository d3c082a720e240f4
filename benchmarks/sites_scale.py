"""What a round costs the server of ten to thirty real sites on this machine.

    uv run python benchmarks/sites_scale.py [--sites 10,20,30] [--rounds 10]

FML with MLPs on the digits over mutual TLS. For each number of sites, between the first round and the last but one: seconds
of a round by the clock (all sites share this machine's cores); processor seconds of the server's processes; tensor bytes
that the server sent and received; and the proportional set sizes of the server and of a site, each with its job. Processes
are forked from one process that has the imports, and share its memory. A site that a user starts takes more, which is
measured for one site. A hundred sites do not fit in 24 GiB: the server's bytes and memory are extrapolated, but not its
processor seconds, which grow faster than the sites. Writes benchmarks/results/sites-scale.json.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any

import psutil
import torch
from common import command, figure, machine, versions
from faults import ROOT, ledger
from scale import MIB, read_memory

from loopback import Loopback, loopback
from wards import COMMON, MLPS

RESULTS = ROOT / "benchmarks" / "results" / "sites-scale.json"


def get_process(fed: Loopback, name: str) -> psutil.Process:
    """Return the process of the server or of a site, whose child is the job."""
    return psutil.Process(fed.processes[name].pid)


def read_seconds(fed: Loopback) -> float:
    """Return the processor seconds of the server's processes so far."""
    return sum(sum(process.cpu_times()[:2]) for process in (get_process(fed, "server"), *fed.job("server")))


def measure(count: int, rounds: int, work: Path) -> dict[str, Any]:
    """Return the figures of a federation with so many sites."""
    sites = {f"site{n}": MLPS["north"] for n in range(count)}
    with loopback(work / str(count), {**COMMON, "rounds": rounds}, sites, wait=600.0, deadline=600.0) as fed:
        began = time.monotonic()
        fed.start("server", *sites, jobs=1)
        fed.wait(lambda: fed.log("server").count("is connected") >= count, 900, "all sites are connected")
        fed.submit()
        fed.round(1, 900)
        first, start, before = time.monotonic(), time.monotonic() - began, read_seconds(fed)
        fed.round(rounds - 1, 3600)  # the job ends after the last round
        clock, processor = time.monotonic() - first, read_seconds(fed) - before
        memory = {name: read_memory(get_process(fed, name)) / MIB for name in ("server", *sites)}
        fed.done(1800)
        lines = [line for line in ledger(fed) if line["round"] > 1]
    done = rounds - 2
    row = {
        "sites": count,
        "rounds": rounds,
        "start_seconds": figure(start),
        "round_seconds": figure(clock / done),
        "server_processor_seconds": figure(processor / done),
        "bytes_down": sum(line["down"] for line in lines) // (rounds - 1),
        "bytes_up": sum(line["up"] for line in lines) // (rounds - 1),
        "answers": len([line for line in lines if line["up"]]),
        "server_mib": figure(memory.pop("server")),
        "site_mib": figure(mean(memory.values())),
    }
    print(row, flush=True)
    return row


def measure_own_process(work: Path) -> float:
    """Return the memory of a site that is started as a user starts it, without its job, in MiB."""
    with loopback(work / "own", COMMON, {"north": MLPS["north"]}) as fed:
        fed.start("server")
        words = ["-m", "fedmutual", "site", "--kit", fed.folder / "kits" / "north", "--config", fed.configs["north"]]
        with (fed.folder / "north.log").open("ab") as out:
            fed.processes["north"] = subprocess.Popen(
                [sys.executable, *words], cwd=fed.folder, stdout=out, stderr=out, start_new_session=True
            )
        fed.submit()
        fed.round(1, 600)
        return figure(read_memory(get_process(fed, "north")) / MIB)


def extrapolate(rows: list[dict[str, Any]], count: int) -> dict[str, Any]:
    """Return the server's bytes and memory at `count` sites by the line of least squares through the measured ones."""
    sites = [row["sites"] for row in rows]
    names = ("bytes_down", "bytes_up", "server_mib")
    lines = {name: linear_regression(sites, [row[name] for row in rows]) for name in names}
    return {"sites": count} | {name: figure(line.intercept + line.slope * count) for name, line in lines.items()}


def main() -> None:
    """Measure each number of sites, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", default="10,20,30")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the federation is ended
    torch.set_num_threads(1)
    if args.rounds < 3:
        parser.error("--rounds must be at least 3: the first and the last round are not measured")
    about = {"command": command("sites_scale.py"), "machine": machine(), "versions": versions("nvflare")}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        own_mib = measure_own_process(Path(work))
        rows = [measure(int(count), args.rounds, Path(work)) for count in args.sites.split(",")]
    content = {**about, "own_site_mib": own_mib, "results": rows, "extrapolated": extrapolate(rows, 100)}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
