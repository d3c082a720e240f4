"""The stages of a secure sum over orders and answers: what the server does between the training of a round and its end."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from fedmutual.core import Message
from fedmutual.engines.loop import count_bytes
from fedmutual.sites.protocol import WORK, Order, SiteAnswer
from fedmutual.sites.secure_sum.letters import Rejected, Stage, SumContext
from fedmutual.sites.secure_sum.masks import Words
from fedmutual.sites.secure_sum.server_files import SumStages

Ask = Callable[[Mapping[str, tuple[Order, Message]]], Iterator[tuple[str, tuple[SiteAnswer, Message]]]]
Refuse = Callable[[str, Order, str], None]


@dataclass(frozen=True)
class OpenedRound:
    """What came of a secure sum."""

    total: Words
    present: tuple[str, ...]  # whose updates are in it
    finished: tuple[str, ...]  # who did the last stage
    up: Mapping[str, int]  # bytes that each site sent
    down: Mapping[str, int]  # bytes that each site was sent


class SecureSums:
    """The secure sums of a federation, at the server."""

    def __init__(self, stages: SumStages, contract: str, sites: tuple[str, ...], count: int) -> None:
        """contract: its digest. sites: all of the federation. count: words of an update."""
        self._stages, self._contract, self._sites, self._count = stages, contract, sites, count

    def open(self, round: int, attempt: int, model: str, trained: Collection[str], ask: Ask, refuse: Refuse) -> OpenedRound:
        """Do the stages that are left of a round's sum.

        model: digest of what sites were sent to train on. trained: the sites that did. ask: sends orders, and gives answers
        as they come. refuse: is told whose answer is of no use, and why.

        Raises:
            TooFewSites: a stage is below the threshold; the same call goes on with it.
            Rejected: the masks of the sum cannot be taken off.
            RunError: a stage cannot be written down.
        """
        context = SumContext(self._contract, self._sites, round, attempt, model)
        server = self._stages.begin(context, self._count)
        up, down = Counter[str](), Counter[str]()
        for stage in Stage:
            if stage in server.answers:
                continue
            letters = server.make_orders(stage)
            orders = {
                site: (Order(WORK, round, int(stage), attempt=attempt), letter)
                for site, letter in letters.items()
                if stage is not Stage.KEYS or site in trained
            }
            answers: dict[str, Message] = {}
            for site, (said, message) in ask(orders):
                up[site] += count_bytes(message)
                down[site] += count_bytes(letters[site])
                try:
                    if said.problem is not None:
                        raise Rejected(said.problem)
                    server.check_answer(stage, site, message)
                    answers[site] = message
                except Rejected as problem:
                    refuse(site, said.order, str(problem))
            server.close_stage(stage, answers)
            self._stages.save(server, stage)
        finished = tuple(sorted(server.answers[Stage.UNMASK]))
        return OpenedRound(server.add_words(), server.present, finished, up, down)
