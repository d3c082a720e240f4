"""Both losses of mutual learning: values against scipy, gradients against the library autograd, and by hand."""

import math
from collections.abc import Callable
from itertools import product

import autograd
import autograd.numpy as anp
import numpy as np
import pytest
import torch
from autograd.scipy.special import logsumexp
from scipy.special import log_softmax, rel_entr, softmax
from torch import Tensor, nn

from fedmutual.losses import Classification, mutual

B, C = 5, 4
SETTINGS = list(product((0.0, 0.3, 1.0), (0.0, 0.3, 1.0), (1.0, 3.0)))  # alpha, beta, temperature

draw = np.random.default_rng(0)
PERSONAL, MEME = 3 * draw.normal(size=(2, B, C))
TARGETS = draw.integers(0, C, B)


def ours(alpha: float, beta: float, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> (personal loss, meme loss, personal logits, meme logits)"""
    personal, meme = (torch.tensor(z, requires_grad=True) for z in (PERSONAL, MEME))
    return *mutual(personal, meme, torch.tensor(TARGETS), alpha, beta, temperature), personal, meme


def by_scipy(student: np.ndarray, teacher: np.ndarray, weight: float, t: float) -> float:
    """weight CE(student) + (1 - weight) T^2 KL(teacher || student)"""
    ce = -log_softmax(student, axis=-1)[np.arange(B), TARGETS].mean()
    return float(
        weight * ce + (1 - weight) * t**2 * rel_entr(softmax(teacher / t, -1), softmax(student / t, -1)).sum(-1).mean()
    )


def by_autograd(teacher: np.ndarray, weight: float, t: float) -> Callable[[np.ndarray], float]:
    """Return the loss as a function of the student alone, in the operations of the library autograd."""

    def log_soft(z: np.ndarray) -> np.ndarray:
        return z - logsumexp(z, axis=-1, keepdims=True)

    def loss(student: np.ndarray) -> float:
        ce = -anp.mean(anp.sum(log_soft(student) * np.eye(C)[TARGETS], axis=-1))
        log_p = log_soft(teacher / t)
        kl = anp.mean(anp.sum(anp.exp(log_p) * (log_p - log_soft(student / t)), axis=-1))
        return weight * ce + (1 - weight) * t * t * kl

    return loss


@pytest.mark.parametrize(("alpha", "beta", "temperature"), SETTINGS)
def test_values_are_those_of_scipy(alpha: float, beta: float, temperature: float) -> None:
    personal_loss, meme_loss, *_ = ours(alpha, beta, temperature)
    assert personal_loss.shape == meme_loss.shape == ()
    assert personal_loss.item() == pytest.approx(by_scipy(PERSONAL, MEME, alpha, temperature), abs=1e-9)
    assert meme_loss.item() == pytest.approx(by_scipy(MEME, PERSONAL, beta, temperature), abs=1e-9)


@pytest.mark.parametrize(("alpha", "beta", "temperature"), SETTINGS)
def test_gradients_are_those_of_autograd(alpha: float, beta: float, temperature: float) -> None:
    personal_loss, meme_loss, personal, meme = ours(alpha, beta, temperature)
    gradients = torch.autograd.grad([personal_loss, meme_loss], [personal, meme])  # in one pass, as the engines take it
    wanted = (
        autograd.grad(by_autograd(MEME, alpha, temperature))(PERSONAL),
        autograd.grad(by_autograd(PERSONAL, beta, temperature))(MEME),
    )
    for a, b in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("alpha", "beta", "temperature"), SETTINGS)
def test_a_loss_moves_its_own_network_only(alpha: float, beta: float, temperature: float) -> None:
    personal, meme = nn.Linear(3, C), nn.Linear(3, C)
    x = torch.ones(B, 3)
    for trained, untrained, loss in ((personal, meme, 0), (meme, personal, 1)):
        losses = mutual(personal(x), meme(x), torch.tensor(TARGETS), alpha, beta, temperature)
        personal.zero_grad()
        meme.zero_grad()
        losses[loss].backward()
        assert all(p.grad is None for p in untrained.parameters())
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.parameters())


def test_settings_as_tensors() -> None:
    z = torch.tensor(PERSONAL), torch.tensor(MEME), torch.tensor(TARGETS)
    settings = torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    assert mutual(*z, *settings) == mutual(*z, 0.3, 0.7)
    assert Classification().mutual(*z, *settings, 2.0) == mutual(*z, 0.3, 0.7, 2.0)


def test_fit_is_cross_entropy() -> None:
    value = Classification().fit(torch.tensor(PERSONAL), torch.tensor(TARGETS)).item()
    assert value == pytest.approx(by_scipy(PERSONAL, MEME, 1.0, 1.0), abs=1e-12)


# Temperature. KL's gradient in the student's logits is (q_T - p_T) / (T B), so T^2 makes it T (q_T - p_T) / B. For large T
# a softmax is 1 / C + (z - mean z) / (C T), which leaves ((z_q - mean z_q) - (z_p - mean z_p)) / (B C): T has dropped out.


def distilled(temperature: float) -> np.ndarray:
    personal_loss, _, personal, _ = ours(0.0, 0.0, temperature)
    return torch.autograd.grad(personal_loss, personal)[0].numpy()


def test_temperature_squared_keeps_the_scale_of_the_gradient() -> None:
    q, p = (z - z.mean(-1, keepdims=True) for z in (PERSONAL, MEME))
    limit = (q - p) / (B * C)
    np.testing.assert_allclose(distilled(1e4), limit, rtol=0, atol=1e-3 * np.abs(limit).max())


# Edges


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("gap", [120.0, 1e4])
def test_logits_far_apart_stay_finite(gap: float, temperature: float, dtype: torch.dtype) -> None:
    # Each row: what the personal net is sure of, then what the meme is sure of.
    personal = torch.tensor([[gap, -gap], [gap, -gap], [0.0, 0.0]], dtype=dtype, requires_grad=True)
    meme = torch.tensor([[-gap, gap], [gap, -gap], [-gap, gap]], dtype=dtype, requires_grad=True)
    personal_loss, meme_loss = mutual(personal, meme, torch.tensor([0, 1, 1]), 0.5, 0.5, temperature)
    # CE personal: 0, 2 gap, ln 2; meme: 2 gap, 2 gap, 0.  T^2 KL(meme || personal): T 2 gap, 0, T^2 ln 2.
    # T^2 KL(personal || meme): T 2 gap, 0, and of (1/2, 1/2) against (0, 1) T^2 (gap / T - ln 2) = T gap - T^2 ln 2.
    t, ln2 = temperature, math.log(2)
    wanted = (2 * gap + ln2 + t * 2 * gap + t * t * ln2) / 6, (4 * gap + t * 2 * gap + t * gap - t * t * ln2) / 6
    assert personal_loss.item() == pytest.approx(wanted[0], rel=1e-6)
    assert meme_loss.item() == pytest.approx(wanted[1], rel=1e-6)
    for gradient in torch.autograd.grad([personal_loss, meme_loss], [personal, meme]):
        assert gradient.isfinite().all()
        # CE's gradient is at most 1 an entry, T^2 KL's at most T; halves, over three rows
        assert gradient.abs().max() <= (1 + t) / 6 + 1e-6


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_not_hidden(who: int, value: float) -> None:
    z = [torch.zeros(2, 3), torch.zeros(2, 3)]
    z[who][1, 2] = value
    for loss in mutual(*z, torch.tensor([0, 0]), 0.5, 0.5):
        assert loss.isnan()
