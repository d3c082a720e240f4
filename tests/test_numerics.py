"""The bits that training ends with: whoever changes them raises fedmutual.numerics.VERSION."""

import json

import pytest

from fedmutual import numerics
from fedmutual.algorithms import ALGORITHMS
from numerics_golden import GOLDEN, TOLERANCE, digest, machine, norms, trained_weights

RAISE = (
    "training ends with other bits than before: raise fedmutual.numerics.VERSION, then run `python tests/numerics_golden.py`"
)
WRITTEN = json.loads(GOLDEN.read_text())
NEW = pytest.mark.skip(reason="no bits of the new method are recorded: run `python tests/numerics_golden.py`")


def test_the_golden_bits_are_those_of_this_numerics_version():
    assert WRITTEN["version"] == numerics.VERSION, "run `python tests/numerics_golden.py`"
    assert set(WRITTEN["norms"]) <= set(ALGORITHMS)


@pytest.mark.parametrize("method", [m if m in WRITTEN["norms"] else pytest.param(m, marks=NEW) for m in ALGORITHMS])
def test_a_short_run_of_each_method_ends_with_the_golden_bits(method, tmp_path):
    weights = trained_weights(method, tmp_path)
    assert norms(weights) == pytest.approx(WRITTEN["norms"][method], rel=TOLERANCE), RAISE
    exact = WRITTEN["digests"].get(machine(), {}).get(method)
    if exact is not None:  # another machine rounds otherwise, and a new method is recorded on one machine: the norms decide
        assert digest(weights) == exact, RAISE


def test_one_changed_bit_is_another_digest(tmp_path):
    weights = trained_weights("independent", tmp_path)
    first = next(iter(weights))
    changed = weights | {first: weights[first].clone()}
    changed[first].view(-1)[0] = changed[first].view(-1)[0].nextafter(changed[first].new_tensor(9.0))
    assert digest(changed) != digest(weights)
    assert norms(changed) == pytest.approx(norms(weights), rel=TOLERANCE)
