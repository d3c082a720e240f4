"""The masks of a secure sum: words modulo 2^64 from keys that two sites agree on, and from a seed of each site's own.

Two sites agree on a key by X25519 (RFC 7748) and HKDF-SHA256 (RFC 5869); the keystream is ChaCha20 (RFC 8439). The site of
a pair that comes first by name adds the words of the pair, the other one subtracts them: in the sum they cancel.
"""

import hashlib
from collections.abc import Iterable

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from numpy.typing import NDArray

from fedmutual.privacy.secret import Stream, derive_key

Words = NDArray[np.uint64]
"""Numbers modulo 2^64 [N]."""

_SALT = b"fedmutual secure sum 1"


def make_key() -> bytes:
    """Draw an X25519 private key of 32 bytes."""
    return X25519PrivateKey.generate().private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def public_key(private: bytes) -> bytes:
    """The X25519 public key, 32 bytes, of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)


def agree_key(private: bytes, public: bytes, context: bytes, purpose: str, first: str, second: str) -> bytes:
    """The key of 32 bytes that two sites agree on for a purpose, from one's private and the other's public key.

    context: what the key is bound to: federation, round, attempt and model. first, second: the sites, in one order for both.

    Raises:
        ValueError: the public key is none, or one that gives the same secret with every private key.
    """
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ValueError("its public key is no key of X25519, or gives one secret with every other key") from None
    return derive_key(shared, context.hex(), purpose, first, second, salt=_SALT)


def commit_seed(seed: bytes, context: bytes) -> bytes:
    """A digest of 32 bytes by which a seed is known again when it is opened."""
    return hashlib.sha256(_SALT + b"\0seed\0" + context + seed).digest()


def expand_seed(seed: bytes, context: bytes, site: str, count: int) -> Words:
    """The words of a site's own mask."""
    return _draw_words(derive_key(seed, context.hex(), "self mask", site, salt=_SALT), count)


def add_pair_masks(words: Words, site: str, private: bytes, others: Iterable[tuple[str, bytes]], context: bytes) -> None:
    """Add the masks that a site has with each of the others, in place.

    private: the site's X25519 key. others: the other sites and their public keys.

    Raises:
        ValueError: as `agree_key`.
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
