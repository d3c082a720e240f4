"""A site's side of a secure sum: make keys and shares, check the orders of the server, and refuse dishonest orders.

A site has two secrets: a mask key and a seed. A site never reveals shares of both secrets of another site. It opens only one
attempt of a round: a second sum without one site would give the server the update of that site, by subtraction.
"""

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from fedmutual.core import Message
from fedmutual.sites.protocol import Order
from fedmutual.sites.secure_sum import masks, messages
from fedmutual.sites.secure_sum.fixed_point import pack_update
from fedmutual.sites.secure_sum.identity import Authority, Forged, Signer, read_authority, read_signer
from fedmutual.sites.secure_sum.masks import Words
from fedmutual.sites.secure_sum.messages import (
    WORDS,
    Announcement,
    Key,
    Rejected,
    Share,
    Stage,
    SumContext,
    pack_content,
    read_content,
)
from fedmutual.sites.secure_sum.shares import SHARE_BYTES, split_secret
from fedmutual.sites.site_journal import UPDATE, SiteJournal

SERVER = "the server"
_REPLY = "reply."


class SumState(BaseModel):
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
    shares: dict[str, tuple[Share | None, Share | None]] = {}  # site -> shares of its mask key and of its seed
    members: list[str] = []  # the sites with which this site has pair masks, and this site
    present: list[str] = []  # the sites whose words the server claims to have


class SumSite:
    """One site in one sum. The caller saves `state` and `opened` after each stage, before the answer is sent.

    The site is a user in the protocol of Bonawitz et al., 2017, https://doi.org/10.1145/3133956.3133982. The module
    `sites.site_journal` ensures that a site answers each stage of an attempt once, or repeats the same answer.
    """

    def __init__(
        self,
        context: SumContext,
        site: str,
        signer: Signer,
        authority: Authority,
        state: SumState | None = None,
        opened: Mapping[int, str] | None = None,
    ) -> None:
        """state: of the current sum, as saved; None before the first one. opened: round -> digest of the opened sum."""
        self._context, self._site, self._signer, self._authority = context, site, signer, authority
        self.state, self.opened = state, dict(opened or {})

    def announce_keys(self, order: Message) -> Message:
        """Draw new keys, and return the signed announcement of their public keys.

        Raises Rejected where the order is of another attempt, or this round was opened in another attempt.
        """
        if read_content(messages.ATTEMPT, order, SERVER) != self._context.attempt:
            raise Rejected("the server asks for the keys of another attempt")
        self._check_opened(None)
        mask_key, seal_key, seed = masks.make_key(), masks.make_key(), secrets.token_bytes(32)
        self.state = SumState(
            binding=self._context.binding.hex(), mask_key=mask_key.hex(), seal_key=seal_key.hex(), seed=seed.hex()
        )
        public = masks.derive_public_key(mask_key), masks.derive_public_key(seal_key)
        commitment = masks.commit_seed(seed, self._context.binding)
        return pack_content(messages.make_announcement(self._context, self._site, *public, commitment, self._signer))

    def share_secrets(self, order: Message) -> Message:
        """Check all announcements, and return encrypted shares of this site's secrets for all other sites.

        Raises Rejected where an announcement is forged, is repeated, or belongs to another sum or model; the announcement of
        this site is missing; fewer sites than the threshold announced keys; or this site has masked its words.
        """
        state, announcements = self._get_state(), read_content(messages.ANNOUNCEMENTS, order, SERVER)
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
                own_shares = share_of_key.hex(), share_of_seed.hex()
            else:
                sealed[peer_announcement.site] = messages.seal_shares(
                    self._context,
                    seal_key,
                    bytes.fromhex(peer_announcement.seal_key),
                    self._site,
                    peer_announcement.site,
                    share_of_key + share_of_seed,
                ).hex()
        self._change_state(announcements=announcements, shares={self._site: own_shares})
        return pack_content(sealed)

    def mask_words(self, order: Message, words: Words) -> Words:
        """Store the shares of the other sites, and return the masked words [N] of this site. words: the words of its update.

        Raises Rejected where a share was changed, or belongs to a site that announced no keys; fewer sites than the
        threshold sent shares; the round was opened before; this site has signed the list of present sites; or it masked its
        words for other sites before, so that the difference of both answers would reveal a pair mask.
        """
        self._check_opened(None)
        state, sealed = self._get_state(), read_content(messages.SEALED, order, SERVER)
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
            shares[sender] = decrypted[:SHARE_BYTES].hex(), decrypted[SHARE_BYTES:].hex()
        others = [(site, bytes.fromhex(announcements[site].mask_key)) for site in members if site != self._site]
        masked = words.copy()
        masks.add_seed_mask(masked, seed, self._context.binding, self._site)
        masks.add_pair_masks(masked, self._site, mask_key, others, self._context.binding)
        self._change_state(shares=shares, members=members)
        return masked

    def confirm_present(self, order: Message) -> Message:
        """Sign the list of sites whose words the server claims to have, and erase this site's own secrets.

        Raises Rejected where this site, which sent its words, is not on the list; a site on the list shared no secrets; the
        list is shorter than the threshold; or this site has signed another list.
        """
        state, present = self._get_state(), read_content(messages.PRESENT, order, SERVER)
        if self._site not in present:
            raise Rejected("the server claims that this site dropped out, but this site sent its words")
        self._check_sites(present, "sent their words")
        if not set(present) <= set(state.members):
            raise Rejected("the server claims to have words of a site that shared no secrets")
        if state.present and state.present != sorted(present):
            raise Rejected("this site has signed another list of present sites; two lists would open two sums")
        self._change_state(present=sorted(present), mask_key=None, seal_key=None, seed=None)
        return pack_content(self._signer.sign(messages.make_confirmed_content(self._context, present)).hex())

    def open_secrets(self, order: Message) -> Message:
        """Return shares of the seeds of present sites, and shares of the mask keys of sites that dropped out.

        `opened` then has this attempt of the round, and `state` has no other shares. Raises Rejected where fewer sites than
        the threshold signed the list that this site signed; a signature is forged; or the round was opened before, in
        another attempt or with other sites.
        """
        state, signatures = self._get_state(), read_content(messages.SIGNATURES, order, SERVER)
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
        seeds = {site: _check_held(state.shares[site][1]) for site in state.present}
        keys = {site: _check_held(state.shares[site][0]) for site in state.members if site not in state.present}
        revealed = {site: (None, share) for site, share in seeds.items()}
        self._change_state(shares=revealed | {site: (share, None) for site, share in keys.items()})
        self.opened[self._context.round] = digest
        return pack_content((seeds, keys))

    def _get_state(self) -> SumState:
        """Return the state of this sum. Raises Rejected if this site has none."""
        if self.state is None or self.state.binding != self._context.binding.hex():
            raise Rejected("this site announced no keys for this attempt of the round")
        return self.state

    def _change_state(self, **changes: object) -> None:
        self.state = self._get_state().model_copy(update=changes)

    def _check_opened(self, digest: str | None) -> None:
        """Raise Rejected if the round was opened before. digest: the digest of the sum that may be opened again."""
        if self.opened.get(self._context.round, digest) != digest:
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


