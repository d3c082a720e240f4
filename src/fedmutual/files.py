"""Files that are whole or not there: written beside their place, flushed to the disk, then renamed into it."""

import errno
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedmutual.errors import RunError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write into, which takes another's place in one step, when all is written; its folder is made if missing.

    The part file is created exclusively, under a name that nobody can foresee: in a folder that other users can write
    into, none of them can put a link there beforehand, and no part file of a killed process is in the way.

    Raises:
        RunError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as problem:
        with suppress(OSError):
            part.unlink()
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        mend = "free some space, then go on" if full else "choose another folder with --out"
        raise RunError(f"{path}: cannot be written ({problem.strerror or problem}); {mend}") from None


def sync_folder(folder: Path) -> None:
    """Until the disk has the names of a folder's files; a no-op where folders cannot be opened, as on Windows."""
    with suppress(PermissionError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one step, as `replacing`."""
    with replacing(path) as file:
        file.write(content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file in one step."""
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of format 1.

    Raises:
        RunError: it is missing, damaged, or of another format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path}: there is no such file") from None
    except (OSError, ValueError, RecursionError) as problem:  # the last: brackets in brackets, by the thousand
        raise RunError(f"{path}: is damaged or no JSON ({problem})") from None
    if not isinstance(content, dict) or content.get("format") != 1:
        raise RunError(f"{path}: is not of format 1, the only one that this version of fedmutual reads")
    return content


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Replace a safetensors file in one step. `about` goes into its header, as one entry: of several, the order varies."""
    whole = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    write_bytes(path, save(whole, metadata={"fedmutual": json.dumps(about)}))


def read_tensors(path: Path, names: Collection[str] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A safetensors file -> (tensors, header). Nothing else is ever loaded: no pickle is opened.

    names: of the tensors that are wanted; None: all.

    Raises:
        RunError: it is missing, unreadable, truncated, or no safetensors file.
    """
    try:
        with path.open("rb") as raw:
            head = raw.read(2)
    except FileNotFoundError:
        raise RunError(f"{path}: there is no such file") from None
    except OSError as problem:
        raise RunError(f"{path}: cannot be read ({problem.strerror or problem})") from None
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("fedmutual", "{}"))
            if not isinstance(about, dict):
                raise ValueError("what its header says of it is no table")
            return {k: file.get_tensor(k) for k in file.keys() if names is None or k in names}, about  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as problem:
        # asked only now: a safetensors file may begin with these bytes too, as its header's length
        if head == b"PK" or head[:1] == b"\x80":
            raise RunError(
                f"{path}: is a pickle, which could run code when opened; fedmutual reads safetensors only"
            ) from None
        raise RunError(f"{path}: is truncated or no safetensors file ({problem})") from None
