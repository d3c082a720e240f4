"""Numbers of any size in fixed point: words that add up whatever their order, against Python's exact fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmutual.data.statistics import DIGITS, FRACTION_BITS, RANGE, decode_total, encode_number

UNIT = Fraction(1, 2**FRACTION_BITS)
Numbers = st.lists(st.floats(-4e27, 4e27).map(Fraction), min_size=1, max_size=20)


def add(numbers: list[list[int]]) -> list[int]:
    """Return the sums of the words modulo 2^64, as signed integers: what masked words leave of them."""
    return [(sum(words) + 2**63) % 2**64 - 2**63 for words in zip(*numbers, strict=True)]


def test_words_by_hand() -> None:
    assert encode_number(Fraction(3)) == [0, 0, 0, 3, 0, 0]
    assert encode_number(Fraction(1, 2**96)) == [1, 0, 0, 0, 0, 0]
    assert encode_number(Fraction(-1, 2**96)) == [2**32 - 1] * 5 + [-1]
    assert decode_total([0, 0, 0, 2**32 + 5, 1, 0]) == 2**32 + 5 + 2**32  # digits above the base carry


@given(Numbers, st.booleans())
def test_words_add_up_to_the_sum(numbers: list[Fraction], hide_carries: bool) -> None:
    words = [encode_number(number, hide_carries) for number in numbers]
    assert all(-(2**63) <= word < 2**63 for one in words for word in one)
    exact = sum((Fraction(round(n / UNIT)) * UNIT for n in numbers), Fraction())
    assert decode_total(add(words)) == decode_total(add(words[::-1])) == exact


def test_hidden_carries_hide_the_sign_of_each_number() -> None:
    """Without them the highest digit is -1 for each negative number; with them it is random."""
    assert {encode_number(Fraction(n))[-1] for n in (-3, -2, -1)} == {-1}
    highest = [encode_number(Fraction(-1), hide_carries=True)[-1] for _ in range(50)]
    assert len(set(highest)) > 40
    assert all(encode_number(Fraction(7), True) != encode_number(Fraction(7), True) for _ in range(5))


@pytest.mark.parametrize("number", [RANGE, -RANGE, 1e300])
def test_a_number_beyond_the_range_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="4e\\+28"):
        encode_number(Fraction(number))
    assert len(encode_number(Fraction(RANGE) - 1)) == DIGITS
