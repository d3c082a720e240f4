"""Targets that are no classes: which are read, under which names, and what is refused."""

import numpy as np
import pytest
import torch

import fedmutual
from fedmutual.data.federation import load

ROWS = 40
CONFIG = """
name = "labels"
rounds = 1
data.name = "npz"
partition.clients = 2
algorithm.name = "fml"
model.shared = "mlp"
training.task = "multilabel"
"""


def write_npz(folder, y, **arrays):
    np.savez(folder / "rows.npz", x=np.random.default_rng(0).normal(size=(len(y), 3)), y=y, **arrays)
    file = folder / "labels.toml"
    file.write_text(CONFIG)
    return lambda **more: fedmutual.load_config(file, **{"data.root": folder / "rows.npz", **more})


def make_labels(labels=3):
    return np.random.default_rng(1).integers(0, 2, (ROWS, labels))


def test_labels_are_read_under_their_names(tmp_path):
    y = make_labels()
    make_config = write_npz(tmp_path, y.astype(bool))
    federation = load(make_config(**{"data.classes": ["cough", "fever", "rash"]}))
    assert (federation.space.classes, federation.space.outputs) == (("cough", "fever", "rash"), 3)
    rows = federation.clients["0"].private
    (_, targets) = next(iter(rows.rows([torch.arange(len(rows))])))
    assert targets.dtype == torch.float32
    assert targets.tolist() == y[rows.index].tolist()
    assert load(make_config()).space.classes == ("0", "1", "2")


def test_targets_of_rows_move_together(tmp_path):
    shares = load(write_npz(tmp_path, make_labels())()).clients["0"].private
    shuffled = shares.shuffled(1.0, np.random.default_rng(2))
    assert sorted(map(tuple, shuffled.labels)) == sorted(map(tuple, shares.labels))
    assert np.isnan(shares.unlabelled([1]).labels[1]).all()
    assert not np.isnan(shares.unlabelled([1]).labels[0]).any()


@pytest.mark.parametrize(
    ("y", "settings", "sentence"),
    [
        (make_labels() * 2, {}, "must hold 0 or 1 for each label"),
        (make_labels()[:, :, None], {}, "targets have the shape [40, 3, 1]"),
        (make_labels().astype(str), {}, "give 0 or 1 for each label"),
        (make_labels(), {"data.classes": ["a", "b"]}, "key 'data.classes' has 2 names, but targets have 3 labels"),
        (make_labels(), {"data.labels": {"a": "b"}}, "key 'data.labels' is for classes"),
        (make_labels(), {"training.task": "regression"}, "give one number for each of the 40 examples"),
        (make_labels(), {"training.task": "classification"}, "for one-hot labels use the argmax"),
        (make_labels(), {"algorithm.name": "fedproto"}, "training.task must be one of classes"),
    ],
)
def test_what_is_refused(tmp_path, y, settings, sentence):
    with pytest.raises(fedmutual.UserError) as problem:
        fedmutual.run(write_npz(tmp_path, y)(**settings), tmp_path / "run")
    assert sentence in str(problem.value)
    assert not (tmp_path / "run").exists()
