"""Scores against scikit-learn, an independent library, and by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, recall_score, roc_auc_score

from fedmutual.scores import DECLARED, score_classification, score_multilabel, score_segmentation


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(2, 6), st.booleans())
def test_against_scikit_learn(seed, n, classes, tied):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, classes))
    z = z.round() if tied else z  # ties in the ranks
    y = rng.integers(0, classes, n)
    y[:2] = (0, 1)
    ours = score_classification(torch.tensor(z), torch.tensor(y))
    predicted, present = z.argmax(1), np.unique(y)
    p = torch.tensor(z).softmax(1).numpy()  # torch's own: another order of sums would break ties
    assert ours["accuracy"] == pytest.approx(accuracy_score(y, predicted))
    assert ours["loss"] == pytest.approx(log_loss(y, p, labels=range(classes)))
    recall = recall_score(y, predicted, labels=range(classes), average=None, zero_division=0)
    assert ours["balanced_accuracy"] == pytest.approx(np.mean(recall[present]))
    assert ours["auroc"] == pytest.approx(np.mean([roc_auc_score(y == c, p[:, c]) for c in present]))
    assert ours["recall"] == [pytest.approx(recall[c]) if c in present else None for c in range(classes)]


def test_by_hand():
    """Four rows of class 0, one of class 1; class 2 absent. Named: 0, 0, 0, 1, 1."""
    z = torch.tensor([[9.0, 0, 0], [9, 0, 0], [9, 0, 0], [0, 9, 0], [0, 9, 0]])
    ours = score_classification(z, torch.tensor([0, 0, 0, 0, 1]))
    assert ours["examples"] == 5
    assert ours["accuracy"] == pytest.approx(4 / 5)
    assert ours["majority"] == pytest.approx(4 / 5)
    assert ours["balanced_accuracy"] == pytest.approx((3 / 4 + 1) / 2)
    assert ours["recall"] == [3 / 4, 1, None]
    assert ours["auroc"] == pytest.approx((3 / 4 + 1 / 4 / 2 + (3 / 4 + 1 / 4 / 2)) / 2), "3 of 4 pairs in order, one tied"
    assert set(ours) == set(DECLARED)


def test_one_class_has_no_auroc_and_overflow_no_loss():
    z = torch.tensor([[1.0, 0], [0, 1]])
    assert score_classification(z, torch.tensor([1, 1]))["auroc"] is None
    broken = score_classification(torch.full((2, 2), float("nan")), torch.tensor([0, 1]))
    assert (broken["loss"], broken["auroc"], broken["accuracy"]) == (None, None, 0.0)


@pytest.mark.parametrize(
    ("row", "accuracy"),
    [
        ([float("nan"), 0], 0.5),
        ([0, float("nan")], 0.5),
        ([float("inf"), 0], 0.5),
        ([-float("inf"), -float("inf")], 0.5),
        ([0, -float("inf")], 1.0),
    ],
)
def test_a_row_without_an_answer_is_wrong_whatever_its_class(row, accuracy):
    logits = torch.tensor([row, [1.0, 0.0]])
    assert score_classification(logits, torch.tensor([0, 0]))["accuracy"] == accuracy
    pixels = score_segmentation(logits.reshape(2, 2, 1, 1), torch.zeros(2, 1, 1, dtype=torch.long))
    assert pixels["pixel_accuracy"] == (1.0 if accuracy == 1.0 else None)


def test_minus_infinity_is_a_label_that_is_surely_absent():
    logits = torch.tensor([[-float("inf")], [0.5], [1.0]])
    scores = score_multilabel(logits, torch.tensor([[0.0], [1.0], [1.0]]))
    assert (scores["auroc"], scores["f1"]) == (1.0, 1.0)
