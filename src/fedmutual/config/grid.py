"""Grids of values: read ``--set key=v1,v2``, list every combination or draw some at random, and name each combination."""

import hashlib
import itertools
import json
import re
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, log, log10
from typing import Any

import numpy as np

from fedmutual.config.reading import parse_override
from fedmutual.core import Schedule
from fedmutual.errors import ConfigError

Grid = Mapping[str, Any]
"""Dotted key -> a list of values to try, a value that is fixed, or a range: ``{"log-uniform": [0.001, 0.1]}``."""

_RANGE_FIXES = {
    "uniform": "write two numbers, the smaller one first: {uniform=[0.1,0.9]}",
    "log-uniform": "write two numbers above 0, the smaller one first: {log-uniform=[0.001,0.1]}",
    "integers": "write two whole numbers, the smaller one first: {integers=[1,5]}",
    "choices": "there is nothing to choose from; write {choices=[1,5]}",
}
RANGES = tuple(_RANGE_FIXES)

LEARNING_RATE = "optimizer.lr"
_LONGEST = 100  # characters of a folder's name


def read_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read ``--set key=v1,v2 --set key2=v`` and return dotted key -> values. A value that is not TOML is plain text.

    A comma inside brackets, braces or quotes is part of a value: ``algorithm.alpha={start=0.9,end=0.3},0.5`` has two values.

    Raises:
        ConfigError: a key has no value, an empty one, or comes twice.
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        parts = list(_split_parts(text.partition("=")[2]))
        if "=" in text and not all(part.strip() for part in parts):
            what = "an empty value among its values" if len(parts) > 1 else "no value"
            raise ConfigError(f"--set {text}: the key has {what}; write --set key=v1,v2, as in --set optimizer.lr=0.01,0.1")
        for part in parts:
            key, value = parse_override(f"{text.partition('=')[0]}={part}" if "=" in text else text)
            grid.setdefault(key, []).append(value)
        if len(grid[key]) > len(parts):
            raise ConfigError(f"--set names {key!r} twice; name it once, with its values separated by commas")
    return grid


def expand_grid(grid: Grid) -> dict[str, list[Any]]:
    """Return the grid with a list for every key.

    Raises:
        ConfigError: a list is empty.
    """
    lists = {k: list(v) if isinstance(v, list | tuple) else [v] for k, v in grid.items()}
    for key, values in lists.items():
        if not values:
            raise ConfigError(f"the key {key!r} has no value to try; list some, or remove it")
    return lists


