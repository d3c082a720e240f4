"""The committed experiments, read once for all tests of a process: reading them takes seconds."""

from functools import cache

from fedmutual.reproduce import PaperExperiment, read_experiments
from fedmutual.reproduce.cells import find_home


@cache
def read_committed_experiments() -> dict[str, PaperExperiment]:
    """Return the committed experiments by id, in the order of their indexes."""
    return {experiment.id: experiment for experiment in read_experiments(find_home())}
