"""A site's side of a secure sum: make keys and shares, check the orders of the server, and refuse dishonest orders.

A site has two secrets: a mask key and a seed. A site never reveals shares of both secrets of another site. It opens only one
attempt of a round: a second sum without one site would give the server the update of that site, by subtraction.
"""

import hashlib
import secrets
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from fedmutual.core import Message
from fedmutual.sites.secure_sum import masks, messages
from fedmutual.sites.secure_sum.identity import Authority, Forged, Signer
from fedmutual.sites.secure_sum.masks import Words
from fedmutual.sites.secure_sum.messages import (
    Announcement,
    Key,
    Rejected,
    Share,
    SumContext,
    pack_sum_message,
    read_sum_message,
)
from fedmutual.sites.secure_sum.shares import SHARE_BYTES, split_secret
from fedmutual.sites.state_files import StateRecord

SERVER = "the server"


class HeldShares(BaseModel):
    """The shares of a site's two secrets that this site holds. After UNMASK it holds only the one that it has revealed."""

    model_config = ConfigDict(strict=True)

    key: Share | None = None
    seed: Share | None = None


class SumSecrets(BaseModel):
    """The secrets and the state of a site in the current sum. They stay on the disk of the site until they are erased.

    The site erases its own secrets in CONFIRM, when its words are at the server, and the shares that it does not reveal in
    UNMASK: later, no disk of a site holds a secret that the server does not have.
    """

    model_config = ConfigDict(strict=True)

    binding: Key  # binding of the sum
    mask_key: Key | None
    seal_key: Key | None
    seed: Key | None
    announcements: list[Announcement] = []
    shares: dict[str, HeldShares] = {}  # site -> shares of the secrets of that site
    members: list[str] = []  # the sites with which this site has pair masks, and this site
    present: list[str] = []  # the sites whose words the server claims to have


class SiteRecord(StateRecord):
    """The secrets of the current sum, and the digest of the sum that was opened in each round."""

    secrets: SumSecrets | None = None
    # round (-1: the start) -> digest of the sum and its sites
    opened: dict[Annotated[str, Field(pattern="^(-1|[0-9]{1,9})$")], Key] = Field(default_factory=dict)


