"""The loop's view of sites: each has one client, which lives there and nowhere else."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Concatenate, TypeVar, cast

from fedmutual.core import At, Client, Disagreed, Message, Spec
from fedmutual.engines.base import Reply, examine, participate
from fedmutual.engines.sites.attempts import Attempts
from fedmutual.engines.sites.post import EXAM, LONGEST, WORK, Answer, Garbled, Order, Post, packed, wrong
from fedmutual.engines.sites.sizes import Sizes
from fedmutual.records.events import Score

R = TypeVar("R")
_WORDS = 1000 * LONGEST  # characters of each site's own that the logs of a federation take, while this process lives


class TooFew(RuntimeError):
    """Fewer sites answered than the quorum: the round does not count, and is begun again when they are back."""


class Sites:
    """An engine over a post. A site that does not answer in time, or answers nonsense, is named and left out."""

    def __init__(self, post: Post, quorum: int, deadline: float, by_hand: bool, sizes: Sizes, attempts: Attempts) -> None:
        """by_hand: sites send their messages to each other, so that answers hold none. sizes: how large answers may be."""
        self._post, self._quorum, self._deadline, self._by_hand = post, quorum, deadline, by_hand
        self._sizes, self._attempts = sizes, attempts
        self._written = Counter[str]()  # characters of each site's own words so far
        self._remarks = list[str]()
        self._spoke: tuple[str, ...] = ()  # who did its part of the phase before

    def remarks(self) -> list[str]:
        """As `Engine.remarks`."""
        said, self._remarks = self._remarks, []
        return said

    def close(self) -> None:
        """As `Engine.close`: sites go on living."""

    def each(
        self, do: Callable[Concatenate[Client, ...], R], arguments: Mapping[str, tuple[Any, ...]]
    ) -> Iterator[tuple[str, R]]:
        """What a client would do, as an order to its site. What only a checkpoint wants is done there unasked.

        Raises:
            TooFew: the quorum was missed.
            Disagreed: a site has another public seed set.
        """
        if do is participate:
            yield from cast(Iterator[tuple[str, R]], self._work(arguments))
        elif do is examine:
            yield from cast(Iterator[tuple[str, R]], self._exam(arguments))

    def _work(self, arguments: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, Reply]]:
        spoke = list[str]()
        asked = None
        if self._by_hand:  # a letter to who hangs would keep its sender waiting
            asked = tuple(sorted(arguments.keys() & set(self._post.there()) - set(self._post.late())))
        orders = self._attempts.stamp({i: self._order(given, asked) for i, given in arguments.items()})
        for i, (said, message) in self._asked(orders):
            _, _, declared, _ = arguments[i]
            why = _wrong(said, message, declared if not self._by_hand else {}, i)
            if why is not None:
                self._leave_out(i, said.order, why)
                continue
            self._remarks += [f"site {i!r} left out the message of {self._quoted(i, remark)}" for remark in said.remarks]
            spoke.append(i)
            yield i, Reply(message, dict(said.train), said.up, said.down)
        self._spoke = tuple(sorted(spoke))
        if len(spoke) < min(self._quorum, len(arguments)):
            raise TooFew(f"{len(spoke)} of {len(arguments)} sites did their part, and {self._quorum} are wanted")

    def _order(self, given: tuple[Any, ...], asked: tuple[str, ...] | None) -> tuple[Order, Message]:
        _, inbox, _, at = given
        assert isinstance(at, At)
        senders = self._attempts.settle_senders(at.round, at.phase, self._spoke) if self._by_hand and at.phase else None
        return Order(WORK, at.round, at.phase, senders, asked), {} if self._by_hand else inbox

    def _exam(self, arguments: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, tuple[Score, ...]]]:
        given = {i: arguments[i] for i in arguments if i in self._spoke}  # who missed the round is not waited for again
        number = self._attempts.number
        orders = {i: (Order(EXAM, round - 1, 0, attempt=number), inbox) for i, (_, inbox, round, _, _) in given.items()}
        for i, (said, _) in self._asked(orders):
            if said.problem is not None:
                self._leave_out(i, said.order, said.problem)
                continue
            yield i, tuple(replace(score, client=i) for score in said.scores)

    def _asked(self, orders: Mapping[str, tuple[Order, Message]]) -> Iterator[tuple[str, tuple[Answer, Message]]]:
        """Ask those that are there -> what they answered to this order, as it comes."""
        there = self._post.there()
        for i in orders:
            if i not in there:
                self._leave_out(i, orders[i][0], "it is not there")
        left = {i for i in orders if i in there}
        sent = {i: packed(*orders[i]) for i in orders if i in there}
        for i, content in self._post.ask(sent, self._deadline):
            if i not in left:
                continue  # a second answer
            try:
                said, message = self._sizes.open_answer(orders[i][0], content)
            except Garbled as problem:
                self._leave_out(i, orders[i][0], str(problem))
                left.discard(i)
                continue
            if (said.order.kind, said.order.round, said.order.phase) != _key(orders[i][0]):
                self._remarks.append(f"site {i!r} answered to another order than the last: ignored")
                continue
            left.discard(i)
            yield i, (said, message)
        for i in sorted(left):
            self._leave_out(i, orders[i][0], "it did not answer in time")

    def _leave_out(self, site: str, order: Order, why: str) -> None:
        whose = f"the scores of site {site!r} are" if order.kind == EXAM else f"site {site!r} is"
        self._remarks.append(f"{whose} left out: {self._quoted(site, why)}")

    def _quoted(self, site: str, words: str) -> str:
        """A site's own words, as far as the logs have room for them: it may say others in every round."""
        self._written[site] += len(words)
        return words if self._written[site] <= _WORDS else f"(site {site!r} has said more than is written down)"


def _key(order: Order) -> tuple[str, int, int]:
    return order.kind, order.round, order.phase


def _wrong(said: Answer, message: Message, declared: Spec, site: str) -> str | None:
    """Why an answer to an order of work is of no use, in one clause; None if it is.

    Raises:
        Disagreed: the site, or one that it names, has another public seed set.
    """
    if said.accused is not None:
        raise Disagreed(said.accused, said.problem or "")
    return said.problem or wrong(message, declared, site)
