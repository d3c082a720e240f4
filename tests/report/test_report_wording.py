"""Sentences from gains given by hand."""

from types import SimpleNamespace

import pytest

from fedmutual.report.statistics import Gains, Pair
from fedmutual.report.wording import FEDERATING, lead


def gains(*by_seed):
    return Gains(tuple(Pair(seed, "a", 1, 0.5 + gain, 0.5, 100) for seed, gain in enumerate(by_seed)))


@pytest.mark.parametrize(
    ("by_seed", "said"),
    [
        ((0.1, 0.2, -0.3), "clients do as well as alone with FML"),  # the sum of these floats is not 0
        ((0.3, -0.1, 0.0), "clients do better with FML, which may be chance"),
        ((-0.3, 0.1), "clients do worse with FML, and two seeds cannot exclude chance"),
    ],
)
def test_what_is_not_certain_has_the_direction_of_its_mean(by_seed, said):
    told = lead(SimpleNamespace(federated=("fml",)), {"FML": gains(*by_seed)}, FEDERATING)
    assert told == f"Whether federating pays is not certain here: in the mean {said}."
