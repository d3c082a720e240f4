"""A site's side of a secure sum: make keys and shares, check the orders of the server, and refuse dishonest orders.

A site has two secrets: a mask key and a seed. A site never reveals shares of both secrets of another site. It opens only one
attempt of a round: a second sum without one site would give the server the update of that site, by subtraction.
"""

import hashlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict

from fedmutual.core import Message
from fedmutual.errors import RunError
from fedmutual.sites.protocol import Order
from fedmutual.sites.secure_sum import masks, messages
from fedmutual.sites.secure_sum.fixed_point import pack_update
from fedmutual.sites.secure_sum.identity import Authority, Forged, Signer, read_authority, read_signer
from fedmutual.sites.secure_sum.masks import Words
from fedmutual.sites.secure_sum.messages import WORDS, Announcement, Key, Rejected, Share, Stage, SumContext
from fedmutual.sites.secure_sum.shares import SHARE_BYTES, split_secret
from fedmutual.sites.site_journal import UPDATE, SiteJournal

_REPLY = "reply."
Done = tuple[dict[str, Any], Any]
"""The changes of a site's state by a stage, and the content of its answer."""


def check_sum_sites(journal: SiteJournal, trainers: Collection[str], read_only: bool) -> None:
    """Record the sites of a federation's masked sums, unless `read_only`.

    Raises RunError where earlier sums were of other sites: the difference of two sums would be an update.
    """
    known, sites = journal.get_fact("sum sites"), sorted(trainers)
    if known not in (None, sites) and journal.is_begun():
        raise RunError(
            f"{journal.folder}: the masked sums of this federation were of {', '.join(known)}, and the contract has "
            f"{', '.join(sites)}: the difference of two sums is nearly the update of one site; begin a federation of "
            "another name"
        )
    if not read_only:
        journal.set_fact("sum sites", sites)


class SumState(BaseModel):
    """The secrets and the state of a site in the current sum. They stay on the disk of the site until they are erased.

    The site erases its own secrets in CONFIRM, when its words are at the server, and the shares that it does not reveal in
    UNMASK: later, no disk of a site holds a secret that the server does not have.
    """

    model_config = ConfigDict(strict=True)

    binding: Key  # binding of the sum
    keys: tuple[Key, Key, Key] | None  # mask key, seal key and seed; None: erased
    announcements: dict[str, Announcement] = {}
    shares: dict[str, tuple[Share | None, Share | None]] = {}  # site -> shares of its mask key and of its seed
    members: list[str] = []  # the sites with which this site has pair masks, and this site
    present: list[str] = []  # the sites whose words the server claims to have

    def read_keys(self) -> tuple[bytes, bytes, bytes]:
        """Return the mask key, the seal key and the seed. Raises Rejected where they are erased."""
        if self.keys is None:
            raise Rejected("this site has signed the list of present sites, and has erased its keys")
        mask_key, seal_key, seed = map(bytes.fromhex, self.keys)
        return mask_key, seal_key, seed