def list_combinations(grid: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Return every combination, dotted key -> value; the value of the last key changes fastest."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def is_range(value: Any) -> bool:
    """Return whether a value is a table with one of the names in `RANGES` and nothing else: ``{integers=[1,5]}``.

    Every other table is a value. A value that has the form of a range is one choice: ``{choices=[{uniform=[0,1]}]}``.
    """
    return isinstance(value, Mapping) and len(value) == 1 and {*value} <= {*RANGES}


def describe_ranges(values: Iterable[Any]) -> str:
    """Return what ranges there are, for an error, if a value may be meant as a range of another name; else ""."""
    tables = [value for value in values if isinstance(value, Mapping) and len(value) == 1 and not is_range(value)]
    meant = any(isinstance(ends, list | tuple) and len(ends) == 2 for table in tables for ends in table.values())
    return f"; the ranges are {', '.join(RANGES)}" if meant else ""


def draw_combinations(grid: Mapping[str, Sequence[Any]], trials: int, seed: int) -> list[dict[str, Any]]:
    """Return `trials` combinations that are drawn at random, dotted key -> value. Equal ones may be among them.

    Each key has a stream of its own, by the seed and the name of the key: the values that a key gets depend neither on the
    other keys, so that methods with different settings try equal values of those in common, nor on the number of trials.

    grid: as `expand_grid` returns it. A key takes one range, or values of which each is equally likely.

    Raises:
        ConfigError: `trials` is below 1, or a range is none.
    """
    if trials < 1:
        raise ConfigError(f"trials = {trials}: must be 1 or more")
    return [*list_rows({key: _draw_values(key, values, trials, seed) for key, values in grid.items()})]


def list_rows(columns: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the first value of each key, then the second ones, and so on."""
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def _draw_values(key: str, values: Sequence[Any], trials: int, seed: int) -> list[Any]:
    stream = np.random.default_rng([seed, zlib.crc32(key.encode())])
    ranges = [value for value in values if is_range(value)]
    if ranges and len(values) > 1:
        raise ConfigError(f"key {key!r}: a range stands alone, and here are {len(values)} values; give the range or a list")
    kind, ends = next(iter(ranges[0].items())) if ranges else ("choices", values)
    if kind == "choices" and isinstance(ends, list | tuple) and ends:
        return [ends[n] for n in stream.integers(len(ends), size=trials)]
    if not _is_drawable(kind, ends):
        raise ConfigError(f"key {key!r}: {format_value({kind: ends})}: {_RANGE_FIXES[kind]}")
    low, high = ends
    if kind == "integers":
        return [int(n) for n in stream.integers(low, high, size=trials, endpoint=True)]
    drawn = (
        np.exp(stream.uniform(log(low), log(high), trials)) if kind == "log-uniform" else stream.uniform(low, high, trials)
    )
    # names of folders contain the values, so they have few digits; in a narrow range three digits would round to its ends
    digits = 3 + max(0, int(log10(max(abs(low), abs(high)) / (high - low))))
    return [min(max(float(f"{value:.{digits}g}"), low), high) for value in drawn]


def _is_drawable(kind: str, ends: Any) -> bool:
    """Return whether the ends of a range are two increasing numbers of its kind."""
    types, least = (int,) if kind == "integers" else (int, float), 0 if kind == "log-uniform" else -inf
    is_pair = isinstance(ends, list | tuple) and len(ends) == 2 and all(type(end) in types for end in ends)
    return kind != "choices" and is_pair and least < ends[0] < ends[1] < inf


def make_label(values: Mapping[str, Any]) -> str:
    """Return the name of a combination: "lr=0.01, alpha=0.3". Keys are shortened if they stay different."""
    lasts = [key.rpartition(".")[2] for key in values]
    full_keys = {k for k in values if k.startswith("clients.") or lasts.count(k.rpartition(".")[2]) > 1}
    return ", ".join(f"{k if k in full_keys else k.rpartition('.')[2]}={format_value(v)}" for k, v in values.items())


def make_folder_name(label: str) -> str:
    """Return a label as the name of a folder: equal labels have equal names, different labels different names."""
    compact_label = label.replace(", ", ",")
    name = re.sub(r"[^\w.=,+-]+", "-", re.sub(r"[][{}\"']", "", compact_label), flags=re.ASCII).strip("-.")
    if name == compact_label and len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(label.encode()).hexdigest()[:6]}"


def format_value(value: Any) -> str:
    """Return a value as ``--set key=value`` takes it: TOML on one line, text without quotes if it is still read as text."""
    if isinstance(value, str) and "," not in value and value.strip() and parse_override(f"key={value}")[1] == value:
        return value
    return _format_toml_value(value)


def _format_toml_value(value: Any) -> str:
    if isinstance(value, Schedule):
        value = value.record()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{format_toml_key(k)}={_format_toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_format_toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)


def format_toml_key(name: str) -> str:
    """Return a key as TOML writes it, in quotes if they are needed."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)


def _split_parts(text: str) -> Iterator[str]:
    """Yield the parts of a text between commas. A part that begins with a bracket, brace or quote ends where it is TOML."""
    pieces = text.split(",")
    while pieces:
        part = pieces.pop(0)
        while pieces and part.lstrip()[:1] in ("[", "{", '"', "'") and not _is_toml(part):
            part += f",{pieces.pop(0)}"
        yield part


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return False
    return True
