"""A site's part of a secure sum: what it makes, what it holds of the others, and what it refuses.

A site never gives shares of both secrets of another site, and it opens one attempt of a round, once and for all: from a
second sum without one site a server would have that site's update by subtraction.
"""

import hashlib
import secrets
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from fedmutual.core import Message
from fedmutual.sites.secure_sum import letters, masks
from fedmutual.sites.secure_sum.identity import Authority, Forged, Signer
from fedmutual.sites.secure_sum.letters import Announcement, Key, Rejected, Share, SumContext
from fedmutual.sites.secure_sum.masks import Words
from fedmutual.sites.secure_sum.shares import SHARE_BYTES, split_secret

SERVER = "the server"


class HeldShares(BaseModel):
    """A site's share of another site's secrets, or of its own."""

    model_config = ConfigDict(strict=True)

    key: Share
    seed: Share


class SumSecrets(BaseModel):
    """What a site holds of the sum under way: on its own disk, and sent to nobody as it is."""

    model_config = ConfigDict(strict=True)

    binding: Key  # of the sum that it belongs to
    mask_key: Key
    seal_key: Key
    seed: Key
    announcements: list[Announcement] = []
    shares: dict[str, HeldShares] = {}  # by the site whose secrets they are of
    members: list[str] = []  # whose words carry pair masks
    present: list[str] = []  # whose words the server said to have


class SiteRecord(BaseModel):
    """The secrets of the sum under way, and which attempt of each round was opened."""

    model_config = ConfigDict(strict=True)

    secrets: SumSecrets | None = None
    opened: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Key] = {}  # round -> digest of the sum and who is in it


