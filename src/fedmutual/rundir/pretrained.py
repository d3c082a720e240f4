"""What a run's networks began with, kept in its folder: where it came from may be gone when the run goes on."""

from collections.abc import Mapping
from pathlib import Path

from fedmutual.models import Weights
from fedmutual.rundir.file_names import CONFIG
from fedmutual.tensor_files import read_tensors, write_tensors

FOLDER, OWN = "pretrained", "pretrained.safetensors"


def kept(folder: Path) -> dict[tuple[str, str], Weights]:
    """(client, or "" for all; network) -> what it began with, of the run in a folder; nothing where there is none.

    Raises:
        RunError: a file is damaged.
    """
    found = {}
    for file in (
        (*folder.glob(f"{FOLDER}/*.safetensors"), *folder.glob(f"clients/*/{OWN}")) if (folder / CONFIG).exists() else ()
    ):
        state, about = read_tensors(file)
        found[about["client"], about["network"]] = Weights(about["weights"], state or None, str(file))
    return found


def keep(folder: Path, pretrained: Mapping[tuple[str, str], Weights]) -> None:
    """Write what is not there yet. Weights that could not be had are kept too, as a file of no tensors.

    Raises:
        RunError: a file cannot be written.
    """
    for (client, network), weights in pretrained.items():
        shared = folder / FOLDER / f"{network.replace(':', '.')}.safetensors"
        file = folder / "clients" / client / OWN if client else shared
        if not file.exists():
            about = {"format": "1", "client": client, "network": network, "weights": weights.said}
            write_tensors(file, weights.state or {}, about)
