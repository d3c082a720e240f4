"""Snapshots: what a user sees of fedmutual, as JSON files beside this one.

`RECORD=1 uv run pytest tests/outside -n 0` writes every snapshot anew; look at `git diff` then. Nobody edits one by
hand, but for the calls in exit_codes.json.
"""

import difflib
import json
import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
COMMAND = "RECORD=1 uv run pytest tests/outside -n 0"


class Snapshots:
    """The committed snapshots, to compare with or to write."""

    def __init__(self, folder: Path = FOLDER, record: bool | None = None) -> None:
        """record: whether `check` writes. Unset, the environment variable RECORD decides."""
        self._folder = folder
        self.is_recording = bool(os.environ.get("RECORD")) if record is None else record

    def read(self, name: str) -> dict[str, Any]:
        """The content of NAME.json; {} where there is no such file."""
        path = self._folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def check(self, name: str, section: str, value: object) -> None:
        """Compare a value with a section of NAME.json; the test fails with the lines that differ. Or write the section."""
        content, now = self.read(name), json.loads(json.dumps(value))
        if self.is_recording:
            text = json.dumps(content | {section: now}, indent=1, sort_keys=True, ensure_ascii=False)
            (self._folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        elif section not in content:
            pytest.fail(f"{name}.json has no section {section!r}; write it: {COMMAND}", pytrace=False)
        elif content[section] != now:
            pytest.fail(_difference(f"{name}.json, section {section!r}", content[section], now), pytrace=False)


def _difference(where: str, before: object, now: object) -> str:
    lines = [json.dumps(side, indent=1, sort_keys=True, ensure_ascii=False).splitlines() for side in (before, now)]
    differing = difflib.unified_diff(*lines, fromfile="committed", tofile="now", n=2, lineterm="")
    return "\n".join((f"{where} is no longer true. Where the change is meant: {COMMAND}", *differing))