class SumSite:
    """One site in one sum. `record` is to be written down after each stage, before its answer leaves.

    `admission` sees to it that a site answers each stage once an attempt, or again with the same answer.
    """

    def __init__(self, context: SumContext, site: str, signer: Signer, authority: Authority, record: SiteRecord) -> None:
        """record: as it was written down."""
        self._context, self._site, self._signer, self._authority = context, site, signer, authority
        self.record = record

    def announce_keys(self, order: Message) -> Message:
        """Draw new keys and announce them. Raises Rejected where this round was opened in another attempt."""
        attempt = letters.read_letter(letters.Attempt, order, SERVER).attempt
        if attempt != self._context.attempt:
            raise Rejected("the server asks for the keys of another attempt")
        self._check_opened(None)
        drawn = SumSecrets(
            binding=self._context.binding.hex(),
            mask_key=masks.make_key().hex(),
            seal_key=masks.make_key().hex(),
            seed=secrets.token_hex(32),
        )
        self.record = self.record.model_copy(update={"secrets": drawn})
        mask_key, seal_key = (masks.public_key(bytes.fromhex(key)) for key in (drawn.mask_key, drawn.seal_key))
        commitment = masks.commit_seed(bytes.fromhex(drawn.seed), self._context.binding)
        return letters.pack_letter(letters.announce(self._context, self._site, mask_key, seal_key, commitment, self._signer))

    def share_secrets(self, order: Message) -> Message:
        """Check all announcements, and split this site's secrets among the sites that announced keys.

        Raises:
            Rejected: an announcement is forged, of another sum or model, or twice; this site's own is missing; or they are
                too few.
        """
        held, keys = self._held(), letters.read_letter(letters.Announcements, order, SERVER).keys
        for announcement in keys:
            letters.check_announcement(announcement, self._context, self._authority)
        sites = [announcement.site for announcement in keys]
        self._check_sites(sites, "announced keys")
        own = next(announcement for announcement in keys if announcement.site == self._site)
        if own.mask_key != masks.public_key(bytes.fromhex(held.mask_key)).hex():
            raise Rejected("the server holds other keys of this site than it announced")
        points = {site: self._context.point(site) for site in sites}
        split = [
            split_secret(bytes.fromhex(secret), self._context.threshold, list(points.values()))
            for secret in (held.mask_key, held.seed)
        ]
        sealed = {}
        for other in keys:
            key, seed = (shares[points[other.site]] for shares in split)
            if other.site == self._site:
                mine = HeldShares(key=key.hex(), seed=seed.hex())
            else:
                keys_of_pair = bytes.fromhex(held.seal_key), bytes.fromhex(other.seal_key)
                sealed[other.site] = self._seal(*keys_of_pair, other.site, key + seed)
        self._hold(announcements=keys, shares={self._site: mine}, members=[], present=[])
        return letters.pack_letter(letters.SealedShares(shares=sealed))

    def _seal(self, private: bytes, public: bytes, receiver: str, shares: bytes) -> str:
        try:
            return letters.seal_shares(self._context, private, public, self._site, receiver, shares).hex()
        except ValueError as problem:
            raise Rejected(f"the keys of site {receiver!r} are refused: {problem}") from None

    def mask_words(self, order: Message, words: Words) -> Words:
        """Take in the shares of the others -> this site's words under its own mask and those of all pairs.

        Raises:
            Rejected: shares were changed, or are of a site that announced no keys; or they are too few; or the round was
                opened; or this site masked its words for other sites before: both answers would tell a pair mask.
        """
        self._check_opened(None)
        held, sealed = self._held(), letters.read_letter(letters.SealedShares, order, SERVER).shares
        public = {announcement.site: announcement for announcement in held.announcements}
        members = sorted({*sealed, self._site})
        if self._site in sealed or not public.keys() >= set(members):
            raise Rejected("the server sends shares of a site that announced no keys")
        self._check_sites(members, "shared their secrets")
        if held.members and held.members != members:
            raise Rejected("this site masked its words before, for other sites, and masks them once")
        shares = {self._site: held.shares[self._site]}
        for sender, content in sealed.items():
            keys = bytes.fromhex(held.seal_key), bytes.fromhex(public[sender].seal_key)
            opened = letters.open_shares(self._context, *keys, sender, self._site, bytes.fromhex(content))
            shares[sender] = HeldShares(key=opened[:SHARE_BYTES].hex(), seed=opened[SHARE_BYTES:].hex())
        others = [(site, bytes.fromhex(public[site].mask_key)) for site in members if site != self._site]
        masked = words + masks.expand_seed(bytes.fromhex(held.seed), self._context.binding, self._site, len(words))
        masks.add_pair_masks(masked, self._site, bytes.fromhex(held.mask_key), others, self._context.binding)
        self._hold(shares=shares, members=members, present=[])
        return np.ascontiguousarray(masked)

    def confirm_present(self, order: Message) -> Message:
        """Sign which sites' words the server says to have.

        Raises:
            Rejected: this site, whose words it sent, is not among them; another one has no place there; they are too few.
        """
        held, present = self._held(), letters.read_letter(letters.Present, order, SERVER).sites
        if self._site not in present:
            raise Rejected("the server says that this site dropped out, and it sent its words")
        self._check_sites(present, "sent their words")
        if not set(present) <= set(held.members):
            raise Rejected("the server says to have words of a site that shared no secrets")
        self._hold(present=sorted(present))
        signature = self._signer.sign(letters.confirmed_content(self._context, present))
        return letters.pack_letter(letters.Confirmation(signature=signature.hex()))

    def open_secrets(self, order: Message) -> Message:
        """Give shares of the seeds of those who are present, and of the keys of those who dropped out.

        `record` has by then that this attempt of the round was opened.

        Raises:
            Rejected: too few sites signed the sites that this site signed, or a signature is forged; or the round was opened
                before, in another attempt or with other sites.
        """
        held, signatures = self._held(), letters.read_letter(letters.Confirmations, order, SERVER).signatures
        if not held.present:
            raise Rejected("the server asks for shares before this site has signed who is present")
        content = letters.confirmed_content(self._context, held.present)
        certificates = {a.site: bytes.fromhex(a.certificate) for a in held.announcements}
        for site, signature in signatures.items():
            if site not in held.present:
                raise Rejected(f"the signature of site {site!r} is refused: the site is not among those present")
            try:
                self._authority.check(site, certificates[site], bytes.fromhex(signature), content)
            except Forged:
                raise Rejected(f"site {site!r} did not sign the sites that this site was told of") from None
        self._check_sites([*signatures], "signed who is present", own=False)
        digest = hashlib.sha256(content).hexdigest()
        self._check_opened(digest)
        absent = [site for site in held.members if site not in held.present]
        self.record = self.record.model_copy(update={"opened": {**self.record.opened, str(self._context.round): digest}})
        return letters.pack_letter(
            letters.Opened(
                seeds={site: held.shares[site].seed for site in held.present},
                keys={site: held.shares[site].key for site in absent},
            )
        )

    def _held(self) -> SumSecrets:
        """The secrets of this very sum. Raises Rejected where this site has none."""
        held = self.record.secrets
        if held is None or held.binding != self._context.binding.hex():
            raise Rejected("this site announced no keys for this attempt of the round")
        return held

    def _hold(self, **changed: object) -> None:
        self.record = self.record.model_copy(update={"secrets": self._held().model_copy(update=changed)})

    def _check_opened(self, digest: str | None) -> None:
        """Raise Rejected where the round was opened. digest: of the sum that may be opened again, with the same shares."""
        if self.record.opened.get(str(self._context.round), digest) != digest:
            raise Rejected(
                "the sum of this round was opened before; a second one, with other sites, would tell single updates"
            )

    def _check_sites(self, sites: list[str], what: str, own: bool = True) -> None:
        """Raise Rejected unless enough sites, each once, did a stage. own: whether this site must be one of them."""
        if len(set(sites)) < len(sites) or (own and self._site not in sites):
            raise Rejected(f"the server names the sites that {what} wrongly: one twice, or without this one")
        if len(sites) < self._context.threshold:
            raise Rejected(
                f"{len(sites)} of {len(self._context.sites)} sites {what}, and {self._context.threshold} are needed"
            )
