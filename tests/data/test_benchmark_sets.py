"""Data sets and the protocol that this field compares on, read from small files of their published layouts."""

import json

import numpy as np
import pytest
from PIL import Image

import fedmutual
from fedmutual.config import parse_config
from fedmutual.data import load
from fedmutual.data.check import find_problems
from fedmutual.data.partition import pfllib
from fedmutual.errors import ConfigError, DataError


def federation(name, root, **more):
    return load(parse_config({"data": {"name": name, "root": str(root)}, "partition": {"clients": 2}} | more))


def rows(part):
    (batch,) = part.rows([np.arange(len(part))])
    return batch


# MedMNIST


@pytest.fixture
def medmnist(tmp_path):
    """The arrays of a file of MedMNIST: 60, 20 and 20 images, labels [n, 1]."""
    rng, arrays = np.random.default_rng(0), {}
    for kind, n in (("train", 60), ("val", 20), ("test", 20)):
        arrays[f"{kind}_images"] = rng.integers(0, 256, (n, 28, 28, 3), dtype=np.uint8)
        arrays[f"{kind}_labels"] = (np.arange(n) % 4).astype(np.uint8)[:, None]
    return tmp_path / "pathmnist.npz", arrays


def test_medmnist_trains_on_training_and_validation_rows(medmnist):
    path, arrays = medmnist
    np.savez(path, **arrays)
    loaded = federation("medmnist", path)
    assert (loaded.space.shape, len(loaded.space.classes), len(loaded.test)) == ((3, 28, 28), 4, 20)
    assert sum(len(shares.private) for shares in loaded.clients.values()) == 80


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda a: a.pop("val_labels"), "there is no array 'val_labels'"),
        (lambda a: a.update(train_labels=np.zeros((60, 14))), "give each row as many labels as the others"),
        (lambda a: a.update(train_images=np.zeros((60, 28, 28, 28), np.uint8)), "holds volumes of 28 x 28 x 28"),
    ],
)
def test_a_file_that_is_not_medmnists_is_named(medmnist, change, sentence):
    path, arrays = medmnist
    change(arrays)
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=sentence) as problem:
        federation("medmnist", path)
    assert "pathmnist.npz" in str(problem.value)


def test_several_labels_of_medmnist_need_the_task(medmnist):
    path, arrays = medmnist
    for kind, n in (("train", 60), ("val", 20), ("test", 20)):
        arrays[f"{kind}_labels"] = np.random.default_rng(0).integers(0, 2, (n, 14), dtype=np.uint8)
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=r"training\.task = 'multilabel'"):
        federation("medmnist", path)
    assert len(federation("medmnist", path, training={"task": "multilabel"}).space.classes) == 14


# FEMNIST


def write_leaf(folder, **writers):
    for part, n in (("train", 9), ("test", 3)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        data = {w: {"x": [[k / 784] * 784 for k in range(n)], "y": [k % 3 for k in range(n)]} for w in writers[part]}
        content = {"users": list(data), "num_samples": [n] * len(data), "user_data": data}
        (folder / part / f"all_data_0_niid_0_keep_0_{part}_9.json").write_text(json.dumps(content))
    return folder


DOMAINS = {"partition": {"kind": "domains"}, "split": {"validation": 0.3}}


def test_each_writer_of_femnist_is_a_client(tmp_path):
    both = ("f0001_41", "f0002_07")
    loaded = federation("femnist", write_leaf(tmp_path, train=both, test=both), **DOMAINS)
    assert tuple(loaded.clients) == both
    assert (loaded.space.shape, len(loaded.space.classes), len(loaded.test)) == ((1, 28, 28), 62, 6)
    assert loaded.space.classes[10:12] == ("A", "B")
    assert [len(shares.test) for shares in loaded.clients.values()] == [3, 3]


def test_upper_and_lower_case_classes_of_femnist_are_not_suspicious(tmp_path):
    both = ("f0001_41", "f0002_07")
    root = str(write_leaf(tmp_path, train=both, test=both))
    problems = find_problems(parse_config({"data": {"name": "femnist", "root": root}, **DOMAINS}))
    assert problems
    assert not any("look alike" in problem for problem in problems)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d["f1"]["x"].__setitem__(0, [0.0] * 100), r"train_9\.json: writer 'f1'"),
        (lambda d: d["f1"]["y"].__setitem__(0, 62), "writer 'f1': needs images x of 784 numbers, and for"),
        (lambda d: d["f1"]["y"].pop(), r"x is \[9, 784\] and y \[8\]"),
        (lambda d: d["f1"].update(y=[[k] for k in d["f1"]["y"]]), r"y \[9, 1\]"),
        (lambda d: d["f1"]["x"].__setitem__(0, ["0.5"] * 784), "writer 'f1': needs images x of 784 numbers"),
        (lambda d: d["f1"]["x"].__setitem__(0, [10**400] * 784), "writer 'f1': needs images x of 784 numbers"),
    ],
)
def test_a_damaged_file_of_leaf_is_named(tmp_path, change, sentence):
    folder = write_leaf(tmp_path, train=("f1", "f2"), test=("f1", "f2"))
    (path,) = (folder / "train").iterdir()
    content = json.loads(path.read_text())
    change(content["user_data"])
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=sentence):
        federation("femnist", folder, **DOMAINS)


