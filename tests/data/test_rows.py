from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as published

from fedmutual import data
from fedmutual.data.rows import PAD, CropFlip
from own_data import config, everything, folder, npz

DIGITS = {"name": "digits", "augment": "crop-flip"}
PLAN = [torch.tensor([3, 1, 4]), torch.tensor([1, 5])]


def batches(rows: Any, seed: int | None = None) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed) if seed is not None else None
    return [t for batch in rows.rows(iter(PLAN), rng) for t in batch]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_rows_are_those_of_the_plan() -> None:
    rows = data.load(config(data={"name": "digits"})).clients["1"].private
    x, y = everything(rows)
    got = batches(rows)
    assert equal(got, [x[PLAN[0]], y[PLAN[0]], x[PLAN[1]], y[PLAN[1]]])
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert np.array_equal(rows.labels, y.numpy())


def test_clients_share_one_store() -> None:
    federation = data.load(config(data={"name": "digits"}))
    stores = {id(rows.store) for rows in (federation.test, *(s.private for s in federation.clients.values()))}
    assert len(stores) == 1


def test_other_labels_take_no_more_memory_on_a_device() -> None:
    rows = data.load(config(data={"name": "digits"})).clients["0"].private
    device = torch.device("meta")
    stores: list[Any] = [r.to(device).store for r in (rows, rows.hide_labels([0]), rows.hide_labels(range(9)))]
    assert len({id(store) for store in stores}) == 3
    assert all(store.x is stores[0].x for store in stores)


def test_augmentation_is_drawn_from_the_stream_alone() -> None:
    federation = data.load(config(data=DIGITS))
    rows = federation.clients["0"].private
    before = torch.get_rng_state()
    assert equal(batches(rows, 1), batches(rows, 1))
    assert not equal(batches(rows, 1), batches(rows, 2))
    assert not equal(batches(rows, 1), batches(rows))
    assert torch.equal(before, torch.get_rng_state())
    assert equal(batches(federation.test, 1), batches(federation.test))  # evaluation data are never changed


def test_crop_flip_is_torchvisions_pad_crop_and_flip() -> None:
    x, black = torch.rand(40, 3, 6, 5), torch.tensor([-1.0, -2.0, -3.0])
    padded = torch.stack([published.pad(x[:, c], [PAD], fill=float(black[c])) for c in range(3)], 1)
    crops = set()
    for i, image in enumerate(CropFlip(black)(x, torch.Generator().manual_seed(0))):
        ways = [
            (top, left, flip)
            for top in range(2 * PAD + 1)
            for left in range(2 * PAD + 1)
            for flip in (False, True)
            if torch.equal(image, _way(padded[i], top, left, flip))
        ]
        assert ways
        crops.add(ways[0])
    assert len(crops) > 30  # each image its own way
    assert {flip for *_, flip in crops} == {False, True}


def _way(padded: torch.Tensor, top: int, left: int, flip: bool) -> torch.Tensor:
    cropped = published.crop(padded, top, left, 6, 5)
    return published.horizontal_flip(cropped) if flip else cropped


def test_the_border_is_black_after_scaling() -> None:
    federation = data.load(config(data=DIGITS))
    x, _ = everything(federation.test)
    black = -0.3053 / 0.3760  # (0 / 16 - mean) / std
    assert x.min() == pytest.approx(black)
    ((augmented, _),) = federation.clients["0"].private.rows([torch.arange(50)], torch.Generator().manual_seed(0))
    assert augmented.min() == pytest.approx(black)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_read_as_needed_are_those_in_memory(tmp_path: Path, workers: int) -> None:
    about = folder(tmp_path, {"a": 8, "b": 8}) | {
        "augment": "crop-flip",
        "mean": [0.5] * 3,
        "std": [0.2] * 3,
        "size": [7, 9],
    }
    resident_data, read = (
        data.load(config(data=about | {"resident": resident, "workers": workers})) for resident in (True, False)
    )
    before = torch.get_rng_state()
    for id, shares in resident_data.clients.items():
        assert equal(batches(shares.private, 3), batches(read.clients[id].private, 3))
        assert equal(list(everything(shares.validation)), list(everything(read.clients[id].validation)))
    assert resident_data.partition == read.partition
    assert torch.equal(before, torch.get_rng_state())  # dropout draws from it


def test_a_test_part_read_as_needed(tmp_path: Path) -> None:
    x = np.arange(8, dtype=np.float32)[:, None]
    about = npz(tmp_path / "a.npz", x=x, y=[0, 1] * 4, x_test=x + 100, y_test=[0, 1] * 4) | {"resident": False}
    federation = data.load(config(data=about, partition={"clients": 1}))
    assert everything(federation.test)[0][:, 0].tolist() == list(range(100, 108))
    both = federation.test.with_index(np.array([1, 9, 0]))
    assert everything(both)[0][:, 0].tolist() == [1, 101, 0]
    assert everything(both)[1].tolist() == [1, 1, 0]


def test_large_data_are_read_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    about = config(data={"name": "digits"})
    resident_data = data.load(about)
    monkeypatch.setattr("fedmutual.data.stores.RESIDENT", 1797 * 64 * 4)  # no longer less than that
    streamed_data = data.load(about)
    assert type(resident_data.test.store) is not type(streamed_data.test.store)
    assert equal(batches(resident_data.test), batches(streamed_data.test))


def test_images_are_resized_as_torchvision_does() -> None:
    from sklearn.datasets import load_digits

    federation = data.load(config(data={"name": "digits", "size": [16, 12], "mean": [0.0], "std": [1.0]}))
    originals = torch.from_numpy(load_digits().images[federation.test.index]).float()[:, None] / 16
    assert torch.equal(everything(federation.test)[0], published.resize(originals, [16, 12], antialias=True))
