"""Published sets of domains, in folders that everyone fetches for themselves."""

import os
from pathlib import Path

import pytest

from fedmutual import data
from own_data import config, everything, image, refused

ROOT = Path(os.environ.get("FEDMUTUAL_DATA", "none"))
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
    assert loaded[0].space.scaling["mean"] == [0.485, 0.456, 0.406]
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
