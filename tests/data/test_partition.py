import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedmutual.data.draws import Index, apportion, count_classes, make_numpy_generator, sample
from fedmutual.data.partition import dirichlet, iid, shards
from fedmutual.errors import DataError

MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # its training images of each class


def is_partition(parts: list[Index], n: int) -> bool:
    return sorted(np.concatenate(parts).tolist()) == list(range(n))


def held(parts: list[Index], labels: Index) -> Index:
    return np.stack([count_classes(labels[p], int(labels.max()) + 1) for p in parts])


@pytest.mark.parametrize(("sizes", "classes", "pieces"), [(MNIST, 6, 3), (MNIST, 4, 2), (MNIST, 2, 1), ([40] * 100, 60, 3)])
def test_the_papers_shards(sizes: list[int], classes: int, pieces: int) -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)), sizes))
    parts = shards(labels, 5, classes, np.random.default_rng(1))
    assert is_partition(parts, len(labels))
    table = held(parts, labels)
    assert ((table > 0).sum(1) == classes).all()  # a client has so many classes
    assert ((table > 0).sum(0) == pieces).all()  # a class is cut into so many shards
    for c, size in enumerate(sizes):  # equal ones
        assert set(table[:, c][table[:, c] > 0]) <= {size // pieces, -(-size // pieces)}


def test_as_many_shards_as_classes_overlap_nowhere() -> None:
    labels = np.repeat(np.arange(10), 7)
    parts = shards(labels, 5, 2, 3)
    assert (held(parts, labels) > 0).sum() == 10
    assert len({frozenset(labels[p].tolist()) for p in parts}) == 5


@settings(max_examples=150)
@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 8), st.integers(0, 2**32))
def test_shards_lose_no_row_and_repeat_no_class(clients: int, classes: int, per_client: int, seed: int) -> None:
    assume(per_client <= classes <= clients * per_client)
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.concatenate([np.arange(classes).repeat(clients), rng.integers(0, classes, 20)]))
    parts = shards(labels, clients, per_client, rng)
    assert is_partition(parts, len(labels))
    table = held(parts, labels) > 0
    assert (table.sum(1) == per_client).all()
    assert set(table.sum(0).tolist()) <= {clients * per_client // classes, -(-clients * per_client // classes)}


def test_the_stream_decides_which_classes_are_cut_more_often() -> None:
    labels = np.repeat(np.arange(4), 6)
    cut_twice = set()
    for seed in range(30):
        table = held(shards(labels, 3, 2, seed), labels) > 0
        assert sorted(table.sum(0).tolist()) == [1, 1, 2, 2]
        cut_twice.add(frozenset(np.flatnonzero(table.sum(0) == 2).tolist()))
    assert len(cut_twice) > 3


def test_shards_go_by_the_stream_whatever_its_kind() -> None:
    labels = np.repeat(np.arange(10), 10)
    by_torch = [shards(labels, 5, 4, torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert all(np.array_equal(a, b) for a, b in zip(by_torch[0], by_torch[1], strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(by_torch[0], by_torch[2], strict=True))
    same = [shards(labels, 5, 4, 7), shards(torch.from_numpy(labels), 5, 4, np.random.default_rng(7))]
    assert all(np.array_equal(a, b) for a, b in zip(*same, strict=True))


@pytest.mark.parametrize(
    ("sizes", "clients", "per_client", "why"),
    [
        ([9, 9, 9], 2, 4, "classes_per_client = 4 cannot be met with the 3 classes"),
        ([9] * 10, 2, 2, "2 clients of classes_per_client = 2 can hold 4 classes, and there are 10"),
        ([9, 1, 9], 3, 2, "class '1' has 1 training example, too few for its 2 shards"),
    ],
)
def test_shards_that_cannot_be(sizes: list[int], clients: int, per_client: int, why: str) -> None:
    with pytest.raises(DataError, match=why):
        shards(np.repeat(np.arange(len(sizes)), sizes), clients, per_client, 0)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 99))
def test_iid_parts(n: int, clients: int, seed: int) -> None:
    assume(n >= clients)
    parts = iid(n, clients, seed)
    assert is_partition(parts, n)
    assert {len(p) for p in parts} <= {n // clients, -(-n // clients)}


def test_more_clients_than_rows() -> None:
    with pytest.raises(DataError, match="5 clients cannot share 3 training examples: client '3' would get none"):
        iid(3, 5, 0)


@settings(max_examples=50)
@given(st.integers(1, 6), st.floats(0.05, 50), st.integers(1, 5), st.integers(0, 99))
def test_dirichlet_parts(clients: int, alpha: float, min_size: int, seed: int) -> None:
    labels = np.random.default_rng(seed).integers(0, 4, 120)
    parts = dirichlet(labels, clients, alpha, seed, min_size)
    assert len(parts) == clients
    assert is_partition(parts, 120)
    assert min(map(len, parts)) >= min_size


def test_dirichlet_mixes_as_alpha_says() -> None:
    # a Dirichlet(a, .., a) share of K has the variance (K - 1) / (K^2 (K a + 1)): for K = 4 that is
    labels = np.repeat(np.arange(10), 1000)
    for alpha, variance in ((0.1, 0.1339), (5.0, 0.00893)):
        shares = np.concatenate([held(dirichlet(labels, 4, alpha, seed, 1), labels).ravel() / 1000 for seed in range(30)])
        assert shares.mean() == pytest.approx(0.25)
        assert shares.var() == pytest.approx(variance, rel=0.15)


def test_dirichlet_that_cannot_be() -> None:
    labels = np.repeat([0, 1], 20)
    with pytest.raises(DataError, match="40 training examples are too few for 5 clients of at least 10"):
        dirichlet(labels, 5, 1.0, 0, 10)
    with pytest.raises(DataError, match=r"raise partition\.alpha"):
        dirichlet(labels, 4, 0.001, 0, 10)


# Random choices over labelled rows.


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