class SumSite:
    """One site in one sum. The caller saves `record` after each stage, before the answer is sent.

    The site is a user in the protocol of Bonawitz et al., 2017, https://doi.org/10.1145/3133956.3133982. The module
    `sites.admission` ensures that a site answers each stage of an attempt once, or repeats the same answer.
    """

    def __init__(self, context: SumContext, site: str, signer: Signer, authority: Authority, record: SiteRecord) -> None:
        """record: the saved record of the site; `SiteRecord()` before the first sum."""
        self._context, self._site, self._signer, self._authority = context, site, signer, authority
        self.record = record

    def announce_keys(self, order: Message) -> Message:
        """Draw new keys, and return the signed announcement of their public keys.

        Raises:
            Rejected: the order is of another attempt, or this round was opened in another attempt.
        """
        attempt = read_sum_message(messages.KeyRequest, order, SERVER).attempt
        if attempt != self._context.attempt:
            raise Rejected("the server asks for the keys of another attempt")
        self._check_opened(None)
        mask_key, seal_key, seed = masks.make_key(), masks.make_key(), secrets.token_bytes(32)
        new_secrets = SumSecrets(
            binding=self._context.binding.hex(), mask_key=mask_key.hex(), seal_key=seal_key.hex(), seed=seed.hex()
        )
        self.record = self.record.model_copy(update={"secrets": new_secrets})
        public = masks.derive_public_key(mask_key), masks.derive_public_key(seal_key)
        commitment = masks.commit_seed(seed, self._context.binding)
        return pack_sum_message(messages.make_announcement(self._context, self._site, *public, commitment, self._signer))

    def share_secrets(self, order: Message) -> Message:
        """Check all announcements, and return encrypted shares of this site's secrets for all other sites.

        Raises:
            Rejected: an announcement is forged, is repeated, or belongs to another sum or model; the announcement of this
                site is missing; fewer sites than the threshold announced keys; or this site has masked its words.
        """
        state, announcements = self._read_secrets(), read_sum_message(messages.Announcements, order, SERVER).keys
        if state.members:
            raise Rejected("this site has masked its words, and does not share its secrets again")
        mask_key, seal_key, seed = _read_keys(state)
        for announcement in announcements:
            messages.check_announcement(announcement, self._context, self._authority)
        sites = [announcement.site for announcement in announcements]
        self._check_sites(sites, "announced keys")
        announced = next(announcement for announcement in announcements if announcement.site == self._site)
        if announced.mask_key != masks.derive_public_key(mask_key).hex():
            raise Rejected("the server sends other keys of this site than this site announced")
        points = {site: self._context.find_point(site) for site in sites}
        shares_by_secret = [
            split_secret(secret, self._context.threshold, list(points.values())) for secret in (mask_key, seed)
        ]
        sealed = {}
        for peer_announcement in announcements:
            share_of_key, share_of_seed = (shares[points[peer_announcement.site]] for shares in shares_by_secret)
            if peer_announcement.site == self._site:
                own_shares = HeldShares(key=share_of_key.hex(), seed=share_of_seed.hex())
            else:
                sealed[peer_announcement.site] = messages.seal_shares(
                    self._context,
                    seal_key,
                    bytes.fromhex(peer_announcement.seal_key),
                    self._site,
                    peer_announcement.site,
                    share_of_key + share_of_seed,
                ).hex()
        self._change_secrets(announcements=announcements, shares={self._site: own_shares})
        return pack_sum_message(messages.SealedShares(shares=sealed))

    def mask_words(self, order: Message, words: Words) -> Words:
        """Store the shares of the other sites, and return the masked words [N] of this site. words: the words of its update.

        Raises:
            Rejected: a share was changed, or belongs to a site that announced no keys; fewer sites than the threshold sent
                shares; the round was opened before; this site has signed the list of present sites; or it masked its words
                for other sites before, so that the difference of both answers would reveal a pair mask.
        """
        self._check_opened(None)
        state, sealed = self._read_secrets(), read_sum_message(messages.SealedShares, order, SERVER).shares
        announcements = {announcement.site: announcement for announcement in state.announcements}
        members = sorted({*sealed, self._site})
        if self._site in sealed or not announcements.keys() >= set(members):
            raise Rejected("the server sends shares of a site that announced no keys")
        self._check_sites(members, "shared their secrets")
        if state.members and state.members != members:
            raise Rejected("this site masked its words before, for other sites; a site masks its words only once")
        mask_key, seal_key, seed = _read_keys(state)
        shares = {self._site: state.shares[self._site]}
        for sender, encrypted in sealed.items():
            public = bytes.fromhex(announcements[sender].seal_key)
            decrypted = messages.open_shares(self._context, seal_key, public, sender, self._site, bytes.fromhex(encrypted))
            shares[sender] = HeldShares(key=decrypted[:SHARE_BYTES].hex(), seed=decrypted[SHARE_BYTES:].hex())
        others = [(site, bytes.fromhex(announcements[site].mask_key)) for site in members if site != self._site]
        masked = words.copy()
        masks.add_seed_mask(masked, seed, self._context.binding, self._site)
        masks.add_pair_masks(masked, self._site, mask_key, others, self._context.binding)
        self._change_secrets(shares=shares, members=members)
        return masked

    def confirm_present(self, order: Message) -> Message:
        """Sign the list of sites whose words the server claims to have, and erase this site's own secrets.

        Raises:
            Rejected: this site, which sent its words, is not on the list; a site on the list shared no secrets; the list is
                shorter than the threshold; or this site has signed another list.
        """
        state, present = self._read_secrets(), read_sum_message(messages.PresentSites, order, SERVER).sites
        if self._site not in present:
            raise Rejected("the server claims that this site dropped out, but this site sent its words")
        self._check_sites(present, "sent their words")
        if not set(present) <= set(state.members):
            raise Rejected("the server claims to have words of a site that shared no secrets")
        if state.present and state.present != sorted(present):
            raise Rejected("this site has signed another list of present sites; two lists would open two sums")
        self._change_secrets(present=sorted(present), mask_key=None, seal_key=None, seed=None)
        signature = self._signer.sign(messages.make_confirmed_content(self._context, present))
        return pack_sum_message(messages.Confirmation(signature=signature.hex()))

    def open_secrets(self, order: Message) -> Message:
        """Return shares of the seeds of present sites, and shares of the mask keys of sites that dropped out.

        `record` then notes that this attempt of the round was opened, and holds no other shares.

        Raises:
            Rejected: fewer sites than the threshold signed the list that this site signed; a signature is forged; or the
                round was opened before, in another attempt or with other sites.
        """
        state, signatures = self._read_secrets(), read_sum_message(messages.Confirmations, order, SERVER).signatures
        if not state.present:
            raise Rejected("the server asks for shares before this site has signed the list of present sites")
        content = messages.make_confirmed_content(self._context, state.present)
        certificates = {announcement.site: bytes.fromhex(announcement.certificate) for announcement in state.announcements}
        for site, signature in signatures.items():
            if site not in state.present:
                raise Rejected(f"the signature of site {site!r} is refused: the site is not on the list of present sites")
            try:
                self._authority.check(site, certificates[site], bytes.fromhex(signature), content)
            except Forged:
                raise Rejected(f"site {site!r} did not sign the list of sites that this site received") from None
        self._check_sites([*signatures], "signed the list of present sites", is_own_required=False)
        digest = hashlib.sha256(content).hexdigest()
        self._check_opened(digest)
        seeds = {site: _check_held(state.shares[site].seed) for site in state.present}
        keys = {site: _check_held(state.shares[site].key) for site in state.members if site not in state.present}
        revealed = {site: HeldShares(seed=share) for site, share in seeds.items()}
        self._change_secrets(shares=revealed | {site: HeldShares(key=share) for site, share in keys.items()})
        self.record = self.record.model_copy(update={"opened": {**self.record.opened, str(self._context.round): digest}})
        return pack_sum_message(messages.OpenedShares(seeds=seeds, keys=keys))

    def _read_secrets(self) -> SumSecrets:
        """Return the secrets of this sum. Raises Rejected if this site has none."""
        state = self.record.secrets
        if state is None or state.binding != self._context.binding.hex():
            raise Rejected("this site announced no keys for this attempt of the round")
        return state

    def _change_secrets(self, **changes: object) -> None:
        self.record = self.record.model_copy(update={"secrets": self._read_secrets().model_copy(update=changes)})

    def _check_opened(self, digest: str | None) -> None:
        """Raise Rejected if the round was opened before. digest: the digest of the sum that may be opened again."""
        if self.record.opened.get(str(self._context.round), digest) != digest:
            raise Rejected(
                "the sum of this round was opened before; a second sum, with other sites, would reveal single updates"
            )

    def _check_sites(self, sites: list[str], action: str, is_own_required: bool = True) -> None:
        """Raise Rejected unless `sites` holds `threshold` different sites. action: what they did, for the error text."""
        if len(set(sites)) < len(sites) or (is_own_required and self._site not in sites):
            raise Rejected(f"the server's list of the sites that {action} names a site twice, or lacks this site")
        if len(sites) < self._context.threshold:
            raise Rejected(
                f"{len(sites)} of {len(self._context.sites)} sites {action}, and {self._context.threshold} are needed"
            )


def _read_keys(state: SumSecrets) -> tuple[bytes, bytes, bytes]:
    """Return a site's mask key, seal key and seed. Raises Rejected if they are erased."""
    if state.mask_key is None or state.seal_key is None or state.seed is None:
        raise Rejected("this site has signed the list of present sites, and has erased its keys")
    return bytes.fromhex(state.mask_key), bytes.fromhex(state.seal_key), bytes.fromhex(state.seed)


def _check_held(share: str | None) -> str:
    """Return a share. Raises Rejected if it is erased."""
    if share is None:
        raise Rejected("this site has erased a share that the order asks for")
    return share
