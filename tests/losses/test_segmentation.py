"""A class of each pixel: losses and their gradients by hand and against torch, scores against scikit-learn and by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
from torch.distributions import Categorical, kl_divergence

from fedmutual.losses import Classification, Segmentation
from fedmutual.scores import OF_MASKS, score_segmentation

LOG3 = math.log(3)  # as the logit of one of two classes: the posterior 3/4


def test_the_mutual_losses_by_hand():
    # one image of 1 x 2 pixels, two classes. Posteriors of class 1: personal 3/4 and 1/2, meme 1/2 and 1/2
    personal = torch.tensor([[[[0.0, 0.0]], [[LOG3, 0.0]]]], dtype=torch.float64, requires_grad=True)
    meme = torch.zeros(1, 2, 1, 2, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[[1, 0]]])
    losses = Segmentation().mutual(personal, meme, target, torch.tensor(0.25), torch.tensor(0.5), 1.0)
    entropy_personal = (math.log(4 / 3) + math.log(2)) / 2
    meme_from_personal = (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)) / 2  # the second pixel agrees
    personal_from_meme = (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)) / 2
    assert losses[0].item() == pytest.approx(0.25 * entropy_personal + 0.75 * meme_from_personal)
    assert losses[1].item() == pytest.approx(0.5 * math.log(2) + 0.5 * personal_from_meme)
    # d/d logit of class 1 of either term is (own posterior - its target) / pixels; each loss moves its own network only
    sum(losses).backward()
    assert personal.grad[0, 1].flatten().tolist() == pytest.approx(
        [(0.25 * (0.75 - 1) + 0.75 * (0.75 - 0.5)) / 2, 0.25 * 0.5 / 2]
    )
    assert meme.grad[0, 1].flatten().tolist() == pytest.approx([(0.5 * (0.5 - 1) + 0.5 * (0.5 - 0.75)) / 2, 0.5 * 0.5 / 2])


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
