"""Several labels of one example: losses and their gradients by hand, scores against scikit-learn and by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, log_loss, roc_auc_score
from torch.distributions import Bernoulli, kl_divergence

from fedmutual.losses import MultiLabel, bernoulli_kl
from fedmutual.scores import OF_LABELS, score_multilabel

LOG3 = math.log(3)  # the logit of 3/4


def test_the_divergence_is_torchs():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 50, 4, generator=generator, dtype=torch.float64) * 5
    expected = kl_divergence(Bernoulli(logits=p), Bernoulli(logits=q))
    torch.testing.assert_close(bernoulli_kl(p, q), expected)


def test_the_mutual_losses_by_hand():
    # one row, two labels. Posteriors: personal 3/4 and 1/2, meme 1/2 and 1/2; targets 1 and 0
    personal = torch.tensor([[LOG3, 0.0]], dtype=torch.float64, requires_grad=True)
    meme = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    losses = MultiLabel().mutual(personal, meme, target, torch.tensor(0.25), torch.tensor(0.5), 1.0)
    entropy_personal = (math.log(4 / 3) + math.log(2)) / 2
    entropy_meme = math.log(2)
    meme_from_personal = (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)) / 2  # the second label agrees
    personal_from_meme = (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)) / 2
    assert losses[0].item() == pytest.approx(0.25 * entropy_personal + 0.75 * meme_from_personal)
    assert losses[1].item() == pytest.approx(0.5 * entropy_meme + 0.5 * personal_from_meme)
    # d/d logit of either term is (own posterior - its target) / labels; each loss moves its own network only
    sum(losses).backward()
    assert personal.grad.flatten().tolist() == pytest.approx([(0.25 * (0.75 - 1) + 0.75 * (0.75 - 0.5)) / 2, 0.25 * 0.5 / 2])
    assert meme.grad.flatten().tolist() == pytest.approx([(0.5 * (0.5 - 1) + 0.5 * (0.5 - 0.75)) / 2, 0.5 * 0.5 / 2])


def test_a_temperature_softens_both_sides_and_keeps_the_gradients_scale():
    p, m, y = torch.tensor([[2.0]]), torch.tensor([[-4.0]]), torch.tensor([[1.0]])
    loss, _ = MultiLabel().mutual(p, m, y, torch.tensor(0.0), torch.tensor(0.0), 2.0)
    assert loss.item() == pytest.approx(4 * kl_divergence(Bernoulli(logits=m / 2), Bernoulli(logits=p / 2)).item())


def test_scores_are_scikit_learns():
    rng = np.random.default_rng(0)
    y, z = rng.integers(0, 2, (40, 3)), rng.normal(size=(40, 3)).round(1)  # with ties
    scores = score_multilabel(torch.tensor(z), torch.tensor(y, dtype=torch.float32))
    p = 1 / (1 + np.exp(-z))
    assert scores["auroc"] == pytest.approx(roc_auc_score(y, p, average="macro"))
    assert scores["f1"] == pytest.approx(f1_score(y, p > 0.5, average="macro"))
    assert scores["loss"] == pytest.approx(np.mean([log_loss(y[:, k], p[:, k]) for k in range(3)]))
    assert tuple(scores) == OF_LABELS


def test_labels_without_both_values_have_no_auroc_by_hand():
    # label 0: both positives above the negative; label 1: always present, predicted once of twice
    z = torch.tensor([[3.0, 1.0], [2.0, 1.0], [-1.0, -1.0]])
    scores = score_multilabel(z, torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.0, 1.0]]))
    assert scores["label_auroc"] == [1.0, None]
    assert scores["auroc"] == 1.0
    assert scores["f1"] == pytest.approx((1 + 2 * 2 / (2 * 2 + 1)) / 2)
    all_present = score_multilabel(z, torch.ones(3, 2))
    assert all_present["auroc"] is None
    assert score_multilabel(z / 0, torch.ones(3, 2))["loss"] is None
