"""partition.json: the rows of each client, with a fingerprint; a later run can restore the division from the file."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from fedmutual.config import Config
from fedmutual.data.division import Division, Table, check_name
from fedmutual.data.draws import Index, count_classes
from fedmutual.data.kinds import PRIVATE, PUBLIC, ROW_KINDS, VALIDATION
from fedmutual.data.targets import Targets
from fedmutual.errors import DataError
from fedmutual.files import FORMAT
from fedmutual.rundir.schema import RecordedPartition, RecordedRows

_AS_WRITTEN = "use the unchanged file of a run"


def make_record(config: Config, table: Table, division: Division, data: str) -> dict[str, Any]:
    """Return the content of partition.json. `data`: the hex digest of the examples.

    Rows "of train" number the training part as it was read. Rows "of test" number the test set: the rows of the training
    part that `test.rows` lists or, without such a list, the test part.
    """
    class_total = len(table.classes)
    held_out = bool((division.test < table.trains).all())

    def format_rows(rows: Index) -> dict[str, Any]:
        if len(rows) and np.isin(rows, division.test).all():
            return {"of": "test", "rows": np.searchsorted(division.test, rows).tolist()}
        return {"of": "train", "rows": rows.tolist()}

    def count_per_class(rows: Index) -> list[int]:
        class_counts: list[int] = count_classes(table.labels[rows], class_total).tolist()
        return class_counts

    clients = {
        i: {**{kind: format_rows(rows) for kind, rows in _order_shares(shares)},
            "counts": {kind: count_per_class(rows) for kind, rows in _order_shares(shares)}}
        for i, shares in division.clients.items()
    }  # fmt: skip
    test: dict[str, Any] = {"examples": len(division.test), "counts": count_per_class(division.test)}
    if held_out:
        test["rows"] = division.test.tolist()
    return {
        "format": FORMAT,
        "source": config.data.name,
        "kind": config.partition.kind,
        "seed": config.seed,
        "classes": list(table.classes),
        "data": data,
        "fingerprint": fingerprint_partition(table, data, test, clients),
        "test": test,
        "clients": clients,
    }


def compute_digest(examples: bytes, table: Table, shape: tuple[int, ...], targets: Targets | Index) -> str:
    """Return a hex digest that identifies the examples together with their targets, classes and shape."""
    about = repr((table.trains, table.classes, shape)).encode()
    return hashlib.sha256(about + examples + hashlib.sha256(targets.tobytes()).digest()).hexdigest()


def join_records(config: Config, partitions: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of partition.json for clients with data of their own, from the record of each client's data.

    Row numbers count the rows of each client's own data. `classes` holds the classes of all clients; counts are by class
    name.
    """
    classes = list(dict.fromkeys(name for about in partitions.values() for name in about["classes"]))

    def align_counts(about: Mapping[str, Any], counted: list[int]) -> list[int]:
        by_name = dict(zip(about["classes"], counted, strict=True))
        return [by_name.get(name, 0) for name in classes]

    clients = {}
    for i, about in partitions.items():
        (client_record,) = about["clients"].values()
        counted = {kind: align_counts(about, class_counts) for kind, class_counts in client_record["counts"].items()}
        clients[i] = {**client_record, "counts": counted, "source": about["source"], "classes": about["classes"]}
    tests = [align_counts(about, about["test"]["counts"]) for about in partitions.values()]
    fingerprints = json.dumps({i: about["fingerprint"] for i, about in partitions.items()})
    return {
        "format": FORMAT,
        "source": ", ".join(dict.fromkeys(about["source"] for about in partitions.values())),
        "kind": "own data",
        "seed": config.seed,
        "classes": classes,
        "fingerprint": hashlib.sha256(fingerprints.encode()).hexdigest(),
        "test": {
            "examples": sum(about["test"]["examples"] for about in partitions.values()),
            "counts": [sum(class_counts) for class_counts in zip(*tests, strict=True)],
        },
        "clients": clients,
    }


def restore_division(path: Path, table: Table, data: str) -> Division:
    """Return the division that a partition.json describes.

    Raises:
        DataError: the file cannot be read, belongs to other data, or was changed by hand.
    """
    file = _read_file(path)
    if file.test is None or file.data != data or file.classes != table.classes:
        raise DataError(
            f"{path}: this partition belongs to other data; use the data.name, root, classes and size of the run that "
            "wrote the file"
        )
    plain_file = file.model_dump(exclude_none=True)
    for i in file.clients:
        check_name(i, f"{path}: client {i!r}")
    if fingerprint_partition(table, data, plain_file["test"], plain_file["clients"]) != file.fingerprint:
        raise DataError(f"{path}: the file was changed: its fingerprint is of other rows; {_AS_WRITTEN}")
    test = np.arange(table.trains, len(table.labels))
    if file.test.rows is not None:
        test = _restore_rows(RecordedRows(of="train", rows=file.test.rows), test, table.trains, f"{path}: test")
    clients = {}
    for i, client in file.clients.items():
        shares = {kind: share for kind in ROW_KINDS if (share := getattr(client, kind)) is not None}
        if not {PRIVATE, VALIDATION} <= shares.keys():
            raise DataError(f"{path}: client {i!r} has no private or no validation rows; {_AS_WRITTEN}")
        clients[i] = {
            kind: _restore_rows(share, test, table.trains, f"{path}: client {i!r}, {kind}") for kind, share in shares.items()
        }
    _check_disjoint(path, test, clients)
    return Division(test, clients)


def _read_file(path: Path) -> RecordedPartition:
    try:
        return RecordedPartition.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{path}: there is no such file; set 'partition.file' to the partition.json of an earlier run"
        ) from None
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror})") from None
    except ValidationError as problem:
        first_error = problem.errors()[0]
        key = ".".join(map(str, first_error["loc"])) or "the file"
        raise DataError(f"{path}: is not a partition.json: {key}: {first_error['msg'].lower()}") from None


def _restore_rows(share: RecordedRows, test: Index, trains: int, name: str) -> Index:
    rows = np.array(share.rows, dtype=np.int64)
    row_total = len(test) if share.of == "test" else trains
    if not len(rows) or rows.max() >= row_total or len(np.unique(rows)) < len(rows):
        raise DataError(f"{name}: must be one or more different row numbers below {row_total}; {_AS_WRITTEN}")
    return test[rows] if share.of == "test" else rows


def _check_disjoint(path: Path, test: Index, clients: Mapping[str, Mapping[str, Index]]) -> None:
    """Raise DataError where two clients train on a row, or a row is both trained on and scored on."""
    trains = (PRIVATE, PUBLIC)
    trained = np.concatenate([rows for shares in clients.values() for kind, rows in shares.items() if kind in trains])
    scored = [test, *(rows for shares in clients.values() for kind, rows in shares.items() if kind not in trains)]
    if len(np.unique(trained)) < len(trained) or np.isin(trained, np.concatenate(scored)).any():
        raise DataError(f"{path}: two clients train on one row, or a row is for training and for scores; {_AS_WRITTEN}")


def fingerprint_partition(table: Table, data: str, test: Mapping[str, Any], clients: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a hex digest of the data and of every list of rows."""
    lists = {i: {k: [c[k]["of"], c[k]["rows"]] for k in ROW_KINDS if k in c} for i, c in clients.items()}
    text = json.dumps([FORMAT, data, list(table.classes), test.get("rows"), lists], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _order_shares(shares: Mapping[str, Index]) -> list[tuple[str, Index]]:
    return [(kind, shares[kind]) for kind in ROW_KINDS if kind in shares]