@dataclass(eq=False, repr=False)  # `state` has secrets
class SumSite:
    """One site in one sum. The caller saves `state` and `opened` after each stage, before the answer is sent.

    The site is a user in the protocol of Bonawitz et al., 2017, https://doi.org/10.1145/3133956.3133982. The module
    `sites.site_journal` ensures that a site answers each stage of an attempt once, or repeats the same answer.
    """

    context: SumContext
    site: str
    signer: Signer
    authority: Authority
    state: SumState | None = None  # of the current sum; None before the first one
    opened: dict[int, str] = field(default_factory=dict)  # round -> digest of the opened sum

    def answer(self, stage: Stage, order: Message, words: Words) -> Message:
        """Return the answer to the order of a stage. words: of this site's update [N], which UPLOAD masks.

        Raises Rejected where the order is of another sum or attempt, or would open a second sum or both secrets of a site.
        """
        content = messages.read_content(messages.ORDERS[stage], order, "the server")
        if stage in (Stage.KEYS, Stage.UPLOAD):
            self._check_opened(None)
        if stage is Stage.KEYS:
            return messages.pack_content(self._announce_keys(content))
        state = self.state
        if state is None or state.binding != self.context.binding.hex():
            raise Rejected("this site announced no keys for this attempt of the round")
        methods: dict[Stage, Callable[[SumState, Any], Done]] = {
            Stage.SHARES: self._share_secrets,
            Stage.UPLOAD: partial(self._mask_words, words=words),
            Stage.CONFIRM: self._confirm_present,
            Stage.UNMASK: self._open_secrets,
        }
        changes, answer = methods[stage](state, content)
        self.state = state.model_copy(update=changes)
        return {WORDS: torch.from_numpy(answer.view(np.int64))} if stage is Stage.UPLOAD else messages.pack_content(answer)

    def _announce_keys(self, attempt: int) -> Announcement:
        """Draw new keys, and return the signed announcement of their public keys."""
        context = self.context
        if attempt != context.attempt:
            raise Rejected("the server asks for the keys of another attempt")
        keys = masks.make_key(), masks.make_key(), secrets.token_bytes(32)
        mask_key, seal_key, seed = (key.hex() for key in keys)
        self.state = SumState(binding=context.binding.hex(), keys=(mask_key, seal_key, seed))
        public = masks.derive_public_key(keys[0]), masks.derive_public_key(keys[1])
        return messages.make_announcement(
            context, self.site, *public, masks.commit_seed(keys[2], context.binding), self.signer
        )

    def _share_secrets(self, state: SumState, announced: Sequence[Announcement]) -> Done:
        """Check all announcements, and return encrypted shares of this site's secrets for all other sites."""
        context = self.context
        if state.members:
            raise Rejected("this site has masked its words, and does not share its secrets again")
        mask_key, seal_key, seed = state.read_keys()
        for announcement in announced:
            messages.check_announcement(announcement, context, self.authority)
        self._check_sites([announcement.site for announcement in announced], "announced keys")
        announcements = {announcement.site: announcement for announcement in announced}
        if announcements[self.site].mask_key != masks.derive_public_key(mask_key).hex():
            raise Rejected("the server sends other keys of this site than this site announced")
        points = {site: context.find_point(site) for site in announcements}
        of_key, of_seed = (split_secret(secret, context.threshold, [*points.values()]) for secret in (mask_key, seed))
        sealed = {}
        for site, announcement in announcements.items():
            public, shares = bytes.fromhex(announcement.seal_key), of_key[points[site]] + of_seed[points[site]]
            if site != self.site:
                sealed[site] = messages.seal_shares(context, seal_key, public, self.site, site, shares).hex()
        point = points[self.site]
        own_shares = {self.site: (of_key[point].hex(), of_seed[point].hex())}
        return {"announcements": announcements, "shares": own_shares}, sealed

    def _mask_words(self, state: SumState, sealed: Mapping[str, str], words: Words) -> Done:
        """Store the shares of the other sites, and return the masked words [N] of this site.

        A site masks its words for one set of sites only: the difference of two answers would reveal a pair mask.
        """
        context, members = self.context, sorted({*sealed, self.site})
        if self.site in sealed or not state.announcements.keys() >= set(members):
            raise Rejected("the server sends shares of a site that announced no keys")
        self._check_sites(members, "shared their secrets")
        if state.members and state.members != members:
            raise Rejected("this site masked its words before, for other sites; a site masks its words only once")
        mask_key, seal_key, seed = state.read_keys()
        shares = {self.site: state.shares[self.site]}
        for sender, encrypted in sealed.items():
            public = bytes.fromhex(state.announcements[sender].seal_key)
            opened = messages.open_shares(context, seal_key, public, sender, self.site, bytes.fromhex(encrypted))
            shares[sender] = opened[:SHARE_BYTES].hex(), opened[SHARE_BYTES:].hex()
        others = [(site, bytes.fromhex(state.announcements[site].mask_key)) for site in members if site != self.site]
        masked = words.copy()
        masks.add_seed_mask(masked, seed, context.binding, self.site)
        masks.add_pair_masks(masked, self.site, mask_key, others, context.binding)
        return {"shares": shares, "members": members}, masked

    def _confirm_present(self, state: SumState, present: list[str]) -> Done:
        """Sign the list of sites whose words the server claims to have, and erase this site's own secrets."""
        if self.site not in present:
            raise Rejected("the server claims that this site dropped out, but this site sent its words")
        self._check_sites(present, "sent their words")
        if not set(present) <= set(state.members):
            raise Rejected("the server claims to have words of a site that shared no secrets")
        if state.present and state.present != sorted(present):
            raise Rejected("this site has signed another list of present sites; two lists would open two sums")
        signature = self.signer.sign(messages.make_confirmed_content(self.context, present))
        return {"present": sorted(present), "keys": None}, signature.hex()

    def _open_secrets(self, state: SumState, signatures: Mapping[str, str]) -> Done:
        """Return shares of the seeds of present sites, and shares of the mask keys of sites that dropped out.

        `opened` then has this attempt of the round, and the state has no other shares.
        """
        if not state.present:
            raise Rejected("the server asks for shares before this site has signed the list of present sites")
        content = messages.make_confirmed_content(self.context, state.present)
        for site, signature in signatures.items():
            if site not in state.present:
                raise Rejected(f"the signature of site {site!r} is refused: the site is not on the list of present sites")
            certificate = bytes.fromhex(state.announcements[site].certificate)
            try:
                self.authority.check(site, certificate, bytes.fromhex(signature), content)
            except Forged:
                raise Rejected(f"site {site!r} did not sign the list of sites that this site received") from None
        self._check_sites([*signatures], "signed the list of present sites", is_own_required=False)
        digest = hashlib.sha256(content).hexdigest()
        self._check_opened(digest)
        seeds = {site: state.shares[site][1] for site in state.present}
        keys = {site: state.shares[site][0] for site in state.members if site not in state.present}
        if None in (*seeds.values(), *keys.values()):
            raise Rejected("this site has erased a share that the order asks for")
        self.opened[self.context.round] = digest
        of_seeds = {site: (None, share) for site, share in seeds.items()}
        return {"shares": of_seeds | {site: (share, None) for site, share in keys.items()}}, (seeds, keys)

    def _check_opened(self, digest: str | None) -> None:
        """Raise Rejected if the round was opened before. digest: the digest of the sum that may be opened again."""
        if self.opened.get(self.context.round, digest) != digest:
            raise Rejected(
                "the sum of this round was opened before; a second sum, with other sites, would reveal single updates"
            )

    def _check_sites(self, sites: list[str], action: str, is_own_required: bool = True) -> None:
        """Raise Rejected unless `sites` holds `threshold` different sites. action: what they did, for the error text."""
        if len(set(sites)) < len(sites) or (is_own_required and self.site not in sites):
            raise Rejected(f"the server's list of the sites that {action} names a site twice, or lacks this site")
        if len(sites) < self.context.threshold:
            raise Rejected(
                f"{len(sites)} of {len(self.context.sites)} sites {action}, and {self.context.threshold} are needed"
            )


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
        """The site's signing key and the authority of the kits. They are read once: a check of an RSA key takes 0.1 s."""
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

        The new secrets are written to the journal, in the transaction of the caller. Raises Rejected where the order is
        refused; RunError where the journal or the kit is damaged, or cannot be written.
        """
        journal = self.journal
        trained = journal.read("SELECT inbox FROM phases WHERE round = ? AND phase = 0", order.round)
        if not trained:
            raise Rejected("this site has no update of this round")
        context = SumContext(self.contract, self.sites, order.round, order.attempt, trained[0][0])
        state, opened = journal.get_fact("sum", SumState), dict(journal.read("SELECT round, digest FROM opened"))
        sum_site, stage = SumSite(context, self.site, *self.keys, state, opened), Stage(order.phase)
        words, digest = np.zeros(0, np.uint64), None
        if stage is Stage.UPLOAD:
            words = journal.read_tensors(UPDATE, order.round)[WORDS].numpy().view(np.uint64)
            digest = hashlib.sha256(words.tobytes()).hexdigest()
        answer = sum_site.answer(stage, inbox, words)
        assert sum_site.state is not None
        journal.set_fact("sum", sum_site.state.model_dump())
        journal.write("INSERT OR REPLACE INTO opened VALUES (?, ?)", *sum_site.opened.items())
        return answer, digest
