"""Read and write tensors as safetensors files."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedmutual.errors import RunError
from fedmutual.files import write_bytes


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str], sync: bool = True) -> None:
    """Replace a safetensors file in one step. about: one entry of the header (several would vary in order).

    sync: as for `files.replace_file`.

    Raises:
        RunError: the file cannot be written.
    """
    cpu_tensors = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    write_bytes(path, save(cpu_tensors, metadata={"fedmutual": json.dumps(about)}), sync)


def read_tensors(path: Path, names: Collection[str] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (name -> tensor, header) of a safetensors file. Only tensors are loaded: no pickle is opened.

    names: the tensors to read; None: all.

    Raises:
        RunError: the file is missing, unreadable, truncated, or not a safetensors file.
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
                raise ValueError("its header entry is no table")
            return {k: file.get_tensor(k) for k in file.keys() if names is None or k in names}, about  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RecursionError) as problem:
        # asked only now: a safetensors file may begin with these bytes too, as its header's length
        if head == b"PK" or head[:1] == b"\x80":
            raise RunError(
                f"{path}: is a pickle, which could run code when opened; fedmutual reads safetensors only"
            ) from None
        raise RunError(f"{path}: is truncated or no safetensors file ({problem})") from None
