"""environment.json, as far as who uses a run's models needs it: checked when it is read."""

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
    """What is done to inputs."""

    divisor: Annotated[float, Field(gt=0)]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int] | None = None
    augment: str = "none"
    columns: tuple[EncodedColumn, ...] | None = None


class Participant(_Record):
    """What a client's networks take and give."""

    input: tuple[int, ...]  # the shape of one example
    outputs: int
    classes: tuple[str, ...]
    scaling: Scaled
    task: str
    columns: tuple[str, ...] | None = None


class Network(_Record):
    """A client's own network."""

    name: str


class Networks(_Record):
    """The networks of a run."""

    personal: dict[str, Network]


class About(_Record):
    """What a run's models are, and what its clients bring."""

    pooled: bool
    models: Networks
    clients: Annotated[dict[str, Participant], Field(min_length=1)]


def about(folder: Path) -> About:
    """What environment.json of a run's folder says.

    Raises:
        RunError: it is missing, damaged, of another format, or not what fedmutual writes.
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
