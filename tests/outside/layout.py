"""What a run folder consists of: its files, and the keys and types of each."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

Layout = dict[str, dict[str, str]]
"""File -> key -> type."""


def read_layout(folder: Path) -> Layout:
    """The files of a folder, in their order -> what each holds. Locks and SQLite's files beside a journal are no part."""
    beside = (".lock", "journal.sqlite-wal", "journal.sqlite-shm")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in beside)
    return {_general(path.relative_to(folder).as_posix()): dict(sorted(_entries(path))) for path in files}


def flatten(layout: Layout) -> set[str]:
    """One line for each file and each key, to compare two layouts by."""
    return set(layout) | {f"{file} {key}: {kind}" for file, keys in layout.items() for key, kind in keys.items()}


def _general(path: str) -> str:
    """A path without what depends on the version, the machine and the time."""
    path = re.sub(r"-(n\d+|\d+\.\d+\.\d+)/", "-VERSION/", path)  # of `reproduce`, now and before
    return re.sub(r"events\.out\.tfevents\..*", "events.out.tfevents", path)


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    """The keys of a file with their types; nothing for text, pages and pictures."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as content:
            about = content.metadata() or {}
            headers = [] if path.parent.name == "answers" else list(about.values())  # those are what sites send
            yield from (pair for header in headers for pair in _kinds(json.loads(header), "header"))
            for name in content.keys():  # noqa: SIM118 - no mapping
                tensor = content.get_slice(name)
                yield name, f"{tensor.get_dtype()} {tensor.get_shape()}"
        return
    text = path.read_text(encoding="utf-8") if path.suffix in (".json", ".jsonl", ".toml") else ""
    values: list[Any] = []
    if path.suffix == ".jsonl":
        values = [json.loads(line) for line in text.splitlines()]
    elif text:
        values = [json.loads(text) if path.suffix == ".json" else tomllib.loads(text)]
    kinds: dict[str, set[str]] = {}
    for value in values:
        for key, kind in _kinds(value, ""):
            kinds.setdefault(key, set()).add(kind)
    yield from ((key, " or ".join(sorted(kind))) for key, kind in kinds.items())


def _kinds(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Each key below a value, dotted, with its type; all items of a list count as one."""
    match value:
        case dict():
            yield from [(key, "table")] if key and not value else []
            for name, inner in value.items():
                yield from _kinds(inner, f"{key}.{name}" if key else name)
        case list():
            yield from () if value else [(key, "empty list")]
            for inner in value:
                yield from _kinds(inner, f"{key}[]")
        case bool():
            yield key, "true or false"
        case int() | float():
            yield key, "number"
        case str():
            yield key, "text"
        case None:
            yield key, "null"
