"""Labels: matched by class name, and as users have them in memory: missing labels are refused, bytes are text."""

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedmutual import data
from fedmutual.config import DataConfig, parse_config
from fedmutual.data.examples import ArrayExamples, Part
from fedmutual.data.labels import clean_labels
from fedmutual.errors import ConfigError, DataError
from own_data import config, everything, folder, npz, refused

X = np.arange(24, dtype=np.float32).reshape(12, 2)
HALF: dict[str, Any] = {"split": {"test": 0.5}, "partition": {"clients": 1}}


def classes_of(about: dict[str, Any]) -> dict[int, str]:
    """First feature of each row (it tells the rows of X apart) -> the class that the row got."""
    federation = data.load(config(data=about, **HALF))
    parts = [everything(rows) for rows in (federation.clients["0"].private, federation.test)]
    return {int(a[0]) // 2: federation.space.classes[int(b)] for x, y in parts for a, b in zip(x, y, strict=True)}


def test_a_site_without_class_3_keeps_4_as_4(tmp_path: Path) -> None:
    y = np.array([0, 1, 2, 4] * 3)
    about = npz(tmp_path / "a.npz", x=X, y=y)
    federation = data.load(config(data=about | {"classes": ["0", "1", "2", "3", "4"]}, **HALF))
    assert federation.space.classes == ("0", "1", "2", "3", "4")
    assert set(federation.test.labels.tolist()) == {0, 1, 2, 4}
    assert "no client has training examples of class '3', so no model learns to recognise it" in federation.notes
    federation = data.load(config(data=about, **HALF))  # whole numbers count classes, named or not
    assert set(federation.test.labels.tolist()) == {0, 1, 2, 4}


def test_a_folder_without_class_3_keeps_4_as_4(tmp_path: Path) -> None:
    about = folder(tmp_path, {"0": 4, "1": 4, "2": 4, "4": 4}) | {"classes": ["0", "1", "2", "3", "4"]}
    federation = data.load(config(data=about, **HALF))
    assert set(federation.test.labels.tolist()) == {0, 1, 2, 4}


def test_own_names_are_mapped_to_the_federations(tmp_path: Path) -> None:
    about = npz(tmp_path / "a.npz", x=X, y=np.array(["norm", "pneu", "norm"] * 4))
    about |= {"classes": ["pneumonia", "normal"], "labels": {"norm": "normal", "pneu": "pneumonia"}}
    assert classes_of(about) == {i: "pneumonia" if i % 3 == 1 else "normal" for i in range(12)}
    numbers = npz(tmp_path / "b.npz", x=X, y=np.array([7, 9, 7] * 4))
    numbers |= {"classes": ["pneumonia", "normal"], "labels": {"7": "normal", "9": "pneumonia"}}
    assert classes_of(numbers) == {i: "pneumonia" if i % 3 == 1 else "normal" for i in range(12)}


def test_names_of_the_data_themselves(tmp_path: Path) -> None:
    named = npz(tmp_path / "a.npz", x=X, y=np.array([1, 0, 1] * 4), classes=np.array(["cat", "dog"]))
    assert classes_of(named) == {i: "cat" if i % 3 == 1 else "dog" for i in range(12)}
    assert data.load(config(data=named, **HALF)).space.classes == ("cat", "dog")
    assert data.load(config(data=named | {"classes": ["dog", "eel", "cat"]}, **HALF)).space.classes == ("dog", "eel", "cat")
    assert classes_of(named | {"classes": ["dog", "eel", "cat"]}) == {i: "cat" if i % 3 == 1 else "dog" for i in range(12)}


def test_found_names_are_sorted_as_people_count(tmp_path: Path) -> None:
    about = npz(tmp_path / "a.npz", x=X, y=np.array(["10", "9", "b"] * 4))
    assert data.load(config(data=about, **HALF)).space.classes == ("9", "10", "b")


def test_an_unknown_name_is_named_with_its_file(tmp_path: Path) -> None:
    about = folder(tmp_path, {"cat": 3, "dgo": 3}) | {"classes": ["cat", "dog"]}
    message = refused("dgo/00.png: its class 'dgo' is none of the classes 'cat', 'dog'; did you mean 'dog'?", data=about)
    assert 'data.labels = { dgo = "dog" }' in message
    mapped = about | {"labels": {"dgo": "hound"}}
    refused("its class 'dgo', which data.labels calls 'hound', is none of the classes", data=mapped)


def test_no_class_is_proposed_but_one_that_is_like_it_or_that_it_begins(tmp_path: Path) -> None:
    about = npz(tmp_path / "a.npz", x=X, y=np.array(["B", "M", "unclear"] * 4)) | {"classes": ["malignant", "benign"]}
    message = refused("row 0 of 'x' in", data=about)
    assert "its class 'B' is none of the classes 'malignant', 'benign' (nor are 'M', 'unclear'); did you mean" in message
    assert 'write data.labels = { B = "benign", M = "malignant", unclear = "..." }' in message


OWN = {"label": "label", "name": "csv"}


def test_clients_with_data_of_their_own_are_named_with_their_key(tmp_path: Path) -> None:
    tables = {"town": "benign malignant", "rural 1": "B M"}
    clients = {}
    for name, labels in tables.items():
        path = tmp_path / f"{name}.csv"
        path.write_text("a,label\n" + "".join(f"{i},{labels.split()[i % 2]}\n" for i in range(12)))
        clients[name] = {"data": {"root": str(path)}}
    common = {"data": OWN | {"classes": ["benign", "malignant"]}, "clients": clients, "partition": {}}
    message = refused("client 'rural 1': line 2 of", **common)
    fix = 'clients."rural 1".data.labels = { B = "benign", M = "malignant" }'
    assert fix in message
    renamed = common["data"] | {"labels": {"B": "benign", "M": "malignant"}}
    assert data.load(config(**common | {"data": renamed})).space.classes == ("benign", "malignant")
    assert data.find_problems(config(**common | {"data": renamed}))  # as a run takes them
    slip = common["data"] | {"labels": renamed["labels"] | {"Z": "benign"}}
    refused(
        "key 'data.labels' renames 'Z', but no label has that name; there are 'B', 'M', 'benign'", **common | {"data": slip}
    )
    half = common["data"] | {"labels": {"M": "malignant"}}
    refused('clients."rural 1".data.labels = { M = "malignant", B = "benign" }', **common | {"data": half})
    clients["town"]["data"]["labels"] = {"X": "benign"}
    refused("client 'town': key 'data.labels' renames 'X', but no label has that name", **common)


def test_a_name_in_data_labels_that_no_label_has(tmp_path: Path) -> None:
    about = npz(tmp_path / "a.npz", x=X, y=np.array(["norm", "Pneu", "norm"] * 4))
    message = "key 'data.labels' renames 'pneu', but no label has that name; did you mean 'Pneu'?"
    refused(message, data=about | {"labels": {"norm": "normal", "pneu": "pneumonia"}})
    message = "key 'data.labels' renames 'x', but no label has that name; there are 'Pneu', 'norm'"
    refused(message, data=about | {"labels": {"x": "y"}})
    lacking = npz(tmp_path / "b.npz", x=X, y=np.array([0, 1] * 6), classes=np.array(["cat", "dog", "eel"]))
    assert data.load(config(data=lacking | {"labels": {"eel": "fish"}}, **HALF)).space.classes == ("cat", "dog", "fish")


def test_truth_values_have_one_name_in_arrays_and_tables(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,label\n" + "".join(f"{2 * k},{k % 2 == 0}\n" for k in range(12)))
    for about in (npz(tmp_path / "a.npz", x=X, y=np.array([True, False] * 6)), {"name": "csv", "root": tmp_path / "a.csv"}):
        assert classes_of(about) == {row: ["True", "False"][row % 2] for row in range(12)}
    counted = npz(tmp_path / "a.npz", x=X, y=np.array([True, False] * 6)) | {"classes": ["0", "1"]}
    assert classes_of(counted) == {row: "10"[row % 2] for row in range(12)}  # beside a client with 0 and 1


def test_names_of_ordinal_classes_need_an_order(tmp_path: Path) -> None:
    about = npz(tmp_path / "a.npz", x=X, y=np.array(["low", "middle", "high"] * 4))
    with pytest.raises(ConfigError, match=r"'high', 'low', 'middle'; list them in their order in data.classes"):
        data.load(config(data=about, training={"task": "ordinal"}, **HALF))


def test_whole_numbers_beside_blanks_have_the_names_of_whole_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,label\n" + "0,1.0\n1,0.0\n2,\n" * 4)
    space = data.load(config(data={"name": "csv", "root": tmp_path / "a.csv", "unlabelled": True})).space
    assert space.classes == ("0", "1")


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint8, np.uint64])
def test_labels_of_every_integer_type_are_read(tmp_path: Path, dtype: type) -> None:
    about = npz(tmp_path / "a.npz", x=X, y=np.array([0, 1, 2] * 4, dtype))
    assert classes_of(about) == {row: str(row % 3) for row in range(12)}


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"y": np.array([0, 1, -1] * 4)}, "row 2 of 'x' in PATH: its label -1 is out of range"),
        ({"y": np.array([0, 1, 900] * 4)}, "row 2 of 'x' in PATH: its label 900 is out of range"),
        ({"y": np.array([0, 1, 5] * 4), "classes": np.array(["a", "b"])}, "label 5 is out of range: labels go from 0 to 1"),
        ({"y": np.array([0.0, 1.5, 1.0] * 4)}, "labels must be whole numbers or names, but are float64 (1.5, for example)"),
        ({"y": np.eye(3)[[0, 1, 2] * 4]}, "labels have the shape [12, 3]; give one label for each"),
        ({"y": np.array([0, 1])}, "array 'y' has the shape [2]"),
        ({"y": np.array(["a"] * 12)}, "there is only one class, 'a'; classification needs two"),
    ],
)
def test_labels_that_cannot_be(tmp_path: Path, arrays: dict[str, Any], words: str) -> None:
    path = tmp_path / "a.npz"
    refused(words.replace("PATH", str(path)), data=npz(path, x=X, **arrays))


