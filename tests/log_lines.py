"""Read logs and records as their files hold them, without fedmutual's schema."""

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log; none before the log exists."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_scores(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the scores of each evaluated round of a run folder."""
    return [line["scores"] for line in read_lines(folder / "metrics.jsonl")]


def read_trials(folder: Path | str) -> list[dict[str, str]]:
    """Return the settings that a sweep tried, in order: key -> value as its file has it."""
    return [setting["set"] for setting in json.loads((Path(folder) / "sweep.json").read_text())["settings"]]
