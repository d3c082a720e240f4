"""Who is connected, and whether somebody said stop: files in the state folder, from the server's process to the job's."""

import json
from collections.abc import Mapping
from pathlib import Path

from fedmutual.records.files import write_json

THERE, STOP = "there.json", "stop.json"


Sites = Mapping[str, str]
"""Who is connected: site -> what tells this connection from an earlier one, before the site was started anew."""


def note(folder: Path, sites: Sites) -> None:
    """Write down who is connected."""
    write_json(folder / THERE, {"format": 1, "sites": dict(sites)})


def there(folder: Path) -> Sites:
    """Who is connected."""
    try:
        found: dict[str, str] = json.loads((folder / THERE).read_text(encoding="utf-8"))["sites"]
        return found
    except FileNotFoundError:
        return {}


def stop(folder: Path) -> None:
    """Say stop: the rounds end after the one that is under way."""
    write_json(folder / STOP, {"format": 1})


def stopped(folder: Path) -> bool:
    """Whether somebody did."""
    return (folder / STOP).exists()


def forget_stop(folder: Path) -> None:
    """Somebody submits it again."""
    (folder / STOP).unlink(missing_ok=True)
