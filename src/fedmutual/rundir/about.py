"""Read the part of environment.json that is needed to use a run's models."""

from pathlib import Path

from fedmutual.rundir.file_names import ENVIRONMENT
from fedmutual.rundir.record_files import read_record
from fedmutual.rundir.schema import About


def read_networks(folder: Path) -> About:
    """Return the networks of a run, and the inputs and outputs of each client.

    Raises:
        RunError: environment.json is missing, damaged, of another format, or does not follow the schema.
    """
    return read_record(folder / ENVIRONMENT, About)
