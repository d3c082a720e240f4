"""The server's part of a secure sum: it passes letters on, adds masked words, and takes the masks off the sum alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations, islice

import numpy as np
import torch

from fedmutual.core import Message
from fedmutual.sites.secure_sum import letters, masks
from fedmutual.sites.secure_sum.identity import Authority, Forged
from fedmutual.sites.secure_sum.letters import WORDS, Announcement, Rejected, Stage, SumContext
from fedmutual.sites.secure_sum.masks import Words
from fedmutual.sites.secure_sum.shares import join_shares

_TRIALS = 1000  # sets of shares that are tried for one secret, where some sites gave wrong shares


class TooFewSites(RuntimeError):
    """Too few sites did a stage; it can be asked again."""


@dataclass
class SumServer:
    """The answers of one sum, stage by stage. Orders depend on nothing else: a new process goes on where one ended."""

    context: SumContext
    authority: Authority
    count: int  # how many words a site sends
    answers: dict[Stage, dict[str, Message]] = field(default_factory=dict)

    def make_orders(self, stage: Stage) -> dict[str, Message]:
        """What each site that did the stage before is sent."""
        if stage is Stage.KEYS:
            order = letters.pack_letter(letters.Attempt(attempt=self.context.attempt))
            return dict.fromkeys(self.context.sites, order)
        before = self.answers[Stage(stage - 1)]
        if stage is Stage.SHARES:
            keys = letters.Announcements(keys=[self._announcement(site) for site in sorted(before)])
            return dict.fromkeys(before, letters.pack_letter(keys))
        if stage is Stage.UPLOAD:
            sealed = {i: letters.read_letter(letters.SealedShares, m, i).shares for i, m in before.items()}
            return {
                to: letters.pack_letter(
                    letters.SealedShares(shares={i: of[to] for i, of in sealed.items() if i != to and to in of})
                )
                for to in before
            }
        if stage is Stage.CONFIRM:
            return dict.fromkeys(before, letters.pack_letter(letters.Present(sites=sorted(before))))
        signatures = {i: letters.read_letter(letters.Confirmation, m, i).signature for i, m in before.items()}
        return dict.fromkeys(before, letters.pack_letter(letters.Confirmations(signatures=signatures)))

    def check_answer(self, stage: Stage, site: str, message: Message) -> None:
        """Raise Rejected, with the reason, where a site's answer to a stage is of no use."""
        sender = f"site {site!r}"
        if stage is Stage.KEYS:
            announcement = letters.read_letter(Announcement, message, sender)
            if announcement.site != site:
                raise Rejected(f"{sender} announced keys of another site")
            letters.check_announcement(announcement, self.context, self.authority)
        elif stage is Stage.SHARES:
            receivers = self.answers[Stage.KEYS].keys() - {site}
            if letters.read_letter(letters.SealedShares, message, sender).shares.keys() != receivers:
                raise Rejected(f"{sender} did not share its secrets with all others")
        elif stage is Stage.UPLOAD:
            words = message.get(WORDS)
            if words is None or set(message) != {WORDS} or words.dtype != torch.int64 or words.shape != (self.count,):
                raise Rejected(f"{sender} sent no words of the size of the model")
        elif stage is Stage.CONFIRM:
            signature = bytes.fromhex(letters.read_letter(letters.Confirmation, message, sender).signature)
            content = letters.confirmed_content(self.context, self.answers[Stage.UPLOAD])
            certificate = bytes.fromhex(self._announcement(site).certificate)
            try:
                self.authority.check(site, certificate, signature, content)
            except Forged as problem:
                raise Rejected(f"the signature of {sender} is refused: {problem}") from None
        else:
            opened = letters.read_letter(letters.Opened, message, sender)
            if opened.seeds.keys() != set(self.present) or opened.keys.keys() != set(self.absent):
                raise Rejected(f"{sender} gave shares of other secrets than those that it was asked for")

    def close_stage(self, stage: Stage, answers: Mapping[str, Message]) -> None:
        """Go on with these answers, which were checked. Raises TooFewSites where they are below the threshold."""
        if len(answers) < self.context.threshold:
            raise TooFewSites(
                f"{len(answers)} of {len(self.context.sites)} sites did the stage {stage.name} of the secure sum, and "
                f"{self.context.threshold} are needed"
            )
        self.answers[stage] = dict(answers)

    @property
    def present(self) -> tuple[str, ...]:
        """The sites whose updates are in the sum."""
        return tuple(sorted(self.answers[Stage.UPLOAD]))

    @property
    def absent(self) -> tuple[str, ...]:
        """The sites that shared their secrets and sent no words."""
        return tuple(sorted(self.answers[Stage.SHARES].keys() - self.answers[Stage.UPLOAD].keys()))

    def add_words(self) -> Words:
        """The sum of the words of all sites present, without masks: all that the server learns.

        Raises:
            Rejected: the shares of a site's secret, of those who gave them, do not give the secret back.
        """
        context, total = self.context.binding, np.zeros(self.count, np.uint64)
        opened = {i: letters.read_letter(letters.Opened, m, i) for i, m in self.answers[Stage.UNMASK].items()}
        for site in self.present:
            np.add(total, self.answers[Stage.UPLOAD][site][WORDS].numpy().view(np.uint64), out=total)
            seed = self._join(site, "seed", {i: one.seeds[site] for i, one in opened.items()})
            np.subtract(total, masks.expand_seed(seed, context, site, self.count), out=total)
        public = {site: bytes.fromhex(self._announcement(site).mask_key) for site in self.present}
        for site in self.absent:  # the masks that it would have added cancel those that the others added
            key = self._join(site, "key", {i: one.keys[site] for i, one in opened.items()})
            masks.add_pair_masks(total, site, key, public.items(), context)
        return total

    def _join(self, site: str, what: str, shares: Mapping[str, str]) -> bytes:
        """The secret of a site that its announcement commits to, from any threshold of the shares that fit."""
        points = {self.context.point(i): bytes.fromhex(share) for i, share in shares.items()}
        for chosen in islice(combinations(points, self.context.threshold), _TRIALS):
            try:
                secret = join_shares({point: points[point] for point in chosen})
            except ValueError:
                continue
            if self._is_secret(site, what, secret):
                return secret
        raise Rejected(
            f"the {what} of site {site!r} cannot be recovered: site {site!r}, or one of {', '.join(sorted(shares))}, gave "
            "wrong shares"
        )

    def _is_secret(self, site: str, what: str, secret: bytes) -> bool:
        announcement = self._announcement(site)
        if what == "seed":
            return masks.commit_seed(secret, self.context.binding).hex() == announcement.seed
        return masks.public_key(secret).hex() == announcement.mask_key

    def _announcement(self, site: str) -> Announcement:
        return letters.read_letter(Announcement, self.answers[Stage.KEYS][site], site)
