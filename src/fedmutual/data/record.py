"""partition.json: the rows of each client, with a fingerprint; a later run can restore the division from the file."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from fedmutual.calling import Shape
from fedmutual.config import Config, SplitConfig
from fedmutual.data.division import Division, Table, check_name
from fedmutual.data.draws import Index, count_classes
from fedmutual.data.examples import list_names
from fedmutual.data.splits import PRIVATE, PUBLIC, ROW_KINDS, VALIDATION
from fedmutual.data.stores import Store
from fedmutual.data.targets import Targets
from fedmutual.errors import DataError, format_count
from fedmutual.files import FORMAT
from fedmutual.rundir.record_files import describe_violation
from fedmutual.rundir.schema import RecordedPartition, RecordedRows

NOBODY = "no client has training examples of"
_AS_WRITTEN = "use the unchanged file of a run"
_MOST_LISTED = 3


def make_record(config: Config, table: Table, division: Division, data: str) -> dict[str, Any]:
    """Return the content of partition.json. `data`: the hex digest of the examples.

    Rows "of train" number the training part as it was read. Rows "of test" number the test set: the rows of the training
    part that `test.rows` lists or, without such a list, the test part.
    """

    def format_rows(rows: Index) -> dict[str, Any]:
        places = np.searchsorted(division.test, rows)  # in sorted rows; `np.isin` would go through all of them
        if len(rows) and len(division.test) and (division.test.take(places, mode="clip") == rows).all():
            return {"of": "test", "rows": places.tolist()}
        return {"of": "train", "rows": rows.tolist()}

    def count_per_class(rows: Index) -> list[int]:
        class_counts: list[int] = count_classes(table.labels[rows], len(table.classes)).tolist()
        return class_counts

    clients = {}
    for i, shares in division.clients.items():
        kinds = [kind for kind in ROW_KINDS if kind in shares]
        counts = {kind: count_per_class(shares[kind]) for kind in kinds}
        clients[i] = {**{kind: format_rows(shares[kind]) for kind in kinds}, "counts": counts}
    test: dict[str, Any] = {"examples": len(division.test), "counts": count_per_class(division.test)}
    if (division.test < table.trains).all():  # held out of the training part
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


def describe_inputs(store: Store) -> dict[str, dict[str, Any]]:
    """Return what networks get of one example, by the name of the input: its type and shape."""
    x = next(iter(store.batches([torch.tensor([0])])))[0]
    named = {"x": x} if isinstance(x, torch.Tensor) else x
    return {k: {"dtype": str(one.dtype).removeprefix("torch."), "shape": list(one.shape[1:])} for k, one in named.items()}


def compute_digest(examples: bytes, table: Table, shape: Shape, targets: Targets | Index) -> str:
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
        facts = {key: about[key] for key in ("source", "classes", "read", "inputs") if key in about}
        clients[i] = {**client_record, "counts": counted, **facts}
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
    try:
        file = RecordedPartition.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{path}: there is no such file; set 'partition.file' to the partition.json of an earlier run"
        ) from None
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror})") from None
    except ValidationError as problem:
        raise DataError(f"{path}: is not a partition.json: {describe_violation(problem)}") from None
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

    def restore(share: RecordedRows, test: Index, name: str) -> Index:
        rows, total = np.array(share.rows, dtype=np.int64), len(test) if share.of == "test" else table.trains
        if not len(rows) or rows.max() >= total or len(np.unique(rows)) < len(rows):
            raise DataError(f"{path}: {name}: must be one or more different row numbers below {total}; {_AS_WRITTEN}")
        return test[rows] if share.of == "test" else rows

    test = np.arange(table.trains, len(table.labels))
    if file.test.rows is not None:
        test = restore(RecordedRows(of="train", rows=file.test.rows), test, "test")
    clients, trained, scored = {}, list[Index](), [test]
    for i, client in file.clients.items():
        shares = {kind: share for kind in ROW_KINDS if (share := getattr(client, kind)) is not None}
        if not {PRIVATE, VALIDATION} <= shares.keys():
            raise DataError(f"{path}: client {i!r} has no private or no validation rows; {_AS_WRITTEN}")
        clients[i] = {kind: restore(share, test, f"client {i!r}, {kind}") for kind, share in shares.items()}
        for kind, rows in clients[i].items():
            (trained if kind in (PRIVATE, PUBLIC) else scored).append(rows)
    all_trained = np.concatenate(trained)
    if len(np.unique(all_trained)) < len(all_trained) or np.isin(all_trained, np.concatenate(scored)).any():
        raise DataError(f"{path}: two clients train on one row, or a row is for training and for scores; {_AS_WRITTEN}")
    return Division(test, clients)


def fingerprint_partition(table: Table, data: str, test: Mapping[str, Any], clients: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a hex digest of the data and of every list of rows."""
    lists = {i: {k: [c[k]["of"], c[k]["rows"]] for k in ROW_KINDS if k in c} for i, c in clients.items()}
    text = json.dumps([FORMAT, data, list(table.classes), test.get("rows"), lists], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def note_clients_and_classes(config: Config, partition: Mapping[str, Any], of_classes: bool) -> tuple[str, ...]:
    """Return remarks on small clients and missing classes.

    partition: the content of partition.json. of_classes: whether each row has one class.
    """
    names: Sequence[str] = partition["classes"]
    counts_by_client = {i: count_training_examples(client) for i, client in partition["clients"].items()}
    batches = {i: config.get_client_config(i).training.batch_size or config.training.batch_size for i in counts_by_client}
    small = {i: n for i, counts in counts_by_client.items() if (n := sum(counts)) < batches[i]}
    listed = list(small)[: _MOST_LISTED if len(small) > _MOST_LISTED + 1 else None]
    sentences = [
        f"client {i!r} has {format_count(small[i], 'example')}, fewer than batch_size {batches[i]}: it trains as one "
        "smaller batch"
        for i in listed
    ]
    if len(small) > len(listed):
        sentences.append(f"{len(small) - len(listed)} more clients have fewer examples than their batch_size, too")
    trained = [sum(class_counts) for class_counts in zip(*counts_by_client.values(), strict=True)]
    missing = [name for name, count in zip(names, trained, strict=True) if of_classes and not count]
    if missing:
        noun, pronoun = ("class", "it") if len(missing) == 1 else ("classes", "them")
        sentences.append(f"{NOBODY} {noun} {list_names(missing)}, so no model learns to recognise {pronoun}")
    tested = zip(names, partition["test"]["counts"], trained, strict=True)
    untested = [name for name, test_count, train_count in tested if of_classes and train_count and not test_count]
    if untested:
        noun, pronoun = ("class", "it") if len(untested) == 1 else ("classes", "them")
        sentences.append(
            f"the test set has no examples of {noun} {list_names(untested)}: its scores say nothing about {pronoun}"
        )
    if config.partition.kind == "file" and config.split != SplitConfig():
        sentences.append("validation, hold-out and test rows come from the partition file: [split] has no effect")
    return tuple(sentences)


def note_split(split: SplitConfig, table: Table) -> tuple[str, ...]:
    """Return remarks on the rows that the split holds out of the table."""
    sentences = []
    if split.private is not None and table.trains < len(table.labels):
        sentences.append(
            f"the data have {format_count(len(table.labels) - table.trains, 'test example')} of their own, which are "
            "unused: with split.private all shares come out of the training examples"
        )
    if table.bases is not None and split.shared is False:
        sentences.append(
            "split.shared = false: each domain has its own split of the same images, so clients train on images that others "
            "are scored on, at another angle, and scores measure memorisation, too"
        )
    return tuple(sentences)


def count_training_examples(client: Mapping[str, Any]) -> list[int]:
    """Return a client's training examples of each class [C], with public ones; `client`: an entry of partition.json."""
    private, public = (client["counts"].get(kind) for kind in ("private", "public"))
    return [sum(pair) for pair in zip(private, public, strict=True)] if public else list(private)
