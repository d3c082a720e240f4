"""Write files in one step: a part file is flushed to the disk, then renamed. Read and write JSON; limit downloads."""

import errno
import json
import os
import re
import socket
import sqlite3
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

from fedmutual.errors import RunError

Table = dict[str, Any]

SILENCE_LIMIT = 30.0  # seconds without a byte before a download is given up
FORMAT = 1
"""Of every JSON file that fedmutual writes and reads again."""
JSON_LOGS = "FEDMUTUAL_JSON_LOGS"
"""The environment variable with which a site or a server prints lines as JSON; its value is the name of the federation."""
OTHER_FOLDER = "choose another folder with --out (in Python: out=...)"
"""The advice of an error about the folder that results are written into."""


@contextmanager
def replace_file(path: Path, sync: bool = True, fix: str | None = None) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` in one step when it is complete; its folder is created if missing.

    The part file is created exclusively, under a random name: in a folder that other users can write into, nobody can put a
    link there in advance, and a part file of a killed process is not in the way.

    sync: wait until the disk has the content; False for a file that no later process reads. fix: the advice of
    the error; None: to free space or to choose another folder.

    Raises:
        RunError: the file cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as problem:
        with suppress(OSError):
            part.unlink()
        fix = fix or ("free some space, then resume" if is_disk_full(problem) else OTHER_FOLDER)
        raise RunError(f"{path}: cannot be written ({problem.strerror or problem}); {fix}") from None


def is_disk_full(problem: BaseException | None) -> bool:
    """Return whether an error, or the error that it was raised from, says that a disk or a user's quota is full."""
    while problem is not None:
        if getattr(problem, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            return True
        if getattr(problem, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return True
        problem = problem.__context__
    return False


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of a folder's files; a no-op where folders cannot be opened, as on Windows."""
    with suppress(PermissionError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_bytes(path: Path, content: bytes, sync: bool = True) -> None:
    """Replace a file in one step. sync: as for `replace_file`.

    Raises:
        RunError: the file cannot be written.
    """
    with replace_file(path, sync) as file:
        file.write(content)


def make_log_line(text: str, level: str = "info", federation: str = "") -> str:
    """Return a line of a log as JSON: "time", "level", "event", "federation", and the "round" that the text begins with.

    federation: "" takes the one of this process, if it has one only.
    """
    found = re.match(r"(?:\w[\w.-]*: )?round (\d+)", text)
    about = {"federation": federation or os.environ.get(JSON_LOGS) or None, "round": int(found[1]) if found else None}
    now = datetime.now().astimezone().isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "event": text, **about}, ensure_ascii=False)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file in one step.

    Raises:
        RunError: the file cannot be written.
    """
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path, fix: str = "begin again in another folder") -> Table:
    """Return the table in a JSON file of format 1. fix: the advice of the error if the file is damaged.

    Raises:
        RunError: the file is missing, damaged, or of another format.
    """
    content = read_json_object(path, fix)
    written = content.get("format")
    if written != FORMAT:
        raise RunError(
            f"{path}: is of format {written!r}, and this version of fedmutual reads format {FORMAT}; use the version of "
            "fedmutual that wrote it"
        )
    return content


def read_json_object(path: Path, fix: str) -> Table:
    """Return the table in a JSON file without a format number, such as FLARE's.

    fix: the advice of the error if the file is damaged.

    Raises:
        RunError: the file is missing or damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: there is no such file; restore it, or begin again in another folder") from None
    except (OSError, ValueError, RecursionError) as problem:  # RecursionError: thousands of nested brackets
        raise RunError(f"{path}: is damaged or is not JSON ({problem}); {fix}") from None
    if not isinstance(content, dict):
        raise RunError(f"{path}: is damaged: its content is not a JSON object; {fix}")
    return content


@contextmanager
def limit_waiting() -> Iterator[None]:
    """Within, give up downloads after `SILENCE_LIMIT` seconds without a byte; standard output goes to standard error.

    For libraries that set no limit themselves.
    """
    waited = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SILENCE_LIMIT)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        socket.setdefaulttimeout(waited)
