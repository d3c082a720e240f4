"""The masks of a secure sum: one mask for each pair of sites, from a key of the pair, and one from each site's seed.

Two sites agree on a key by X25519 (RFC 7748) and HKDF-SHA256 (RFC 5869); the keystream is ChaCha20 (RFC 8439). The first
site of a pair, by name, adds the mask of the pair, and the second site subtracts the mask: in the sum the masks cancel.
"""

import hashlib
from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from numpy.typing import NDArray

from fedmutual.privacy.secret import Stream, derive_key

Words = NDArray[np.uint64]
"""Fixed-point words [N]: the numbers of `fixed_sum` as unsigned integers modulo 2^64. Masks are words too."""

_SALT = b"fedmutual secure sum 1"


def make_key() -> bytes:
    """Draw and return an X25519 private key of 32 bytes."""
    return X25519PrivateKey.generate().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def derive_public_key(private: bytes) -> bytes:
    """Return the X25519 public key, 32 bytes, of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def agree_key(private: bytes, public: bytes, context: bytes, purpose: str, first: str, second: str) -> bytes:
    """Return the key of 32 bytes that two sites agree on for a purpose.

    private: the key of one site. public: the key of the other site. context: the digest of the sum that the key is bound to.
    first, second: the names of the two sites, in an order that both sites use.

    Raises:
        ValueError: `public` is not an X25519 key, or gives one secret with every private key.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ValueError("its public key is not an X25519 key, or gives one secret with every other key") from None
    return derive_key(shared, context.hex(), purpose, first, second, salt=_SALT)


def commit_seed(seed: bytes, context: bytes) -> bytes:
    """Return the commitment to a seed: a digest of 32 bytes that an opened seed is compared with."""
    return hashlib.sha256(_SALT + b"\0seed\0" + context + seed).digest()


def expand_seed(seed: bytes, context: bytes, site: str, count: int) -> Words:
    """Return the mask [count] that a site derives from its seed."""
    return _draw_words(derive_key(seed, context.hex(), "self mask", site, salt=_SALT), count)


def add_pair_masks(words: Words, site: str, private: bytes, others: Iterable[tuple[str, bytes]], context: bytes) -> None:
    """Add the pair masks of a site to its words, in place.

    private: the X25519 key of the site. others: the name and the public key of each other site.

    Raises:
        ValueError: a public key is not an X25519 key, or gives one secret with every private key.
    """
    for other, public in others:
        first, second = sorted((site, other))
        mask = _draw_words(agree_key(private, public, context, "pair mask", first, second), len(words))
        if site == first:
            np.add(words, mask, out=words)
        else:
            np.subtract(words, mask, out=words)


def _draw_words(key: bytes, count: int) -> Words:
    words: Words = Stream(key).words(count).numpy().view(np.uint64)
    return words
