"""Reproduce the experiments of the papers: train each run once, store its result, and compare it with the paper."""

from fedmutual.reproduce.cells import Cell, Experiment, experiments, read_experiment
from fedmutual.reproduce.plan import Scale
from fedmutual.reproduce.results import Store
from fedmutual.reproduce.run import ReproduceOutcome, reproduce

__all__ = ["Cell", "Experiment", "ReproduceOutcome", "Scale", "Store", "experiments", "read_experiment", "reproduce"]
