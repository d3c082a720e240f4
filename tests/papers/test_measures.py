"""What is read off a run, by hand."""

import pytest

from fedmutual_papers import measures
from made_results import closeup, result

pytestmark = pytest.mark.long

COPIES = {"own": (0.3, 0.4), "copies": (0.8, 0.9)}
# two nodes, four rounds of five local steps: 1,600 / 2 / 20 = 40 up, 4,000 / 2 / 20 = 100 down; 600 / 2 given out once
NODES, SENT = {"a": (9, 0.5), "b": (9, 0.5)}, {"up": 1600, "down": 4000, "seed": 600}
MOVED = result(curve=(0.1,) * 4, clients=NODES, traffic=SENT, steps=5)
CLIMBING = result(curve=(0.2, 0.5, 0.4, 0.8))
# eight rounds: the last quarter has two, and two changes lead to them: 0.6 - 0.5 = 0.1 and 0.3 - 0.6 = -0.3; their mean is
# -0.1, and each is 0.2 away from it
SWINGING = result(curve=(0.0, 0.9, 0.0, 0.9, 0.0, 0.5, 0.6, 0.3))
SIZES = {"a": (10, 0.9), "b": (500, 0.8), "c": (40, 0.7), "d": (90, 0.6), "e": (50, 0.5)}
OURS = result("fml", clients=SIZES)
ALONE = result("independent", clients={"a": (10, 0.5), "b": (500, 0.7), "c": (40, 0.6), "d": (90, 0.6), "e": (50, 0.9)})
ENDS = {"last": {"0": 0.8, "90": 0.6}, "best": {"0": 0.9, "90": 0.7}}


@pytest.mark.parametrize(("name", "of", "expected"), [
    ("global_test", result(curve=(0.5, 0.9, 0.7)), (0.7, 0.9)),  # the last and the best round
    ("global_test", result(curves={}, curve=(0.5,)), (None, None)),
    ("epsilon", result(epsilon=3.9), (3.9, None)),
    ("epsilon", result(), (None, None)),
    ("own_validation", result(curve=(0.1, 0.2), own_curve=(0.6, 0.4)), (0.4, 0.6)),
    # without a personal model the local model is the copy
    ("local_validation", result("fedavg", curves=COPIES, curve=(0, 0)), (0.9, 0.9)),
    ("local_validation", result("fml", curves=COPIES, curve=(0, 0)), (0.4, 0.4)),
    ("swing_global", SWINGING, (0.2, None)),
    ("swing_global", result(curve=(0.1, 0.2, 0.3, 0.4)), (0.0, None)),  # a steady climb is calm
    ("swing_global", result(curve=(0.1, 0.2)), (None, None)),  # one change has no deviation
    ("rounds_to:1", CLIMBING, (2, None)),
    ("rounds_to:1.2", CLIMBING, (4, None)),
    ("rounds_to:1.9", CLIMBING, (None, None)),
    ("rounds_to:1", result(curve=(0.2, 0.5), rounds=5, every=3), (5, None)),  # evaluated after rounds 3 and 5
    ("noise:0.1", result(noise={"0": 0.2, "0.1": 0.45}), (0.25, None)),
    ("noise:0.5", result(noise={"0": 0.2, "0.1": 0.4}), (None, None)),
    ("acc", result("fedh2l", transfer={"acc": ENDS}), (0.7, 0.8)),
    ("fwt", result("fedh2l", transfer={"acc": ENDS}), (None, None)),
    ("bytes_up", MOVED, (40, None)),
    ("bytes_down", MOVED, (100, None)),
    ("bytes_seed", MOVED, (300, None)),
    ("bytes_up", MOVED.model_copy(update={"steps": 0}), (200, None)),  # rounds that are passes over the data: 1,600 / 2 / 4
    ("bytes_up", result(), (None, None)),
    ("projected", result(projected=0.25), (0.25, None)),
    ("projected", result(), (None, None)),
    ("separation", result(closeup=closeup(silhouette=0.5)), (None, 0.5)),  # of the best round
    ("separation", result(), (None, None)),
    ("worst", OURS, (0.5, None)),
    ("gain_small", OURS, ((0.4 + 0.1) / 2, None)),  # over training alone, of a and c
    ("gain_large", OURS, ((0.1 + 0.0) / 2, None)),  # of b and d
    ("harmed", OURS, (1, None)),  # e; d is as good as alone
    ("harmed", ALONE, (None, None)),
])  # fmt: skip
def test_a_measure_of_a_run(name, of, expected):
    beside = {of.arm: of, "independent": of if of is ALONE else ALONE}
    ends = tuple(measures.read_values(name, of, at, beside, 0.5).get(None) for at in ("last", "best"))
    assert ends == tuple(pytest.approx(number) if number is not None else None for number in expected)


@pytest.mark.parametrize("name", ["gain_small", "gain_large", "harmed", "rounds_to:1"])
def test_without_training_alone_there_is_no_gain_and_without_a_target_no_round(name):
    assert measures.read_values(name, OURS, "last", {"fml": OURS}) == {}


def test_of_nodes_that_are_domains_the_best_round_counts():
    nodes = result("fedh2l", transfer={"acc": ENDS})
    assert measures.find("acc")[0].counts == "best"
    for at, mean in (("last", 0.7), ("best", 0.8)):
        assert measures.read_values("acc", nodes, at) == {**ENDS[at], None: pytest.approx(mean)}
    assert measures.find("own_validation")[0].counts == "mean"  # its best is chosen on the very data