def test_a_single_class_in_data_classes_is_refused(tmp_path: Path) -> None:
    about = npz(tmp_path / "a.npz", x=X, y=np.array(["a", "b"] * 6)) | {"classes": ["a"]}
    refused("key 'data.classes' names only one class, 'a'; classification needs two", data=about)


def test_a_class_named_twice(tmp_path: Path) -> None:
    refused(
        "key 'data.classes' names 'a' twice", data=npz(tmp_path / "a.npz", x=X, y=X[:, 0]) | {"classes": ["a", "b", "a"]}
    )


def test_a_class_missing_at_one_client_is_not_reported_as_missing_everywhere(tmp_path: Path) -> None:
    both = npz(tmp_path / "both.npz", x=np.arange(40.0).reshape(20, 2), y=np.array(["a", "b"] * 10))
    one = npz(tmp_path / "one.npz", x=np.arange(20.0).reshape(10, 2), y=np.array(["a"] * 10))
    clients = {"both": {"data": both}, "one": {"data": one}}
    given = parse_config({"data": {"name": "npz", "classes": ["a", "b"]}, "clients": clients, "training": {"batch_size": 2}})
    assert not [note for note in data.load(given).notes if "no model learns" in note]


def clean(values, **settings):
    part = Part(ArrayExamples(np.zeros((len(values), 1))), values, lambda row: f"row {row}")
    return clean_labels(part, DataConfig(**settings)).labels


