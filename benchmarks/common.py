"""Shared by the sections: numbers with their spread, goals, and result files with the machine and the command."""

import ctypes
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from fedmutual.results.estimate import estimate


@dataclass(frozen=True)
class Options:
    """The options of a section."""

    pairs: int  # turns of interleaved contestants
    tiny: bool  # only see that it runs: its numbers mean nothing
    device: str  # of the section gpu
    seeds: int  # of the section precision
    pflib: Path | None  # of the section peers: a clone of PFLlib
    htfl: Path | None  # there, a clone of HtFLlib
    setting: str | None  # there, the only setting that is measured, as "mlp-5"
    epochs: int  # there, local epochs of a round
    peers: Mapping[str, Path]  # there, the name of a library -> a Python that has the library
    before: Path | None = None  # of the sections disk and commands: a clone of an earlier version


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.low:{spec}} to {self.high:{spec}})"

    def to_json(self) -> dict[str, Any]:
        return {"median": figure(self.median), "quartiles": [figure(self.low), figure(self.high)]}


def spread(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def ratios(above: Iterable[float], below: Iterable[float]) -> Spread:
    """Return the ratio of each turn."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def figure(value: float, digits: int = 4) -> float:
    """Return the number with this many significant digits."""
    return float(f"{value:.{digits}g}")


def interval(values: Sequence[float], spec: str) -> str:
    """Return the mean, and half of the 95 % interval over seeds."""
    summary = estimate(values, "seeds")
    return f"{summary.mean:{spec}}" + (f" ± {summary.half:.2f}" if summary.half is not None else "")


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def machine() -> dict[str, Any]:
    """Return the machine and the versions of this run."""
    facts = {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "platform": platform.platform(),
        "load_before": [round(v, 2) for v in os.getloadavg()],
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


class Others:
    """The share of the processors' time that other programs took meanwhile, 0 to 1; None if it is not known."""

    def __init__(self) -> None:
        self._begun = time.monotonic(), _read_other_seconds()

    def share(self) -> float | None:
        """Return the share since the object was made."""
        (when, before), now = self._begun, _read_other_seconds()
        if before is None or now is None:
            return None
        return max(0.0, figure((now - before) / (time.monotonic() - when) / (os.cpu_count() or 1), 2))


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose parent ends, so that the time of the descendant is counted.

    Only on Linux. A contestant's fork server and workers end shortly after the contestant, which has not waited for them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of prctl(2)


def read_children_seconds() -> float:
    """Return the processor seconds of all existing descendants, and of ended processes that one of these has waited for."""
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(child.cpu_times()[:4])  # user and system, of the process and of its children
    return total


def _read_other_seconds() -> float | None:
    """Return the busy seconds of all processors since the machine started, without those of the benchmark's processes."""
    if sys.platform != "linux":
        return None
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
    return float(busy - sum(psutil.Process().cpu_times()[:4]) - read_children_seconds())


def versions(*more: str) -> dict[str, str]:
    packages = {name: version(name) for name in ("fedmutual", "torch", "numpy", *more)}
    return {"python": platform.python_version(), **packages, "commit": _commit()}


def command(script: str) -> str:
    """Return the command of this process, with PATH for the paths of this machine."""
    words = (re.sub(r"^(|\w+=)/.*", r"\1PATH", word) for word in sys.argv[1:])
    return shlex.join(("uv", "run", "python", f"benchmarks/{script}", *words))


def write(folder: Path, section: str, about: Mapping[str, Any], results: Any) -> None:
    """Write FOLDER/<section>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    when = datetime.now(UTC).isoformat(timespec="minutes")
    content = {"section": section, "date": when, **about, "versions": versions(), "results": results}
    (folder / f"{section}.json").write_text(json.dumps(content, indent=1, default=lambda thing: thing.to_json()) + "\n")


def _cpu() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    about = dict(line.split("\t: ", 1) for line in lines if "\t: " in line)
    return about.get("model name", platform.machine())


def _commit() -> str:
    """Return the checked-out commit, and whether anything but results has changed."""

    def git(*words: str) -> str:
        return subprocess.run(("git", *words), cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "../src", ".", ":!results")
    return git("rev-parse", "--short", "HEAD") + (" with uncommitted changes" if changed else "")
