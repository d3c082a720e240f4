"""The names of fedmutual's admin commands, and the files that a lead may fetch: used by the server and by the lead."""

import re
from pathlib import Path

from fedmutual.rundir.checkpoint import make_file_name
from fedmutual.rundir.file_names import CHECKPOINT, CONFIG, ENVIRONMENT, LEDGER, LOG, METRICS, PARTITION, SERVER, SUMMARY

STATUS, STOP, RESULT, AGAIN = (f"fedmutual_{what}" for what in ("status", "stop", "result", "again"))
ERROR = "error"  # the key of an answer that has only the text of an error
_FILES = (CONFIG, ENVIRONMENT, PARTITION, SUMMARY, CHECKPOINT, METRICS, LEDGER, LOG)
_MODEL = rf"{SERVER}/round-[0-9]{{1,18}}\.safetensors"


def list_result_files(folder: Path, round: int | None) -> dict[str, Path]:
    """Return the files that a lead may fetch: name -> path. round: of the saved shared model; None: no model is saved."""
    names = [name for name in _FILES if (folder / name).is_file()]
    model = [] if round is None else [f"{SERVER}/{make_file_name(round)}"]
    return {name: folder / name for name in (*names, *model)}


def is_result(name: str) -> bool:
    """Return whether a name is the name of a result file. A lead writes no other file, whatever name a server sends."""
    return name in _FILES or re.fullmatch(_MODEL, name) is not None
