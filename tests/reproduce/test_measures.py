"""What is read off a run, by hand."""

import pytest

from fedmutual.reproduce import measures
from made_results import result


def read(name, of, **beside):
    kind, argument = measures.find(name)
    return kind.read(of, {of.arm: of, **beside}, argument)


def test_the_global_model_after_the_last_and_the_best_round():
    assert read("global_test", result(curve=(0.5, 0.9, 0.7))) == (0.7, 0.9)
    assert read("global_test", result(curves={}, curve=(0.5,))) == (None, None)


def test_own_data_are_those_of_the_clients_that_count():
    assert read("own_validation", result(curve=(0.1, 0.2), own=(0.6, 0.4))) == (0.4, 0.6)


def test_the_local_model_is_the_copy_where_there_is_no_personal_one():
    curves = {"own": (0.3, 0.4), "copies": (0.8, 0.9)}
    assert read("local_validation", result("fedavg", curves=curves, curve=(0, 0))) == (0.9, 0.9)
    assert read("local_validation", result("fml", curves=curves, curve=(0, 0))) == (0.4, 0.4)


def test_oscillation_is_the_deviation_of_the_changes_of_the_last_quarter():
    # eight rounds: the last quarter has two, and two changes lead to them: 0.6 - 0.5 = 0.1 and 0.3 - 0.6 = -0.3; their mean
    # is -0.1, and each is 0.2 away from it
    curve = (0.0, 0.9, 0.0, 0.9, 0.0, 0.5, 0.6, 0.3)
    assert read("swing_global", result(curve=curve)).last == pytest.approx(0.2)
    assert read("swing_global", result(curve=(0.1, 0.2, 0.3, 0.4))).last == pytest.approx(0.0)  # a steady climb is calm
    assert read("swing_global", result(curve=(0.1, 0.2))).last is None  # one change has no deviation


def test_rounds_to_a_share_of_the_papers_accuracy():
    climbing = result(curve=(0.2, 0.5, 0.4, 0.8), target=0.5)
    assert read("rounds_to:1", climbing).last == 2
    assert read("rounds_to:1.2", climbing).last == 4
    assert read("rounds_to:1.9", climbing).last is None
    assert read("rounds_to:1", result(target=None)).last is None
    sparse = result(curve=(0.2, 0.5), target=0.5, rounds=5, every=3)  # evaluated after rounds 3 and 5
    assert read("rounds_to:1", sparse).last == 5


def test_gains_of_the_clients_with_fewest_and_most_examples():
    ours = result("fml", clients={"a": (10, 0.9), "b": (500, 0.8), "c": (40, 0.7), "d": (90, 0.6), "e": (50, 0.5)})
    alone = result("independent", clients={"a": (10, 0.5), "b": (500, 0.7), "c": (40, 0.6), "d": (90, 0.6), "e": (50, 0.9)})
    assert read("gain_small", ours, independent=alone).last == pytest.approx((0.4 + 0.1) / 2)  # a and c
    assert read("gain_large", ours, independent=alone).last == pytest.approx((0.1 + 0.0) / 2)  # b and d
    assert read("gain_small", ours).last is None


def test_noise_by_its_deviation():
    noisy = result(noise={"0": 0.2, "0.1": 0.4})
    assert (read("noise:0.1", noisy).last, read("noise:0.5", noisy).last) == (0.4, None)


def test_an_unknown_measure():
    with pytest.raises(LookupError, match="there is no measure 'accuracy'"):
        measures.find("accuracy")
