"""What is read off a run, by hand."""

import pytest

from fedmutual_papers import measures
from fedmutual_papers.result import Ends, Traffic
from made_results import closeup, result

pytestmark = pytest.mark.long


def read(name, of, **beside):
    kind, argument = measures.find(name)
    return kind.read(of, {of.arm: of, **beside}, argument)


def test_the_global_model_after_the_last_and_the_best_round():
    assert read("global_test", result(curve=(0.5, 0.9, 0.7))) == (0.7, 0.9)
    assert read("global_test", result(curves={}, curve=(0.5,))) == (None, None)


def test_epsilon_is_the_runs_and_none_without_noise():
    assert read("epsilon", result(epsilon=3.9)) == (3.9, None)
    assert read("epsilon", result()) == (None, None)


def test_own_data_are_those_of_the_clients_that_count():
    assert read("own_validation", result(curve=(0.1, 0.2), own_curve=(0.6, 0.4))) == (0.4, 0.6)


def test_without_a_personal_model_the_local_model_is_the_copy():
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


def test_the_worst_client_and_the_clients_that_a_method_harms():
    ours = result("fml", clients={"a": (10, 0.9), "b": (10, 0.6), "c": (10, 0.7)})
    alone = result("independent", clients={"a": (10, 0.5), "b": (10, 0.7), "c": (10, 0.7)})
    assert read("worst", ours).last == 0.6
    assert read("harmed", ours, independent=alone).last == 1  # b; c is as good as alone
    assert read("harmed", alone).last is None
    assert read("harmed", ours).last is None


def test_noise_by_its_deviation():
    noisy = result(noise={"0": 0.2, "0.1": 0.4})
    assert (read("noise:0.1", noisy).last, read("noise:0.5", noisy).last) == (0.4, None)


def test_of_nodes_that_are_domains_the_best_round_counts():
    acc = Ends(last={"0": 0.8, "90": 0.6}, best={"0": 0.9, "90": 0.7})
    nodes = result("fedh2l", transfer={"acc": acc})
    assert read("acc", nodes) == (pytest.approx(0.7), pytest.approx(0.8))
    kind = measures.find("acc")[0]
    assert (kind.counts, kind.nodes(nodes, "best"), kind.nodes(nodes, "last")) == ("best", acc.best, acc.last)
    assert read("fwt", nodes) == (None, None)
    assert measures.find("own_validation")[0].counts == "last"  # its best is chosen on the very data


def test_bytes_are_of_a_node_and_a_local_step():
    # two nodes, four rounds of five local steps: 1,600 / 2 / 20 = 40 up, 4,000 / 2 / 20 = 100 down; 600 / 2 given out once
    sent = result(
        curve=(0.1,) * 4, clients={"a": (9, 0.5), "b": (9, 0.5)}, traffic=Traffic(up=1600, down=4000, seed=600), steps=5
    )
    assert [read(f"bytes_{way}", sent).last for way in ("up", "down", "seed")] == [40, 100, 300]
    epochs = sent.model_copy(update={"steps": 0})  # rounds that are passes over the data: 1,600 / 2 / 4
    assert read("bytes_up", epochs).last == 200
    assert read("bytes_up", result()).last is None


def test_projections_and_separation():
    assert read("projected", result(projected=0.25)).last == 0.25
    assert read("separation", result(closeup=closeup(silhouette=0.5))) == (None, 0.5)  # of the best round
    assert read("projected", result()).last is read("separation", result()).best is None


def test_an_unknown_measure():
    with pytest.raises(LookupError, match="there is no measure 'accuracy'"):
        measures.find("accuracy")
