"""The server's side of a secure sum: forward messages, add the masked words, and remove the masks from the sum.

A server that restarts in the middle of a sum must send the same orders as before, because the sites refuse different orders.
So the closed stages of the current sum are in the server's journal.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch

from fedmutual.core import Message
from fedmutual.engines.loop import count_bytes
from fedmutual.sites.journal import Journal
from fedmutual.sites.protocol import WORK, Order, SiteAnswer
from fedmutual.sites.secure_sum import masks, messages
from fedmutual.sites.secure_sum.identity import Authority, Forged
from fedmutual.sites.secure_sum.masks import Words
from fedmutual.sites.secure_sum.messages import (
    WORDS,
    Announcement,
    Rejected,
    Stage,
    SumContext,
    pack_content,
    read_content,
)
from fedmutual.sites.secure_sum.shares import join_shares

SendOrders = Callable[[Mapping[str, tuple[Order, Message]]], Iterator[tuple[str, tuple[SiteAnswer, Message]]]]
_STAGE = "stage"  # kind of content in the journal: a site's answer to a stage
_TRIALS = 1000  # sets of shares that are tried for one secret: with 20 sites enough to leave 3 wrong shares out


class TooFewSites(RuntimeError):
    """Fewer sites than the threshold answered a stage. The stage can be repeated."""


@dataclass
class SumServer:
    """The answers of one sum, by stage. Orders depend on these answers only, so a restarted server sends the same orders.

    The server of Bonawitz et al., 2017, https://doi.org/10.1145/3133956.3133982.
    """

    context: SumContext
    authority: Authority
    count: int  # the number of words that a site sends
    answers: dict[Stage, dict[str, Message]] = field(default_factory=dict)

    def make_orders(self, stage: Stage) -> dict[str, Message]:
        """Return the orders of a stage: site -> message, for each site that answered the previous stage."""
        if stage is Stage.KEYS:
            return dict.fromkeys(self.context.sites, pack_content(self.context.attempt))
        previous = self.answers[Stage(stage - 1)]
        if stage is Stage.SHARES:
            return dict.fromkeys(previous, pack_content([self._read_announcement(site) for site in sorted(previous)]))
        if stage is Stage.UPLOAD:
            sealed = {i: read_content(messages.SEALED, m, i) for i, m in previous.items()}
            return {
                receiver: pack_content({i: by[receiver] for i, by in sealed.items() if i != receiver and receiver in by})
                for receiver in previous
            }
        if stage is Stage.CONFIRM:
            return dict.fromkeys(previous, pack_content(sorted(previous)))
        signatures = {i: read_content(messages.SIGNATURE, m, i) for i, m in previous.items()}
        return dict.fromkeys(previous, pack_content(signatures))

    def check_answer(self, stage: Stage, site: str, message: Message) -> None:
        """Check the answer of a site to a stage.

        Raises Rejected where the answer is invalid; the error text names the site and the reason.
        """
        sender = f"site {site!r}"
        if stage is Stage.KEYS:
            announcement = read_content(messages.ANNOUNCEMENT, message, sender)
            if announcement.site != site:
                raise Rejected(f"{sender} announced keys of another site")
            messages.check_announcement(announcement, self.context, self.authority)
        elif stage is Stage.SHARES:
            receivers = self.answers[Stage.KEYS].keys() - {site}
            if read_content(messages.SEALED, message, sender).keys() != receivers:
                raise Rejected(f"{sender} did not share its secrets with all others")
        elif stage is Stage.UPLOAD:
            words = message.get(WORDS)
            if words is None or set(message) != {WORDS} or words.dtype != torch.int64 or words.shape != (self.count,):
                raise Rejected(f"{sender} sent words of another number than the model has")
        elif stage is Stage.CONFIRM:
            signature = bytes.fromhex(read_content(messages.SIGNATURE, message, sender))
            content = messages.make_confirmed_content(self.context, self.answers[Stage.UPLOAD])
            certificate = bytes.fromhex(self._read_announcement(site).certificate)
            try:
                self.authority.check(site, certificate, signature, content)
            except Forged as problem:
                raise Rejected(f"the signature of {sender} is refused: {problem}") from None
        else:
            seeds, keys = read_content(messages.OPENED, message, sender)
            if seeds.keys() != set(self.present) or keys.keys() != set(self.absent):
                raise Rejected(f"{sender} gave shares of other secrets than the order asks for")

    def close_stage(self, stage: Stage, answers: Mapping[str, Message]) -> None:
        """Store the checked answers of a stage, and close the stage.

        Raises TooFewSites where there are fewer answers than the threshold.
        """
        if len(answers) < self.context.threshold:
            raise TooFewSites(
                f"{len(answers)} of {len(self.context.sites)} sites answered the stage {stage.name} of the secure sum, and "
                f"{self.context.threshold} are needed"
            )
        self.answers[stage] = dict(answers)

    @property
    def present(self) -> tuple[str, ...]:
        """The sites whose updates are in the sum."""
        return tuple(sorted(self.answers[Stage.UPLOAD]))

    @property
    def absent(self) -> tuple[str, ...]:
        """The sites that shared their secrets and then sent no words."""
        return tuple(sorted(self.answers[Stage.SHARES].keys() - self.answers[Stage.UPLOAD].keys()))

    def add_words(self) -> Words:
        """Return the sum of the words [count] of all present sites, without masks. The server learns nothing else.

        Raises Rejected where a secret of a site cannot be recovered from the shares that the other sites gave.
        """
        context, total = self.context.binding, np.zeros(self.count, np.uint64)
        opened = {i: read_content(messages.OPENED, m, i) for i, m in self.answers[Stage.UNMASK].items()}
        for site in self.present:
            np.add(total, self.answers[Stage.UPLOAD][site][WORDS].numpy().view(np.uint64), out=total)
            seed = self._recover_secret(site, "seed", {i: seeds[site] for i, (seeds, _) in opened.items()})
            masks.add_seed_mask(total, seed, context, site, subtract=True)
        public = {site: bytes.fromhex(self._read_announcement(site).mask_key) for site in self.present}
        for site in self.absent:  # the masks that this site would have added cancel the masks that the other sites added
            key = self._recover_secret(site, "key", {i: keys[site] for i, (_, keys) in opened.items()})
            masks.add_pair_masks(total, site, key, public.items(), context)
        return total

    def _recover_secret(self, site: str, kind: str, shares: Mapping[str, str]) -> bytes:
        """Return a site's secret, which its announcement commits to. kind: "seed" or "key". shares: site -> share, in hex.

        Wrong shares are tolerated while enough others are right: random sets of `threshold` shares are tried.
        """
        points, random = {self.context.find_point(i): bytes.fromhex(share) for i, share in shares.items()}, Random(0)
        for _ in range(_TRIALS):
            trial = random.sample(sorted(points), self.context.threshold)
            try:
                secret = join_shares({point: points[point] for point in trial})
            except ValueError:
                continue
            if self._is_secret(site, kind, secret):
                return secret
        raise Rejected(
            f"the {kind} of site {site!r} cannot be recovered: site {site!r}, or one of {', '.join(sorted(shares))}, gave "
            "wrong shares"
        )

    def _is_secret(self, site: str, kind: str, secret: bytes) -> bool:
        announcement = self._read_announcement(site)
        if kind == "seed":
            return masks.commit_seed(secret, self.context.binding).hex() == announcement.seed
        return masks.derive_public_key(secret).hex() == announcement.mask_key

    def _read_announcement(self, site: str) -> Announcement:
        return read_content(messages.ANNOUNCEMENT, self.answers[Stage.KEYS][site], site)


class SecureSums:
    """The server's secure sums of a federation, one per round."""

    def __init__(self, journal: Journal, authority: Authority, contract: str, sites: tuple[str, ...]) -> None:
        """contract: digest of the contract, in hex. sites: all sites of the federation."""
        self._journal, self._authority, self._contract, self._sites = journal, authority, contract, sites

    def open(
        self,
        round: int,
        attempt: int,
        model: str,
        count: int,
        trained: Collection[str],
        ask: SendOrders,
        refuse: Callable[[str, Order, str], None],
    ) -> tuple[Words, tuple[str, ...], tuple[str, ...], Mapping[str, int], Mapping[str, int]]:
        """Run the remaining stages of a round's sum.

        model: digest of the model that the sites were sent. count: the number of words that a site sends. trained: the sites
        that trained. ask: sends orders, and yields each answer when it arrives. refuse: is called with the site, the order
        and the reason for each invalid answer.

        Returns:
            The sum of the words [count]; the sites whose updates are in the sum; the sites that answered the last stage; the
            bytes that each site sent, and those that the server sent to it.

        Raises:
            TooFewSites: fewer sites than the threshold answered a stage; calling `open` again repeats this stage.
            Rejected: the masks of the sum cannot be removed.
            RunError: the journal is damaged or cannot be written.
        """
        server = self.begin(SumContext(self._contract, self._sites, round, attempt, model), count)
        up, down = Counter[str](), Counter[str]()
        for stage in Stage:
            if stage in server.answers:
                continue
            sent = server.make_orders(stage)
            orders = {
                site: (Order(WORK, round, int(stage), attempt=attempt), message)
                for site, message in sent.items()
                if stage is not Stage.KEYS or site in trained
            }
            answers: dict[str, Message] = {}
            for site, (site_answer, message) in ask(orders):
                up[site] += count_bytes(message)
                down[site] += count_bytes(sent[site])
                try:
                    if site_answer.problem is not None:
                        raise Rejected(site_answer.problem)
                    server.check_answer(stage, site, message)
                    answers[site] = message
                except Rejected as problem:
                    refuse(site, site_answer.order, str(problem))
            server.close_stage(stage, answers)
            self.save(server, stage)
        return server.add_words(), server.present, tuple(sorted(server.answers[Stage.UNMASK])), up, down

    def begin(self, context: SumContext, count: int) -> SumServer:
        """Return the server's side of a sum, with the stages that are closed already. count: words of an update."""
        server = SumServer(context, self._authority, count)
        if self._journal.get_fact("sum") != context.binding.hex():
            with self._journal.change():
                self._journal.write("DELETE FROM contents WHERE kind = ?", (_STAGE,))
                self._journal.set_fact("sum", context.binding.hex())
        for stage, site in self._journal.read(
            "SELECT DISTINCT phase, site FROM contents WHERE kind = ? ORDER BY phase", _STAGE
        ):
            answer = self._journal.read_tensors(_STAGE, context.round, stage, site)
            server.answers.setdefault(Stage(stage), {})[site] = answer
        return server

    def save(self, server: SumServer, stage: Stage) -> None:
        """Write a closed stage, in one transaction."""
        with self._journal.change():
            for site, answer in server.answers[stage].items():
                self._journal.write_tensors(answer, _STAGE, server.context.round, stage, site)
