"""Choose the engine of a run: "auto" compares the work of the run with the machine."""

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from fedmutual.config.schema import EngineConfig
from fedmutual.engines.base import Make, Simulation
from fedmutual.engines.child_process import IS_FORKED, count_cores
from fedmutual.engines.graphs import make_capture
from fedmutual.engines.inprocess import DiskStorage, InProcess
from fedmutual.engines.processes import Processes
from fedmutual.engines.ray import Cluster
from fedmutual.engines.stacked import Stacked, Stacker
from fedmutual.engines.workers import Unportable
from fedmutual.federation.networks import Workload

LONG = 5.0 if IS_FORKED else 60.0  # seconds of training in one process that pay for the start of worker processes

_MOST_STACKED = 6.6e9
"""Floating-point operations of a client's step up to which "auto" takes one stack on a GPU. In benchmarks/results/gpu.json
`stacked` is 2.4 to 7.3 times as fast with 0.2e9 and 0.6e9 operations, and 0.8 times as fast with 76e9. No network between
them was measured: the limit is the geometric mean of 0.6e9 and 76e9."""


class EngineChoice(NamedTuple):
    """The engine that trains a run, the number of its workers, and the reason for the choice."""

    name: str
    workers: int
    why: str  # the reason of the choice, for the log


def choose_engine(
    name: str, workers: int | None, device: torch.device, work: Mapping[str, Workload], obstacle: str = ""
) -> EngineChoice:
    """Return the engine with this name, or for "auto" the engine that suits the work and the machine.

    workers: as configured; None: one worker per core.
    work: of each client in the whole run.
    obstacle: why clients cannot be stepped in one stack, as a clause; "": they can.
    """
    cores = count_cores()
    count = min(workers or cores, len(work))
    if name != "auto":
        return EngineChoice(name, count if name in ("processes", "cluster") else 1, "as configured")
    if device.type == "cuda" and obstacle:
        return EngineChoice("inprocess", 1, obstacle)
    if device.type == "cuda" and sum(w.flops for w in work.values()) > _MOST_STACKED * sum(w.steps for w in work.values()):
        return EngineChoice("inprocess", 1, "there is a GPU, and a step of one client is enough work for it")
    if device.type == "cuda":
        return EngineChoice("stacked", 1, "there is a GPU, and small networks fill it only together")
    if device.type != "cpu":
        return EngineChoice("inprocess", 1, f"the device is {device.type}")
    if multiprocessing.current_process().daemon:
        return EngineChoice("inprocess", 1, "this process trains one of several runs side by side")
    seconds = sum(w.seconds for w in work.values())
    if count < 2:
        return EngineChoice("inprocess", 1, "there is one client" if len(work) < 2 else "there is one core")
    if seconds < LONG:
        return EngineChoice("inprocess", 1, "there is little to compute, and worker processes take time to start")
    return EngineChoice("processes", count, f"there are {cores} cores, and about {seconds:.0f} seconds of work or more")


def open_engine(
    choice: EngineChoice,
    make: Make,
    work: Mapping[str, Workload],
    config: EngineConfig,
    device: torch.device,
    disk: DiskStorage | None = None,
    obstacle: str = "",
) -> tuple[Simulation, EngineChoice]:
    """Return the engine, which holds the clients, and the choice with the number of workers.

    obstacle: as `Stacker` takes it.
    disk: where the states of clients that are not in memory are stored; None: all clients stay in memory. The
        engine "stacked" does not use it.
    If "auto" chose an engine that cannot hold these clients, the engine "inprocess" is opened.

    Raises:
        ConfigError: the engine cannot hold these clients, or a client cannot be built.
        WorkerLost: a worker died while it built its clients.
    """
    costs = {i: w.seconds for i, w in work.items()}
    if choice.name == "cluster":
        gpus = config.gpus or (None if device.type == "cuda" else 0.0)
        cluster = Cluster(make, costs, config.workers, config.threads, config.address, gpus, disk)
        return cluster, choice._replace(workers=cluster.workers)
    if choice.name == "processes":
        try:
            return Processes(make, costs, choice.workers, config.threads, disk), choice
        except Unportable as problem:
            if config.name != "auto":
                raise
            choice = EngineChoice("inprocess", 1, str(problem))
    if choice.name == "stacked":
        return Stacked(make, tuple(work), make_stacker([config], obstacle)), choice
    return InProcess(make, tuple(work), disk), choice


def make_stacker(configs: Sequence[EngineConfig], obstacle: str = "") -> Stacker:
    """Return a stacker for the clients of these runs. obstacle: as `Stacker` takes it."""
    capture = make_capture() if any(c.graphs for c in configs) else None
    return Stacker(obstacle, capture)


def plan_disk_storage(
    resident: int | None, choice: EngineChoice, work: Mapping[str, Workload], folder: Path, memory: int
) -> DiskStorage | None:
    """Return where the states of clients that are not in memory are stored; None: all clients stay in memory.

    resident: the number of clients of a process that stay in memory; None: all clients of a run, if their states fit in
        half of the memory, else as many as fit in a quarter of it.
    memory: bytes of this machine. Without `resident` the clients of a cluster stay in memory.
    """
    needed = sum(w.bytes for w in work.values())
    if choice.name == "stacked" or (resident is None and (choice.name == "cluster" or needed <= memory / 2)):
        return None
    fit = int(len(work) * memory / 4 / needed / choice.workers)
    return DiskStorage(folder, resident or max(1, fit))


def count_memory() -> int:
    """Return the bytes of memory of this machine, or of the container if it may use less; 2**63 if they are not known."""
    known = [2**63]
    with suppress(AttributeError, ValueError, OSError):  # the first on Windows
        known.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(ValueError, OSError):  # "max" without a limit
        known.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(known)
