"""Keep the pretrained weights of a run in its folder: their source may be gone when the run is resumed."""

from collections.abc import Mapping
from pathlib import Path

from fedmutual.models import Weights
from fedmutual.rundir.file_names import CONFIG, client_folder
from fedmutual.rundir.record_files import check_record
from fedmutual.rundir.schema import PretrainedHeader
from fedmutual.tensor_files import read_tensors, write_tensors

FOLDER, OWN = "pretrained", "pretrained.safetensors"


def read_initial_weights(folder: Path) -> dict[tuple[str, str], Weights]:
    """Return the pretrained weights in a run's folder by (client, or "" for all clients; network); empty without weights.

    Raises:
        RunError: a file is damaged.
    """
    weights = {}
    for file in (
        (*folder.glob(f"{FOLDER}/*.safetensors"), *folder.glob(f"clients/*/{OWN}")) if (folder / CONFIG).exists() else ()
    ):
        state, about = read_tensors(file)
        header = check_record(file, PretrainedHeader, about)
        weights[header.client, header.network] = Weights(header.weights, state or None, str(file))
    return weights


def write_initial_weights(folder: Path, pretrained: Mapping[tuple[str, str], Weights]) -> None:
    """Write the weights that the folder lacks. Weights that could not be loaded are recorded as a file without tensors.

    Raises:
        RunError: a file cannot be written.
    """
    for (client, network), weights in pretrained.items():
        shared = folder / FOLDER / f"{network.replace(':', '.')}.safetensors"
        file = client_folder(folder, client) / OWN if client else shared
        if not file.exists():
            about = {"format": "1", "client": client, "network": network, "weights": weights.description}
            write_tensors(file, weights.state or {}, about)
