"""What the tests of the outside share: the snapshots, and a copy of the sample run folders."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from outside import samples as sample_folders
from outside.snapshots import Snapshots


@pytest.fixture
def snapshots():
    return Snapshots()


@pytest.fixture
def samples(tmp_path, monkeypatch):
    """A copy of the sample run folders and of the files that made them, which is the current folder."""
    folder = sample_folders.copy(tmp_path / "samples")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def digit(samples):
    """The file of one example that the samples' models take: the handwritten 4, on 4 by 4 pixels; labelled.npz says so."""
    image = load_digits().images[4].reshape(4, 2, 4, 2).mean((1, 3))
    path = samples / "four.npz"
    np.savez(path, x=image[None, None].astype(np.uint8))
    np.savez(samples / "labelled.npz", x=image[None, None].astype(np.uint8), y=np.array([4]))
    return path