def make_objects(*labels):
    values = np.empty(len(labels), dtype=object)
    values[:] = labels
    return values


@pytest.mark.parametrize(
    ("labels", "cleaned"),
    [
        (np.array([b"ill", b"well"]), ["ill", "well"]),
        (make_objects(b"ill", "ill", np.str_("well")), ["ill", "ill", "well"]),
        (np.array(["ill", "NA", "None"]), ["ill", "NA", "None"]),
        (np.array(["ill", "well"], dtype=np.dtypes.StringDType()), ["ill", "well"]),
        (make_objects(2, np.int64(1)), ["2", "1"]),
        (make_objects(2, 1.5), [2.0, 1.5]),
        (make_objects(Decimal("1.5"), 2), [1.5, 2.0]),
        (np.array([[1, Decimal(0)]], dtype=object), [[1.0, 0.0]]),
        (make_objects(True, np.False_), ["True", "False"]),
        (np.array([[2.5, True]], dtype=object), [[2.5, 1.0]]),
        (np.array([3, 1]), [3, 1]),
        (np.array([], dtype=object), []),
    ],
)
def test_labels_are_read(labels, cleaned):
    assert clean(labels).tolist() == cleaned
    assert len(labels) == 0 or clean(labels).dtype != object


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA, pd.NaT, "", "  ", b"", "nan", "<NA>"])
def test_missing_labels_are_counted(missing):
    with pytest.raises(DataError, match=r"^row 1: its label is missing \(2 of 4 labels\); fill in the labels, drop"):
        clean(make_objects("ill", missing, "well", missing))


@pytest.mark.parametrize(
    "labels",
    [
        np.array([0.0, np.nan]),
        np.array(["ill", np.nan]),
        np.array(["ill", None], dtype=np.dtypes.StringDType(na_object=None)),
        np.array([[0.0, 1.0], [1.0, np.nan]]),
    ],
)
def test_labels_are_missing_in_every_type(labels):
    with pytest.raises(DataError, match=r"^row 1: its label is missing \(1 of 2 labels\)"):
        clean(labels)


def test_text_of_a_missing_value_may_be_a_class():
    labels = np.array(["nan", "<NA>", "ill"])
    assert clean(labels, classes=["nan", "ill"], labels={"<NA>": "ill"}).tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (make_objects(1, "1"), "row 1: its label '1' is text, and the label 1 of row 0 is a number"),
        (make_objects(True, 1), "row 1: its label 1 is a number, and the label True of row 0 is a truth value"),
        (np.array([b"ill", b"\xfc"]), r"row 1: its label b'\xfc' is not UTF-8 text; decode the labels"),
    ],
)
def test_labels_are_of_one_kind(labels, words):
    with pytest.raises(DataError, match=re.escape(words)):
        clean(labels)
