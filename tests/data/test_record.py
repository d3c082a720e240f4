import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmutual import data
from fedmutual.data.division import Table
from fedmutual.data.record import fingerprint_partition
from own_data import config, npz, refused

SHARDS = {"kind": "shards", "clients": 5, "classes_per_client": 4}
SPLIT = {"holdout": 0.1}


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, data.Federation]:
    """A partition.json of digits, and whose it is."""
    federation = data.load(config(seed=3, partition=SHARDS, split=SPLIT))
    path = tmp_path / "partition.json"
    path.write_text(json.dumps(federation.partition))
    return path, federation


def test_what_it_holds(written: tuple[Path, data.Federation]) -> None:
    path, federation = written
    recorded = json.loads(path.read_text())
    assert recorded == federation.partition
    assert (recorded["format"], recorded["source"], recorded["kind"], recorded["seed"]) == (1, "digits", "shards", 3)
    assert recorded["classes"] == list("0123456789")
    assert len(recorded["fingerprint"]) == 64
    assert recorded["test"]["examples"] == sum(recorded["test"]["counts"]) == len(federation.test)
    for id, shares in federation.clients.items():
        client = recorded["clients"][id]
        assert client["private"] == {"of": "train", "rows": shares.private.index.tolist()}
        test = np.array(recorded["test"]["rows"])
        assert client["validation"]["of"] == "test"
        assert test[client["validation"]["rows"]].tolist() == shares.validation.index.tolist()
        assert client["holdout"]["of"] == "train"
        for kind, rows in (("private", shares.private), ("validation", shares.validation), ("holdout", shares.holdout)):
            assert rows is not None
            assert client["counts"][kind] == np.bincount(rows.labels, minlength=10).tolist()


def test_rows_of_a_test_part_count_from_its_start(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32)[:, None]
    about = npz(tmp_path / "a.npz", x=x, y=[0, 1] * 6, x_test=x[:4], y_test=[0, 1] * 2)
    partition = data.load(config(data=about, partition={"clients": 1})).partition
    assert partition["test"] == {"examples": 4, "counts": [2, 2]}
    assert partition["clients"]["0"]["validation"] == {"of": "test", "rows": [0, 1, 2, 3]}


def test_a_partition_is_given_back(written: tuple[Path, data.Federation]) -> None:
    path, federation = written
    back = data.load(config(seed=9, partition={"kind": "file", "file": str(path)}))
    assert back.partition["clients"] == federation.partition["clients"]
    assert back.partition["fingerprint"] == federation.partition["fingerprint"]
    assert (back.partition["kind"], back.partition["seed"]) == ("file", 9)
    assert np.array_equal(back.test.index, federation.test.index)
    for id, shares in federation.clients.items():
        assert np.array_equal(back.clients[id].private.index, shares.private.index)
        assert np.array_equal(back.clients[id].validation.index, shares.validation.index)
    assert not any("[split]" in note for note in back.notes)
    other = data.load(config(partition={"kind": "file", "file": str(path)}, split={"preset": "v1"}))
    assert "validation, hold-out and test rows come from the partition file: [split] has no effect" in other.notes


@pytest.mark.parametrize(
    "tables",
    [
        {"split": {"private": 0.5, "public": 0.2, "validation": 0.1, "test": 0.1}},
        {"data": {"name": "digits", "angles": [0, 30, 90], "per_class": 20}, "partition": {"kind": "domains"},
         "split": {"private": 0.65, "public": 0.1, "validation": 0.1, "test": 0.15}},
    ],
)  # fmt: skip
def test_public_rows_and_domains_are_given_back(tables: dict[str, Any], tmp_path: Path) -> None:
    federation = data.load(config(**tables))
    path = tmp_path / "partition.json"
    path.write_text(json.dumps(federation.partition))
    back = data.load(config(data=tables.get("data", {}), partition={"kind": "file", "file": str(path)}))
    assert back.partition["clients"] == federation.partition["clients"]
    assert back.partition["fingerprint"] == federation.partition["fingerprint"]
    assert back.public is not None
    assert federation.public is not None
    assert back.public.digest == federation.public.digest
    assert np.array_equal(back.test.index, federation.test.index)


