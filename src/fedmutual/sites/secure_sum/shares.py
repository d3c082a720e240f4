"""Secrets split among sites, of which `threshold` together give a secret back, and fewer learn nothing of it.

Shamir, How to Share a Secret, 1979, https://doi.org/10.1145/359168.359176, over the integers modulo the prime 2^521 - 1.
"""

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**521 - 1
SECRET_BYTES = 32
SHARE_BYTES = 66  # of a number below PRIME


def split_secret(secret: bytes, threshold: int, points: Sequence[int]) -> dict[int, bytes]:
    """Split a secret of 32 bytes: point -> share of 66 bytes, the value of a random polynomial that is the secret at 0.

    points: one of each holder, different whole numbers from 1 on. threshold: how many shares give the secret back.

    Raises:
        ValueError: the secret has another length, points are equal or below 1, or the threshold is not 1 to their number.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if len(set(points)) < len(points) or min(points, default=0) < 1 or not 1 <= threshold <= len(points):
        raise ValueError(f"{threshold} of the points {list(points)} cannot hold a secret")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {point: _evaluate(coefficients, point).to_bytes(SHARE_BYTES, "big") for point in points}


def join_shares(shares: Mapping[int, bytes]) -> bytes:
    """Give back the secret of 32 bytes: the value at 0 of the polynomial through all shares. shares: point -> share.

    Fewer shares than the threshold, or a wrong share, give another secret, or none.

    Raises:
        ValueError: there are none, one is no share, or they do not belong to one secret of 32 bytes.
    """
    if not shares or min(shares) < 1:
        raise ValueError("there are no shares of a secret")
    values = {point: int.from_bytes(share, "big") for point, share in shares.items()}
    if any(len(share) != SHARE_BYTES for share in shares.values()) or max(values.values()) >= PRIME:
        raise ValueError(f"a share is a number below 2^521 - 1 in {SHARE_BYTES} bytes")
    secret = sum(value * _weigh(point, values) for point, value in values.items()) % PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("the shares do not belong to one secret")
    return secret.to_bytes(SECRET_BYTES, "big")


def _evaluate(coefficients: Sequence[int], point: int) -> int:
    """The value of a polynomial, lowest coefficient first."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value


def _weigh(point: int, points: Mapping[int, int]) -> int:
    """Lagrange's coefficient of a point for the value at 0."""
    above, below = 1, 1
    for other in points:
        if other != point:
            above = above * other % PRIME
            below = below * (other - point) % PRIME
    return above * pow(below, -1, PRIME) % PRIME
