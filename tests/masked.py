"""Run a secure sum in this process: sites, a server between them, and the changes of an adversary on the way."""

from collections.abc import Callable, Mapping

import numpy as np

from authority import make_authority, make_signer
from fedmutual.core import Message
from fedmutual.sites.secure_sum.messages import WORDS, Rejected, Stage, SumContext
from fedmutual.sites.secure_sum.server import SumServer
from fedmutual.sites.secure_sum.site import SumSite, SumState

Change = Callable[[str, Message], Message]
NAMES = ("ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine")


def make_context(count: int, **changed) -> SumContext:
    about = {"contract": "c0" * 32, "sites": NAMES[:count], "round": 4, "attempt": 0, "model": "11" * 32}
    return SumContext(**{**about, **changed})


class Table:
    """All sites of a sum, and an honest server unless `orders` or `answers` change messages."""

    def __init__(
        self,
        count: int,
        words: Mapping[str, list[int]] | None = None,
        away: Mapping[Stage, set[str]] | None = None,
        orders: Mapping[Stage, Change] | None = None,
        answers: Mapping[Stage, Change] | None = None,
        contexts: Mapping[str, SumContext] | None = None,
        context: SumContext | None = None,
        records: Mapping[str, SumSite] | None = None,
    ) -> None:
        """away: sites that answer neither a stage nor any later one. orders, answers: site -> how its message is changed.

        contexts: sites with another context. records: the sites in an earlier sum, whose records these have.
        """
        self.context = context or make_context(count)
        self.words = {
            i: np.array((words or {}).get(i, [k + 1, 2**64 - 1 - k, 10**18 * k % 2**64]), np.uint64)
            for k, i in enumerate(self.context.sites)
        }
        self.sites = {
            i: SumSite(
                (contexts or {}).get(i, self.context),
                i,
                make_signer(i),
                make_authority(),
                *((records[i].state, records[i].opened) if records else ()),
            )
            for i in self.context.sites
        }
        self.server = SumServer(self.context, make_authority(), 3)
        self.away, self.orders, self.changes = away or {}, orders or {}, answers or {}
        self.refusals: dict[str, str] = {}  # who refused an order, or whose answer was refused, and why
        self.uploads: dict[str, list[int]] = {}

    def run(self, last: Stage = Stage.UNMASK) -> "Table":
        """Run all stages up to the named stage. Raise TooFew if too few sites answer."""
        absent_sites: set[str] = set()
        for stage in Stage:
            if stage > last:
                break
            absent_sites |= self.away.get(stage, set())
            answers = {}
            for i, order in self.server.make_orders(stage).items():
                if i in absent_sites:
                    continue
                try:
                    answer = self.ask(stage, i, self.orders.get(stage, lambda _, m: m)(i, order))
                    answer = self.changes.get(stage, lambda _, m: m)(i, answer)
                    self.server.check_answer(stage, i, answer)
                    answers[i] = answer
                except Rejected as problem:
                    self.refusals[i] = str(problem)
            self.server.close_stage(stage, answers)
        return self

    def ask(self, stage: Stage, site: str, order: Message) -> Message:
        """Return a site's answer; the site's state is written and read again in between, as on a disk."""
        sum_site = self.sites[site]
        if sum_site.state is not None:
            sum_site.state = SumState.model_validate_json(sum_site.state.model_dump_json())
        answer = sum_site.answer(stage, order, self.words[site])
        if stage is Stage.UPLOAD:
            self.uploads[site] = answer[WORDS].numpy().view(np.uint64).tolist()
        return answer

    def plain(self, sites) -> list[int]:
        """Return the sum of these sites' words, computed in Python's integers."""
        return [sum(int(self.words[i][k]) for i in sites) % 2**64 for k in range(3)]
