"""Masks beside the documents that they follow: X25519 by its RFC's vectors, HKDF and ChaCha20 by code of the test's own."""

import hashlib
import hmac
import struct

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from fedmutual.sites.secure_sum import masks

BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")  # RFC 7748, 6.1
BOB_PUBLIC = bytes.fromhex("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
ALICE_PUBLIC = bytes.fromhex("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
SHARED = bytes.fromhex("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
CONTEXT = b"ward, round 1"
SALT = b"fedmutual secure sum 1"


def hkdf(secret: bytes, *purpose: str) -> bytes:
    """RFC 5869, one block of 32 bytes; the purpose's parts with their lengths before them."""
    info = b"".join(struct.pack(">I", len(part)) + part.encode() for part in purpose)
    return hmac.digest(hmac.digest(SALT, secret, "sha256"), info + b"\x01", "sha256")


def chacha20(key: bytes, count: int) -> list[int]:
    """RFC 8439, section 2.3, with a nonce of zeros, as words of 64 bits in little endian."""

    def rotate(v: int, n: int) -> int:
        return (v << n | v >> (32 - n)) & 0xFFFFFFFF

    def quarter(x: list[int], a: int, b: int, c: int, d: int) -> None:
        for to, add, turn, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[to] = (x[to] + x[add]) & 0xFFFFFFFF
            x[turn] = rotate(x[turn] ^ x[to], bits)

    stream = b""
    for block in range(-(-count // 8)):
        state = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), block, 0, 0, 0]
        x = list(state)
        for _ in range(10):
            for k in range(4):
                quarter(x, k, 4 + k, 8 + k, 12 + k)
            for k in range(4):
                quarter(x, k, 4 + (k + 1) % 4, 8 + (k + 2) % 4, 12 + (k + 3) % 4)
        stream += struct.pack("<16I", *((a + b) & 0xFFFFFFFF for a, b in zip(x, state, strict=True)))
    return list(struct.unpack(f"<{count}Q", stream[: 8 * count]))


def test_the_own_chacha20_is_that_of_the_document() -> None:
    """RFC 8439, A.1, test vector 1: key, nonce and counter of zeros."""
    assert chacha20(bytes(32), 2) == [*struct.unpack("<2Q", bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28"))]


def test_keys_are_those_of_the_document() -> None:
    assert masks.derive_public_key(BOB) == BOB_PUBLIC
    agreed = masks.agree_key(BOB, ALICE_PUBLIC, CONTEXT, "pair mask", "alice", "bob")
    assert agreed == hkdf(SHARED, CONTEXT.hex(), "pair mask", "alice", "bob")


def test_the_mask_of_a_pair_by_hand() -> None:
    """bob comes after alice: he subtracts what she adds."""
    words = np.array([5, 0, 2**64 - 1], np.uint64)
    masks.add_pair_masks(words, "bob", BOB, [("alice", ALICE_PUBLIC)], CONTEXT)
    mask = chacha20(hkdf(SHARED, CONTEXT.hex(), "pair mask", "alice", "bob"), 3)
    assert words.tolist() == [(w - m) % 2**64 for w, m in zip([5, 0, 2**64 - 1], mask, strict=True)]


def test_the_own_mask_by_hand() -> None:
    seed = bytes(range(32))
    words = np.zeros(9, np.uint64)
    masks.add_seed_mask(words, seed, CONTEXT, "bob")
    assert words.tolist() == chacha20(hkdf(seed, CONTEXT.hex(), "self mask", "bob"), 9)
    masks.add_seed_mask(words, seed, CONTEXT, "bob", subtract=True)
    assert not words.any()
    assert masks.commit_seed(seed, CONTEXT) == hashlib.sha256(SALT + b"\0seed\0" + CONTEXT + seed).digest()


def test_a_long_mask_is_one_keystream() -> None:
    """The mask is added in pieces."""
    words = np.zeros(100_003, np.uint64)
    masks.add_seed_mask(words, bytes(32), CONTEXT, "bob")
    cipher = Cipher(ChaCha20(hkdf(bytes(32), CONTEXT.hex(), "self mask", "bob"), bytes(16)), None).encryptor()
    assert words.tobytes() == cipher.update(bytes(words.nbytes))


def test_the_masks_of_pairs_cancel() -> None:
    keys = {i: masks.make_key() for i in "abcd"}
    total = np.zeros(1000, np.uint64)
    for i, key in keys.items():
        words = np.full(1000, 3, np.uint64)
        masks.add_pair_masks(words, i, key, [(j, masks.derive_public_key(k)) for j, k in keys.items() if j != i], CONTEXT)
        assert np.count_nonzero(words == 3) < 3
        total += words
    assert (total == 12).all()


def test_another_place_or_purpose_has_another_key_and_a_key_of_small_order_is_refused() -> None:
    """Points of small order, by which everybody has one secret: RFC 7748, 6.1."""
    places = (
        (CONTEXT, "pair mask", "alice", "bob"),
        (CONTEXT, "pair mask", "alice", "carol"),
        (CONTEXT, "shares", "alice", "bob"),
        (b"ward, round 2", "pair mask", "alice", "bob"),
    )
    assert len({masks.agree_key(BOB, ALICE_PUBLIC, *place) for place in places}) == 4
    for public in (bytes(32), b"\x01" + bytes(31), ALICE_PUBLIC[:31]):
        with pytest.raises(ValueError, match="public key"):
            masks.agree_key(BOB, public, *places[0])
