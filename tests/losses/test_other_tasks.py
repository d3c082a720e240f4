"""Numbers, several labels and masks as targets: losses and their gradients by hand and against torch, scores against
scikit-learn and by hand.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, log_loss, roc_auc_score
from torch.distributions import Bernoulli, Categorical, kl_divergence

from fedmutual.losses import Classification, MultiLabel, Regression, Segmentation, bernoulli_kl
from fedmutual.scores import OF_LABELS, OF_MASKS, OF_NUMBERS, score_multilabel, score_regression, score_segmentation


def test_the_mutual_losses_of_numbers_by_hand():
    # outputs 1, 3 and 2, 2; targets 0, 2. Squares: personal (1 + 1) / 2 = 1, meme (4 + 0) / 2 = 2, apart (1 + 1) / 2 = 1
    personal = torch.tensor([[1.0], [3.0]], requires_grad=True)
    meme = torch.tensor([[2.0], [2.0]], requires_grad=True)
    y = torch.tensor([0.0, 2.0])
    a, b = Regression().mutual(personal, meme, y, torch.tensor(0.25), torch.tensor(0.75), 1.0)
    assert (a.item(), b.item()) == (0.25 * 1 + 0.75 * 1, 0.75 * 2 + 0.25 * 1)
    # d/d output of a mean square is 2 (difference) / 2; each loss moves its own network only
    (a + b).backward()
    assert personal.grad.flatten().tolist() == [0.25 * 1 + 0.75 * -1, 0.25 * 1 + 0.75 * 1]
    assert meme.grad.flatten().tolist() == [0.75 * 2 + 0.25 * 1, 0.75 * 0 + 0.25 * -1]


def test_scores_of_numbers_by_hand():
    # mean of the targets 2, their squares about it 1 + 0 + 1 = 2, the errors' 1 + 0 + 0 = 1: r2 = 1 - 1/2
    scores = score_regression(torch.tensor([2.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 3.0]))
    assert scores == {
        "examples": 3,
        "loss": pytest.approx(1 / 3),
        "mean_absolute_error": pytest.approx(1 / 3),
        "r2": pytest.approx(0.5),
    }
    assert tuple(scores) == OF_NUMBERS
    assert score_regression(torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0]))["r2"] is None
    assert score_regression(torch.tensor([float("inf"), 2.0]), torch.tensor([1.0, 2.0]))["loss"] is None


HALF = torch.tensor(0.5)
LOG3 = math.log(3)  # the logit of 3/4, also as that of one of two classes


def test_the_divergence_of_labels_is_torchs():
    generator = torch.Generator().manual_seed(0)
    p, q = torch.randn(2, 50, 4, generator=generator, dtype=torch.float64) * 5
    expected = kl_divergence(Bernoulli(logits=p), Bernoulli(logits=q))
    torch.testing.assert_close(bernoulli_kl(p, q), expected)


BY_HAND = {  # of a task: two labels of one row, or two pixels of one image of two classes -> logits, target, logits of "yes"
    "labels": (MultiLabel(), torch.tensor([[LOG3, 0.0]]), torch.tensor([[1.0, 0.0]]), lambda z: z),
    "pixels": (Segmentation(), torch.tensor([[[[0.0, 0.0]], [[LOG3, 0.0]]]]), torch.tensor([[[1, 0]]]), lambda z: z[0, 1]),
}


@pytest.mark.parametrize(("task", "logits", "target", "choose"), BY_HAND.values(), ids=BY_HAND)
def test_the_mutual_losses_of_labels_and_of_pixels_by_hand(task, logits, target, choose):
    # posteriors of "yes": personal 3/4 and 1/2, meme 1/2 and 1/2; targets yes and no
    personal, meme = (z.double().requires_grad_() for z in (logits, torch.zeros_like(logits)))
    losses = task.mutual(personal, meme, target.double() if target.is_floating_point() else target, HALF / 2, HALF, 1.0)
    entropy_personal = (math.log(4 / 3) + math.log(2)) / 2
    meme_from_personal = (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)) / 2  # of the second the two agree
    personal_from_meme = (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)) / 2
    assert losses[0].item() == pytest.approx(0.25 * entropy_personal + 0.75 * meme_from_personal)
    assert losses[1].item() == pytest.approx(0.5 * math.log(2) + 0.5 * personal_from_meme)
    # d/d logit of "yes" of either term is (own posterior - its target) / 2; each loss moves its own network only
    sum(losses).backward()
    of_personal, of_meme = (choose(z.grad).flatten().tolist() for z in (personal, meme))
    assert of_personal == pytest.approx([(0.25 * (0.75 - 1) + 0.75 * (0.75 - 0.5)) / 2, 0.25 * 0.5 / 2])
    assert of_meme == pytest.approx([(0.5 * (0.5 - 1) + 0.5 * (0.5 - 0.75)) / 2, 0.5 * 0.5 / 2])


def test_a_temperature_softens_both_sides_and_keeps_the_gradients_scale():
    p, m, y = torch.tensor([[2.0]]), torch.tensor([[-4.0]]), torch.tensor([[1.0]])
    loss, _ = MultiLabel().mutual(p, m, y, torch.tensor(0.0), torch.tensor(0.0), 2.0)
    assert loss.item() == pytest.approx(4 * kl_divergence(Bernoulli(logits=m / 2), Bernoulli(logits=p / 2)).item())


def test_scores_of_labels_are_scikit_learns():
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


def test_the_divergence_of_pixels_is_torchs():
    p, m = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, nothing = torch.zeros(3, 5, 6, dtype=torch.long), torch.tensor(0.0)
    of_personal, of_meme = Segmentation().mutual(p, m, y, nothing, nothing, 2.0)
    by_pixel = [Categorical(logits=logits.movedim(1, -1) / 2) for logits in (p, m)]
    assert of_personal.item() == pytest.approx(4 * kl_divergence(by_pixel[1], by_pixel[0]).mean().item())
    assert of_meme.item() == pytest.approx(4 * kl_divergence(by_pixel[0], by_pixel[1]).mean().item())


def test_images_of_one_pixel_are_a_classification():
    p, m = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1))
    y, alpha, beta = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor(0.3), torch.tensor(0.6)
    as_image = (p[..., None, None], m[..., None, None], y[:, None, None])
    expected = Classification().mutual(p, m, y, alpha, beta, 1.5)
    torch.testing.assert_close(Segmentation().mutual(*as_image, alpha, beta, 1.5), expected)
    torch.testing.assert_close(Segmentation().fit(as_image[0], as_image[2]), Classification().fit(p, y))


def test_dice_is_scikit_learns_f1_of_pixels():
    generator = torch.Generator().manual_seed(2)
    z = torch.randn(5, 3, 4, 4, generator=generator)
    y = torch.randint(0, 3, (5, 4, 4), generator=generator)
    scores = score_segmentation(z, y)
    expected = f1_score(y.flatten(), z.argmax(1).flatten(), average=None)
    assert scores["class_dice"] == pytest.approx(expected.tolist())
    assert scores["dice"] == pytest.approx(expected.mean())
    assert scores["pixel_accuracy"] == pytest.approx((z.argmax(1) == y).float().mean().item())
    assert scores["loss"] == pytest.approx(F.cross_entropy(z, y).item())
    assert tuple(scores) == OF_MASKS


def test_a_class_without_examples_and_predictions_does_not_count():
    # four pixels: truth 0 0 1 1, prediction 0 0 0 1; class 2 is nowhere
    z = F.one_hot(torch.tensor([[[0, 0, 0, 1]]]), 3).movedim(-1, 1).float()
    scores = score_segmentation(z, torch.tensor([[[0, 0, 1, 1]]]))
    assert scores["class_dice"] == [pytest.approx(2 * 2 / (3 + 2)), pytest.approx(2 * 1 / (1 + 2)), None]
    assert scores["dice"] == pytest.approx((0.8 + 2 / 3) / 2)
    assert score_segmentation(z / 0, torch.zeros(1, 1, 4, dtype=torch.long))["loss"] is None
