"""The published sets, where they are; and what is said where they are not."""

import os
import urllib.request
from pathlib import Path

import pytest
import torch

from fedmutual import data
from own_data import config, everything, refused

ROOT = Path(os.environ.get("FEDMUTUAL_DATA", "none"))
FOLDERS = {"mnist": "MNIST", "cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


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


def test_rows_that_are_scaled_are_whole() -> None:
    if not (ROOT / "MNIST").is_dir():
        pytest.skip("$FEDMUTUAL_DATA names no folder with MNIST")
    about = {"kind": "shards", "clients": 5, "classes_per_client": 2}
    federation = data.load(config(data={"name": "mnist", "resident": False}, partition=about))
    counts = [c["counts"] for c in federation.partition["clients"].values()]
    assert sum(sum(c["private"]) for c in counts) == 60_000
    assert sum(sum(c["validation"]) for c in counts) == 10_000
    x, _ = everything(federation.clients["0"].validation)
    assert x.min() == pytest.approx(-0.1307 / 0.3081)
    assert x.max() == pytest.approx((1 - 0.1307) / 0.3081)
