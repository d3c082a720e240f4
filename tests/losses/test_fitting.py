"""Losses on targets by the keys of [training], against torch, torchvision and scikit-learn."""

import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from torchvision.ops import sigmoid_focal_loss

from fedmutual.algorithms import ALGORITHMS
from fedmutual.config.methods import EVERYWHERE, list_training_fields
from fedmutual.config.schema import TrainingConfig
from fedmutual.core import Recipe
from fedmutual.errors import AlgorithmError, ConfigError
from fedmutual.fitting import Fitted, count_weights
from fedmutual.losses import Classification, MultiLabel, Regression, Segmentation
from fedmutual.privacy.context import _describe_code
from fedmutual.stepping import clip_gradients
from toy import Rows

torch.manual_seed(0)
Z, Y = torch.randn(6, 3), torch.tensor([0, 2, 1, 1, 0, 2])
MASK_Z, MASK = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
LABELS = torch.tensor([[1.0, 0, 1], [0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 0, 0], [0, 0, 1]])
W = (1.0, 2.0, 0.5)


def pytorch_weighted(z, y):
    """The sum of w_y times each loss, over the number of rows: torch divides by the sum of the weights."""
    return F.cross_entropy(z, y, weight=torch.tensor(W), reduction="sum") / y.numel()


CASES = {
    "smoothing": (Classification(), {"label_smoothing": 0.2}, Z, Y, F.cross_entropy(Z, Y, label_smoothing=0.2)),
    "smooth masks": (
        Segmentation(),
        {"label_smoothing": 0.2},
        MASK_Z,
        MASK,
        F.cross_entropy(MASK_Z, MASK, label_smoothing=0.2),
    ),
    "weights": (Classification(), {"class_weights": W}, Z, Y, pytorch_weighted(Z, Y)),
    "weighted masks": (Segmentation(), {"class_weights": W}, MASK_Z, MASK, pytorch_weighted(MASK_Z, MASK)),
    "focal": (
        Classification(),
        {"focal": 2.0},
        Z,
        Y,
        (-((1 - (p := Z.softmax(1).gather(1, Y[:, None]))) ** 2) * p.log()).mean(),
    ),
    "focal labels": (MultiLabel(), {"focal": 2.0}, Z, LABELS, sigmoid_focal_loss(Z, LABELS, -1, 2.0, "mean")),
    "weighted labels": (
        MultiLabel(),
        {"class_weights": W},
        Z,
        LABELS,
        F.binary_cross_entropy_with_logits(Z, LABELS, pos_weight=torch.tensor(W)),
    ),
    "own": (Classification(), {"loss": "own:loss", "call": torch.nn.MultiMarginLoss()}, Z, Y, F.multi_margin_loss(Z, Y)),
}


@pytest.mark.parametrize(("task", "keys", "z", "y", "value"), CASES.values(), ids=CASES)
def test_each_key_has_the_value_of_the_library(task, keys, z, y, value):
    fitted, other = Fitted(task, **keys), torch.randn_like(z)
    torch.testing.assert_close(fitted.fit(z, y), value)
    whole, part, half = torch.tensor(1.0), torch.tensor(0.0), torch.tensor(0.5)
    personal, _ = fitted.mutual(z, other, y, whole, whole, 2.0)
    torch.testing.assert_close(personal, value)
    taught, _ = task.mutual(z, other, y, part, part, 2.0)
    torch.testing.assert_close(fitted.mutual(z, other, y, half, half, 2.0)[0], (value + taught) / 2)
    assert fitted.tells == task.tells


def test_rows_without_a_label_do_not_count():
    partly = torch.where(torch.arange(6) < 4, Y, -1)
    fitted = Fitted(Classification(), class_weights=W)
    torch.testing.assert_close(fitted.fit(Z, partly), fitted.fit(Z[:4], Y[:4]))
    blank = LABELS.clone()
    blank[4:] = torch.nan
    labels = Fitted(MultiLabel(), focal=1.0)
    torch.testing.assert_close(labels.fit(Z, blank), labels.fit(Z[:4], LABELS[:4]))


def test_balanced_weights():
    y = torch.tensor([0] * 7 + [2] * 3)
    weights = count_weights(Rows(torch.zeros(10, 1), y), 3, of_labels=False)
    expected = compute_class_weight("balanced", classes=np.array([0, 2]), y=y.numpy())
    assert weights == pytest.approx((expected[0], 0.0, expected[1]))
    assert count_weights(Rows(Z, LABELS), 3, of_labels=True) == pytest.approx((1.0, 2.0, 1.0))


