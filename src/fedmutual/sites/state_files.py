"""The JSON files in which a server and its sites keep their own state, read and written by their schema."""

import json
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fedmutual.errors import RunError
from fedmutual.files import FORMAT, Table, read_json, write_json
from fedmutual.rundir.record_files import describe_violation


class StateRecord(BaseModel):
    """The content of a file of state."""

    model_config = ConfigDict(strict=True)


R = TypeVar("R", bound=StateRecord)


def read_state(path: Path, kind: type[R]) -> R | None:
    """Return the content of a file of state; None where there is no file.

    Raises:
        RunError: the file is damaged, of another format, or does not follow the schema.
    """
    return check_state(path, kind, read_json(path)) if path.exists() else None


def check_state(path: Path, kind: type[R], table: Table, fix: str = "restore a copy of the file") -> R:
    """Return the table that a file of state holds as a record. fix: the advice of the error.

    Raises:
        RunError: the table does not follow the schema.
    """
    try:
        return kind.model_validate_json(json.dumps(table))  # as JSON, where a list may stand for a tuple
    except ValidationError as problem:
        raise RunError(f"{path}: is damaged: {describe_violation(problem)}; {fix}") from None


def write_state(path: Path, record: StateRecord) -> None:
    """Write a file that `read_state` can read.

    Raises:
        RunError: the file cannot be written.
    """
    write_json(path, {"format": FORMAT, **record.model_dump(mode="json")})
