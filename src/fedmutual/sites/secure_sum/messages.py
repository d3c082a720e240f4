"""The messages of a secure sum. A message holds one tensor: either JSON text as bytes, or masked fixed-point words.

Five stages follow the training of a site: KEYS, SHARES, UPLOAD, CONFIRM, UNMASK. In each stage the server sends an order to
every site that answered the previous stage, and each of these sites answers.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_json

from fedmutual.core import Message
from fedmutual.sites.secure_sum.identity import LONGEST_CERTIFICATE, Authority, Forged, Signer
from fedmutual.sites.secure_sum.masks import agree_key, check_public_key
from fedmutual.sites.secure_sum.shares import SHARE_BYTES

LEAST_SITES, MOST_SITES = 3, 20
CONTENT, WORDS = "content", "words"  # names of tensors in a message: JSON text as uint8 [N], masked words as int64 [N]
NONCE_BYTES = 12  # of ChaCha20-Poly1305
_SIGNED = "fedmutual secure sum 1"  # at the start of all signed content: the key of a kit signs other content too


class Stage(IntEnum):
    """The stages of a secure sum, counted from 1; number 0 of a round is the training."""

    KEYS = 1
    SHARES = 2
    UPLOAD = 3
    CONFIRM = 4
    UNMASK = 5


class Rejected(RuntimeError):
    """A message of a secure sum is refused. The error text names the sender and holds no secret."""


@dataclass(frozen=True)
class SumContext:
    """The identity of a sum. Keys, shares and signatures are bound to all fields."""

    contract: str  # digest of the contract, in hex
    sites: tuple[str, ...]  # all sites of the federation
    round: int  # from 0
    attempt: int  # from 0
    model: str  # digest of the model that the server sent, in hex

    @property
    def binding(self) -> bytes:
        """The digest of all fields, 32 bytes."""
        fields = [self.contract, sorted(self.sites), self.round, self.attempt, self.model]
        return hashlib.sha256(json.dumps(fields).encode()).digest()

    @property
    def threshold(self) -> int:
        """The number of sites that must answer every stage; see `find_threshold`."""
        return find_threshold(len(self.sites))

    def find_point(self, site: str) -> int:
        """Return the point of a site's shares, a whole number from 1 on."""
        return sorted(self.sites).index(site) + 1


def find_threshold(count: int) -> int:
    """Return how many of `count` sites must take part in a sum: more than two thirds, and at least LEAST_SITES.

    More than two thirds: the variant of Bonawitz et al. (2017) against a dishonest server.
    """
    return max(2 * count // 3 + 1, LEAST_SITES)


def _hex(size: int) -> str:
    return f"^[0-9a-f]{{{2 * size}}}$"


Key = Annotated[str, Field(pattern=_hex(32))]
Digest = Annotated[str, Field(pattern=_hex(32))]
Share = Annotated[str, Field(pattern=_hex(SHARE_BYTES))]
Sealed = Annotated[str, Field(pattern=_hex(NONCE_BYTES + 2 * SHARE_BYTES + 16))]
Signature = Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=2048)]
Site = Annotated[str, Field(min_length=1, max_length=200)]
_OfSites = Field(max_length=MOST_SITES)


