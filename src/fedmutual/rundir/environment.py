"""Read environment.json: the machine of a run, its networks, its main metric, and the inputs and outputs of its models."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmutual.errors import RunError
from fedmutual.metric import ACCURACY, Metric
from fedmutual.rundir.file_names import ENVIRONMENT
from fedmutual.rundir.record_files import read_record
from fedmutual.rundir.schema import Environment, Participant


def read_environment(folder: Path) -> Environment:
    """Return the content of environment.json.

    Raises:
        RunError: the file is missing, damaged, of another format, or does not follow the schema.
    """
    return read_record(folder / ENVIRONMENT, Environment)


def read_model_environment(folder: Path) -> Environment:
    """Return the content of environment.json, with the networks and the clients that are needed to use a run's models.

    Raises:
        RunError: as `read_environment`, or the file names no client.
    """
    environment = read_environment(folder)
    if not environment.clients:
        raise RunError(
            f"{folder / ENVIRONMENT}: is damaged: clients: it names no client; restore the file as the "
            "run wrote it, or begin again in another folder"
        )
    return environment


def read_metric(folder: Path) -> Metric:
    """Return the main metric of the run in a folder; accuracy before the run has begun.

    Raises:
        RunError: as `read_environment`.
    """
    return read_environment(folder).main_metric if (folder / ENVIRONMENT).exists() else ACCURACY


@dataclass(frozen=True)
class Interface:
    """The inputs and outputs of a model."""

    shape: tuple[int, ...]  # of one example: (F,), (C, T), (C, H, W) or (C, D, H, W)
    classes: tuple[str, ...]  # or labels, in the order of the outputs
    task: str
    scaling: dict[str, Any]  # of inputs: divisor, mean, std, size, augment
    columns: tuple[str, ...] | None  # the names of a table's features
    agreed: bool  # whether all clients of the model scale their inputs equally

    @property
    def dtype(self) -> str:
        """The type of the inputs: float32, or int64 for ids."""
        return self.scaling.get("dtype") or "float32"


def find_participant(folder: Path, clients: Mapping[str, Participant], client: str | None = None) -> Participant:
    """Return a client's record, with the inputs and outputs of its networks; without a client, the first client's record.

    folder: of the run, for the message. clients: of the run, as `read_model_environment` returns them.

    Raises:
        RunError: the run has no such client.
    """
    if client is not None and client not in clients:
        raise RunError(f"{folder}: there is no client {client!r}; there are {', '.join(clients)}")
    return clients[client] if client is not None else next(iter(clients.values()))


def read_interface(folder: Path, client: str | None = None) -> Interface:
    """Return the inputs and outputs of a client's model; without a client, of the shared model.

    Raises:
        RunError: a file of the folder is missing or damaged, or the run has no such client.
    """
    clients = read_model_environment(folder).clients
    participant = find_participant(folder, clients, client)
    return Interface(
        shape=participant.input,
        classes=participant.classes,
        task=participant.task,
        scaling=participant.scaling.model_dump(mode="json"),
        columns=participant.columns,
        agreed=client is not None or all(_list_steps(other) == _list_steps(participant) for other in clients.values()),
    )


def _list_steps(participant: Participant) -> dict[str, Any]:
    """Return the scaling of every input, without augmentation, which only training uses."""
    return participant.scaling.model_dump(exclude={"augment"})
