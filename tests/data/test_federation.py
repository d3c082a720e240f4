from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedmutual import data
from own_data import config, everything, folder, npz

SHARDS = {"kind": "shards", "clients": 5, "classes_per_client": 2}


def keys(rows: Any) -> set[bytes]:
    """Each row's bytes."""
    return {x.numpy().tobytes() for x in everything(rows)[0]}


@pytest.mark.parametrize("split", [{}, {"preset": "v1"}, {"holdout": 0.2}, {"validation": 0.2, "holdout": 0.1}])
@pytest.mark.parametrize("kind", [{"clients": 5}, SHARDS, {"kind": "dirichlet", "clients": 5, "alpha": 0.5}])
def test_what_is_scored_on_is_never_trained_on(kind: dict[str, Any], split: dict[str, Any]) -> None:
    """On the bytes of real digits, all of which differ."""
    federation = data.load(config(partition=kind, split=split))
    trained = [keys(s.private) for s in federation.clients.values()]
    assert len(set.union(*trained)) == sum(map(len, trained))  # nor by two clients
    scored = [federation.test, *(s.validation for s in federation.clients.values())]
    scored += [s.holdout for s in federation.clients.values() if s.holdout is not None]
    assert not set.union(*trained) & set.union(*map(keys, scored))


def test_all_rows_in_one_place() -> None:
    federation = data.load(config(partition=SHARDS, split={"holdout": 0.1}))
    pooled = federation.pool_clients()
    clients = federation.clients.values()
    assert np.array_equal(pooled.private.index, np.sort(np.concatenate([s.private.index for s in clients])))
    assert np.array_equal(pooled.validation.index, federation.test.index)
    assert pooled.holdout is not None
    assert len(pooled.holdout) == sum(len(s.holdout) for s in clients if s.holdout is not None)
    x, y = everything(pooled.private)
    own_x, own_y = everything(federation.clients["2"].private)
    at = np.searchsorted(pooled.private.index, federation.clients["2"].private.index)
    assert torch.equal(x[at], own_x)
    assert torch.equal(y[at], own_y)
    assert data.load(config()).pool_clients().holdout is None


def test_notes_on_clients() -> None:
    notes = data.load(
        config(training={"batch_size": 400}, clients={"1": {"training": {"batch_size": 50}}}, partition=SHARDS)
    ).notes
    assert notes[0] == "client '0' has 288 examples, fewer than batch_size 400: it trains as one smaller batch"
    assert len(notes) == 4  # and not client 1, whose own batches are smaller
    many = data.load(config(training={"batch_size": 400}, partition={"clients": 9})).notes
    assert many[-1] == "6 more clients have fewer examples than their batch_size, too"
    assert data.load(config(partition={"clients": 1})).notes == (
        "there is one client only, so no other client can teach it",
    )
    assert data.load(config()).notes == ()


def test_notes_on_own_data(tmp_path: Path) -> None:
    about = folder(tmp_path, {"cat": 6, "dog": 6})
    assert data.load(config(data=about)).notes == (
        "data.mean and data.std are not given, so the pixels are only divided by 255",
    )
    federation = data.load(config(data=about | {"mean": [0.5] * 3, "std": [0.25] * 3}))
    assert federation.notes == ()
    scaled = {"divisor": 255.0, "mean": [0.5] * 3, "std": [0.25] * 3, "size": None, "augment": "none"}
    assert federation.space.scaling.model_dump(mode="json", exclude_unset=True) == scaled
    table = npz(
        tmp_path / "a.npz", x=np.arange(24.0).reshape(12, 2), y=[0, 1, 2] * 4, x_test=np.ones((4, 2)), y_test=[0] * 4
    )
    assert data.load(config(data=table, training={"batch_size": 1})).notes == (
        "data.mean and data.std are not given, so the features are taken as they are",
        "the test set has no examples of classes '1', '2': its scores say nothing about them",
    )


IMAGES = np.random.default_rng(0).integers(0, 240, (12, 8, 8))


@pytest.mark.parametrize(
    ("x", "given", "message"),
    [
        (IMAGES.astype(np.uint8), {}, "the pixels are only divided by 255"),
        (IMAGES, {}, "the pixels are taken as they are, some of them large (channel 0 is about 1"),
        (IMAGES, {"mean": [0.3], "std": [0.4]}, "inputs are large after scaling by data.mean and data.std (channel 0"),
        (IMAGES.astype(np.uint8), {"mean": [0.3], "std": [0.4]}, None),
        (IMAGES, {"mean": [120.0], "std": [70.0]}, None),
        (IMAGES.astype(np.uint8), {"mean": [0.3], "std": [0.004]}, "large after scaling by data.mean and data.std"),
        (IMAGES.reshape(12, 64), {"mean": [120.0] * 64, "std": [70.0] * 64}, None),
        (IMAGES.reshape(12, 64), {"mean": [0.3] * 64, "std": [0.4] * 64}, "scaling by data.mean and data.std (column "),
    ],
)
def test_large_inputs_are_remarked(tmp_path: Path, x: Any, given: dict[str, Any], message: str | None) -> None:
    """Also with a mean and deviation for another scale, for example of images divided by 255."""
    file = npz(tmp_path / "a.npz", x=x, y=[0, 1, 2] * 4, x_test=x[:6], y_test=[0, 1, 2] * 2)
    notes = data.load(config(data=file | given, training={"batch_size": 1}, partition={"clients": 2})).notes
    assert any(message in note for note in notes) if message else not any("large" in note for note in notes), notes


def test_the_scaling_of_the_inputs_is_described() -> None:
    space = data.load(config(data={"name": "digits", "augment": "crop-flip"})).space
    assert space.scaling.model_dump(mode="json", exclude_unset=True) == {
        "divisor": 16.0,
        "mean": [0.3053],
        "std": [0.3760],
        "size": None,
        "augment": "crop-flip",
    }
