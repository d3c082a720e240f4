"""What a lead may ask the server beside FLARE's own commands, by name, and have of it: both sides hold by it."""

import re
from pathlib import Path

from fedmutual.rundir.checkpoint import COMMIT, file_name
from fedmutual.rundir.file_names import CONFIG, ENVIRONMENT, LEDGER, METRICS, PARTITION, SUMMARY

STATUS, STOP, RESULT, AGAIN = (f"fedmutual_{what}" for what in ("status", "stop", "result", "again"))
_FILES = (CONFIG, ENVIRONMENT, PARTITION, SUMMARY, COMMIT, METRICS, LEDGER, "log.txt")
_MODEL = r"server/round-[0-9]{1,18}\.safetensors"


def list_results(folder: Path, round: int | None) -> dict[str, Path]:
    """What of a federation's folder a lead may have: what sites shared, and the shared model of a round, None before one."""
    names = [name for name in _FILES if (folder / name).is_file()]
    model = [] if round is None else [f"server/{file_name(round)}"]
    return {name: folder / name for name in (*names, *model)}


def is_result(name: str) -> bool:
    """Whether a file is called as one of those. No other is written where a lead asked: a server has no say in names."""
    return name in _FILES or re.fullmatch(_MODEL, name) is not None
