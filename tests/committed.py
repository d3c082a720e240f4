"""The committed experiments, read once for all tests of a process: reading them takes seconds."""

from functools import cache

from fedmutual_papers.experiment_files import PaperExperiment, find_home, read_experiments


@cache
def read_committed_experiments() -> dict[str, PaperExperiment]:
    """Return the committed experiments by id, in the order of their indexes."""
    return {experiment.id: experiment for experiment in read_experiments(find_home())}
