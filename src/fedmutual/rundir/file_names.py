"""The names of the files and folders in a run's folder."""

from pathlib import Path

from fedmutual.user_code.recorded_code import CONFIG as CONFIG
from fedmutual.user_code.recorded_code import ENVIRONMENT as ENVIRONMENT

PARTITION = "partition.json"
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"  # a line per evaluation
LEDGER = "ledger.jsonl"  # a line per round, phase and client
CHECKPOINT = "checkpoint.json"  # names the saved round
TUNED = "tuned.json"  # of a run of `compare --tune`
CALIBRATION = "calibration.json"  # of `score --calibrate`
SUBGROUPS = "subgroups.json"  # of `score --by COLUMN --keep`
ADAPT = "adapt.json"  # of a folder of `adapt`
LOG = "log.txt"
LOCK = ".lock"
BEGUN = "begun.safetensors"  # the weights that the run began with, if they are of another run
PRETRAINED = "pretrained"  # the folder of pretrained weights; of a client's own, the file in its folder
FINE_TUNE, SCRATCH = "fine-tune", "scratch"  # folders of `adapt`, beside the folder of the newcomer's algorithm
SERVER = "server"  # the folder of the server's state


def server_folder(folder: Path) -> Path:
    """Return the folder of the server's state and of the shared model's best weights."""
    return folder / SERVER


def client_folder(folder: Path, client: str) -> Path:
    """Return the folder of a client's state, of its best weights, and of the scores that it does not share."""
    return folder / "clients" / client


def list_client_folders(folder: Path) -> list[Path]:
    """Return the folders of all clients."""
    return list((folder / "clients").glob("*"))
