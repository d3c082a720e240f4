"""Sums of numbers of any size in fixed point: an integer as digits in base 2^32, one digit in each 64-bit word.

A number v becomes the integer round(v * 2^96), and the integer becomes DIGITS digits; the last digit has the sign. Words are
added without regard to carries, and `decode_total` carries once, at the end: the order of the summands changes no bit, and
words may be masked (`sites.secure_sum`). Unlike an update of a model (`fixed_sum`), a number is never clipped.
"""

import secrets
from collections.abc import Sequence
from fractions import Fraction

DIGITS = 6
FRACTION_BITS = 96
RANGE = 2.0 ** (32 * DIGITS - 1 - FRACTION_BITS)  # a number must be smaller, about 4e28
_BASE = 2**32
_CARRIES = 2**26  # of 20 sites, digits and random carries together stay below 2^63


def encode_number(value: Fraction, hide_carries: bool = False) -> list[int]:
    """Return a number as DIGITS words, from the lowest digit to the highest; each word fits into a signed 64-bit integer.

    hide_carries: add a random multiple of the base to each digit, and subtract as many carries from the next digit. The sum
    of the numbers is unchanged, and the sums of single digits reveal nothing else, for example not how many numbers were
    negative. At most 20 such numbers can be added.

    Raises:
        ValueError: the number is not below RANGE.
    """
    if abs(value) >= RANGE:
        raise ValueError(f"it is not below {RANGE:.1g}, the range of a fixed-point sum")
    integer = round(value * 2**FRACTION_BITS)
    words = [integer >> 32 * place for place in range(DIGITS)]
    words = [*(word % _BASE for word in words[:-1]), words[-1]]
    for place in range(DIGITS - 1) if hide_carries else ():
        carries = secrets.randbelow(_CARRIES)
        words[place] += carries * _BASE
        words[place + 1] -= carries
    return words


def decode_total(words: Sequence[int]) -> Fraction:
    """Return the total that the summed words of `encode_number` stand for."""
    return Fraction(sum(word << 32 * place for place, word in enumerate(words)), 2**FRACTION_BITS)
