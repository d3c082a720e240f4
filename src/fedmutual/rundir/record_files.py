"""Read and write the files of a run's folder by their schema."""

import json
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from fedmutual.errors import RunError
from fedmutual.files import FORMAT, Table, read_json, write_json
from fedmutual.rundir.file_names import SUMMARY
from fedmutual.rundir.logs import append_lines
from fedmutual.rundir.schema import Record, Summary

R = TypeVar("R", bound=BaseModel)
_FIX = "restore the file as the run wrote it, or begin again in another folder"


def read_record(path: Path, kind: type[R]) -> R:
    """Return the content of a JSON file as a record.

    Raises:
        RunError: the file is missing, damaged, of another format, or does not follow the schema.
    """
    return check_record(path, kind, read_json(path))


def check_record(path: Path, kind: type[R], table: Table, fix: str = _FIX) -> R:
    """Return the table that a file holds as a record. fix: the advice of the error.

    Raises:
        RunError: the table does not follow the schema.
    """
    try:
        return kind.model_validate_json(json.dumps(table, default=str))  # as JSON, where a list may stand for a tuple
    except ValidationError as problem:
        raise RunError(f"{path}: is damaged: {describe_violation(problem)}; {fix}") from None


def read_summary(folder: Path) -> Summary | None:
    """Return the content of summary.json in a run's folder; None before the end of the run.

    Raises:
        RunError: as `read_record`.
    """
    return read_record(folder / SUMMARY, Summary) if (folder / SUMMARY).exists() else None


def is_finished(summary: Summary | None, rounds: int) -> bool:
    """Return whether a run of this many rounds is finished: all rounds are complete and summary.json is written."""
    return summary is not None and summary.rounds >= rounds


def write_record(path: Path, record: Record) -> None:
    """Write a JSON file that `read_record` can read. Keys that were not set are left out.

    Raises:
        RunError: the file cannot be written.
    """
    write_json(path, {"format": FORMAT, **dump_record(record)})


def read_toml(path: Path) -> Table:
    """Return the table in a TOML file.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise RunError(f"{path}: cannot be read ({problem}); restore the file, or begin again in another folder") from None


def read_records(path: Path, kind: type[R]) -> Iterator[R]:
    """Yield each line of a log as a record; nothing if there is no log yet.

    Raises:
        RunError: the log cannot be read, or a line of it is cut off or does not follow the schema.
    """
    if not path.exists():
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise RunError(f"{path}: cannot be read ({problem}); correct the cause, or begin again in another folder") from None
    lines = text.splitlines()
    is_cut = bool(text) and not text.endswith("\n")
    for number, line in enumerate(lines, 1):
        try:
            yield kind.model_validate_json(line)
        except ValidationError as problem:
            raise make_line_error(path, number, describe_violation(problem), is_cut and number == len(lines)) from None
    if is_cut:
        raise make_line_error(path, len(lines), "the line has no end", is_cut)


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Append records to a log as lines that `read_records` can read.

    Raises:
        RunError: the log cannot be written.
    """
    append_lines(path, (json.dumps(dump_record(record), allow_nan=False) for record in records))


def dump_record(record: Record) -> Table:
    """Return a record as the table of its file; keys that were not set are left out."""
    return record.model_dump(mode="json", by_alias=True, exclude_unset=True)


def make_line_error(path: Path, line: int, why: str, is_cut: bool = False) -> RunError:
    """Return the error for a damaged line of a log. is_cut: a kill or a full disk left the line incomplete."""
    if is_cut:
        fix = "restore it" if (path.parent / SUMMARY).exists() else "`--resume` removes an incomplete last line"
        return RunError(f"{path}: line {line} is cut off ({why}); {fix}, or begin again in another folder")
    return RunError(f"{path}: line {line} is not what fedmutual writes ({why}); begin again in another folder")


def describe_violation(problem: ValidationError) -> str:
    """Return the first violation of a schema in a few words, with its key."""
    first = problem.errors()[0]
    key = ".".join(map(str, first["loc"]))
    text = "it is not valid JSON" if first["type"] == "json_invalid" else first["msg"][:1].lower() + first["msg"][1:]
    return f"{key}: {text}" if key else text
