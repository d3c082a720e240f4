import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmutual.data.draws import apportion, count_classes, make_numpy_generator, sample


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_largest_remainders() -> None:
    # 4 seats on weights 5 : 3 : 1 are 2.22, 1.33 and 0.44: the whole parts are 2, 1, 0, and the greatest rest is the last's
    assert apportion([5, 3, 1], 4, np.array([9, 9, 9]), rng()).tolist() == [2, 1, 1]


def test_caps_pass_on_what_they_refuse() -> None:
    # 10 on three equal weights are 3.33 each; the first takes 2 only, the others share the remaining 8
    assert apportion([1, 1, 1], 10, np.array([2, 9, 9]), rng()).tolist() == [2, 4, 4]
    assert apportion([1, 0, 3], 10, np.array([2, 9, 3]), rng()).tolist() == [2, 0, 3]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=8),
    st.integers(0, 60),
    st.integers(0, 9),
)
def test_apportioned_whole_numbers(pairs: list[tuple[int, int]], total: int, seed: int) -> None:
    weights, caps = (np.array(v) for v in zip(*pairs, strict=True))
    given_ = apportion(weights, total, caps, np.random.default_rng(seed))
    room = caps[weights > 0].sum()
    assert given_.sum() == min(total, room)
    assert ((given_ >= 0) & (given_ <= caps) & ((weights > 0) | (given_ == 0))).all()
    if (weights * total <= caps * weights.sum()).all() and weights.any():  # no cap binds: within one of the exact share
        assert (np.abs(given_ - weights * total / weights.sum()) < 1).all()


def test_ties_go_by_the_stream() -> None:
    first = {tuple(apportion([1, 1, 1], 1, np.array([1, 1, 1]), np.random.default_rng(s))) for s in range(20)}
    assert first == {(1, 0, 0), (0, 1, 0), (0, 0, 1)}


def test_a_sample_has_the_mix_of_the_whole() -> None:
    labels = np.repeat([0, 1, 2], [60, 30, 10])
    rows = np.arange(100, 200)
    chosen = sample(rows, labels, 20, rng())
    assert count_classes(labels[chosen - 100], 3).tolist() == [12, 6, 2]
    assert len(set(chosen.tolist())) == 20


def test_keeping_one_of_each_class() -> None:
    labels = np.array([0] * 8 + [1])
    for seed in range(10):
        chosen = sample(np.arange(9), labels, 6, np.random.default_rng(seed), keep=True)
        assert 8 not in chosen
    assert len(sample(np.arange(2), np.array([0, 1]), 1, rng(), keep=True)) == 1  # cannot be kept: one is taken all the same


@pytest.mark.parametrize("make", [lambda: 5, lambda: torch.Generator().manual_seed(5), lambda: np.random.default_rng(5)])
def test_any_stream_repeats(make: object) -> None:
    a, b = (make_numpy_generator(make()).integers(1000, size=5).tolist() for _ in range(2))  # type: ignore[operator]
    assert a == b