def _read_keys(state: SumState) -> tuple[bytes, bytes, bytes]:
    """Return a site's mask key, seal key and seed. Raises Rejected if they are erased."""
    if state.mask_key is None or state.seal_key is None or state.seed is None:
        raise Rejected("this site has signed the list of present sites, and has erased its keys")
    return bytes.fromhex(state.mask_key), bytes.fromhex(state.seal_key), bytes.fromhex(state.seed)


def _check_held(share: str | None) -> str:
    """Return a share. Raises Rejected if it is erased."""
    if share is None:
        raise Rejected("this site has erased a share that the order asks for")
    return share


@dataclass(frozen=True)
class SiteSums:
    """The secure sums of a site in one federation: the update, the secrets and the opened sums are in its journal."""

    journal: SiteJournal
    site: str
    sites: tuple[str, ...]  # all sites of the federation
    contract: str  # digest of the contract, in hex
    startup: Path  # the startup folder of the site's kit

    @cached_property
    def keys(self) -> tuple[Signer, Authority]:
        """The site's signing key and the authority of the kits. They are read once: a check of an RSA key takes 0.1 s.

        Raises RunError where a file of the kit is missing or damaged.
        """
        return read_signer(self.startup), read_authority(self.startup)

    def pack_update(self, reply: Message, inbox: Message) -> Message:
        """Return the content of kind UPDATE: the words of a site's update, and the reply as it passed the privacy boundary.

        Raises ValueError where n_k is out of the range of a fixed-point sum.
        """
        words = torch.from_numpy(pack_update(reply, inbox).view(np.int64))
        return {WORDS: words} | {_REPLY + name: tensor for name, tensor in reply.items()}

    def read_reply(self, round: int) -> Message:
        """Return the reply of a round as it passed the privacy boundary; {} without one."""
        tensors = self.journal.read_tensors(UPDATE, round)
        return {name.removeprefix(_REPLY): tensor for name, tensor in tensors.items() if name.startswith(_REPLY)}

    def answer_stage(self, order: Order, inbox: Message) -> tuple[Message, str | None]:
        """Return the answer to an order, and the SHA-256 of the words before they were masked: None outside of UPLOAD.

        The new secrets are written to the journal, in the transaction of the caller.

        Raises:
            Rejected: the order is refused.
            RunError: the journal or the kit is damaged, or cannot be written.
        """
        trained = self.journal.read("SELECT inbox FROM phases WHERE round = ? AND phase = 0", order.round)
        if not trained:
            raise Rejected("this site has no update of this round")
        context = SumContext(self.contract, self.sites, order.round, order.attempt, trained[0][0])
        saved, opened = self.journal.get_fact("sum"), dict(self.journal.read("SELECT round, digest FROM opened"))
        sum_site = SumSite(context, self.site, *self.keys, saved and SumState.model_validate_json(saved), opened)
        unmasked_digest: str | None = None
        if order.phase == Stage.UPLOAD:
            words = self.journal.read_tensors(UPDATE, order.round)[WORDS].numpy().view(np.uint64)
            unmasked_digest = hashlib.sha256(words.tobytes()).hexdigest()
            answer: Message = {WORDS: torch.from_numpy(sum_site.mask_words(inbox, words).view(np.int64))}
        else:
            methods = {
                Stage.KEYS: sum_site.announce_keys,
                Stage.SHARES: sum_site.share_secrets,
                Stage.CONFIRM: sum_site.confirm_present,
                Stage.UNMASK: sum_site.open_secrets,
            }
            answer = methods[Stage(order.phase)](inbox)
        assert sum_site.state is not None
        self.journal.set_fact("sum", sum_site.state.model_dump_json())
        self.journal.write("INSERT OR REPLACE INTO opened VALUES (?, ?)", *sum_site.opened.items())
        return answer, unmasked_digest
