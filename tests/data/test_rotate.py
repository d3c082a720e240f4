"""Domains made of the same images: how they are turned, which are drawn, and that no split takes them apart."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedmutual import data
from fedmutual.config import Config, parse_config
from fedmutual.data import sources
from fedmutual.data.sources import rotate_images
from fedmutual.studies import run
from own_data import config, everything, folder, npz, refused

MNIST = Path(os.environ.get("FEDMUTUAL_DATA", "none")) / "MNIST"
DOMAINS = {"kind": "domains"}
SPLIT = {"private": 0.65, "public": 0.1, "validation": 0.1, "test": 0.15}
DIGITS: dict[str, Any] = {"name": "digits", "angles": [0, 30, 90], "per_class": 20}


def test_a_quarter_turn_by_hand() -> None:
    x = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.uint8)[None, None]
    assert rotate_images(x, 90).tolist() == [[[[7, 4, 1], [8, 5, 2], [9, 6, 3]]]]  # what was left is on top
    assert rotate_images(x, 90).dtype == torch.uint8
    assert rotate_images(x.float(), -90).tolist() == [[[[3, 6, 9], [2, 5, 8], [1, 4, 7]]]]


def test_no_turn_changes_no_bit() -> None:
    x = torch.randint(0, 256, (5, 3, 7, 8), dtype=torch.uint8)
    assert torch.equal(rotate_images(x, 0), x)
    assert torch.equal(rotate_images(x, 360), x)


def test_turned_as_pillow_turns() -> None:
    """Within a grey level where no pixel mixes with the black around the image, which Pillow treats otherwise."""
    x = torch.randint(0, 256, (28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for angle in (20, 40, 60):
        ours = rotate_images(x[None, None], angle)[0, 0].int().numpy()
        theirs = np.asarray(Image.fromarray(x.numpy()).rotate(-angle, Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(ours - theirs)[7:-7, 7:-7].max() <= 1
        assert ours[0, 0] == ours[-1, -1] == 0


def by_domain(about: dict[str, Any], **tables: Any) -> tuple[sources.Source, torch.Tensor, np.ndarray]:
    """The source, its training images [angles, n, ...] and their labels."""
    source = sources.read_source(config(data=about, partition=DOMAINS, **tables))
    x = source.train.x.take(range(len(source.train.x)))
    n = len(about["angles"])
    return source, x.view(n, -1, *x.shape[1:]), np.asarray(source.train.labels).reshape(n, -1)


def test_the_same_images_in_all_domains() -> None:
    source, x, labels = by_domain(DIGITS)
    assert x.shape == (3, 200, 1, 8, 8)
    assert x.dtype == torch.uint8
    for k, angle in enumerate(DIGITS["angles"]):
        assert torch.equal(x[k], rotate_images(x[0], angle))
        assert np.bincount(labels[k]).tolist() == [20] * 10
        assert np.array_equal(labels[k], labels[0])
    assert source.train.domains is not None
    assert source.train.domains[[0, 200, 400]].tolist() == ["0", "30", "90"]
    assert source.train.where(201).endswith(" of digits, turned by 30 degrees")
    assert source.train.x.take([599, 3])[1].equal(x[0, 3])
    _, other, _ = by_domain(DIGITS, seed=1)
    assert not torch.equal(other[0], x[0])
    _, all_digits, _ = by_domain({"name": "digits", "angles": [0, 15]})
    assert len(all_digits[0]) == 1797


def test_a_test_part_is_turned_unless_images_are_drawn(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (24, 5, 5)).astype(np.uint8)
    about = npz(tmp_path / "a.npz", x=x[:16], y=[0, 1] * 8, x_test=x[16:], y_test=[0, 1] * 4) | {"angles": [0, 180]}
    federation = data.load(config(data=about, partition=DOMAINS, split={"public": 0.2}))
    assert federation.partition["test"]["examples"] == 16
    upright, over = (everything(federation.clients[i].validation)[0] for i in ("0", "180"))
    assert torch.equal(upright.flip(2, 3), over)
    drawn = data.load(config(data=about | {"per_class": 6}, partition=DOMAINS))
    assert sum(len(s.private) for s in drawn.clients.values()) + len(drawn.test or ()) == 24


def test_no_rotation_of_a_test_image_is_trained_on() -> None:
    federation = data.load(config(data=DIGITS, partition=DOMAINS, split=SPLIT))
    assert list(federation.clients) == ["0", "30", "90"]
    rows = {i: [s.private, s.public, s.validation, s.test] for i, s in federation.clients.items()}
    images = {i: [set(share.index % 200) for share in shares if share is not None] for i, shares in rows.items()}
    assert images["0"] == images["30"] == images["90"]
    assert [len(share) for share in images["0"]] == [130, 20, 20, 30]
    assert len(set.union(*images["0"])) == 200
    assert federation.notes == ()
    leaking = data.load(config(data=DIGITS, partition=DOMAINS, split=SPLIT | {"shared": False}))
    assert set(leaking.clients["0"].private.index % 200) & set(leaking.clients["30"].test.index % 200)  # type: ignore[union-attr]
    assert any(note.startswith("split.shared = false: each domain has its own split") for note in leaking.notes)


def test_rotated_mnist_as_published() -> None:
    if not MNIST.is_dir():
        pytest.skip("$FEDMUTUAL_DATA names no folder with MNIST")
    tables = {"data": {"name": "rotated-mnist", "angles": [0, 20, 40, 60]}, "partition": DOMAINS, "split": SPLIT}
    federation = data.load(parse_config(tables))
    assert list(federation.clients) == ["0", "20", "40", "60"]
    kinds = ("private", "public", "validation", "test")
    base = {}
    for id, shares in federation.clients.items():
        assert [len(getattr(shares, kind)) for kind in kinds] == [650, 100, 100, 150]
        assert federation.partition["clients"][id]["counts"]["private"] == [65] * 10
        base[id] = [set(getattr(shares, kind).index % 1000) for kind in kinds]
    assert base["0"] == base["20"] == base["40"] == base["60"]
    assert len(set.union(*base["0"])) == 1000
    assert federation.public is not None
    assert federation.public.count_bytes(labels=True) == dict.fromkeys(federation.clients, 100 * (28 * 28 + 8))
    defaults = data.load(parse_config(tables | {"data": {"name": "rotated-mnist"}}))
    assert defaults.partition == federation.partition


def same(**tables: Any) -> str:
    return run.identify_data(Config.model_validate(config(partition=DOMAINS, **tables)))


def test_which_runs_may_share_what_was_read() -> None:
    assert same(data=DIGITS) != same(data=DIGITS, seed=1)
    assert same(data={"name": "rotated-mnist"}) != same(data={"name": "rotated-mnist"}, seed=1)
    all_images = {"name": "digits", "angles": [0, 30]}
    assert same(data=all_images) == same(data=all_images, seed=1)
    assert same(data=all_images) == same(data=all_images, rounds=9)


def test_what_cannot_be_turned(tmp_path: Path) -> None:
    refused("key 'data.angles' makes a domain of each angle; set partition.kind = 'domains'", data=DIGITS)
    refused("data.name = 'rotated-mnist' makes a domain of each angle", data={"name": "rotated-mnist"})
    refused("key 'data.per_class' needs the key 'data.angles'", data={"name": "digits", "per_class": 5})
    refused("key 'data.angles' has 30 twice", data=DIGITS | {"angles": [30, 0, 30.0]}, partition=DOMAINS)
    refused(
        "digits: class '8' has 174 training images, and data.per_class asks for 175; lower it",
        data=DIGITS | {"per_class": 175},
        partition=DOMAINS,
    )
    table = npz(tmp_path / "a.npz", x=np.ones((12, 3)), y=[0, 1] * 6) | {"angles": [0, 5]}
    refused("'data.angles' is for images, but the examples are tables of features", data=table, partition=DOMAINS)
    named = npz(tmp_path / "b.npz", x=np.ones((12, 3, 3)), y=[0, 1] * 6, domain=["n", "s"] * 6) | {"angles": [0, 5]}
    refused("'data.angles'", "already has domains", data=named, partition=DOMAINS)
    pictures = folder(tmp_path / "c", {"cat": 4, "dog": 4}) | {"angles": [0, 5], "per_class": 2, "test": str(tmp_path / "c")}
    refused("key 'data.test' has no effect with 'data.per_class'", data=pictures, partition=DOMAINS)
    clients = {i: {"data": {"name": "digits"}} for i in ("north", "south")}
    refused("makes a domain of each angle", data={"angles": [0, 5]}, partition={}, clients=clients)


def test_folders_of_images_can_be_turned(tmp_path: Path) -> None:
    about = folder(tmp_path, {"cat": 6, "dog": 6}, size=(6, 6)) | {"angles": [0, 90], "resident": False}
    federation = data.load(config(data=about, partition=DOMAINS, split={"validation": 0.25, "test": 0.25}))
    assert [len(s.private) for s in federation.clients.values()] == [7, 7]
    x, y = (everything(s.private) for s in federation.clients.values())
    assert torch.allclose(x[0].rot90(-1, (2, 3)), y[0])
