"""The mean, the median and the trimmed mean of replies: by hand, beside SciPy and NumPy, of counters, in any order."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import trim_mean

from fedmutual import aggregation
from fedmutual.aggregation import Aggregation, mean, median, trimmed_mean
from fedmutual.core import Message, Unusable


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


def test_real_and_imaginary_parts_are_combined_apart() -> None:
    values = {"a": 1 + 8j, "b": 3 + 2j, "c": 8 + 2j}
    replies = {i: {"w": torch.tensor([[v]])} for i, v in values.items()}
    assert mean(replies)["w"].tolist() == [[4 + 4j]]
    assert median(replies)["w"].tolist() == trimmed_mean(replies, 0.34)["w"].tolist() == [[3 + 2j]]
    with pytest.raises(Unusable, match="'w' is complex"):
        Aggregation(sum="fixed")(replies)


def test_weights_of_any_scale_by_hand() -> None:
    # (1 * 1 + 3 * 5) / 4 = 4; (1 * 2 + 3 * 6) / 4 = 5
    replies = {"a": {"w": torch.tensor([[1.0], [2.0]])}, "b": {"w": torch.tensor([[5.0], [6.0]])}}
    for scale in (1.0, 600.0):
        assert mean(replies, {"b": 3 * scale, "a": scale})["w"].tolist() == [[4.0], [5.0]]


def test_the_mean_of_one_reply_equals_it_without_shared_memory() -> None:
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
    for result in (mean(replies), mean(replies, {"a": 1.0, "b": 1.0}), median(replies), trimmed_mean(replies)):
        assert result["w"].dtype == dtype
        assert result["w"].tolist() == [0.5, 0.5]


def replies_of(values: list[float], dtype: torch.dtype = torch.float32) -> dict[str, Message]:
    return {str(i): {"w": torch.tensor([value, -value], dtype=dtype)} for i, value in enumerate(values)}


def test_the_median_by_hand() -> None:
    three_replies = replies_of([1.0, 1e30, 3.0])
    assert median(three_replies)["w"].tolist() == [3.0, -3.0]
    four_replies = replies_of([8.0, -1e30, 1.0, 3.0])  # the mean of the two middle values, 1 and 3
    assert median(four_replies)["w"].tolist() == [2.0, -2.0]


def test_the_trimmed_mean_by_hand() -> None:
    five = replies_of([1.0, 2.0, 6.0, 1e30, -1e30])  # one is cut off at either end: (1 + 2 + 6) / 3
    assert trimmed_mean(five, 0.2)["w"].tolist() == [3.0, -3.0]
    assert trimmed_mean(five, 0.39)["w"].tolist() == [3.0, -3.0]  # 1.95 replies are one
    assert trimmed_mean(five, 0.4)["w"].tolist() == [2.0, -2.0]


def test_of_two_replies_every_rule_is_their_mean() -> None:
    two = replies_of([1.0, 4.0])
    assert median(two)["w"].tolist() == trimmed_mean(two)["w"].tolist() == mean(two)["w"].tolist() == [2.5, -2.5]


def test_the_default_leaves_out_one_of_three_at_either_end_which_is_the_median() -> None:
    three = replies_of([5.0, 1.0, 3.0])
    assert trimmed_mean(three)["w"].tolist() == median(three)["w"].tolist() == [3.0, -3.0]


@given(st.integers(1, 12), st.integers(0, 49))
def test_beside_scipy_and_numpy(count: int, percent: int) -> None:
    trim = (percent + 0.5) / 100  # not where rounding decides, which is the next test's
    values = torch.randn(count, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    replies = {str(i): {"w": row} for i, row in enumerate(values)}
    np.testing.assert_allclose(median(replies)["w"].numpy(), np.median(values.numpy(), 0), rtol=1e-14, atol=1e-15)
    trimmed = trimmed_mean(replies, trim)["w"].numpy()
    np.testing.assert_allclose(trimmed, trim_mean(values.numpy(), trim, axis=0), rtol=1e-12, atol=1e-14)


def test_a_share_that_no_binary_fraction_is_cuts_off_what_it_says() -> None:
    """0.29 * 100 is 28.999999999999996, and SciPy cuts off 28."""
    replies = replies_of([float(k) for k in range(29)] + [100.0] * 71, torch.float64)
    assert trimmed_mean(replies, 0.29)["w"].tolist() == [100.0, -100.0]


def test_a_large_tensor_is_sorted_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = {i: {"w": draw(n)["layer.weight"]} for n, i in enumerate("abcd")}
    at_once = median(replies)["w"]
    monkeypatch.setattr(aggregation, "_PIECE", 5)
    assert torch.equal(median(replies)["w"], at_once)


@pytest.mark.parametrize("trim", [-0.1, 0.5, float("nan")])
def test_a_share_outside_its_range_is_refused(trim: float) -> None:
    with pytest.raises(ValueError, match="trim must be at least 0 and below"):
        trimmed_mean(replies_of([1.0, 2.0]), trim)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
def test_counters_take_their_lower_middle_value(rule: aggregation.Rule) -> None:
    """A maximum would be the liar's."""
    combine = Aggregation(rule)
    counts = [2**60 + 1, 2**63 - 1, 2**60]  # which no float holds
    replies = {str(i): {"n": torch.tensor(n), "on": torch.tensor([n > 2**61])} for i, n in enumerate(counts)}
    assert combine(replies)["n"].item() == 2**60 + 1
    assert combine(replies)["on"].tolist() == [False]
    assert combine({**replies, "3": replies["2"]})["n"].item() == 2**60
    assert combine(replies)["n"].dtype == torch.int64


def test_a_rule_by_its_name() -> None:
    replies = replies_of([0.0, 1.0, 2.0, 3.0, 14.0])
    first = [Aggregation(rule, 0.2)(replies)["w"][0].item() for rule in ("mean", "median", "trimmed-mean")]
    assert first == [4.0, 2.0, 2.0]
    heavy = Aggregation()(replies, {i: 1.0 + 5.0 * (i == "4") for i in replies})  # (0 + 1 + 2 + 3 + 6 * 14) / 10
    assert heavy["w"][0].item() == 9.0


@given(st.permutations(["0", "1", "10", "2", "site"]), st.sampled_from(["mean", "median", "trimmed-mean"]))
def test_the_order_of_answers_does_not_matter_to_any_rule(order: list[str], rule: aggregation.Rule) -> None:
    replies = {i: draw(n) for n, i in enumerate(sorted(order))}
    straight, turned = Aggregation(rule)(replies), Aggregation(rule)({i: replies[i] for i in order})
    assert all(torch.equal(straight[name], turned[name]) for name in straight)


@given(st.permutations(["0", "1", "10", "2", "site"]), st.booleans())
def test_the_order_of_answers_does_not_matter(order: list[str], weighted: bool) -> None:
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
    for combine in (mean, median, trimmed_mean):
        with pytest.raises(ValueError, match=r"^'site' and '0' answered with different names$"):
            combine({"site": other, "0": {"w": torch.ones(2)}})


@pytest.mark.parametrize("combine", [mean, median, trimmed_mean])
def test_no_reply_has_no_mean(combine: aggregation.Aggregation) -> None:
    with pytest.raises(ValueError, match="at least one reply"):
        combine({})
