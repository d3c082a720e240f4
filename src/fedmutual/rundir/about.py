"""Read the part of environment.json that is needed to use a run's models, and check it against a schema."""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmutual.errors import RunError
from fedmutual.files import read_json
from fedmutual.rundir.folder import ENVIRONMENT


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class EncodedColumn(_Record):
    """The steps that make features of a table's column."""

    name: str
    kind: Literal["number", "category", "date"]
    values: tuple[str, ...] = ()
    fill: float = 0.0
    mean: float = 0.0
    std: Annotated[float, Field(gt=0)] = 1.0


class Scaled(_Record):
    """The scaling, resizing and augmentation of inputs."""

    divisor: Annotated[float, Field(gt=0)]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] | None = None
    augment: str = "none"
    columns: tuple[EncodedColumn, ...] | None = None


class Participant(_Record):
    """The inputs and outputs of a client's networks."""

    input: tuple[int, ...]  # the shape of one example
    outputs: int
    classes: tuple[str, ...]
    scaling: Scaled
    task: str
    columns: tuple[str, ...] | None = None


class Network(_Record):
    """The personal network of a client."""

    name: str


class Networks(_Record):
    """The networks of a run."""

    personal: dict[str, Network]


class About(_Record):
    """The networks of a run, and the inputs and outputs of each client."""

    pooled: bool
    models: Networks
    clients: Annotated[dict[str, Participant], Field(min_length=1)]


def about(folder: Path) -> About:
    """Return the content of environment.json in a run's folder.

    Raises:
        RunError: the file is missing, damaged, of another format, or does not follow the schema.
    """
    path = folder / ENVIRONMENT
    try:
        return About.model_validate_json(json.dumps(read_json(path)))
    except ValidationError as problem:
        first = problem.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise RunError(
            f"{path}: is not what fedmutual writes ({key}: {first['msg'][:1].lower()}{first['msg'][1:]}); take the file as "
            "the run wrote it"
        ) from None
