"""Who is connected, and whether somebody said stop: files in the state folder, from the server's process to the job's."""

import json
from collections.abc import Iterable
from pathlib import Path

from fedmutual.records.files import write_json

THERE, STOP = "there.json", "stop.json"


def note(folder: Path, sites: Iterable[str]) -> None:
    """Write down who is connected."""
    write_json(folder / THERE, {"format": 1, "sites": sorted(sites)})


def there(folder: Path) -> frozenset[str]:
    """Who is connected."""
    try:
        return frozenset(json.loads((folder / THERE).read_text(encoding="utf-8"))["sites"])
    except FileNotFoundError:
        return frozenset()


def stop(folder: Path) -> None:
    """Say stop: the rounds end after the one that is under way."""
    write_json(folder / STOP, {"format": 1})


def stopped(folder: Path) -> bool:
    """Whether somebody did."""
    return (folder / STOP).exists()


def forget_stop(folder: Path) -> None:
    """Somebody submits it again."""
    (folder / STOP).unlink(missing_ok=True)
