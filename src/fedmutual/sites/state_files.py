"""The JSON files in which a server and its sites keep their own state, read and written by their schema."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from fedmutual.files import FORMAT, read_json, write_json
from fedmutual.rundir.record_files import check_record


class StateRecord(BaseModel):
    """The content of a file of state."""

    model_config = ConfigDict(strict=True)


R = TypeVar("R", bound=StateRecord)
FIX = "restore a copy of the file"  # the advice about a damaged file of state


def read_state_record(path: Path, kind: type[R]) -> R | None:
    """Return the content of a file of state; None where there is no file.

    Raises:
        RunError: the file is damaged, of another format, or does not follow the schema.
    """
    return check_record(path, kind, read_json(path, FIX), FIX) if path.exists() else None


def write_state_record(path: Path, record: StateRecord) -> None:
    """Write a file that `read_state_record` can read.

    Raises:
        RunError: the file cannot be written.
    """
    write_json(path, {"format": FORMAT, **record.model_dump(mode="json")})
