"""Targets that are no classes: which are read, under which names, and what is refused."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

import fedmutual
from fedmutual.config import DataConfig
from fedmutual.data.federation import load
from fedmutual.data.labels import clean_labels
from fedmutual.data.objects import make_memory_source
from fedmutual.data.targets import note_one_class

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
    shuffled = shares.shuffle_labels(1.0, np.random.default_rng(2))
    assert sorted(map(tuple, shuffled.labels)) == sorted(map(tuple, shares.labels))
    assert np.isnan(shares.hide_labels([1]).labels[1]).all()
    assert not np.isnan(shares.hide_labels([1]).labels[0]).any()


@pytest.mark.parametrize(
    ("y", "settings", "sentence"),
    [
        (make_labels() * 2, {}, "its target '2' is not 0 or 1, for each label"),
        (make_labels()[:, :, None], {}, "targets have the shape [40, 3, 1]"),
        (make_labels(), {"data.classes": ["a", "b"]}, "key 'data.classes' has 2 names, but targets have 3 labels"),
        (make_labels(), {"data.labels": {"a": "b"}}, "key 'data.labels' is for classes"),
        (make_labels()[:, :, None].repeat(2, 2), {"training.task": "regression"}, "give one number for each output"),
        (make_labels(), {"training.task": "classification"}, "for one-hot labels use the argmax"),
        (make_labels(), {"algorithm.name": "fedproto"}, "training.task must be a task with classes"),
    ],
)
def test_what_is_refused(tmp_path, y, settings, sentence):
    with pytest.raises(fedmutual.UserError, match=re.escape(sentence)):
        fedmutual.run(write_npz(tmp_path, y)(**settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


SIDES = (4, 6)
MASKS = {"training.task": "segmentation", "model.shared": "unet"}


def write_masks(folder, y, **arrays):
    rng = np.random.default_rng(0)
    np.savez(folder / "rows.npz", x=rng.normal(size=(ROWS, *SIDES)).astype("float32"), y=y, **arrays)
    file = folder / "masks.toml"
    file.write_text(CONFIG)
    return lambda **more: fedmutual.load_config(file, **{"data.root": folder / "rows.npz", **MASKS, **more})


def make_masks(classes=3, sides=SIDES):
    return np.random.default_rng(1).integers(0, classes, (ROWS, *sides))


def test_masks_are_read_under_the_names_of_their_classes(tmp_path):
    y = make_masks()
    make_config = write_masks(tmp_path, y.astype(np.uint8))
    federation = load(make_config(**{"data.classes": ["paper", "ink", "stain", "tear"]}))
    assert (federation.space.classes, federation.space.outputs) == (("paper", "ink", "stain", "tear"), 4)
    rows = federation.clients["0"].private
    x, targets = next(iter(rows.rows([torch.arange(len(rows))])))
    assert (targets.dtype, x.shape[2:]) == (torch.int64, targets.shape[1:])
    assert targets.tolist() == y[rows.index].tolist()
    assert load(make_config()).space.classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("values", "settings", "classes", "numbers"),
    [
        ([0, 255], {"data.labels": {"255": "1"}}, ("0", "1"), [0, 1]),
        ([0, 1, 255], {"data.labels": {"255": "2"}}, ("0", "1", "2"), [0, 1, 2]),
        ([0, 255], {"data.labels": {"0": "paper", "255": "ink"}}, ("ink", "paper"), [1, 0]),
        ([0, 255], {"data.labels": {"255": "ink"}, "data.classes": ["paper", "ink"]}, ("paper", "ink"), [0, 1]),
        ([0, 255], {"data.classes": ["0", "255"]}, ("0", "255"), [0, 1]),
        ([False, True], {}, ("0", "1"), [0, 1]),
    ],
)
def test_values_of_masks_become_classes(tmp_path, values, settings, classes, numbers):
    y = make_masks(len(values))
    federation = load(write_masks(tmp_path, np.array(values)[y])(**settings))
    assert federation.space.classes == classes
    rows = federation.clients["0"].private
    _, targets = next(iter(rows.rows([torch.arange(len(rows))])))
    assert targets.tolist() == np.array(numbers)[y[rows.index]].tolist()


def make_wrong_pixel(value):
    y = make_masks()
    y[7, 1, 2] = value
    return y


@pytest.mark.parametrize(
    ("y", "settings", "sentence"),
    [
        (make_masks().astype("float32"), {}, "targets are float32; give whole numbers, the class of each pixel"),
        (make_masks()[:, 0, 0], {}, "targets have the shape [40]; give a class number for each pixel"),
        (make_masks(sides=(6, 4)), {}, "masks are [6, 4] and images [4, 6]; give both the same sides"),
        (make_masks(), {"data.size": [8, 8]}, "remove 'data.size'"),
        (make_masks(), {"data.augment": "crop-flip"}, "moves the pixels of an image, but not of its mask"),
        (make_masks(), {"data.classes": ["a", "b"]}, "name all classes in data.classes (there are 'a', 'b')"),
        (make_wrong_pixel(-1), {}, "row 7 of 'x'"),
        (make_wrong_pixel(-1), {}, "its mask holds -1, which is no class"),
        (make_wrong_pixel(2**40), {}, "the masks hold the values '0', '1', '2', '1099511627776'"),
        (
            make_masks(2) * 255,
            {},
            "the values '0', '255', and classes are numbered from 0; give each value its class: "
            'data.labels = { 255 = "1" }',
        ),
        (make_masks(2) * 128, {}, 'data.labels = { 128 = "1" }'),
        (np.array([0, 1, 255])[make_masks()], {}, 'data.labels = { 255 = "2" }'),
        (np.repeat(make_masks(2)[..., None], 3, 3), {}, "convert colours to class numbers first"),
        (make_masks()[:, None], {}, "remove the axis of size 1: y.squeeze(1)"),
        (make_masks()[..., None], {}, "remove the axis of size 1: y.squeeze(3)"),
        (make_masks() * 0, {}, "all masks hold the value 0 alone; a segmentation needs two classes"),
        (make_masks() * 0 + 255, {"data.labels": {"255": "ill"}}, "all masks hold the value 255 alone"),
        (make_masks(), {"data.labels": {"a": "b"}}, "key 'data.labels' renames 'a', but no label has that name"),
        (make_masks(), {"model.shared": "mlp"}, "a segmentation needs a network with logits of each pixel"),
        (make_masks(), {"model.part": "features"}, "use model.adaptor = 'rest'"),
        (make_masks(), {"algorithm.name": "fedproto"}, "training.task must be a task with classes"),
        (make_masks(), {"partition.name": "dirichlet"}, "partition"),
    ],
)
def test_what_is_refused_of_masks(tmp_path, y, settings, sentence):
    with pytest.raises(fedmutual.UserError, match=re.escape(sentence)):
        fedmutual.run(write_masks(tmp_path, y)(**settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_masks_of_one_declared_class_are_told():
    assert "hold the class 'a' alone" in note_one_class(make_masks() * 0, ("a", "b", "c"), "x")[0]
    assert note_one_class(make_masks(), ("a", "b", "c"), "x") == []


def write_table(folder, cells="1,0", header="age,fever,cough"):
    rows = [f"{20 + k},{k % 2},{int(k % 3 == 0)}" for k in range(ROWS - 1)] + [f"90,{cells}"]
    (folder / "rows.csv").write_text("\n".join([header, *rows]))
    file = folder / "labels.toml"
    file.write_text(CONFIG.replace('"npz"', '"csv"').replace("rounds", 'data.label = ["fever", "cough"]\nrounds'))
    return lambda **more: fedmutual.load_config(file, **{"data.root": folder / "rows.csv", **more})


@pytest.mark.parametrize("cells", ["1,0", "True, 0.0"])
def test_columns_of_a_table_are_labels(tmp_path, cells):
    federation = load(write_table(tmp_path, cells)())
    assert (federation.space.classes, federation.space.columns) == (("fever", "cough"), ("age",))
    rows = federation.clients["0"].private
    (x, targets) = next(iter(rows.rows([torch.arange(len(rows))])))
    for age, labels in zip(x[:, 0].tolist(), targets.tolist(), strict=True):
        k = age - 20
        assert labels == ([1, 0] if age == 90 else [k % 2, int(k % 3 == 0)])


@pytest.mark.parametrize(
    ("cells", "settings", "sentence"),
    [
        ("1,2", {}, "line 41 of {folder}/rows.csv: its target '2' of 'cough' is not 0 or 1, for each label"),
        (",0", {}, "line 41 of {folder}/rows.csv: its label is missing (1 of 40 labels)"),
        ("1,0", {"data.label": ["fever", "rash"]}, "there is no column 'rash', which data.label names"),
        ("1,0", {"data.label": ["fever", "fever"]}, "each text once"),
        ("1,0", {"data.label": []}, "at least one text"),
        ("1,0", {"data.label": "fever"}, "name the columns of 0 and 1 in a list"),
        ("1,0", {"training.task": "classification"}, "key 'data.label' is a list, but"),
        ("1,0", {"data.columns": {"age": "number", "cough": "number"}}, "which data.label names; remove one"),
    ],
)
def test_columns_that_are_not_labels_are_refused(tmp_path, cells, settings, sentence):
    with pytest.raises(fedmutual.UserError, match=re.escape(sentence.format(folder=tmp_path))):
        load(write_table(tmp_path, cells)(**settings))


def read_rows(federation):
    """Return x and the targets of the training rows of client 0."""
    rows = federation.clients["0"].private
    x, targets, *_ = next(iter(rows.rows([torch.arange(len(rows))])))
    return x, targets, rows.index


@pytest.mark.parametrize("form", ["a table with a truth value", "scikit-survival"])
def test_times_of_survival_in_every_form(form):
    table = pd.DataFrame({"x": np.arange(ROWS), "time": np.arange(ROWS) + 1.0, "event": np.arange(ROWS) % 2 == 1})
    train, label = table, ["time", "event"]
    if form == "scikit-survival":
        y = np.array([*zip(table["event"], table["time"], strict=True)], dtype=[("event", bool), ("time", float)])
        train, label = (table.drop(columns=label), y), None
    source = make_memory_source(train, None, label, "north")
    labels = clean_labels(source.train, DataConfig()).labels
    assert labels.tolist() == table[["time", "event"]].astype(float).to_numpy().tolist()


@pytest.mark.parametrize(
    ("task", "settings", "names", "outputs"),
    [
        ("regression", {}, ("fever", "cough"), 2),
        ("survival", {"data.times": [1, 2.5]}, ("1", "2.5"), 2),
        ("survival", {}, tuple(f"{2.0**k:.10g}" for k in range(-10, 21)), 31),
        ("cox", {}, ("log hazard ratio",), 1),
    ],
)
def test_several_columns_are_numbers_or_times(tmp_path, task, settings, names, outputs):
    federation = load(write_table(tmp_path)(**{"training.task": task, **settings}))
    assert (federation.space.classes, federation.space.outputs) == (names, outputs)
    x, targets, _ = read_rows(federation)
    assert targets.dtype == torch.float32
    assert [[k % 2, int(k % 3 == 0)] for k in (int(age) - 20 for age in x[:, 0]) if k < 70] == [
        row for age, row in zip(x[:, 0].tolist(), targets.tolist(), strict=True) if age < 90
    ]


def make_blank(y, value, rows=(3, 7)):
    y = y.astype(float)
    y[list(rows)] = value
    return y


@pytest.mark.parametrize(
    ("y", "settings", "blank"),
    [
        (make_blank(np.arange(ROWS) % 2, np.nan), {"training.task": "classification"}, -1),
        (np.array(["1", "2", "", "2"] * 10), {"training.task": "ordinal"}, -1),
        (np.array(["a", "b", "unknown", "b"] * 10), {"data.labels": {"unknown": ""}, "training.task": "classification"}, -1),
        (make_blank(make_labels(), np.nan), {}, np.nan),
        (make_blank(np.arange(ROWS), np.nan), {"training.task": "regression"}, np.nan),
    ],
)  # fmt: skip
def test_labels_may_be_missing(tmp_path, y, settings, blank):
    make_config = write_npz(tmp_path, y)
    with pytest.raises(fedmutual.UserError, match=r"data.unlabelled = true"):
        load(make_config(**settings))
    federation = load(make_config(**{"data.unlabelled": True, "split.validation": 0.2, **settings}))
    _, targets, index = read_rows(federation)
    is_blank = (y == "") | (y == "unknown") if y.dtype.kind == "U" else np.isnan(y)
    expected = is_blank.reshape(ROWS, -1).any(1)[index]
    is_missing = (targets == blank) if blank == -1 else targets.isnan()
    assert is_missing.reshape(len(targets), -1).any(1).tolist() == expected.tolist()
    if blank == -1:
        assert federation.partition["classes"][-1] == "no label"
        assert federation.partition["clients"]["0"]["counts"]["private"][-1] == expected.sum()


def test_a_class_is_not_called_as_rows_without_a_label(tmp_path):
    make_config = write_npz(tmp_path, np.array(["a", "no label", "", "a"] * 10))
    settings = {"training.task": "classification", "data.unlabelled": True}
    with pytest.raises(fedmutual.DataError, match=r'rename it: data\.labels = \{ "no label" = "another name" }'):
        load(make_config(**settings))
    assert load(make_config(**settings, **{"data.labels": {"no label": "b"}})).partition["classes"] == ["a", "b", "no label"]


@pytest.mark.parametrize(("policy", "value"), [("ignore", np.nan), ("0", 0), ("1", 1)])
def test_an_uncertain_label_is_what_the_policy_says(tmp_path, policy, value):
    y = make_blank(make_labels(), -1)
    make_config = write_npz(tmp_path, y)
    with pytest.raises(fedmutual.UserError, match=r"data.uncertain = 'ignore', '0' or '1'"):
        load(make_config())
    _, targets, index = read_rows(load(make_config(**{"data.uncertain": policy})))
    np.testing.assert_array_equal(targets.numpy(), np.where(y == -1, value, y)[index])


def test_masks_have_an_ignored_value_and_may_be_of_volumes(tmp_path):
    y = np.array([0, 1, 255])[make_masks(sides=(2, 4, 6))]
    np.savez(tmp_path / "rows.npz", x=np.random.default_rng(0).normal(size=(ROWS, 1, 2, 4, 6)).astype("float32"), y=y)
    (tmp_path / "masks.toml").write_text(CONFIG)
    settings = {"data.root": tmp_path / "rows.npz", **MASKS, "data.labels": {"255": ""}}
    with pytest.raises(fedmutual.UserError, match=r"set data.unlabelled = true"):
        load(fedmutual.load_config(tmp_path / "masks.toml", **settings))
    federation = load(fedmutual.load_config(tmp_path / "masks.toml", **settings, **{"data.unlabelled": True}))
    assert federation.space.classes == ("0", "1")
    _, targets, index = read_rows(federation)
    assert targets.tolist() == np.where(y == 255, -1, y)[index].tolist()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"data.times": [1, 2]}, "key 'data.times' is for training.task = 'survival'"),
        ({"data.times": [2, 1], "training.task": "survival"}, "must be increasing numbers"),
        ({"data.unlabelled": True, "training.task": "cox"}, "key 'data.unlabelled' is not for survival"),
        ({"data.classes": ["a"], "training.task": "survival"}, "data.times names its outputs"),
        ({"data.uncertain": "0", "training.task": "regression"}, "key 'data.uncertain' is for training.task = 'multilabel'"),
        ({"training.task": "survival"}, "targets have the shape [40, 3]; give two numbers for each"),
        ({"training.task": "classification", "data.unlabelled": True}, "for one-hot labels use the argmax"),
    ],
)
def test_keys_of_other_targets_are_refused(tmp_path, settings, sentence):
    with pytest.raises(fedmutual.UserError, match=re.escape(sentence)):
        load(write_npz(tmp_path, make_labels())(**settings))


@pytest.mark.parametrize(("cell", "sentence"), [((-1, 1), "'-1' of 'age'"), ((1, 2), "'2' of 'death'")])
def test_a_time_or_an_event_that_cannot_be_is_named(tmp_path, cell, sentence):
    y = np.ones((ROWS, 2), dtype=int)
    y[5] = cell
    table = pd.DataFrame({"x": range(ROWS), "age": y[:, 0], "death": y[:, 1]})
    frame = fedmutual.Site(train=table, label=["age", "death"])
    with pytest.raises(fedmutual.UserError, match=re.escape(f"its target {sentence} is not a time of at least 0")):
        fedmutual.federate({"a": frame}, "independent", shared="mlp", task="survival", rounds=1, progress=False)
