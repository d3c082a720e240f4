"""The published sets, where they are; and what is said where they are not."""

import os
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedmutual import data
from fedmutual.data import published
from own_data import config, everything, image, refused

ROOT = Path(os.environ.get("FEDMUTUAL_DATA", "none"))
FOLDERS = {"mnist": "MNIST", "cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


def test_the_digits_are_those_of_scikit_learn() -> None:
    images, labels = published._load_digits()
    expected = load_digits()
    assert np.array_equal(images, expected.images)
    assert np.array_equal(labels, expected.target)


@pytest.mark.parametrize(
    ("name", "shape", "sizes", "classes"),
    [
        ("mnist", (1, 28, 28), [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009], ("0", "9")),
        ("cifar10", (3, 32, 32), [1000] * 10, ("airplane", "truck")),
        ("cifar100", (3, 32, 32), [100] * 100, ("apple", "worm")),
    ],
)
def test_a_published_set(name: str, shape: tuple[int, ...], sizes: list[int], classes: tuple[str, str]) -> None:
    if not (ROOT / FOLDERS[name]).is_dir():
        pytest.skip(f"$FEDMUTUAL_DATA names no folder with {FOLDERS[name]}")
    federation = data.load(config(data={"name": name, "resident": False}, partition={"clients": 5}))
    assert federation.space.shape == shape
    assert (federation.space.classes[0], federation.space.classes[-1]) == classes
    assert federation.partition["test"] == {"examples": 10_000, "counts": sizes}
    private = federation.pool_clients().private
    assert len(private) == (60_000 if name == "mnist" else 50_000)
    ((x, _),) = private.rows(
        [torch.arange(0, len(private), 7)]
    )  # a part is enough; MNIST's writers alternate, so no even step
    over = (0, 2, 3)
    assert torch.allclose(x.mean(over), torch.zeros(shape[0]), atol=0.02)
    assert torch.allclose(x.std(over), torch.ones(shape[0]), atol=0.02)


def test_the_rows_are_torchvisions() -> None:
    if not (ROOT / "MNIST").is_dir():
        pytest.skip("$FEDMUTUAL_DATA names no folder with MNIST")
    from torchvision import datasets
    from torchvision.transforms import Compose, Normalize, ToTensor

    usual = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    theirs = datasets.MNIST(ROOT, train=False, transform=usual)
    federation = data.load(config(data={"name": "mnist", "resident": False}))
    ((x, y),) = federation.test.rows([torch.tensor([0, 77, 9999])])
    assert torch.allclose(x, torch.stack([theirs[i][0] for i in (0, 77, 9999)]), atol=1e-6)
    assert y.tolist() == [theirs[i][1] for i in (0, 77, 9999)]


def test_a_root_without_the_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(
        f"data 'mnist' is not at {tmp_path / 'MNIST'} (the path of data.root)",
        "unset data.root to download the data",
        data={"name": "mnist", "root": str(tmp_path)},
    )
    monkeypatch.setenv("FEDMUTUAL_DATA", str(tmp_path))
    refused(f"is not at {tmp_path / 'cifar-100-python'} (the path of $FEDMUTUAL_DATA", data={"name": "cifar100"})


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_no_network(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FEDMUTUAL_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for scheme in ("http", "https"):
        monkeypatch.setenv(f"{scheme}_proxy", "http://127.0.0.1:9")  # the port of discard, where nobody listens
    monkeypatch.setattr(urllib.request, "_opener", None)  # it would remember the proxies of before
    message = refused(
        f"is not at {tmp_path / '.cache' / 'fedmutual' / FOLDERS[name]} and could not be downloaded", data={"name": name}
    )
    assert "set $FEDMUTUAL_DATA or data.root to a folder that has it" in message
    assert not list((tmp_path / ".cache" / "fedmutual").iterdir())  # nothing half-written
    assert capsys.readouterr().out == ""


def test_a_damaged_file(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{name}-ubyte").write_bytes(b"\0\0\x08\x03\0\0")
    refused(
        f"data 'mnist' at {tmp_path / 'MNIST'} cannot be read",
        "delete the folder",
        data={"name": "mnist", "root": str(tmp_path)},
    )


# Sets of domains, in folders that everyone fetches for themselves.

DOMAINS = {"kind": "domains"}
SPLIT = {"private": 0.5, "public": 0.2, "validation": 0.1, "test": 0.2}


def made(root: Path, domains: tuple[str, ...], sizes: tuple[tuple[int, int], ...] = ((6, 5),)) -> Path:
    """Two classes of ten images a domain, in the layout of the sets."""
    for d, domain in enumerate(domains):
        for k, name in enumerate(("chair", "lamp")):
            for i in range(10):
                image(root / domain / name / f"{i}.png", 40 * d + 20 * k + i, sizes[i % len(sizes)])
    return root


PACS = ("art_painting", "cartoon", "photo", "sketch")
HOME = ("Art", "Clipart", "Product", "Real World")


def test_pacs_in_the_data_root_or_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = made(tmp_path / "PACS", PACS)
    monkeypatch.setenv("FEDMUTUAL_DATA", str(tmp_path))
    loaded = [
        data.load(config(data={"name": "pacs", **root}, partition=DOMAINS, split=SPLIT))
        for root in ({}, {"root": str(tmp_path)}, {"root": str(place)})
    ]
    assert list(loaded[0].clients) == list(PACS)
    assert [[len(s) for s in (c.private, c.validation)] for c in loaded[0].clients.values()] == [[10, 2]] * 4
    assert loaded[0].space.scaling.mean == (0.485, 0.456, 0.406)
    assert loaded[0].partition == loaded[1].partition == loaded[2].partition
    x, _ = everything(loaded[0].clients["photo"].private)
    assert x[:, 0, 0, 0].allclose(x.new_tensor((1 - 0.485) / 0.229))  # a corner of 255


@pytest.mark.parametrize("name", ["OfficeHome", "OfficeHomeDataset_10072016"])
def test_office_home_in_one_size(name: str, tmp_path: Path) -> None:
    spelled = (*HOME[:3], "Real_world" if name == "OfficeHome" else HOME[3])
    made(tmp_path / name, spelled, ((6, 5), (9, 12)))
    about = {"name": "office-home", "root": str(tmp_path), "size": [8, 8]}
    federation = data.load(config(data=about, partition=DOMAINS, split=SPLIT))
    assert list(federation.clients) == list(spelled)
    assert federation.space.shape == (3, 8, 8)
    assert federation.public is not None
    assert set(federation.public.count_bytes(labels=False).values()) == {4 * 3 * 8 * 8}
    refused("'office-home' needs the key 'data.size'", data={k: about[k] for k in ("name", "root")}, partition=DOMAINS)


def test_where_they_are_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMUTUAL_DATA", str(tmp_path))
    place = tmp_path / "PACS"
    words = (
        f"data 'pacs' is not at {place} and cannot be downloaded",
        "the folders 'art_painting', 'cartoon', 'photo', 'sketch' there, each with a folder of images for every class",
    )
    refused(*words, data={"name": "pacs"}, partition=DOMAINS)
    made(place, PACS[:3])
    refused(*words, data={"name": "pacs"}, partition=DOMAINS)  # a domain is missing
    refused(f"not at {tmp_path / 'OfficeHome'}", data={"name": "office-home", "size": [8, 8]}, partition=DOMAINS)


def test_they_are_sets_of_domains() -> None:
    refused("data.name = 'pacs' is a set of domains; set partition.kind = 'domains'", data={"name": "pacs"})
    refused("'data.test' has no effect with data.name = 'pacs'", data={"name": "pacs", "test": "x"}, partition=DOMAINS)


def test_pacs_as_published() -> None:
    if not (ROOT / "PACS").is_dir():
        pytest.skip("$FEDMUTUAL_DATA names no folder with PACS")
    about = {"name": "pacs", "resident": False}
    split = {"private": 0.65, "public": 0.1, "validation": 0.1, "test": 0.15}
    federation = data.load(config(data=about, partition=DOMAINS, split=split))
    held = {i: sum(map(sum, c["counts"].values())) for i, c in federation.partition["clients"].items()}
    assert held == {"art_painting": 2048, "cartoon": 2344, "photo": 1670, "sketch": 3929}
    assert federation.space.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    assert len(federation.pool_clients().private) == sum(n - round(0.1 * n) - round(0.15 * n) for n in held.values())
