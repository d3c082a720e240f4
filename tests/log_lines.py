"""Read a log as the file holds it, without fedmutual's schema."""

import json
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log; none before the log exists."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
