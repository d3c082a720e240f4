"""The loop's view of sites: each has one client, which lives there and nowhere else."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, TypeVar, cast

from fedmutual.algorithms.agree import Compare
from fedmutual.algorithms.fedavg import N_K
from fedmutual.boundary import Refused, release_metrics
from fedmutual.core import Algorithm, At, Client, Message, Phase, Spec
from fedmutual.engines.base import Reply, evaluate_client, participate
from fedmutual.engines.loop import Paused, count_bytes
from fedmutual.events import Score
from fedmutual.federation.evaluation_sets import SCORED
from fedmutual.sites.attempts import Attempts
from fedmutual.sites.conduct import Conduct
from fedmutual.sites.protocol import (
    EXAM,
    LONGEST,
    WORK,
    MalformedMessage,
    Order,
    Post,
    SiteAnswer,
    digest_order,
    find_message_fault,
    pack_message,
)
from fedmutual.sites.screening import Limits, screen
from fedmutual.sites.secure_sum.exchange import SecureSums
from fedmutual.sites.secure_sum.fixed_point import divide_total
from fedmutual.sites.secure_sum.messages import Rejected
from fedmutual.sites.secure_sum.server import TooFewSites
from fedmutual.sites.sizes import MessageSizes

R = TypeVar("R")
_WORDS = 1000 * LONGEST  # characters of each site's own that the logs of a federation take, while this process lives


class TooFew(RuntimeError):
    """Fewer sites answered than the quorum: the round does not count, and is begun again when they are back."""


class Setback(Paused):
    """A round came to nothing, although enough sites answered: begun again as it was, it would fail again."""

    def __init__(self, round: int, why: str, diverged: bool) -> None:
        """round: from 0, -1 in the start. diverged: whether most sites did, so that what they were sent is of no use."""
        super().__init__(why)
        self.round, self.diverged = round, diverged


@dataclass
class PhaseOutcome:
    """What came of the orders of one phase."""

    replies: dict[str, Reply] = field(default_factory=dict)
    accusations: dict[str, SiteAnswer] = field(default_factory=dict)  # of another public seed set, by the site that accuses
    diverged: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)  # what they answered is of no use


class SitesEngine:
    """An engine over a post. A site that does not answer in time, or answers nonsense, is named and left out."""

    def __init__(
        self,
        post: Post,
        quorum: int,
        deadline: float,
        by_hand: bool,
        sizes: MessageSizes,
        attempts: Attempts,
        conduct: Conduct,
        limits: Limits,
        algorithm: Algorithm,
        sums: SecureSums | None = None,
    ) -> None:
        """by_hand: sites send their messages to each other, so that answers hold none. sizes: how large answers may be.

        limits: what the replies of the algorithm are held to. sums: where sites mask their updates; None: they send them.
        """
        self._post, self._quorum, self._deadline, self._by_hand = post, quorum, deadline, by_hand
        self._sizes, self._attempts, self._conduct = sizes, attempts, conduct
        self._limits, self._algorithm, self._sums = limits, algorithm, sums
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
            Setback: enough sites answered, and too few of their answers can be used.
            RunError: the sites that are not left out for good are fewer than the quorum; or the disk is full.
        """
        if do is participate:
            yield from cast(Iterator[tuple[str, R]], self._work(arguments))
        elif do is evaluate_client:
            yield from cast(Iterator[tuple[str, R]], self._exam(arguments))

    def _work(self, arguments: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, Reply]]:
        """The replies that are used: after all have come, for each is held against the others."""
        given = {i: a for i, a in arguments.items() if i not in self._conduct.left_out}
        asked = None
        if self._by_hand:  # sending to an unresponsive site would block the sender
            asked = tuple(sorted(given.keys() & set(self._post.there()) - set(self._post.late())))
        found = self._collect(given, self._attempts.stamp({i: self._order(a, asked) for i, a in given.items()}))
        if self._sums is not None:
            self._check_count(found, len(found.replies), given)
            self._spoke = self._open_sum(self._sums, found, given)
            yield from found.replies.items()
            return
        self._screen(found, given)
        upheld = self._judge(found, given, arguments)
        self._spoke = tuple(sorted(found.replies))
        self._check_count(found, len(found.replies) + upheld, given)
        yield from found.replies.items()

    def _open_sum(self, sums: SecureSums, found: PhaseOutcome, given: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
        """Put the sum of the updates in the place of the replies -> the sites that did all stages."""
        at, (_, inbox, _, _) = _when(given), next(iter(given.values()))

        def refuse(site: str, order: Order, why: str) -> None:
            self._leave_out(site, order, why)
            found.refused.add(site)

        model = digest_order(Order(WORK, at.round, at.phase), inbox)
        try:
            opened = sums.open(
                at.round, self._attempts.number, model, found.replies, lambda orders: self._asked(orders, found), refuse
            )
        except TooFewSites as problem:
            raise TooFew(str(problem)) from None
        except Rejected as problem:
            raise Setback(at.round, str(problem), diverged=False) from None
        messages = divide_total(opened.total, opened.present)
        down = {i: opened.down.get(i, 0) + count_bytes(given[i][1]) for i in opened.present}
        trained = {i: found.replies[i].train if i in found.replies else {} for i in opened.present}
        found.replies = {i: Reply(messages[i], trained[i], opened.up.get(i, 0), down[i]) for i in opened.present}
        return opened.finished

    def _collect(self, given: Mapping[str, tuple[Any, ...]], orders: Mapping[str, tuple[Order, Message]]) -> PhaseOutcome:
        """What comes of the orders of a phase."""
        found = PhaseOutcome()
        for i, (said, message) in self._asked(orders, found):
            phase, _, declared, _ = given[i]
            if said.accused and isinstance(phase, Compare):
                found.accusations[i] = said
            elif said.problem is not None:
                self._leave_out(i, said.order, said.problem)
                found.diverged |= {i} if said.diverged else set()
            elif (why := _wrong(said, message, phase, {} if self._by_hand or self._sums else declared, i)) is not None:
                self._leave_out(i, said.order, why)
                found.refused.add(i)
            else:
                self._remarks += [f"site {i!r} left out the message of {self._quoted(i, remark)}" for remark in said.remarks]
                found.replies[i] = Reply(message, dict(said.train), said.up, said.down)
        return found

    def _screen(self, found: PhaseOutcome, given: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse the messages that are too far from the others; write down what the others were like."""
        messages = {i: reply.message for i, reply in found.replies.items() if reply.message}
        if not messages:
            return
        sent = {i: given[i][1] for i in messages}
        refused, norms = screen(messages, sent, self._limits, self._conduct.examples, self._algorithm)
        for i, why in refused.items():
            self._remarks.append(f"site {i!r} is left out: {why}")
            del found.replies[i], messages[i]
        found.refused |= refused.keys()
        self._conduct.note(_when(given).round, norms, {i: int(m[N_K]) for i, m in messages.items() if N_K in m})

    def _judge(self, found: PhaseOutcome, given: Collection[str], sites: Collection[str]) -> int:
        """Leave out for good whom most sites accuse of another public seed set; else who accuses -> accusers that stay.

        So one site's word puts out no other. sites: all of the federation. Raises RunError where too few are left.
        """
        votes = Counter(i for said in found.accusations.values() for i in set(said.accused))
        guilty = {i for i in given if 2 * votes[i] > len(given)}
        out: dict[str, str] = {}
        for said in found.accusations.values():
            words = said.problem or "they do not say in what"
            for i in guilty.intersection(said.accused):
                out.setdefault(i, f"most sites say that it has another public seed set: {words}")
        stay = [i for i, said in found.accusations.items() if i not in guilty and guilty.issuperset(said.accused)]
        for i in found.accusations.keys() - guilty - set(stay):
            out[i] = "it says that another site has another public seed set, and most sites do not"
        if out:
            found.replies = {i: reply for i, reply in found.replies.items() if i not in out}
            self._remarks += [f"site {i!r} is left out for good: {why}" for i, why in sorted(out.items())]
            self._conduct.leave_out(out)
            self._conduct.check_quorum(sites, self._quorum)
        return len(stay)

    def _check_count(self, found: PhaseOutcome, done: int, given: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise where too few sites did their part. done: how many did."""
        wanted, round = min(self._quorum, len(given)), _when(given).round
        if 2 * len(found.diverged) > len(given):
            raise Setback(round, "most sites diverged", diverged=True)
        if done < wanted <= done + len(found.refused):
            names = ", ".join(sorted(found.refused))
            raise Setback(round, f"what {names} sent is of no use, and {wanted} sites are wanted", diverged=False)
        if done < wanted:
            raise TooFew(f"{done} of {len(given)} sites did their part, and {self._quorum} are wanted")

    def _order(self, given: tuple[Any, ...], asked: tuple[str, ...] | None) -> tuple[Order, Message]:
        _, inbox, _, at = given
        assert isinstance(at, At)
        senders = self._attempts.settle_senders(at.round, at.phase, self._spoke) if self._by_hand and at.phase else None
        return Order(WORK, at.round, at.phase, senders, asked), {} if self._by_hand else inbox

    def _exam(self, arguments: Mapping[str, tuple[Any, ...]]) -> Iterator[tuple[str, tuple[Score, ...]]]:
        given = {i: arguments[i] for i in arguments if i in self._spoke}  # who missed the round is not waited for again
        number = self._attempts.number
        orders = {i: (Order(EXAM, round - 1, 0, attempt=number), inbox) for i, (_, inbox, round, _, _) in given.items()}
        for i, (said, _) in self._asked(orders, PhaseOutcome()):
            if said.problem is not None:
                self._leave_out(i, said.order, said.problem)
                continue
            if not _is_of_models(said):
                self._leave_out(i, said.order, "they are of models or rows that are not scored, or of one twice")
                continue
            yield i, tuple(replace(score, client=i) for score in said.scores)

    def _asked(
        self, orders: Mapping[str, tuple[Order, Message]], found: PhaseOutcome
    ) -> Iterator[tuple[str, tuple[SiteAnswer, Message]]]:
        """Ask those that are there -> what they answered to this order, as it comes. What cannot be read is refused."""
        there = self._post.there()
        for i in orders:
            if i not in there:
                self._leave_out(i, orders[i][0], "it is not there")
        left = {i for i in orders if i in there}
        sent = {i: pack_message(*orders[i]) for i in orders if i in there}
        for i, content in self._post.ask(sent, self._deadline):
            if i not in left:
                continue  # a second answer
            try:
                said, message = self._sizes.open_answer(orders[i][0], content)
            except MalformedMessage as problem:
                self._leave_out(i, orders[i][0], str(problem))
                found.refused.add(i)
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


def _when(given: Mapping[str, tuple[Any, ...]]) -> At:
    """The place in the run of a phase, by what its sites are given."""
    at = next(iter(given.values()))[3]
    assert isinstance(at, At)
    return at


def _key(order: Order) -> tuple[str, int, int]:
    return order.kind, order.round, order.phase


def _is_of_models(said: SiteAnswer) -> bool:
    """Whether each score is of a model and of rows that a site scores, and of no others' twice: a mean would count both."""
    of = [(score.model, score.data) for score in said.scores]
    return SCORED.issuperset(of) and len(set(of)) == len(of)


def _wrong(said: SiteAnswer, message: Message, phase: Phase, declared: Spec, site: str) -> str | None:
    """Why an answer to an order of work is of no use, in one clause; None if it is."""
    try:
        release_metrics(said.train, phase.terms, site)
    except Refused:  # by names of the site's own making, which no log has to hold
        return f"it tells losses that its phase does not declare; those are {', '.join(phase.terms) or 'none'}"
    return find_message_fault(message, declared, site)
