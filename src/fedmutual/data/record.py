"""partition.json: who had what, fingerprinted, and given back to a later run."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmutual.config import Config
from fedmutual.data.division import Division, Table, check_name
from fedmutual.data.draws import Index, counts
from fedmutual.data.kinds import KINDS, PRIVATE, PUBLIC
from fedmutual.data.labels import Targets
from fedmutual.errors import DataError

FORMAT = 1
_AS_WRITTEN = "take the file as the run wrote it"
_Row = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class _Rows(_Record):
    of: Literal["train", "test"]
    rows: list[_Row]


class _Client(_Record):
    private: _Rows
    public: _Rows | None = None
    validation: _Rows
    holdout: _Rows | None = None
    test: _Rows | None = None


class _Test(_Record):
    rows: list[_Row] | None = None


class _File(_Record):
    format: Literal[1]
    classes: tuple[str, ...]
    fingerprint: str
    data: str
    test: _Test
    clients: dict[str, _Client]


def describe(config: Config, table: Table, division: Division, data: str) -> dict[str, Any]:
    """What partition.json holds. `data`: a digest of the examples.

    Rows "of train" number the training part as it was read; rows "of test" number the test set: those rows of the training
    part that `test.rows` lists, or, where it lists none, the test part.
    """
    sizes = len(table.classes)
    held_out = bool((division.test < table.trains).all())

    def numbered(rows: Index) -> dict[str, Any]:
        if len(rows) and np.isin(rows, division.test).all():
            return {"of": "test", "rows": np.searchsorted(division.test, rows).tolist()}
        return {"of": "train", "rows": rows.tolist()}

    def per_class(rows: Index) -> list[int]:
        found: list[int] = counts(table.labels[rows], sizes).tolist()
        return found

    clients = {
        i: {**{kind: numbered(rows) for kind, rows in _ordered(shares)},
            "counts": {kind: per_class(rows) for kind, rows in _ordered(shares)}}
        for i, shares in division.clients.items()
    }  # fmt: skip
    test: dict[str, Any] = {"examples": len(division.test), "counts": per_class(division.test)}
    if held_out:
        test["rows"] = division.test.tolist()
    return {
        "format": FORMAT,
        "source": config.data.name,
        "kind": config.partition.kind,
        "seed": config.seed,
        "classes": list(table.classes),
        "data": data,
        "fingerprint": _fingerprint(table, data, test, clients),
        "test": test,
        "clients": clients,
    }


def data_digest(examples: bytes, table: Table, shape: tuple[int, ...], targets: Targets | Index) -> str:
    """What tells these examples, with these targets, from others; a hex digest."""
    about = repr((table.trains, table.classes, shape)).encode()
    return hashlib.sha256(about + examples + hashlib.sha256(targets.tobytes()).digest()).hexdigest()


def joined(config: Config, partitions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What partition.json holds where each client brings data of its own, from what it would hold of each alone.

    Row numbers are those of each client's own data. Classes are all that any client has, counted by their names.
    """
    classes = list(dict.fromkeys(name for about in partitions.values() for name in about["classes"]))

    def spread(about: Mapping[str, Any], counted: list[int]) -> list[int]:
        own = dict(zip(about["classes"], counted, strict=True))
        return [own.get(name, 0) for name in classes]

    clients = {}
    for i, about in partitions.items():
        (held,) = about["clients"].values()
        counted = {kind: spread(about, found) for kind, found in held["counts"].items()}
        clients[i] = {**held, "counts": counted, "source": about["source"], "classes": about["classes"]}
    tests = [spread(about, about["test"]["counts"]) for about in partitions.values()]
    parts = json.dumps({i: about["fingerprint"] for i, about in partitions.items()})
    return {
        "format": FORMAT,
        "source": ", ".join(dict.fromkeys(about["source"] for about in partitions.values())),
        "kind": "own data",
        "seed": config.seed,
        "classes": classes,
        "fingerprint": hashlib.sha256(parts.encode()).hexdigest(),
        "test": {
            "examples": sum(about["test"]["examples"] for about in partitions.values()),
            "counts": [sum(found) for found in zip(*tests, strict=True)],
        },
        "clients": clients,
    }


def restore(path: Path, table: Table, data: str) -> Division:
    """The division that a partition.json describes.

    Raises:
        DataError: it cannot be read, is of other data, or was changed by hand.
    """
    found = _read(path)
    if found.data != data or found.classes != table.classes:
        raise DataError(
            f"{path}: it is the partition of other data; give it with the data.name, root, classes and size it was made with"
        )
    plain = found.model_dump(exclude_none=True)
    for i in found.clients:
        check_name(i, f"{path}: client {i!r}")
    if _fingerprint(table, data, plain["test"], plain["clients"]) != found.fingerprint:
        raise DataError(f"{path}: it was changed, for its fingerprint is of other rows; {_AS_WRITTEN}")
    test = np.arange(table.trains, len(table.labels))
    if found.test.rows is not None:
        test = _numbers(_Rows(of="train", rows=found.test.rows), test, table.trains, f"{path}: test")
    clients = {
        i: {
            kind: _numbers(share, test, table.trains, f"{path}: client {i!r}, {kind}")
            for kind in KINDS
            if (share := getattr(client, kind)) is not None
        }
        for i, client in found.clients.items()
    }
    _check_apart(path, test, clients)
    return Division(test, clients)


def _read(path: Path) -> _File:
    try:
        return _File.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{path}: there is no such file; 'partition.file' names the partition.json of an earlier run"
        ) from None
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror})") from None
    except ValidationError as problem:
        first = problem.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole"
        raise DataError(f"{path}: is no partition.json: {key}: {first['msg'].lower()}") from None


def _numbers(share: _Rows, test: Index, trains: int, what: str) -> Index:
    rows = np.array(share.rows, dtype=np.int64)
    most = len(test) if share.of == "test" else trains
    if not len(rows) or rows.max() >= most or len(np.unique(rows)) < len(rows):
        raise DataError(f"{what}: must be one or more different row numbers below {most}; {_AS_WRITTEN}")
    return test[rows] if share.of == "test" else rows


def _check_apart(path: Path, test: Index, clients: Mapping[str, Mapping[str, Index]]) -> None:
    """No row is trained on by two clients, or trained on and scored on."""
    trains = (PRIVATE, PUBLIC)
    trained = np.concatenate([rows for shares in clients.values() for kind, rows in shares.items() if kind in trains])
    scored = [test, *(rows for shares in clients.values() for kind, rows in shares.items() if kind not in trains)]
    if len(np.unique(trained)) < len(trained) or np.isin(trained, np.concatenate(scored)).any():
        raise DataError(f"{path}: a row is trained on twice, or both trained and scored on; {_AS_WRITTEN}")


def _fingerprint(table: Table, data: str, test: Mapping[str, Any], clients: Mapping[str, Mapping[str, Any]]) -> str:
    """Over the data and every list of rows."""
    lists = {i: {k: [v["of"], v["rows"]] for k, v in c.items() if k != "counts"} for i, c in clients.items()}
    whole = json.dumps([FORMAT, data, list(table.classes), test.get("rows"), lists], separators=(",", ":"))
    return hashlib.sha256(whole.encode()).hexdigest()


def _ordered(shares: Mapping[str, Index]) -> list[tuple[str, Index]]:
    return [(kind, shares[kind]) for kind in KINDS if kind in shares]
