"""Numbers as targets: losses and their gradients by hand, scores by hand."""

import pytest
import torch

from fedmutual.losses import Regression
from fedmutual.scores import OF_NUMBERS, score_regression


def test_the_mutual_losses_by_hand():
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


def test_with_alpha_one_it_is_training_alone():
    personal, meme, y = torch.randn(4, 1), torch.randn(4, 1), torch.randn(4)
    a, _ = Regression().mutual(personal, meme, y, torch.tensor(1.0), torch.tensor(0.5), 1.0)
    assert a == Regression().fit(personal, y)


def test_scores_by_hand():
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
