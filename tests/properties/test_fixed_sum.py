"""The mean in fixed point: by hand, in any order, beside the mean in floating point, at its limits."""

from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmutual.aggregation import Aggregation, mean
from fedmutual.algorithms import FML, FedAvg
from fedmutual.algorithms.fedavg import N_K
from fedmutual.core import At, Message, Total, Unusable
from fedmutual.fixed_sum import FRACTION_BITS, HEAVIEST, LIMIT, EncodedSum, add_updates, encode_update, pack_words
from fedmutual.settings import MOST_SUMMED

FIXED = Aggregation(sum="fixed")
AT = At(seed=0, round=0, rounds=1)


def draw(seed: int) -> Message:
    rng = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(3, 4, generator=rng),
        "layer.bias": torch.randn(3, generator=rng) * 30,
        "norm.running_mean": torch.randn((), generator=rng),
        "norm.num_batches_tracked": torch.randint(100, (), generator=rng),
    }


def same(one: Message, other: Message) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_an_update_by_hand() -> None:
    base = {"w": torch.tensor([1.0, 1.0, 0.0])}
    reply = {"w": torch.tensor([1.5, 0.75, 2.0**-41])}  # half of the unit is rounded to the even neighbour, 0
    assert encode_update(reply, base).tensors["w"].tolist() == [2**39, -(2**38), 0]
    weighed = encode_update(reply, base, 3)  # 3 * 2^-41 in units of 2^-20 is 0
    assert weighed.tensors["w"].tolist() == [3 * 2**19, -3 * 2**18, 0]
    assert weighed.weight == 3


def test_means_by_hand() -> None:
    base = {"w": torch.tensor([10.0])}
    replies = {"a": {"w": torch.tensor([11.0])}, "b": {"w": torch.tensor([14.0])}}
    assert FIXED(replies, base=base)["w"].tolist() == [12.5]
    assert FIXED(replies, {"a": 1.0, "b": 3.0}, base=base)["w"].tolist() == [13.25]  # 10 + (1 * 1 + 3 * 4) / 4


@pytest.mark.parametrize("phase", [FML(), FedAvg(weighting="uniform"), FedAvg(weighting="samples")])
def test_the_mean_of_a_total_has_the_bits_of_the_mean_of_its_replies(phase) -> None:
    base, replies = draw(0), {name: draw(seed) for seed, name in enumerate("abc", 1)}
    sizes = {"a": 5, "b": 1, "c": 70} if N_K in phase.leaves(base) else {}
    words = torch.stack([pack_words(encode_update(reply, base, sizes.get(i))) for i, reply in replies.items()]).sum(0)
    total = Total(tuple(replies), words, weighted=bool(sizes))
    known = {i: reply | ({N_K: torch.tensor(sizes[i])} if sizes else {}) for i, reply in replies.items()}
    assert same(phase.receive(base, total, AT), replace(phase, aggregate=FIXED).receive(base, known, AT))


def test_a_total_shows_no_reply() -> None:
    with pytest.raises(TypeError, match="only their sum is known"):
        dict(Total(("a", "b"), torch.zeros(1, dtype=torch.int64)).items())


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
    largest = encode_update({"w": torch.tensor([1e9])}, {}).tensors["w"].item()
    assert largest == LIMIT * 2**FRACTION_BITS
    assert MOST_SUMMED * largest < 2**63 <= (MOST_SUMMED + 1) * largest
    assert encode_update({"w": torch.tensor([1e9])}, {}, HEAVIEST).tensors["w"].item() == largest


def test_more_clients_than_a_sum_holds_are_refused() -> None:
    one = EncodedSum({"w": torch.ones(1, dtype=torch.int64)}, 1, False)
    assert add_updates([one] * MOST_SUMMED).tensors["w"].item() == MOST_SUMMED
    with pytest.raises(ValueError, match="at most 8191"):
        add_updates([one] * (MOST_SUMMED + 1))


@pytest.mark.parametrize("weights", [None, {"a": 30.0, "b": 7.0, "c": 1.0, "d": 912.0}])
def test_no_order_of_the_clients_changes_a_bit(weights) -> None:
    replies, base = {i: draw(k) for k, i in enumerate("abcd")}, draw(9)
    first = FIXED(replies, weights, base)
    assert all(same(first, FIXED({i: replies[i] for i in order}, weights, base)) for order in permutations("abcd"))


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
