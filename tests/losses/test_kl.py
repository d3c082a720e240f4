"""The divergence: against scipy, at the edges, and as a property."""

import doctest
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax, rel_entr, softmax

from fedmutual import losses
from fedmutual.losses import kl

logits = st.integers(2, 6).flatmap(
    lambda c: arrays(np.float64, (2, 3, c), elements=st.floats(-50, 50, allow_subnormal=False))
)


@given(logits)
def test_values_are_those_of_scipy(z: np.ndarray) -> None:
    p, q = softmax(z, axis=-1)
    ours = kl(*torch.from_numpy(log_softmax(z, axis=-1)))
    np.testing.assert_allclose(ours, rel_entr(p, q).sum(-1), rtol=1e-9, atol=1e-9)


@given(logits)
def test_never_negative_and_zero_only_where_equal(z: np.ndarray) -> None:
    log_p, log_q = torch.from_numpy(z).log_softmax(-1)
    distance = (log_p.exp() - log_q.exp()).abs().sum(-1)
    assert (kl(log_p, log_q) >= distance.square() / 2 - 1e-12).all()  # Pinsker: above zero as soon as p and q differ
    assert (kl(log_p, log_p) == 0).all()


def test_a_probability_of_zero_counts_as_zero() -> None:
    log_p = torch.tensor([[0.0, -math.inf, -math.inf]], dtype=torch.float64)
    log_q = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log().requires_grad_()
    value = kl(log_p, log_q)
    assert value.item() == pytest.approx(math.log(2), abs=1e-15)
    value.sum().backward()
    assert log_q.grad is not None
    assert log_q.grad.tolist() == [[-1.0, 0.0, 0.0]]  # d/d log q = -p


def test_infinite_where_q_rules_out_what_p_does_not() -> None:
    assert kl(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]).log()).item() == math.inf


def test_a_nan_is_not_hidden() -> None:
    good = torch.zeros(2, 3).log_softmax(-1)
    bad = torch.tensor([[0.0, 0.0, 0.0], [0.0, math.nan, 0.0]]).log_softmax(-1)
    for value in (kl(good, bad), kl(bad, good)):
        assert value.isnan().tolist() == [False, True]


def test_the_examples_of_the_docstrings() -> None:
    tried = doctest.testmod(losses)
    assert tried.attempted > 0
    assert tried.failed == 0
