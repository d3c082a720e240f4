"""The public seed set: all nodes' public rows in one order, and what tells one set from another."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedmutual import data
from fedmutual.data.public import PublicSet
from fedmutual.data.rows import ChainedRows, Rows
from fedmutual.errors import ConfigError
from own_data import config, everything, npz

SPLIT = {"public": 0.2, "validation": 0.1}


def public(**tables: Any) -> PublicSet:
    public_set = data.load(config(**{"split": SPLIT, **tables})).public
    assert public_set is not None
    return public_set


def own_data(folder: Path, **clients: Any) -> dict[str, Any]:
    """Tables of clients with data of their own: rows of one feature, that tell the client and the row."""
    about = {}
    for k, (name, n) in enumerate(clients.items()):
        x = np.arange(n, dtype=np.float32)[:, None] + 1000 * k
        about[name] = {"data": npz(folder / f"{name}.npz", x=x, y=np.arange(n) % 2, classes=["a", "b"])}
    return {"partition": {}, "clients": about}


def test_rows_of_all_nodes_in_one_order() -> None:
    federation = data.load(config(partition={"clients": 3}, split=SPLIT))
    public_set = federation.public
    assert public_set is not None
    x, y = everything(public_set.data)
    for id, shares in federation.clients.items():
        assert shares.public is not None
        client_rows = list(public_set.owners[id])
        assert torch.equal(x[client_rows], everything(shares.public)[0])
        assert public_set.counts[id] == tuple(torch.bincount(y[client_rows], minlength=10).tolist())
        assert not set(shares.public.index) & set(shares.private.index)
    assert [i for positions in public_set.owners.values() for i in positions] == list(range(len(public_set)))
    all_rows = np.concatenate([s.private.index for s in federation.clients.values()] + [public_set.data.index])
    assert np.array_equal(federation.pool_clients().private.index, np.sort(all_rows))


def test_bytes_are_those_of_the_source() -> None:
    public_set = public()
    for id, positions in public_set.owners.items():
        assert public_set.count_bytes(labels=False)[id] == 64 * len(positions)  # 8 x 8 uint8
        assert public_set.count_bytes(labels=True)[id] == (64 + 8) * len(positions)


@pytest.mark.parametrize("brought", [False, True])
def test_labels_of_others_cannot_be_read(brought: bool, tmp_path: Path) -> None:
    public_set = public(**(own_data(tmp_path, north=40, south=30) if brought else {}))
    x, y = everything(public_set.data)
    for id, positions in public_set.owners.items():
        is_own = torch.zeros(len(public_set), dtype=torch.bool)
        is_own[list(positions)] = True
        seen, labels = everything(public_set.show_to(id, labels=False))
        assert torch.equal(seen, x)
        assert torch.equal(labels[is_own], y[is_own])
        assert (labels[~is_own] == -1).all()
        assert torch.equal(everything(public_set.show_to(id, labels=True))[1], y)
    assert torch.equal(everything(public_set.data)[1], y)  # as before


def test_the_digest_by_hand(tmp_path: Path) -> None:
    public_set = public(**own_data(tmp_path, north=40, south=30))
    x, y = everything(public_set.data)
    content_hash, labels = hashlib.sha256(), b""
    for id, positions in public_set.owners.items():
        at = list(positions)
        content_hash.update(f"{id}\0{len(at)}\0torch.float32[1]".encode() + x[at].numpy().tobytes())
        labels += y[at].numpy().tobytes()
    assert public_set.unlabelled == content_hash.hexdigest()
    assert public_set.digest == hashlib.sha256(content_hash.digest() + labels).hexdigest()


def test_the_digest_is_of_content(tmp_path: Path) -> None:
    x = np.arange(48, dtype=np.float32).reshape(24, 2)
    y = np.array([0, 1] * 12)
    first_source = npz(tmp_path / "a.npz", x=x, y=y)
    other_sources = {
        "other names": npz(tmp_path / "b.npz", x=x, y=y),
        "scaled otherwise": first_source | {"mean": [1.0, 1.0], "std": [2.0, 2.0]},
        "other examples": npz(tmp_path / "c.npz", x=x + 1, y=y),
        "other labels": npz(tmp_path / "d.npz", x=x, y=1 - y),
    }
    first = public(data=first_source)
    public_set = {name: public(data=about) for name, about in other_sources.items()}
    assert [name for name, other_set in public_set.items() if other_set.digest == first.digest] == [
        "other names",
        "scaled otherwise",
    ]
    assert public(data=first_source, seed=1).digest != first.digest  # other rows


def test_what_nodes_hold_against_each_other() -> None:
    public_set = public()
    mine = public_set.summary(labels=True)
    assert {k: (v.dtype, tuple(v.shape)) for k, v in mine.items()} == {
        "digest": (torch.uint8, (32,)),
        "rows": (torch.int64, ()),
        "counts": (torch.int64, (10,)),
    }
    assert bytes(mine["digest"].tolist()).hex() == public_set.digest
    assert mine["counts"].sum() == mine["rows"] == len(public_set)
    blind = public_set.summary(labels=False)
    assert bytes(blind["digest"].tolist()).hex() == public_set.unlabelled
    assert "counts" not in blind


def test_a_class_missing_in_the_public_set_is_refused(tmp_path: Path) -> None:
    y = np.array(["common"] * 58 + ["rare"] * 2)
    about = npz(tmp_path / "a.npz", x=np.arange(60, dtype=np.float32)[:, None], y=y)
    with pytest.raises(
        ConfigError, match=r"public set has no example of class 'rare', which clients train on; raise 'split"
    ):
        data.load(config(data=about, partition={"clients": 1}, split=SPLIT | {"test": 0.1}))


def test_a_class_that_one_node_lacks_may_be_given_by_another() -> None:
    public_set = public(partition={"kind": "shards", "clients": 5, "classes_per_client": 2})
    assert all(0 in counts for counts in public_set.counts.values())


@pytest.mark.parametrize(
    ("columns", "classes", "words"),
    [
        (1, ["b", "a"], r"client 'south' has the classes 'b', 'a', and client 'north' 'a', 'b'; name all"),
        (2, ["a", "b"], r"client 'south' has examples of the shape \[2\] and 2 outputs, and client 'north'"),
    ],
)
def test_clients_that_differ_share_no_public_set(columns: int, classes: list[str], words: str, tmp_path: Path) -> None:
    tables, x = own_data(tmp_path, north=40, south=30), np.ones((30, columns), dtype=np.float32)
    tables["clients"]["south"]["data"] = npz(tmp_path / "south.npz", x=x, y=np.arange(30) % 2, classes=classes)
    with pytest.raises(ConfigError, match=words):
        data.load(config(split=SPLIT, **tables))


def test_clients_with_data_of_their_own(tmp_path: Path) -> None:
    federation = data.load(config(split=SPLIT, **own_data(tmp_path, north=40, south=30)))
    public_set = federation.public
    assert public_set is not None
    assert isinstance(public_set.data, ChainedRows)
    x, _ = everything(public_set.data)
    assert [(x[list(p)] >= 1000).all().item() for p in public_set.owners.values()] == [False, True]
    assert public_set.count_bytes(labels=True)["south"] == (4 + 8) * len(public_set.owners["south"])
    for shares in federation.clients.values():
        assert isinstance(shares.test, Rows)
    assert isinstance(federation.test, ChainedRows)
    assert len(federation.test) == sum(len(s.test) for s in federation.clients.values() if s.test is not None)


@pytest.mark.parametrize("resident", [True, False])
def test_one_batch_an_index_tensor_over_several_stores(resident: bool, tmp_path: Path) -> None:
    tables = own_data(tmp_path, north=40, south=30, east=25)
    for client_tables in tables["clients"].values():
        client_tables["data"]["resident"] = resident
    public_set = public(**tables).data
    x, y = everything(public_set)
    rng = torch.Generator().manual_seed(0)
    plan = [torch.randperm(len(public_set), generator=rng)[:n] for n in (7, 3, 1, len(public_set))] + [
        torch.tensor([0, 0, 2])
    ]
    batches = list(public_set.rows(iter(plan)))
    assert len(batches) == len(plan)
    for index, (expected_x, expected_y) in zip(plan, batches, strict=True):
        assert torch.equal(expected_x, x[index])
        assert torch.equal(expected_y, y[index])
    assert list(public_set.rows(iter([]))) == []


def test_an_unused_test_set_of_the_data_is_remarked(tmp_path: Path) -> None:
    x = np.arange(60, dtype=np.float32)[:, None]
    about = npz(tmp_path / "a.npz", x=x, y=[0, 1] * 30, x_test=x[:9] + 100, y_test=[0, 1, 0] * 3)
    federation = data.load(config(data=about, split={"private": 0.5, "validation": 0.2, "test": 0.3}))
    assert any("the data have 9 test examples of their own, which are unused" in note for note in federation.notes)
    assert (everything(federation.test)[0] < 100).all()
