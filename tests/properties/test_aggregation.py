"""Mean, median, trimmed mean and sum in fixed point: by hand, beside SciPy and NumPy, of counters, in any order."""

from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import trim_mean

from fedmutual import aggregation
from fedmutual.aggregation import (
    FRACTION_BITS,
    HEAVIEST,
    LIMIT,
    Aggregation,
    FixedTotal,
    RunningMean,
    encode_update,
    mean,
    median,
    trimmed_mean,
)
from fedmutual.algorithms import FML, FedAvg
from fedmutual.algorithms.fedavg import N_K
from fedmutual.core import At, Message, Unusable
from fedmutual.settings import MOST_SUMMED

FIXED = Aggregation(sum="fixed")
AT = At(seed=0, round=0, rounds=1)


def same(one: Message, other: Message) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def draw(seed: int) -> Message:
    rng = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(3, 4, generator=rng),
        "layer.bias": torch.randn(3, generator=rng) * 30,
        "norm.running_mean": torch.randn((), generator=rng),
        "norm.num_batches_tracked": torch.randint(100, (), generator=rng),
    }


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


@pytest.mark.parametrize(
    ("combine", "values", "expected"),
    [
        (mean, [1.0, 3.0, 8.0], 4.0),
        (median, [1.0, 1e30, 3.0], 3.0),
        (median, [8.0, -1e30, 1.0, 3.0], 2.0),  # the mean of the two middle values, 1 and 3
        (partial(trimmed_mean, trim=0.2), [1.0, 2.0, 6.0, 1e30, -1e30], 3.0),  # one is cut off at either end
        (partial(trimmed_mean, trim=0.39), [1.0, 2.0, 6.0, 1e30, -1e30], 3.0),  # 1.95 replies are one
        (partial(trimmed_mean, trim=0.4), [1.0, 2.0, 6.0, 1e30, -1e30], 2.0),
        (trimmed_mean, [5.0, 1.0, 3.0], 3.0),  # the default leaves out one of three at either end
        # 0.29 * 100 is 28.999999999999996, and SciPy cuts off 28
        (partial(trimmed_mean, trim=0.29), [float(k) for k in range(29)] + [100.0] * 71, 100.0),
        *((combine, [1.0, 4.0], 2.5) for combine in (mean, median, trimmed_mean)),
    ],
)
def test_by_hand(combine, values: list[float], expected: float) -> None:
    assert combine(replies_of(values, torch.float64))["w"].tolist() == [expected, -expected]


