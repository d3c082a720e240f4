"""Secret sharing: `threshold` shares recover a secret; fewer shares reveal nothing about the secret.

Shamir, How to Share a Secret, 1979, https://doi.org/10.1145/359168.359176, over the integers modulo the prime 2^521 - 1.
"""

import secrets
from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod

PRIME = 2**521 - 1
SECRET_BYTES = 32
SHARE_BYTES = 66  # bytes of a number below PRIME


def split_secret(secret: bytes, threshold: int, points: Sequence[int]) -> dict[int, bytes]:
    """Split a secret of 32 bytes into shares, and return point -> share of 66 bytes.

    A share is the value at its point of a random polynomial whose value at 0 is the secret. points: different whole numbers
    from 1 on, one for each holder of a share. threshold: the number of shares that recover the secret. Raises ValueError
    where the secret has another length, two points are equal, a point is below 1, or the threshold is below 1 or above the
    number of points.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if len(set(points)) < len(points) or min(points, default=0) < 1 or not 1 <= threshold <= len(points):
        raise ValueError(f"{threshold} of the points {list(points)} cannot hold a secret")
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    values = {x: reduce(lambda value, c: (value * x + c) % PRIME, reversed(coefficients), 0) for x in points}
    return {point: value.to_bytes(SHARE_BYTES, "big") for point, value in values.items()}


def join_shares(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of 32 bytes: the value at 0 of the polynomial through all shares. shares: point -> share.

    With fewer shares than the threshold, or with a wrong share, the result is another number, or a ValueError is raised.
    Raises ValueError where there are no shares, a share is malformed, or the shares do not belong to one secret of 32 bytes.
    """
    if not shares or min(shares) < 1:
        raise ValueError("there are no shares of a secret")
    values = {point: int.from_bytes(share, "big") for point, share in shares.items()}
    if any(len(share) != SHARE_BYTES for share in shares.values()) or max(values.values()) >= PRIME:
        raise ValueError(f"a share is a number below 2^521 - 1 in {SHARE_BYTES} bytes")
    secret = 0
    for point, value in values.items():  # times the Lagrange coefficient of the point for the value at 0
        others = [other for other in values if other != point]
        secret += value * prod(others) * pow(prod(other - point for other in others), -1, PRIME)
    secret %= PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("the shares do not belong to one secret")
    return secret.to_bytes(SECRET_BYTES, "big")
