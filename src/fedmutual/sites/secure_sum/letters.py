"""What a server and its sites send each other in a secure sum: JSON in a tensor of bytes, and the masked words beside it.

Five stages follow a site's training: KEYS, SHARES, UPLOAD, CONFIRM, UNMASK. In each the server sends an order to every site
that did the stage before, and each site answers.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, TypeVar

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedmutual.core import Message
from fedmutual.sites.secure_sum.identity import LONGEST_CERTIFICATE, Authority, Forged, Signer
from fedmutual.sites.secure_sum.masks import agree_key
from fedmutual.sites.secure_sum.shares import SHARE_BYTES

LEAST_SITES, MOST_SITES = 3, 20
LETTER, WORDS = "letter", "words"  # the tensors of a message: JSON as uint8 [N], masked words as int64 [N]
_NONCE = bytes(12)  # a key seals one letter


class Stage(IntEnum):
    """The stages of a secure sum, counted from 1: place 0 of a round is the training."""

    KEYS = 1
    SHARES = 2
    UPLOAD = 3
    CONFIRM = 4
    UNMASK = 5


class Rejected(RuntimeError):
    """A message of a secure sum that is not acted on. The sentence names who sent it, and holds no secret."""


@dataclass(frozen=True)
class SumContext:
    """Which sum: keys, shares and signatures are bound to all of it."""

    contract: str  # digest of the contract, in hex
    sites: tuple[str, ...]  # all sites of the federation
    round: int  # from 0
    attempt: int
    model: str  # digest of what the server sent to be trained on, in hex

    @property
    def binding(self) -> bytes:
        """A digest of 32 bytes of all of it."""
        about = [self.contract, sorted(self.sites), self.round, self.attempt, self.model]
        return hashlib.sha256(json.dumps(about).encode()).digest()

    @property
    def threshold(self) -> int:
        """How many sites must do every stage: more than two thirds of the federation, and at least LEAST_SITES."""
        return find_threshold(len(self.sites))

    def point(self, site: str) -> int:
        """Where a site's share of a secret lies, from 1 on."""
        return sorted(self.sites).index(site) + 1


def find_threshold(count: int) -> int:
    """How many of `count` sites must take part in a sum: more than two thirds."""
    return max(2 * count // 3 + 1, LEAST_SITES)


def _hex(size: int) -> str:
    return f"^[0-9a-f]{{{2 * size}}}$"


Key = Annotated[str, Field(pattern=_hex(32))]
Digest = Annotated[str, Field(pattern=_hex(32))]
Share = Annotated[str, Field(pattern=_hex(SHARE_BYTES))]
Sealed = Annotated[str, Field(pattern=_hex(2 * SHARE_BYTES + 16))]
Signature = Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=2048)]
Site = Annotated[str, Field(min_length=1, max_length=200)]


class Letter(BaseModel):
    """What all letters have in common."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Announcement(Letter):
    """A site's public keys for one sum, signed: the answer of the stage KEYS."""

    site: Site
    round: int
    attempt: int
    model: Digest  # of what the site was sent
    mask_key: Key
    seal_key: Key
    seed: Digest  # commitment to the seed of the site's own mask
    certificate: Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=2 * LONGEST_CERTIFICATE)]
    signature: Signature

    def content(self, contract: str) -> bytes:
        """What is signed."""
        return json.dumps(["announcement", contract, self.model_dump(exclude={"signature"})], sort_keys=True).encode()


class Announcements(Letter):
    """The order of the stage SHARES."""

    keys: Annotated[list[Announcement], Field(max_length=MOST_SITES)]


class SealedShares(Letter):
    """Shares that only their receiver opens: by receiver in an answer of SHARES, by sender in an order of UPLOAD."""

    shares: Annotated[dict[Site, Sealed], Field(max_length=MOST_SITES)]


class Present(Letter):
    """Whose words the server has: the order of the stage CONFIRM."""

    sites: Annotated[list[Site], Field(max_length=MOST_SITES)]


class Confirmation(Letter):
    """A site's signature under the sites of which it was told: the answer of the stage CONFIRM."""

    signature: Signature


class Confirmations(Letter):
    """The order of the stage UNMASK: site -> its signature."""

    signatures: Annotated[dict[Site, Signature], Field(max_length=MOST_SITES)]