@pytest.mark.parametrize("wrong", [lambda z, y: z, lambda z, y: 1.0, lambda z, y: z[9]])
def test_a_wrong_loss_of_ones_own_is_one_sentence(wrong):
    with pytest.raises(AlgorithmError, match=r"key 'training.loss': 'own:loss' (returned|raised) "):
        Fitted(Classification(), loss="own:loss", call=wrong).fit(Z, Y)


def test_clipped_gradients_are_those_of_torch():
    grads = {"personal.a": torch.randn(3, 2), "personal.b": torch.randn(4), "meme.a": torch.randn(3)}
    params = {name: torch.nn.Parameter(torch.zeros_like(g)) for name, g in grads.items()}
    for name, p in params.items():
        p.grad = grads[name].clone()
    torch.nn.utils.clip_grad_value_(params.values(), 0.7)
    for net in ("personal", "meme"):
        torch.nn.utils.clip_grad_norm_([p for name, p in params.items() if name.startswith(net)], 0.9)
    clipped = clip_gradients(grads, Recipe(clip_norm=0.9, clip_value=0.7))
    torch.testing.assert_close(clipped, {name: p.grad for name, p in params.items()})


def test_every_key_of_training_reaches_something():
    read = EVERYWHERE.union(*map(list_training_fields, ALGORITHMS.values()))
    assert read == TrainingConfig.model_fields.keys()


def test_the_loss_of_the_task_does_not_cancel_with_huge_targets():
    """The mean absolute error of 1e10 and mutual learning from a teacher that is 1 away: beside 1e20 both would be lost."""
    task, half = Fitted(Regression(), loss="own:loss", call=F.l1_loss), torch.tensor(0.5)
    outputs, y = torch.zeros(4, 1), torch.full((4, 1), 1e10)
    personal, _ = task.mutual(outputs, outputs + 2e5, y, half, half, 1.0)
    assert personal == 0.5 * 1e10 + 0.5 * 4e10


def test_the_arguments_and_the_code_of_a_partial_loss_are_part_of_the_digest():
    def describe(**fixed):
        task = Fitted(Regression(), loss="own:loss", call=partial(partial(stepping_loss, **fixed)))
        return _describe_code(SimpleNamespace(task=task), SimpleNamespace(nets={}, optimizers={}))

    made = [describe(**f) for f in ({"scale": 1}, {"scale": 2}, {"scale": torch.ones(2)}, {"scale": torch.zeros(2)})]
    assert len({repr(one) for one in made}) == 4
    assert repr(describe(scale=1)) == repr(made[0])
    assert "test_fitting" in repr(made[0])


class Scaled(nn.Module):
    def __init__(self, scale, inner=None):
        super().__init__()
        self.scale, self.inner, self.lock = scale, inner, threading.Lock()

    def apply_to(self, output, target):
        return stepping_loss(output, target, self.scale)


def test_what_a_loss_holds_is_part_of_the_digest():
    def describe(call):
        task = Fitted(Regression(), loss="own:loss", call=call)
        return repr(_describe_code(SimpleNamespace(task=task), SimpleNamespace(nets={}, optimizers={})))

    makers = (
        Scaled,
        lambda scale: Scaled(1, inner=Scaled([scale])),
        lambda scale: Scaled(nn.Parameter(torch.full((2,), float(scale)))),
        lambda scale: Scaled(np.array([scale])),
        lambda scale: Scaled(scale).apply_to,
        lambda scale: nn.CrossEntropyLoss(label_smoothing=scale / 10),
        lambda scale: lambda output, target: stepping_loss(output, target, scale),
        lambda scale: [lambda output, target: output.sum(), lambda output, target: target.sum()][scale - 1],
        lambda scale: Scaled(np.int64(scale)),
        lambda scale: Scaled((torch.float32, torch.float64)[scale - 1]),
    )
    for make in makers:
        assert describe(make(1)) == describe(make(1)) != describe(make(2))
    assert describe(torch.compile(nn.MSELoss()))  # is not too deep
    loop = Scaled(1)
    loop.scale = [loop]
    with pytest.raises(ConfigError, match="refers to itself"):
        describe(loop)


def stepping_loss(output, target, scale):
    return F.mse_loss(output, target) * scale
