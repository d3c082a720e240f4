"""Read and write the files of a run's folder by their schema, and append to its logs."""

import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fedmutual.errors import RunError
from fedmutual.files import FORMAT, Table, read_json, write_bytes, write_json
from fedmutual.metric import ACCURACY, Metric
from fedmutual.rundir.file_names import CALIBRATION, ENVIRONMENT, LEDGER, METRICS, SUBGROUPS, SUMMARY
from fedmutual.rundir.schema import (
    Calibration,
    Calibrations,
    Environment,
    LogLine,
    Record,
    Subgroups,
    SubgroupsFile,
    Summary,
)

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


def read_calibrations(folder: Path) -> tuple[Calibration, ...]:
    """Return what was fitted to models of the run in a folder, by calibration.json; nothing without the file.

    Raises:
        RunError: as `read_record`.
    """
    path = folder / CALIBRATION
    return read_record(path, Calibrations).models if path.exists() else ()


def read_subgroups(folder: Path) -> tuple[Subgroups, ...]:
    """Return the kept scores of groups of rows in a run's folder, by subgroups.json; nothing without the file.

    Raises:
        RunError: as `read_record`.
    """
    path = folder / SUBGROUPS
    return read_record(path, SubgroupsFile).models if path.exists() else ()


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


def read_records(path: Path, kind: type[R], start: int = 0) -> Iterator[R]:
    """Yield each line of a log as a record; nothing if there is no log yet. start: the bytes of lines that are left out.

    Raises:
        RunError: the log cannot be read, or a line of it is cut off or does not follow the schema.
    """
    *complete, rest = _read_lines(path, start)
    for number, line in enumerate([*complete, rest] if rest else complete, 1):
        try:
            yield kind.model_validate_json(line)
        except ValidationError as problem:
            raise make_line_error(path, number, describe_violation(problem), number > len(complete)) from None
    if rest:
        raise make_line_error(path, len(complete) + 1, "the line has no end", is_cut=True)


def _read_lines(path: Path, start: int = 0) -> list[bytes]:
    """Return the lines of a log, and last the text after the last line end: empty, or an incomplete line.

    start: the number of bytes to leave out. A missing log is empty. Raises RunError if a log cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read().split(b"\n")
    except FileNotFoundError:
        return [b""]
    except OSError as problem:
        raise RunError(
            f"{path}: cannot be read ({problem.strerror or problem}); correct the cause, or begin again in another folder"
        ) from None


def append_records(path: Path, records: Iterable[Record]) -> None:
    """Append records to a log as lines that `read_records` can read.

    Raises:
        RunError: the log cannot be written.
    """
    append_lines(path, (json.dumps(dump_record(record), allow_nan=False) for record in records))


def dump_record(record: Record) -> Table:
    """Return a record as the table of its file; keys that were not set are left out."""
    return record.model_dump(mode="json", by_alias=True, exclude_unset=True)


def flatten_table(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return (dotted key, value) for each value of nested tables."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten_table(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def make_line_error(path: Path, line: int, why: str, is_cut: bool = False) -> RunError:
    """Return the error for a damaged line of a log. is_cut: a kill or a full disk left the line incomplete."""
    if is_cut:
        fix = "restore it" if (path.parent / SUMMARY).exists() else "a resume removes an incomplete last line"
        return RunError(f"{path}: line {line} is cut off ({why}); {fix}, or begin again in another folder")
    return RunError(f"{path}: line {line} is not what fedmutual writes ({why}); begin again in another folder")


def describe_violation(problem: ValidationError) -> str:
    """Return the first violation of a schema in a few words, with its key."""
    first = problem.errors()[0]
    key = ".".join(map(str, first["loc"]))
    text = "it is not valid JSON" if first["type"] == "json_invalid" else first["msg"][:1].lower() + first["msg"][1:]
    return f"{key}: {text}" if key else text


def rewind(path: Path, keep: Callable[[int], bool]) -> None:
    """Remove the lines of rounds that are not kept, and an incomplete last line.

    keep: whether the lines of a round stay.

    Raises:
        RunError: a line is damaged, or the file cannot be read or written.
    """
    *complete, _ = _read_lines(path)
    remaining_lines = []
    for number, line in enumerate(complete, 1):
        try:
            round = LogLine.model_validate_json(line).round
        except ValidationError as problem:
            raise make_line_error(path, number, describe_violation(problem)) from None
        if keep(round):
            remaining_lines.append(line + b"\n")
    if path.exists():
        write_bytes(path, b"".join(remaining_lines))


def append_lines(path: Path, lines: Iterable[str], sync: bool = False) -> None:
    """Append lines to a log. sync: return after the lines are on the disk.

    Raises:
        RunError: the log cannot be written.
    """
    try:
        with open(path, "a", encoding="utf-8", opener=_open_no_link) as file:
            file.write("".join(f"{line}\n" for line in lines))
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except OSError as problem:
        raise RunError(f"{path}: cannot be written ({problem.strerror or problem})") from None


def _open_no_link(path: str, flags: int) -> int:
    """Open a log, but follow no symbolic link: a folder from somebody else could hold a link to another file."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def is_scored_on_resume(round: int, saved: int | None, every: int, rounds: int) -> bool:
    """Return whether the scores of a round stay on resume: the round is saved, and a run of `rounds` evaluates it."""
    return saved is not None and round <= saved and (round % every == 0 or round == rounds)


def sync_logs(folder: Path) -> None:
    """Wait until the disk has all lines of a run's logs: after a power failure no saved round may lack its lines.

    Raises:
        RunError: a log cannot be written.
    """
    for path in (folder / METRICS, folder / LEDGER, *(folder / "clients").glob(f"*/{METRICS}")):
        if path.is_file():
            append_lines(path, (), sync=True)


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