class Announcement(BaseModel):
    """The answer of the stage KEYS: a site's public keys for one sum, with a signature."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    site: Site
    round: int
    attempt: int
    model: Digest  # of the model that the site was sent
    mask_key: Key
    seal_key: Key
    seed: Digest  # commitment to the seed of the mask that only this site adds
    certificate: Annotated[str, Field(pattern=r"^([0-9a-f]{2})+$", max_length=2 * LONGEST_CERTIFICATE)]
    signature: Signature

    def make_signed_content(self, contract: str) -> bytes:
        """Return the bytes that are signed: all fields but the signature, and the digest of the contract."""
        fields = self.model_dump(exclude={"signature"})
        return json.dumps([_SIGNED, "announcement", contract, fields], sort_keys=True).encode()


Content = Any
"""The content of an order or an answer, of the type that ORDERS or ANSWERS has for its stage."""
_SEALED = TypeAdapter(Annotated[dict[Site, Sealed], _OfSites])  # shares encrypted for one receiver
ORDERS: dict[Stage, TypeAdapter[Content]] = {
    Stage.KEYS: TypeAdapter(int),  # the attempt, which makes the order of each attempt different
    Stage.SHARES: TypeAdapter(Annotated[list[Announcement], _OfSites]),
    Stage.UPLOAD: _SEALED,  # by sender
    Stage.CONFIRM: TypeAdapter(Annotated[list[Site], _OfSites]),  # the sites whose words the server has received
    Stage.UNMASK: TypeAdapter(Annotated[dict[Site, Signature], _OfSites]),
}
ANSWERS: dict[Stage, TypeAdapter[Content]] = {  # an answer of UPLOAD has words instead
    Stage.KEYS: TypeAdapter(Announcement),
    Stage.SHARES: _SEALED,  # by receiver
    Stage.CONFIRM: TypeAdapter(Signature),  # of the list in the order
    # shares of the seeds of present sites, and of the mask keys of sites that dropped out
    Stage.UNMASK: TypeAdapter(tuple[Annotated[dict[Site, Share], _OfSites], Annotated[dict[Site, Share], _OfSites]]),
}
LONGEST_CONTENT = MOST_SITES * 2 * (LONGEST_CERTIFICATE + 2**11)  # bytes: announcements of all sites


def pack_content(content: Content) -> Message:
    """Return a message that holds the content as JSON text."""
    return {CONTENT: torch.frombuffer(bytearray(to_json(content)), dtype=torch.uint8)}


def read_content(kind: TypeAdapter[Content], message: Message, sender: str) -> Content:
    """Return the content of a message. sender: named in the error text.

    Raises Rejected where the message holds no content of this kind.
    """
    tensor = message.get(CONTENT)
    try:
        if tensor is None or set(message) != {CONTENT} or tensor.dtype != torch.uint8 or tensor.dim() != 1:
            raise Rejected(f"the message of {sender} is not a message of a secure sum")
        return kind.validate_json(tensor.numpy().tobytes(), strict=True)
    except ValidationError as problem:
        place = ".".join(map(str, problem.errors(include_input=False)[0]["loc"]))[:100]
        raise Rejected(f"the message of {sender} does not belong to this stage of a secure sum (field {place!r})") from None


def make_announcement(
    context: SumContext, site: str, mask_key: bytes, seal_key: bytes, seed: bytes, signer: Signer
) -> Announcement:
    """Return a signed announcement. mask_key, seal_key: public keys, 32 bytes each. seed: the commitment to a seed."""
    unsigned = Announcement(
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
    signature = signer.sign(unsigned.make_signed_content(context.contract))
    return unsigned.model_copy(update={"signature": signature.hex()})


def check_announcement(announcement: Announcement, context: SumContext, authority: Authority) -> None:
    """Raise Rejected where an announcement is forged, or is not of a site of the federation or of this sum.

    The error text names the site and the reason.
    """
    site = announcement.site
    try:
        if site not in context.sites:
            raise Forged("the federation has no such site")
        certificate, signature = bytes.fromhex(announcement.certificate), bytes.fromhex(announcement.signature)
        authority.check(site, certificate, signature, announcement.make_signed_content(context.contract))
        if (announcement.round, announcement.attempt) != (context.round, context.attempt):
            raise Forged("they belong to another round or attempt")
        if announcement.model != context.model:
            raise Forged("the server sent that site another model")
        for key in (announcement.mask_key, announcement.seal_key):
            check_public_key(bytes.fromhex(key))
    except ValueError as problem:  # Forged, too
        raise Rejected(f"the keys of site {site!r} are refused: {problem}") from None


def make_confirmed_content(context: SumContext, present: Iterable[str]) -> bytes:
    """Return the bytes that a site signs in the stage CONFIRM. present: the sites whose words the server claims to have."""
    return json.dumps([_SIGNED, "confirmation", context.binding.hex(), sorted(present)]).encode()


def seal_shares(context: SumContext, private: bytes, public: bytes, sender: str, receiver: str, shares: bytes) -> bytes:
    """Return shares encrypted for their receiver by ChaCha20-Poly1305 (RFC 8439), after a random nonce.

    A key encrypts more than one message where a site that crashed shares its secrets again, so the nonce is not constant.

    private: the seal key of the sender. public: the seal key of the receiver.
    """
    nonce = os.urandom(NONCE_BYTES)
    return nonce + _make_cipher(context, private, public, sender, receiver).encrypt(nonce, shares, context.binding)


def open_shares(context: SumContext, private: bytes, public: bytes, sender: str, receiver: str, sealed: bytes) -> bytes:
    """Return decrypted shares. private: the seal key of the receiver. public: the seal key of the sender.

    Raises Rejected where the shares were not encrypted by the sender for this sum.
    """
    try:
        cipher = _make_cipher(context, private, public, sender, receiver)
        return cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], context.binding)
    except InvalidTag:
        raise Rejected(f"the shares of site {sender!r} are refused: they were changed during transfer") from None


def _make_cipher(context: SumContext, private: bytes, public: bytes, sender: str, receiver: str) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(agree_key(private, public, context.binding, "shares", sender, receiver))