@given(st.integers(1, 12), st.integers(0, 49))
def test_beside_scipy_and_numpy(count: int, percent: int) -> None:
    trim = (percent + 0.5) / 100  # not where rounding decides, which is the next test's
    values = torch.randn(count, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    replies = {str(i): {"w": row} for i, row in enumerate(values)}
    np.testing.assert_allclose(median(replies)["w"].numpy(), np.median(values.numpy(), 0), rtol=1e-14, atol=1e-15)
    trimmed = trimmed_mean(replies, trim)["w"].numpy()
    np.testing.assert_allclose(trimmed, trim_mean(values.numpy(), trim, axis=0), rtol=1e-12, atol=1e-14)


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


RULES = (Aggregation(), Aggregation("median"), Aggregation("trimmed-mean"), FIXED)


@given(st.permutations(["0", "1", "10", "2", "site"]), st.sampled_from(RULES), st.booleans())
def test_the_order_of_answers_does_not_matter(order: list[str], combine: Aggregation, weighted: bool) -> None:
    ids = sorted(order)
    replies, base = {i: draw(n) for n, i in enumerate(ids)}, draw(9)
    weights = {i: 7.0 * n + 1 for n, i in enumerate(ids)} if weighted else None
    straight = combine(replies, weights, base)
    turned = combine({i: replies[i] for i in order}, weights and {i: weights[i] for i in reversed(order)}, base)
    assert same(straight, turned)


def test_the_order_of_names_in_a_reply_does_not_matter() -> None:
    a, b = draw(0), draw(1)
    assert same(mean({"a": a, "b": b}), mean({"a": a, "b": dict(reversed(b.items()))}))


@pytest.mark.parametrize("other", [{}, {"w": torch.ones(2), "v": torch.ones(2)}, {"v": torch.ones(2)}])
def test_replies_that_disagree_are_refused(other: Message) -> None:
    for combine in (mean, median, trimmed_mean):
        with pytest.raises(ValueError, match=r"^'site' and '0' answered with different names$"):
            combine({"site": other, "0": {"w": torch.ones(2)}})


@pytest.mark.parametrize("combine", [mean, median, trimmed_mean])
def test_no_reply_has_no_mean(combine: aggregation.Aggregation) -> None:
    with pytest.raises(ValueError, match="at least one reply"):
        combine({})


# A mean in fixed point: by hand, beside the mean in floating point, at its limits.


def test_an_update_by_hand() -> None:
    base = {"w": torch.tensor([1.0, 1.0, 0.0])}
    reply = {"w": torch.tensor([1.5, 0.75, 2.0**-41])}  # half of the unit is rounded to the even neighbour, 0
    assert encode_update(reply, base).tolist() == [2**39, -(2**38), 0]
    assert encode_update(reply, base, 3).tolist() == [3 * 2**19, -3 * 2**18, 0, 3]  # 3 * 2^-41 in units of 2^-20 is 0


def test_means_by_hand() -> None:
    base = {"w": torch.tensor([10.0])}
    replies = {"a": {"w": torch.tensor([11.0])}, "b": {"w": torch.tensor([14.0])}}
    assert FIXED(replies, base=base)["w"].tolist() == [12.5]
    assert FIXED(replies, {"a": 1.0, "b": 3.0}, base=base)["w"].tolist() == [13.25]  # 10 + (1 * 1 + 3 * 4) / 4


@pytest.mark.parametrize("phase", [FML(), FedAvg(weighting="uniform"), FedAvg(weighting="samples")])
def test_the_mean_of_a_total_has_the_bits_of_the_mean_of_its_replies(phase) -> None:
    base, replies = draw(0), {name: draw(seed) for seed, name in enumerate("abc", 1)}
    sizes = {"a": 5, "b": 1, "c": 70} if N_K in phase.leaves(base) else {}
    words = torch.stack([encode_update(reply, base, sizes.get(i)) for i, reply in replies.items()]).sum(0)
    total = FixedTotal(tuple(replies), words, weighted=bool(sizes))
    known = {i: reply | ({N_K: torch.tensor(sizes[i])} if sizes else {}) for i, reply in replies.items()}
    assert same(phase.receive(base, total, AT), replace(phase, aggregate=FIXED).receive(base, known, AT))


def test_a_total_shows_no_reply() -> None:
    with pytest.raises(TypeError, match="only the sum of the replies is known"):
        dict(FixedTotal(("a", "b"), torch.zeros(1, dtype=torch.int64)).items())


def test_the_dtype_of_the_reply_and_the_counter_of_the_server_stay() -> None:
    base = {"w": torch.zeros(2, dtype=torch.float64), "count": torch.tensor(7), "flag": torch.tensor([True])}
    reply = {"w": torch.ones(2, dtype=torch.float64), "count": torch.tensor(9), "flag": torch.tensor([False])}
    result = FIXED({"a": reply}, base=base)
    assert result["w"].dtype == torch.float64
    assert result["count"].item() == 7
    assert result["flag"].tolist() == [True]


def test_without_a_base_replies_are_summed_as_they_are_and_counters_take_the_maximum() -> None:
    replies = {i: {"w": torch.tensor([w]), "count": torch.tensor(n)} for i, w, n in (("a", 1.0, 3), ("b", 2.0, 5))}
    result = FIXED(replies)
    assert result["w"].tolist() == [1.5]
    assert result["count"].item() == 5


def test_a_change_beyond_the_limit_is_clipped() -> None:
    base = {"w": torch.tensor([5.0, 5.0])}
    result = FIXED({"a": {"w": torch.tensor([5.0 + 3 * LIMIT, 5.0 - 3 * LIMIT])}}, base=base)
    assert result["w"].tolist() == [5.0 + LIMIT, 5.0 - LIMIT]


def test_the_largest_sum_does_not_overflow() -> None:
    largest = encode_update({"w": torch.tensor([1e9])}, {}).item()
    assert largest == LIMIT * 2**FRACTION_BITS
    assert MOST_SUMMED * largest < 2**63 <= (MOST_SUMMED + 1) * largest
    assert encode_update({"w": torch.tensor([1e9])}, {}, HEAVIEST).tolist() == [largest, HEAVIEST]


def test_more_clients_than_a_sum_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 8191"):
        FIXED({str(k): {"w": torch.ones(1)} for k in range(MOST_SUMMED + 1)})


@given(st.integers(0, 2**16), st.integers(1, 20), st.booleans())
def test_the_mean_in_floating_point_is_as_near_as_the_unit_says(seed: int, count: int, weighted: bool) -> None:
    replies = {str(k): draw(seed + k) for k in range(count)}
    weights = {i: float(1 + (seed + k) % 1000) for k, i in enumerate(replies)} if weighted else None
    base = draw(seed + 100)
    exact = [sum(Fraction(r["layer.bias"][0].item()) * int(weights[i] if weights else 1) for i, r in replies.items())]
    expected = exact[0] / int(sum(weights.values()) if weights else count)
    fixed, plain = FIXED(replies, weights, base), mean(replies, weights)
    rounding = abs(float(expected)) * 2**-24 + 2.0**-21  # of float32, and of half a unit (2^-20) a client
    assert fixed["layer.bias"][0].item() == pytest.approx(float(expected), abs=rounding)
    assert torch.allclose(fixed["layer.weight"], plain["layer.weight"], atol=1e-6)


@pytest.mark.parametrize(
    ("reply", "weight", "reason"),
    [
        ({"w": torch.tensor([float("nan")])}, 1.0, "not finite"),
        ({"w": torch.tensor([float("inf")])}, 1.0, "not finite"),
        ({"w": torch.tensor([1.0])}, 0.0, "n_k"),
        ({"w": torch.tensor([1.0])}, 1.5, "n_k"),
        ({"w": torch.tensor([1.0])}, float(HEAVIEST + 1), "n_k"),
        ({"w": torch.tensor([1.0])}, float("inf"), "n_k"),
    ],
)
def test_a_reply_that_cannot_be_summed_is_named(reply, weight, reason) -> None:
    with pytest.raises(Unusable) as caught:
        FIXED({"a": {"w": torch.tensor([1.0])}, "b": reply}, {"a": 1.0, "b": weight})
    assert caught.value.why.keys() == {"b"}
    assert reason in caught.value.why["b"]


@pytest.mark.parametrize("phase", [FML(aggregate=FIXED), FedAvg(aggregate=FIXED)])
def test_phases_sum_updates_of_what_they_sent(phase) -> None:
    server = {"w": torch.tensor([1.0])}
    count = {"n_k": torch.tensor(2)} if isinstance(phase, FedAvg) else {}
    replies = {i: {"w": torch.tensor([w]), **count} for i, w in (("a", 1.5), ("b", 1.0), ("c", 0.75))}
    assert phase.receive(server, replies, AT)["w"].item() == pytest.approx(1 + 0.25 / 3, abs=2**-23)
    far = {**replies, "c": {"w": torch.tensor([1.0 + 2 * LIMIT]), **count}}
    assert phase.receive(server, far, AT)["w"].item() == pytest.approx(1 + (0.5 + LIMIT) / 3, rel=2**-23)


@given(st.permutations("abcdef"), st.sets(st.sampled_from("abcdef"), min_size=1), st.booleans())
def test_a_running_mean_has_the_bits_of_the_mean_in_any_order_of_arrival(arrival, came, weighted: bool) -> None:
    replies = {name: draw(seed) for seed, name in enumerate("abcdef") if name in came}
    weights = {name: 1.0 + ord(name) for name in replies} if weighted else None
    running = RunningMean("abcdef")
    for name in (name for name in arrival if name in came):
        running.add(name, replies[name], weights[name] if weights else 1.0)
    total = running.finish()
    assert total.names == tuple(sorted(came))
    for name in (k for k, v in draw(0).items() if v.is_floating_point()):  # by hand: in sorted order, in double precision
        summed = sum(replies[i][name].double() * (weights[i] if weights else 1.0) for i in sorted(came))
        by_hand = (summed / (sum(weights.values()) if weights else len(came))).float()
        assert torch.equal(total.mean[name], by_hand)
    assert total.mean["norm.num_batches_tracked"] == max(r["norm.num_batches_tracked"] for r in replies.values())
