"""Which engine runs an experiment, and why: "auto" picks by what there is to do and what there is to do it with."""

import multiprocessing
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fedmutual.config.schema import EngineConfig
from fedmutual.engines.base import Engine
from fedmutual.engines.inprocess import InProcess
from fedmutual.engines.processes import Processes
from fedmutual.engines.ray import Cluster
from fedmutual.engines.rpc import Make, Unportable
from fedmutual.engines.stacked import Stacked
from fedmutual.federation.workload import Workload

LONG = 60.0  # seconds of training in one process from which worker processes, whose start takes some, are worth it


class EngineChoice(NamedTuple):
    """An engine by its name, and what to say of it."""

    name: str
    workers: int
    why: str


def choose_engine(
    name: str, workers: int | None, device: torch.device, work: Mapping[str, Workload], stackable: bool = True
) -> EngineChoice:
    """The engine of that name, or for "auto" the one that fits.

    workers: as configured; unset, a worker a core.
    work: of each client, in one place.
    stackable: whether clients may be stepped as one; not where each example's gradient is clipped.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(workers or cores, len(work))
    if name != "auto":
        return EngineChoice(name, count if name in ("processes", "cluster") else 1, "as configured")
    if device.type == "cuda" and not stackable:
        return EngineChoice("inprocess", 1, "clients whose gradients are clipped and noised are not stepped as one")
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
        return EngineChoice("inprocess", 1, "there is little to compute, and workers take seconds to start")
    return EngineChoice("processes", count, f"there are {cores} cores, and minutes of work")


def open_engine(
    choice: EngineChoice, make: Make, work: Mapping[str, Workload], config: EngineConfig, device: torch.device
) -> tuple[Engine, EngineChoice]:
    """The engine with its clients in it, and how many workers it came to; where "auto" picked one that cannot hold them,
    the plain one.

    Raises:
        ConfigError: the engine cannot hold these clients.
        Lost: a worker died while it made its own.
    """
    costs = {i: w.seconds for i, w in work.items()}
    if choice.name == "cluster":
        gpus = config.gpus or (None if device.type == "cuda" else 0.0)
        cluster = Cluster(make, costs, config.workers, config.threads, config.address, gpus)
        return cluster, choice._replace(workers=cluster.workers)
    if choice.name == "processes":
        try:
            return Processes(make, costs, choice.workers, config.threads), choice
        except Unportable as problem:
            if config.name != "auto":
                raise
            choice = EngineChoice("inprocess", 1, str(problem))
    clients = map(make, work)
    return (Stacked(clients, config.compile) if choice.name == "stacked" else InProcess(clients)), choice
