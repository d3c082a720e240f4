"""Labels as users have them in memory: missing labels are refused, bytes are text."""

from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from fedmutual.config import DataConfig
from fedmutual.data.examples import ArrayExamples, Part
from fedmutual.data.raw_labels import clean_labels
from fedmutual.errors import DataError


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
        (np.array([3, 1]), [3, 1]),
        (np.array([], dtype=object), []),
    ],
)
def test_labels_are_read(labels, cleaned):
    assert clean(labels).tolist() == cleaned
    assert len(labels) == 0 or clean(labels).dtype != object


@pytest.mark.parametrize("missing", [None, np.nan, pd.NA, pd.NaT, "", "  ", b"", "nan", "<NA>"])
def test_missing_labels_are_counted(missing):
    with pytest.raises(DataError, match=r"^row 1: its label is missing \(2 of 4 labels\); fill in the labels, or drop"):
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
    with pytest.raises(DataError) as problem:
        clean(labels)
    assert words in str(problem.value)
