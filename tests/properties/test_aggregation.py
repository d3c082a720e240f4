"""The mean of replies: by hand, weighted, of counters, and whoever answers first."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmutual.aggregation import mean
from fedmutual.core import Message


def draw(seed: int) -> Message:
    rng = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(3, 4, generator=rng),
        "layer.bias": torch.randn(3, generator=rng) * 1e3,
        "norm.running_mean": torch.randn((), generator=rng),
        "norm.num_batches_tracked": torch.randint(100, (), generator=rng),
    }


def test_the_plain_mean_by_hand() -> None:
    replies = {
        "a": {"w": torch.tensor([1.0, 2.0])},
        "b": {"w": torch.tensor([3.0, 4.0])},
        "c": {"w": torch.tensor([8.0, 0.0])},
    }
    assert mean(replies)["w"].tolist() == [4.0, 2.0]


def test_weights_of_any_scale_by_hand() -> None:
    # (1 * 1 + 3 * 5) / 4 = 4; (1 * 2 + 3 * 6) / 4 = 5
    replies = {"a": {"w": torch.tensor([[1.0], [2.0]])}, "b": {"w": torch.tensor([[5.0], [6.0]])}}
    for scale in (1.0, 600.0):
        assert mean(replies, {"b": 3 * scale, "a": scale})["w"].tolist() == [[4.0], [5.0]]


def test_of_one_reply_itself_but_not_its_memory() -> None:
    reply = draw(0)
    for result in (mean({"a": reply}), mean({"a": reply}, {"a": 7.0})):
        for name, tensor in reply.items():
            assert torch.equal(result[name], tensor)
            assert result[name].data_ptr() != tensor.data_ptr()


def test_statistics_are_averaged_and_counters_take_the_maximum() -> None:
    replies = {
        i: {"mean": torch.tensor([m]), "count": torch.tensor(n), "flag": torch.tensor([f, False])}
        for i, m, n, f in (("a", 1.0, 2**60, True), ("b", 2.0, 2**60 + 1, False), ("c", 6.0, 5, False))
    }
    for weights in (None, {"a": 1.0, "b": 1.0, "c": 1.0}):
        result = mean(replies, weights)
        assert result["mean"].item() == pytest.approx(3.0)
        assert result["count"].item() == 2**60 + 1  # which no float holds
        assert result["count"].dtype == torch.int64
        assert result["flag"].tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_type_stays(dtype: torch.dtype) -> None:
    replies = {"a": {"w": torch.ones(2, dtype=dtype)}, "b": {"w": torch.zeros(2, dtype=dtype)}}
    for weights in (None, {"a": 1.0, "b": 1.0}):
        assert mean(replies, weights)["w"].dtype == dtype
        assert mean(replies, weights)["w"].tolist() == [0.5, 0.5]


@given(st.permutations(["0", "1", "10", "2", "site"]), st.booleans())
def test_who_answers_first_does_not_matter(order: list[str], weighted: bool) -> None:
    ids = sorted(order)
    replies = {i: draw(n) for n, i in enumerate(ids)}
    weights = {i: n + 0.1 for n, i in enumerate(ids)} if weighted else None
    straight = mean(replies, weights)
    turned = mean({i: replies[i] for i in order}, weights and {i: weights[i] for i in reversed(order)})
    assert straight.keys() == turned.keys()
    assert all(torch.equal(straight[name], turned[name]) for name in straight)


def test_the_order_of_names_in_a_reply_does_not_matter() -> None:
    a, b = draw(0), draw(1)
    straight, turned = mean({"a": a, "b": b}), mean({"a": a, "b": dict(reversed(b.items()))})
    assert all(torch.equal(straight[name], turned[name]) for name in straight)


@pytest.mark.parametrize("other", [{}, {"w": torch.ones(2), "v": torch.ones(2)}, {"v": torch.ones(2)}])
def test_replies_that_disagree_are_refused(other: Message) -> None:
    with pytest.raises(ValueError, match=r"^'site' and '0' answered with different names$"):
        mean({"site": other, "0": {"w": torch.ones(2)}})


def test_no_reply_has_no_mean() -> None:
    with pytest.raises(ValueError, match="at least one reply"):
        mean({})
