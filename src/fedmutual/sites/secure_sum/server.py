"""The server's side of a secure sum: forward messages, add the masked words, and remove the masks from the sum.

A server that restarts in the middle of a sum must send the same orders as before, because the sites refuse different orders.
So the closed stages of the current sum are in the server's journal.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random

import numpy as np
import torch

from fedmutual.core import Message
from fedmutual.engines.loop import count_bytes
from fedmutual.sites.journal import Journal
from fedmutual.sites.protocol import WORK, Order, SiteAnswer, TooFew
from fedmutual.sites.secure_sum import masks, messages
from fedmutual.sites.secure_sum.identity import Authority, Forged
from fedmutual.sites.secure_sum.masks import Words, commit_seed
from fedmutual.sites.secure_sum.messages import ANSWERS, WORDS, Rejected, Stage, SumContext, pack_content, read_content
from fedmutual.sites.secure_sum.shares import join_shares

SendOrders = Callable[[Mapping[str, tuple[Order, Message]]], Iterator[tuple[str, tuple[SiteAnswer, Message]]]]
_STAGE = "stage"  # kind of content in the journal: a site's answer to a stage
_TRIALS = 1000  # sets of shares that are tried for one secret: with 20 sites enough to leave 3 wrong shares out


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
        sites = self.answers[Stage(stage - 1)]
        if stage is Stage.CONFIRM:
            return dict.fromkeys(sites, pack_content(sorted(sites)))
        contents = self._read_answers(Stage(stage - 1))
        if stage is Stage.UPLOAD:
            return {
                receiver: pack_content({i: by[receiver] for i, by in contents.items() if i != receiver and receiver in by})
                for receiver in sites
            }
        return dict.fromkeys(
            sites, pack_content([contents[i] for i in sorted(sites)] if stage is Stage.SHARES else contents)
        )

    def check_answer(self, stage: Stage, site: str, message: Message) -> None:
        """Raise Rejected where the answer of a site to a stage is invalid; the error text names the site and the reason."""
        sender = f"site {site!r}"
        if stage is Stage.UPLOAD:
            words = message.get(WORDS)
            if words is None or set(message) != {WORDS} or words.dtype != torch.int64 or words.shape != (self.count,):
                raise Rejected(f"{sender} sent words of another number than the model has")
            return
        content = read_content(ANSWERS[stage], message, sender)
        if stage is Stage.KEYS:
            if content.site != site:
                raise Rejected(f"{sender} announced keys of another site")
            messages.check_announcement(content, self.context, self.authority)
        elif stage is Stage.SHARES:
            if content.keys() != self.answers[Stage.KEYS].keys() - {site}:
                raise Rejected(f"{sender} did not share its secrets with all others")
        elif stage is Stage.CONFIRM:
            signed = messages.make_confirmed_content(self.context, self.answers[Stage.UPLOAD])
            announcement = read_content(ANSWERS[Stage.KEYS], self.answers[Stage.KEYS][site], sender)
            certificate = bytes.fromhex(announcement.certificate)
            try:
                self.authority.check(site, certificate, bytes.fromhex(content), signed)
            except Forged as problem:
                raise Rejected(f"the signature of {sender} is refused: {problem}") from None
        elif [set(secrets) for secrets in content] != [set(self.present), set(self.absent)]:
            raise Rejected(f"{sender} gave shares of other secrets than the order asks for")

    def close_stage(self, stage: Stage, answers: Mapping[str, Message]) -> None:
        """Store the checked answers of a stage. Raises TooFew where there are fewer answers than the threshold."""
        if len(answers) < self.context.threshold:
            raise TooFew(
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
        announced, opened = self._read_answers(Stage.KEYS), self._read_answers(Stage.UNMASK)
        for site in self.present:
            np.add(total, self.answers[Stage.UPLOAD][site][WORDS].numpy().view(np.uint64), out=total)
            seeds, commitment = {i: seeds[site] for i, (seeds, _) in opened.items()}, announced[site].seed
            seed = self._recover_secret(f"seed of site {site!r}", seeds, commitment, partial(commit_seed, context=context))
            masks.add_seed_mask(total, seed, context, site, subtract=True)
        public = [(site, bytes.fromhex(announced[site].mask_key)) for site in self.present]
        for site in self.absent:  # the masks that this site would have added cancel the masks that the other sites added
            keys, commitment = {i: keys[site] for i, (_, keys) in opened.items()}, announced[site].mask_key
            key = self._recover_secret(f"key of site {site!r}", keys, commitment, masks.derive_public_key)
            masks.add_pair_masks(total, site, key, public, context)
        return total

    def _recover_secret(
        self, subject: str, shares: Mapping[str, str], commitment: str, commit: Callable[[bytes], bytes]
    ) -> bytes:
        """Return a secret, to which its site committed. shares: site -> share, in hex. commit: secret -> commitment.

        Wrong shares are tolerated while enough others are right: random sets of `threshold` shares are tried.
        """
        points, random = {self.context.find_point(i): bytes.fromhex(share) for i, share in shares.items()}, Random(0)
        for _ in range(_TRIALS):
            trial = random.sample(sorted(points), self.context.threshold)
            try:
                secret = join_shares({point: points[point] for point in trial})
            except ValueError:
                continue
            if commit(secret).hex() == commitment:
                return secret
        raise Rejected(
            f"the {subject} cannot be recovered: that site, or one of {', '.join(sorted(shares))}, gave wrong shares"
        )

    def _read_answers(self, stage: Stage) -> dict[str, messages.Content]:
        return {i: read_content(ANSWERS[stage], message, i) for i, message in self.answers[stage].items()}


@dataclass(frozen=True)
class SecureSums:
    """The server's secure sums of a federation, one per round."""

    journal: Journal
    authority: Authority
    contract: str  # digest of the contract, in hex
    sites: tuple[str, ...]  # all sites of the federation

    def open(
        self,
        round: int,
        attempt: int,
        model: str,
        count: int,
        trained: Collection[str],
        ask: SendOrders,
        refuse: Callable[[str, Order, str], None],
    ) -> tuple[SumServer, Counter[str], Counter[str]]:
        """Run the remaining stages of a round's sum. Return it, and the bytes that each site sent and was sent.

        model: digest of the model that the sites were sent. count: the number of words that a site sends. trained: the sites
        that trained. ask: sends orders, and yields each answer when it arrives. refuse: is called with the site, the order
        and the reason for each invalid answer. Raises TooFew where fewer sites than the threshold answered a stage
        (calling `open` again repeats this stage); RunError where the journal is damaged or cannot be written.
        """
        context, journal = SumContext(self.contract, self.sites, round, attempt, model), self.journal
        server = SumServer(context, self.authority, count)
        if journal.get_fact("sum") != context.binding.hex():
            with journal.change():
                journal.write("DELETE FROM contents WHERE kind = ?", (_STAGE,))
                journal.set_fact("sum", context.binding.hex())
        for closed, site in journal.read("SELECT DISTINCT phase, site FROM contents WHERE kind = ? ORDER BY phase", _STAGE):
            answer = journal.read_tensors(_STAGE, round, closed, site)
            server.answers.setdefault(Stage(closed), {})[site] = answer
        up, down = Counter[str](), Counter[str]()
        for stage in Stage:
            if stage in server.answers:
                continue
            sent = {i: m for i, m in server.make_orders(stage).items() if stage is not Stage.KEYS or i in trained}
            answers: dict[str, Message] = {}
            for site, (site_answer, message) in ask(
                {i: (Order(WORK, round, int(stage), attempt=attempt), m) for i, m in sent.items()}
            ):
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
            with journal.change():
                for site, answer in answers.items():
                    journal.write_tensors(answer, _STAGE, round, stage, site)
        return server, up, down
