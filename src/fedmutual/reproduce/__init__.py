"""The experiments of the papers, each one command: read, trained once, remembered, and told beside the paper's numbers."""

from fedmutual.reproduce.cells import Cell, Experiment, experiments, read_experiment
from fedmutual.reproduce.plan import Scale
from fedmutual.reproduce.results import Store
from fedmutual.reproduce.run import Told, reproduce

__all__ = ["Cell", "Experiment", "Scale", "Store", "Told", "experiments", "read_experiment", "reproduce"]
