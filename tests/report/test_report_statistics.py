"""Means, intervals and pairs against numbers worked out by hand."""

import math

import pytest
from scipy.stats import ttest_1samp

from fedmutual.results.estimate import Missing, compute_newcombe_interval, estimate
from fedmutual.results.frame import read_run
from fedmutual.results.gains import Gains, pair_clients, pair_global
from run_folders import Made, write

ALONE = {"0": 0.5, "1": 0.4, "2": 0.3}
GAINS = {0: {"0": 0.1, "1": 0.2, "2": 0.0}, 1: {"0": 0.3, "1": 0.4, "2": -0.1}}  # seed -> client -> gain


def fml(seed, round, client):
    return ALONE[client] + GAINS[seed][client] * (round == 2) / (1 if round == 2 else 2)


def alone(seed, round, client):
    return ALONE[client]


def test_an_interval_is_scipys():
    values = [0.91, 0.93, 0.88, 0.97]
    low, high = ttest_1samp(values, 0).confidence_interval(0.95)
    interval = estimate(values, "seeds")
    assert (interval.low, interval.high) == pytest.approx((low, high))
    assert interval.sign == 1


def test_one_value_has_no_interval_and_no_sign():
    interval = estimate([0.5], "seeds")
    assert (interval.half, interval.sign, interval.low, interval.high) == (None, 0, 0.5, 0.5)


@pytest.mark.parametrize(
    ("values", "grain", "sign"),
    [
        ([-0.002, -0.002], 0.0, 0),  # two that tie
        ([0.500, 0.501], 0.0, 0),  # 0.5005 +- 0.0064, and still two
        ([-0.002, -0.002, -0.002], 0.002, 0),  # all by one example
        ([-0.004, -0.004, -0.004], 0.002, -1),
        ([0.0, 0.0, 0.0], 0.0, 0),
    ],
)
def test_few_values_that_agree_are_certain_only_beyond_an_example(values, grain, sign):
    assert estimate(values, "seeds", grain).sign == sign


def test_equal_values_have_an_interval_of_no_width():
    assert estimate([0.5, 0.5], "seeds").half == 0


def test_gains_of_two_seeds_are_averaged_within_a_seed_first(tmp_path):
    ours = [read_run(write(tmp_path / f"fml{s}", Made("fml", fml, seed=s))) for s in (0, 1)]
    others = [read_run(write(tmp_path / f"alone{s}", Made("independent", alone, seed=s))) for s in (0, 1)]
    pairs = pair_clients(ours, others)
    assert isinstance(pairs, Gains)
    # seed means 0.1 and 0.2: mean 0.15, s = 0.1 / sqrt(2), half = 12.706205 * 0.1 / 2 = 0.63531
    assert (pairs.estimate.unit, pairs.estimate.n) == ("seeds", 2)
    assert pairs.estimate.mean == pytest.approx(0.15)
    assert pairs.estimate.half == pytest.approx(0.63531, abs=1e-5)
    assert (pairs.gained, len(pairs.harmed), pairs.equal) == (4, 1, 1)
    assert (pairs.harmed[0].seed, pairs.harmed[0].client) == (1, "2")
    # an example of 50 moves a client by 0.02, and the mean of three clients by a third of it
    assert pairs.estimate.grain == pytest.approx(0.02 / 3)
    assert pairs.by_client["0"].grain == 0.02


def test_gains_of_one_seed_are_averaged_over_its_clients(tmp_path):
    ours = [read_run(write(tmp_path / "fml", Made("fml", fml)))]
    others = [read_run(write(tmp_path / "alone", Made("independent", alone)))]
    pairs = pair_clients(ours, others)
    assert isinstance(pairs, Gains)
    # 0.1, 0.2, 0: mean 0.1, s = 0.1, half = 4.302653 * 0.1 / sqrt(3) = 0.2484138
    assert (pairs.estimate.unit, pairs.estimate.n) == ("clients", 3)
    assert pairs.estimate.mean == pytest.approx(0.1)
    assert pairs.estimate.half == pytest.approx(0.2484138, abs=1e-6)


def test_pairs_are_of_the_last_round_that_both_have(tmp_path):
    ours = [read_run(write(tmp_path / "fml", Made("fml", fml, reached=1)))]
    others = [read_run(write(tmp_path / "alone", Made("independent", alone)))]
    pairs = pair_clients(ours, others)
    assert isinstance(pairs, Gains)
    assert set(pairs.table["round"]) == {1}
    assert pairs.estimate.mean == pytest.approx(0)


def test_runs_with_another_seed_or_partition_are_not_paired(tmp_path):
    ours = [read_run(write(tmp_path / "fml", Made("fml", fml)))]
    seed = [read_run(write(tmp_path / "seed", Made("independent", alone, seed=1)))]
    data = [read_run(write(tmp_path / "data", Made("independent", alone, counts=lambda k, s: [1, 1, 1])))]
    for others in (seed, data):
        pairs = pair_clients(ours, others)
        assert isinstance(pairs, Missing)
        assert "same seed and the same partition" in pairs.why


def test_shared_models_are_paired_by_seed(tmp_path):
    ours = [read_run(write(tmp_path / f"a{s}", Made("fml", fml, lambda s, r: 0.8 + 0.1 * s, seed=s))) for s in (0, 1)]
    others = [read_run(write(tmp_path / f"b{s}", Made("fedavg", alone, lambda s, r: 0.85, seed=s))) for s in (0, 1)]
    pairs = pair_global(ours, others)
    assert pairs is not None
    # -0.05 and 0.05: mean 0, s = 0.1 / sqrt(2), half = 12.706205 * 0.1 / 2
    assert pairs.mean == pytest.approx(0, abs=1e-12)
    assert pairs.half == pytest.approx(0.63531, abs=1e-5)
    assert pair_global(ours, [read_run(write(tmp_path / "c", Made("independent", alone)))]) is None


def test_a_rounding_difference_is_not_a_gain(tmp_path):
    nearly = math.nextafter(0.3, 1)
    ours = [read_run(write(tmp_path / "fml", Made("fml", lambda s, r, c: nearly)))]
    others = [read_run(write(tmp_path / "alone", Made("independent", lambda s, r, c: 0.3)))]
    pairs = pair_clients(ours, others)
    assert isinstance(pairs, Gains)
    assert (pairs.gained, len(pairs.harmed), pairs.equal) == (0, 0, 3)


@pytest.mark.parametrize(
    ("first", "second", "ends"),
    [((56, 70), (48, 80), (0.0524, 0.3339)), ((9, 10), (3, 10), (0.1705, 0.8090)), ((10, 10), (0, 20), (0.6791, 1.0))],
)
def test_the_interval_of_a_difference_of_shares_is_newcombes(first, second, ends):
    """The numbers are those of table II of his paper, method 10."""
    shares = [(hits / rows, rows) for hits, rows in (first, second)]
    assert compute_newcombe_interval(*shares) == pytest.approx(ends, abs=1e-4)