def test_the_fingerprint_tells_data_and_rows_apart(tmp_path: Path) -> None:
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    y = np.array([0, 1] * 6)
    source = npz(tmp_path / "a.npz", x=x, y=y)
    prints = [
        data.load(config(**tables)).partition["fingerprint"]
        for tables in (
            {"data": source},
            {"data": npz(tmp_path / "b.npz", x=x, y=y)},
            {"data": npz(tmp_path / "c.npz", x=np.where(x == 5, 5.5, x), y=y)},
            {"data": npz(tmp_path / "d.npz", x=x, y=1 - y)},
            {"data": source | {"classes": ["0", "1", "2"]}},
            {"data": source, "seed": 1},
            {"data": source, "partition": {"clients": 1}},
        )
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 6


def test_a_partition_of_other_data(written: tuple[Path, data.Federation], tmp_path: Path) -> None:
    path, _ = written
    kind = {"kind": "file", "file": str(path)}
    about = npz(tmp_path / "a.npz", x=np.ones((12, 2)), y=[0, 1] * 6)
    refused(f"{path}: this partition belongs to other data", data=about, partition=kind)
    refused("belongs to other data", data={"name": "digits", "size": [16, 16]}, partition=kind)
    refused("belongs to other data", data={"name": "digits", "classes": list("1234567890")}, partition=kind)


def rewrite(path: Path, change: Any, signed: bool = True) -> dict[str, Any]:
    """Change a file by hand; signed: with the fingerprint made anew. Return the table [partition] that names the file."""
    recorded = json.loads(path.read_text())
    change(recorded)
    if signed:
        table = Table(np.zeros(0, dtype=np.int64), 0, tuple(recorded["classes"]))
        recorded["fingerprint"] = fingerprint_partition(table, recorded["data"], recorded["test"], recorded["clients"])
    path.write_text(json.dumps(recorded))
    return {"kind": "file", "file": str(path)}


def test_a_partition_changed_by_hand(written: tuple[Path, data.Federation]) -> None:
    path, _ = written
    about = rewrite(path, lambda partition: partition["clients"]["0"]["private"]["rows"].pop(), signed=False)
    refused(f"{path}: the file was changed: its fingerprint is of other rows", partition=about)


@pytest.mark.parametrize(
    ("client", "share", "rows", "words"),
    [
        ("0", "private", [5000], "client '0', private: must be one or more different row numbers below 1797"),
        ("0", "private", [], "client '0', private: must be one or more"),
        ("1", "holdout", [4, 4], "client '1', holdout: must be one or more different"),
        ("1", "validation", [359], "different row numbers below 359"),
        ("1", "private", None, "two clients train on one row, or a row is for training and for scores"),
    ],
)
def test_row_numbers_that_cannot_be(
    written: tuple[Path, data.Federation], client: str, share: str, rows: list[int] | None, words: str
) -> None:
    """Someone has made the fingerprint anew: the rows are looked at all the same."""

    def change(partition: dict[str, Any]) -> None:
        partition["clients"][client][share]["rows"] = partition["clients"]["0"]["private"]["rows"] if rows is None else rows

    refused(words, partition=rewrite(written[0], change))


def test_a_client_that_would_leave_the_run_folder(written: tuple[Path, data.Federation]) -> None:
    def change(partition: dict[str, Any]) -> None:
        partition["clients"]["../../elsewhere"] = partition["clients"].pop("0")

    refused("client '../../elsewhere' cannot name a client", partition=rewrite(written[0], change))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "there is no such file; set 'partition.file'"),
        ("{", "is not a partition.json"),
        ("[]", "is not a partition.json"),
        ('{"format": 2}', "is not a partition.json: format"),
        ('{"format": 1}', "is not a partition.json: source: field required"),
    ],
)
def test_files_that_are_not_partitions_are_refused(text: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    if text is not None:
        path.write_text(text)
    refused(f"{path}: ", words, partition={"kind": "file", "file": str(path)})


def test_keys_without_effect(written: tuple[Path, data.Federation]) -> None:
    refused("key 'partition.examples' has no effect", partition={"kind": "file", "file": str(written[0]), "examples": 9})