class Opened(Letter):
    """The answer of the stage UNMASK: of each site a share of one of its two secrets, never of both."""

    seeds: Annotated[dict[Site, Share], Field(max_length=MOST_SITES)]  # of those who are present
    keys: Annotated[dict[Site, Share], Field(max_length=MOST_SITES)]  # of those who are not


class Attempt(Letter):
    """The order of the stage KEYS: with it another attempt is another order."""

    attempt: int


L = TypeVar("L", bound=Letter)
LONGEST_LETTER = MOST_SITES * 2 * (LONGEST_CERTIFICATE + 2**11)  # bytes: announcements of all sites


def pack_letter(letter: Letter) -> Message:
    """A letter as a message."""
    return {LETTER: torch.frombuffer(bytearray(letter.model_dump_json().encode()), dtype=torch.uint8)}


def read_letter(kind: type[L], message: Message, sender: str) -> L:
    """A letter out of a message. Raises Rejected where it is none of its kind."""
    tensor = message.get(LETTER)
    if tensor is None or set(message) != {LETTER} or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        raise Rejected(f"what {sender} sent is no letter of a secure sum")
    try:
        return kind.model_validate_json(tensor.numpy().tobytes())
    except ValidationError as problem:
        place = ".".join(map(str, problem.errors(include_input=False)[0]["loc"]))[:100]
        raise Rejected(f"what {sender} sent is no letter of this stage of a secure sum ({place})") from None


def announce(context: SumContext, site: str, mask_key: bytes, seal_key: bytes, seed: bytes, signer: Signer) -> Announcement:
    """Sign public keys and the commitment to a seed."""
    announcement = Announcement(
        site=site,
        round=context.round,
        attempt=context.attempt,
        model=context.model,
        mask_key=mask_key.hex(),
        seal_key=seal_key.hex(),
        seed=seed.hex(),
        certificate=signer.certificate.hex(),
        signature="00",
    )
    return announcement.model_copy(update={"signature": signer.sign(announcement.content(context.contract)).hex()})


def check_announcement(announcement: Announcement, context: SumContext, authority: Authority) -> None:
    """Raise Rejected, with the site's name and the reason, unless a site of the federation announced keys for this sum."""
    site = announcement.site
    if site not in context.sites:
        raise Rejected(f"the keys of site {site!r} are refused: no such site is of the federation")
    certificate, signature = bytes.fromhex(announcement.certificate), bytes.fromhex(announcement.signature)
    try:
        authority.check(site, certificate, signature, announcement.content(context.contract))
    except Forged as problem:
        raise Rejected(f"the keys of site {site!r} are refused: {problem}") from None
    if (announcement.round, announcement.attempt) != (context.round, context.attempt):
        raise Rejected(f"the keys of site {site!r} are refused: they are of another round or attempt")
    if announcement.model != context.model:
        raise Rejected(f"the keys of site {site!r} are refused: the server sent that site another model")


def confirmed_content(context: SumContext, present: Iterable[str]) -> bytes:
    """What a site signs in the stage CONFIRM: which sites' words the server says to have."""
    return json.dumps(["confirmation", context.binding.hex(), sorted(present)]).encode()


def seal_shares(context: SumContext, private: bytes, public: bytes, sender: str, receiver: str, shares: bytes) -> bytes:
    """Encrypt shares for their receiver: ChaCha20-Poly1305 (RFC 8439). private: the sender's key; public: the receiver's."""
    return _cipher(context, private, public, sender, receiver).encrypt(_NONCE, shares, context.binding)


def open_shares(context: SumContext, private: bytes, public: bytes, sender: str, receiver: str, sealed: bytes) -> bytes:
    """Decrypt shares. private: the receiver's key; public: the sender's.

    Raises:
        Rejected: the sender did not seal them.
    """
    try:
        return _cipher(context, private, public, sender, receiver).decrypt(_NONCE, sealed, context.binding)
    except InvalidTag:
        raise Rejected(f"the shares of site {sender!r} are refused: they were changed on their way") from None


def _cipher(context: SumContext, private: bytes, public: bytes, sender: str, receiver: str) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(agree_key(private, public, context.binding, "shares", sender, receiver))