def test_writers_in_one_part_only_are_refused(tmp_path):
    folder = write_leaf(tmp_path, train=("f1", "f2"), test=("f1",))
    with pytest.raises(DataError, match="'f2' has examples in one of train and test only"):
        federation("femnist", folder, **DOMAINS)
    with pytest.raises(DataError, match="there are no json files of LEAF"):
        federation("femnist", tmp_path / "none", **DOMAINS)
    (next((folder / "train").iterdir())).write_text("[" * 200_000)
    with pytest.raises(DataError, match=r"train_9\.json: is no json of LEAF's FEMNIST \(RecursionError"):
        federation("femnist", folder, **DOMAINS)


# Tiny-ImageNet


@pytest.fixture
def tiny(tmp_path):
    """Two classes of ten training images, four validation images."""
    for k, name in enumerate(("n01443537", "n01629819")):
        (tmp_path / "train" / name / "images").mkdir(parents=True)
        for i in range(10):
            Image.new("RGB", (64, 64), (k * 100, i, 0)).save(tmp_path / "train" / name / "images" / f"{name}_{i}.JPEG")
    (tmp_path / "val" / "images").mkdir(parents=True)
    lines = []
    for i in range(4):
        Image.new("RGB", (64, 64), (0, 0, i)).save(tmp_path / "val" / "images" / f"val_{i}.JPEG")
        lines.append(f"val_{i}.JPEG\t{('n01443537', 'n01629819')[i % 2]}\t0\t32\t44\t62\n")
    (tmp_path / "val" / "val_annotations.txt").write_text("".join(lines))
    return tmp_path


def test_tiny_imagenet_is_tested_on_its_validation_images(tiny):
    loaded = federation("tiny-imagenet", tiny)
    assert (loaded.space.shape, loaded.space.classes) == ((3, 64, 64), ("n01443537", "n01629819"))
    assert sum(len(shares.private) for shares in loaded.clients.values()) == 20
    assert len(loaded.test) == 4


@pytest.mark.parametrize(
    "line", ["../../train/n01443537/images/n01443537_0.JPEG\tn01443537", "val_0.JPEG\tn9", "val_9.JPEG\tn01443537"]
)
def test_annotations_name_images_of_their_folder_alone(tiny, line):
    (tiny / "val" / "val_annotations.txt").write_text(f"{line}\t0\t0\t1\t1\n")
    with pytest.raises(DataError, match="line 1 names no image"):
        federation("tiny-imagenet", tiny)


# PFLlib's protocol


def test_a_client_that_is_full_gets_none_of_the_next_class():
    labels = np.repeat(np.arange(10), 60)
    parts = pfllib(labels, 4, 0.1, 3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(600))
    assert min(map(len, parts)) >= 40
    for part in parts:
        counts = np.bincount(labels[part], minlength=10)
        full = counts.cumsum() >= 150  # 600 / 4 rows
        assert not counts[1:][full[:-1]].any()


def test_too_few_rows_are_refused():
    with pytest.raises(DataError, match="4 clients cannot share 3 examples"):
        pfllib([0, 1, 1], 4, 0.1, 0)


def test_the_protocol_has_its_own_numbers_and_split():
    config = parse_config({"partition": {"kind": "pfllib"}})
    assert (config.partition.clients, config.partition.alpha) == (20, 0.1)
    loaded = load(config)
    trained = [len(shares.private) for shares in loaded.clients.values()]
    scored = [len(shares.validation) for shares in loaded.clients.values()]
    assert sum(trained) + sum(scored) == 1797
    assert all(t == int(0.75 * (t + s)) for t, s in zip(trained, scored, strict=True))
    assert min(t + s for t, s in zip(trained, scored, strict=True)) >= 40
    assert len(loaded.test) == sum(scored)


def test_it_divides_the_test_rows_too_and_a_file_gives_it_back(tmp_path, in_tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(500, 4)).astype(np.float32), np.arange(500) % 5
    np.savez("own.npz", x=x[:400], y=y[:400], x_test=x[400:], y_test=y[400:])
    tables = {
        "rounds": 1,
        "data": {"name": "npz", "root": "own.npz"},
        "partition": {"kind": "pfllib", "clients": 3, "alpha": 1.0},
        "split": {"holdout": 0.2},
        "training": {"local_epochs": 1},
        "engine": {"name": "inprocess"},
    }
    fedmutual.run(parse_config(tables), "out")
    record = json.loads((tmp_path / "out/partition.json").read_text())
    assert record["test"]["examples"] == sum(sum(c["counts"]["validation"]) for c in record["clients"].values())
    held = [sum(c["counts"][kind]) for c in record["clients"].values() for kind in c["counts"]]
    assert sum(held) == 500


@pytest.mark.parametrize("key", ["private", "validation", "test"])
def test_keys_of_the_split_that_the_protocol_sets_are_refused(key):
    with pytest.raises(ConfigError, match=f"'split.{key}' has no effect with partition.kind = 'pfllib'"):
        parse_config({"partition": {"kind": "pfllib"}, "split": {key: 0.3}})
