"""A client's secret, and the random numbers for sampling and noise.

`At.rng` is public: anyone with the seed could compute the noise and subtract it. So every number of this module comes from
the client's secret: HKDF-SHA256 (RFC 5869) derives a key for each purpose, and each key is used for one ChaCha20 keystream
(RFC 8439).
"""

import hashlib
import math
import os
from pathlib import Path

import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from fedmutual.errors import RunError
from fedmutual.files import sync_folder
from fedmutual.rundir.folder import lock_folder

SIZE = 32  # bytes of a secret
_PATIENCE = 60.0  # seconds to wait while another process of this site draws the secret
_SALT = b"fedmutual differential privacy 1"
_BITS = 53  # of a uniform number in float64


def derive_key(secret: bytes, *purpose: str, salt: bytes = _SALT) -> bytes:
    """Return a key of 32 bytes for one purpose. Keys for other purposes or salts reveal nothing about this key."""
    info = b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in purpose)
    return HKDF(algorithm=SHA256(), length=SIZE, salt=salt, info=info).derive(secret)


def derive_simulation_secret(seed: int, client: str) -> bytes:
    """Return a client's secret of 32 bytes for a run in one process, where equal seeds must give equal results.

    The seed determines this secret, so the guarantee holds only against a party without the seed.
    """
    return hashlib.sha256(f"fedmutual simulation\0{seed}\0{client}".encode()).digest()


def read_site_secret(path: Path) -> bytes:
    """Return a real site's secret; without a file, write one with 32 random bytes that only its owner can read.

    Raises:
        RunError: the file cannot be read or written, has another length, or other users may read the file.
    """
    try:
        if not path.exists():
            _draw_secret(path)
        if os.name == "posix" and path.stat().st_mode & 0o077:
            raise RunError(
                f"{path}: other users of this machine may read the secret of the noise; run `chmod 600 {path}` if "
                "nobody has read the file, else remove the file, and the site draws a new secret"
            )
        content = path.read_bytes()
    except OSError as problem:
        raise RunError(f"{path}: the secret cannot be read or written ({problem.strerror or problem})") from None
    if len(content) != SIZE:
        raise RunError(f"{path}: a secret has {SIZE} bytes, and this file has {len(content)}; remove the file to draw one")
    return content


def _draw_secret(path: Path) -> None:
    """Write a new secret, unless another process of this site was faster. Part files of killed processes are removed."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with lock_folder(path.parent, "is drawing the secret of the noise", "try again", _PATIENCE):
        part = path.with_name(f".{path.name}.part")
        part.unlink(missing_ok=True)
        if path.exists():
            return
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(os.urandom(SIZE))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    sync_folder(path.parent)


class Stream:
    """The stream of random numbers for one purpose: the ChaCha20 keystream of one key (RFC 8439), on the CPU.

    Each call takes the next numbers of the stream, so that equal calls in equal order give equal numbers. Two streams of one
    key would repeat their numbers, and with them the noise: use each key for one stream.
    """

    def __init__(self, key: bytes) -> None:
        """key: 32 bytes, used for no other stream."""
        self._cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()

    def draw_words(self, count: int) -> Tensor:
        """Return uniform random int64 [count] over all 64 bits."""
        content = bytearray(8 * count + 16)
        self._cipher.update_into(bytes(8 * count), content)
        return torch.frombuffer(content, dtype=torch.int64, count=count) if count else torch.empty(0, dtype=torch.int64)

    def draw_bernoulli(self, probability: float, count: int) -> Tensor:
        """Return independent bool [count], each True with the probability, rounded down to a multiple of 2^-63."""
        threshold = int(probability * 2**63)
        return self.draw_words(count).bitwise_and_(2**63 - 1) < threshold if threshold < 2**63 else torch.ones(count).bool()

    def make_generator(self) -> torch.Generator:
        """Return a torch generator for augmentation and dropout, whose numbers are never sent."""
        return torch.Generator().manual_seed(int(self.draw_words(1)) & (2**63 - 1))

    def draw_normals(self, count: int, device: torch.device) -> Tensor:
        """Return independent standard normals, float64 [count], on the device.

        Each is the sum of two Box-Muller values, divided by sqrt(2). float64 cannot represent every real number, and
        the gaps between the values of a single Box-Muller draw can reveal which sums are impossible (Mironov, 2012); with
        several draws behind each value the search for such gaps takes too long
        (Holohan and Braghin, 2021, https://arxiv.org/abs/2107.10138).
        """
        half = -(-count // 2)
        words = self.draw_words(4 * half).to(device if device.type != "mps" else "cpu")  # Apple's GPUs have no float64
        uniform = words.bitwise_right_shift_(64 - _BITS).bitwise_and_(2**_BITS - 1).double()
        # without the factor 2 of sqrt(-2 log u), because the sum of two values is divided by sqrt(2)
        radius = uniform[: 2 * half].add_(0.5).mul_(2.0**-_BITS).log_().mul_(-1.0).sqrt_()
        angle = uniform[2 * half :].mul_(2 * math.pi * 2.0**-_BITS)
        cosines, sines = angle.cos().mul_(radius), angle.sin_().mul_(radius)
        return torch.cat([v[:half] + v[half:] for v in (cosines, sines)])[:count]
