"""Secrets split among sites: by hand, from every set of holders, and of what too few of them know."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmutual.sites.secure_sum.shares import PRIME, SHARE_BYTES, join_shares, split_secret

SECRET = bytes(range(32))


def share(value: int) -> bytes:
    return value.to_bytes(SHARE_BYTES, "big")


def test_the_prime_is_prime() -> None:
    """The test of Lucas and Lehmer for 2^521 - 1."""
    value = 4
    for _ in range(521 - 2):
        value = (value * value - 2) % PRIME
    assert value == 0


def test_a_line_and_a_parabola_by_hand() -> None:
    """42 + 7 x at 1 and 2; 5 + x + x^2 at 1, 2 and 4."""
    assert join_shares({1: share(49), 2: share(56)}) == (42).to_bytes(32, "big")
    assert join_shares({1: share(7), 2: share(11), 4: share(25)}) == (5).to_bytes(32, "big")


@given(st.binary(min_size=32, max_size=32), st.integers(1, 7))
def test_every_set_of_enough_holders_gives_the_secret_back(secret: bytes, threshold: int) -> None:
    shares = split_secret(secret, threshold, range(1, 8))
    for holders in combinations(shares, threshold):
        assert join_shares({i: shares[i] for i in holders}) == secret


def test_one_holder_too_few_fits_every_secret_equally() -> None:
    """To the shares of two holders of three belongs, for any secret, a third share."""
    shares = split_secret(SECRET, 3, (1, 2, 3))
    y1, y2 = (int.from_bytes(shares[i], "big") for i in (1, 2))
    for other in (0, 1, int.from_bytes(SECRET, "big"), 2**256 - 1):
        third = (other - 3 * y1 + 3 * y2) % PRIME  # the third differences of a parabola vanish: y0 - 3 y1 + 3 y2 - y3 = 0
        assert join_shares({1: shares[1], 2: shares[2], 3: share(third)}) == other.to_bytes(32, "big")


def test_each_sharing_draws_new_shares() -> None:
    first, second = (split_secret(SECRET, 2, (1, 2)) for _ in range(2))
    assert all(first[i] != second[i] for i in (1, 2))


def test_a_wrong_share_gives_no_secret_or_another() -> None:
    shares = split_secret(SECRET, 2, (1, 2))
    second = int.from_bytes(shares[2], "big")
    assert join_shares({1: shares[1], 2: share((second - 1) % PRIME)}) == (int.from_bytes(SECRET, "big") + 1).to_bytes(
        32, "big"
    )
    with pytest.raises(ValueError, match="do not belong"):
        join_shares({1: shares[1], 2: share((second + 2**300) % PRIME)})


@pytest.mark.parametrize(
    ("secret", "threshold", "points"),
    [
        (SECRET[:31], 2, (1, 2)),
        (SECRET, 3, (1, 2)),
        (SECRET, 0, (1, 2)),
        (SECRET, 2, (1, 1)),
        (SECRET, 2, (0, 1)),  # the share at 0 is the secret
        (SECRET, 1, ()),
    ],
)
def test_what_cannot_be_split_is_refused(secret, threshold, points) -> None:
    with pytest.raises(ValueError, match="secret"):
        split_secret(secret, threshold, points)


@pytest.mark.parametrize("shares", [{}, {0: share(1)}, {1: b""}, {1: share(0)[1:]}, {1: b"\xff" * SHARE_BYTES}])
def test_invalid_shares_are_refused(shares) -> None:
    with pytest.raises(ValueError, match="share"):
        join_shares(shares)
