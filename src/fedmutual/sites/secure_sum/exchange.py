"""The stages of a secure sum at the server, between the training of a round and the next shared model."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from fedmutual.core import Message
from fedmutual.engines.loop import count_bytes
from fedmutual.sites.protocol import WORK, Order, SiteAnswer
from fedmutual.sites.secure_sum.masks import Words
from fedmutual.sites.secure_sum.messages import Rejected, Stage, SumContext
from fedmutual.sites.secure_sum.server_files import SumStages

SendOrders = Callable[[Mapping[str, tuple[Order, Message]]], Iterator[tuple[str, tuple[SiteAnswer, Message]]]]
RefuseAnswer = Callable[[str, Order, str], None]


@dataclass(frozen=True)
class OpenedRound:
    """The result of a secure sum."""

    total: Words
    present: tuple[str, ...]  # the sites whose updates are in the sum
    finished: tuple[str, ...]  # the sites that answered the last stage
    up: Mapping[str, int]  # site -> bytes that the site sent
    down: Mapping[str, int]  # site -> bytes that the server sent to the site


class SecureSums:
    """The server's secure sums of a federation, one per round."""

    def __init__(self, stages: SumStages, contract: str, sites: tuple[str, ...]) -> None:
        """stages: the stages on the server's disk. contract: digest of the contract, in hex. sites: all sites of the
        federation.
        """
        self._stages, self._contract, self._sites = stages, contract, sites

    def open(
        self,
        round: int,
        attempt: int,
        model: str,
        count: int,
        trained: Collection[str],
        ask: SendOrders,
        refuse: RefuseAnswer,
    ) -> OpenedRound:
        """Run the remaining stages of a round's sum and return the sum.

        model: digest of the model that the sites were sent. count: the number of words that a site sends. trained: the sites
        that trained. ask: sends orders, and yields each answer when it arrives. refuse: is called with the site, the order
        and the reason for each invalid answer.

        Raises:
            TooFewSites: fewer sites than the threshold answered a stage; calling `open` again repeats this stage.
            Rejected: the masks of the sum cannot be removed.
            RunError: a saved stage is damaged, or a stage cannot be saved.
        """
        context = SumContext(self._contract, self._sites, round, attempt, model)
        server = self._stages.begin(context, count)
        up, down = Counter[str](), Counter[str]()
        for stage in Stage:
            if stage in server.answers:
                continue
            messages = server.make_orders(stage)
            orders = {
                site: (Order(WORK, round, int(stage), attempt=attempt), message)
                for site, message in messages.items()
                if stage is not Stage.KEYS or site in trained
            }
            answers: dict[str, Message] = {}
            for site, (site_answer, message) in ask(orders):
                up[site] += count_bytes(message)
                down[site] += count_bytes(messages[site])
                try:
                    if site_answer.problem is not None:
                        raise Rejected(site_answer.problem)
                    server.check_answer(stage, site, message)
                    answers[site] = message
                except Rejected as problem:
                    refuse(site, site_answer.order, str(problem))
            server.close_stage(stage, answers)
            self._stages.save(server, stage)
        finished = tuple(sorted(server.answers[Stage.UNMASK]))
        return OpenedRound(server.add_words(), server.present, finished, up, down)
