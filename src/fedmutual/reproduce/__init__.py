"""Reproduce the experiments of the papers: train each run once, store its result, and compare it with the paper."""

from fedmutual.reproduce.cells import Cell, PaperExperiment, read_experiment, read_experiments
from fedmutual.reproduce.plan import Scale
from fedmutual.reproduce.results import ResultStore
from fedmutual.reproduce.run import ReproduceOutcome, reproduce

__all__ = [
    "Cell",
    "PaperExperiment",
    "ReproduceOutcome",
    "ResultStore",
    "Scale",
    "read_experiment",
    "read_experiments",
    "reproduce",
]
