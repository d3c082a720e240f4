"""An engine over real sites: each client stays at its site, and the engine sends orders to the sites."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fedmutual.aggregation import FixedTotal
from fedmutual.algorithms.agree import Compare
from fedmutual.algorithms.fedavg import N_K
from fedmutual.algorithms.peers import is_peer_to_peer
from fedmutual.boundary import Refused, release_metrics
from fedmutual.core import At, Message, Phase, Spec
from fedmutual.engines.base import ClientScores, Engine, Replies, Reply, ScoreOrder
from fedmutual.engines.loop import Paused, count_bytes
from fedmutual.federation.evaluation import SITE_SCORES
from fedmutual.role import ALONE
from fedmutual.sites.contract import Contract
from fedmutual.sites.protocol import (
    EVALUATE,
    LEAVES,
    LONGEST_TEXT,
    WORK,
    MalformedMessage,
    Order,
    SiteAnswer,
    TooFew,
    Transport,
    digest_order,
    find_message_fault,
    pack_message,
)
from fedmutual.sites.screening import screen
from fedmutual.sites.secure_sum.fixed_point import count_words, is_weighted
from fedmutual.sites.secure_sum.messages import Rejected, Stage
from fedmutual.sites.secure_sum.server import SecureSums
from fedmutual.sites.server_journal import LEFT, ServerJournal
from fedmutual.sites.sizes import MessageSizes
from fedmutual.sites.statistics import find_sums_fault, get_screened

_LOG_LIMIT = 1000 * LONGEST_TEXT  # characters of each site's text that one process logs


class Setback(Paused):
    """A round failed although enough sites answered: an unchanged second attempt would fail, too."""

    def __init__(self, round: int, why: str, diverged: bool) -> None:
        """round: from 0; -1 in the start. diverged: whether most sites diverged, so that the sent model is unusable."""
        super().__init__(why)
        self.round, self.diverged = round, diverged


@dataclass
class PhaseOutcome:
    """The results of the orders of one phase."""

    replies: dict[str, Reply] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)  # sites to which an order was sent
    # accusing site -> answer, which names sites with another public seed set
    accusations: dict[str, SiteAnswer] = field(default_factory=dict)
    diverged: set[str] = field(default_factory=set)  # sites whose message is not finite, because their phase failed
    refused: set[str] = field(default_factory=set)  # sites with an unusable answer


class SitesEngine(Engine):
    """An engine over a transport. A site without a usable answer in time is left out, and a remark names the site."""

    def __init__(
        self,
        transport: Transport,
        contract: Contract,
        journal: ServerJournal,
        sizes: MessageSizes,
        sums: SecureSums | None = None,
    ) -> None:
        """sizes: limits of the answers. sums: of masked updates; None where sites send unmasked updates."""
        self._transport, self._contract, self._journal, self._sizes, self._sums = transport, contract, journal, sizes, sums
        # whether sites send their messages to each other, so that answers hold none
        self._peer_to_peer = is_peer_to_peer(contract.algorithm)
        alone = {(ALONE, rows) for _, rows in SITE_SCORES} if contract.trains_alone else set[tuple[str, str]]()
        self._scored = SITE_SCORES | alone  # the pairs (model, rows) that a site can have a score of
        self._written = Counter[str]()  # characters of each site's text in the logs so far
        self._remarks = list[str]()
        self._finished: tuple[str, ...] = ()  # the sites that did the phase before
        self._unsent: Collection[str] = ()
        self.scaling: Message = {}  # added to each order to train or to score (`statistics.pack_scaling`)

    def take_remarks(self) -> list[str]:
        """Return the remarks since the last call, as `Engine.take_remarks`."""
        remarks, self._remarks = self._remarks, []
        return remarks

    def list_unsent(self) -> Collection[str]:
        """As `Engine.list_unsent`."""
        return self._unsent

    def close(self) -> None:
        """Do nothing: the sites keep running."""

    def train(self, phase: Phase, at: At, inboxes: Mapping[str, Message], declared: Spec) -> Replies:
        """As `Engine.train`. All replies come first, because screening compares each reply with the others.

        Raises:
            TooFew: fewer sites answered than the quorum.
            Setback: enough sites answered, and too few of the answers are usable.
            RunError: so many sites are excluded that the quorum cannot be met; or a file is damaged or cannot be written.
        """
        sites, excluded = inboxes, self._journal.excluded
        joined = [i for i in inboxes if i not in excluded and self._contract.sites.takes_part(i, at.round)]
        inboxes = {i: inboxes[i] for i in joined}
        orders = {i: (Order(WORK, at.round, at.phase), inbox | self.scaling) for i, inbox in inboxes.items()}
        if self._peer_to_peer:
            connected = inboxes.keys() & set(self._transport.list_connected())
            on_time = connected - set(self._transport.list_late())  # sending to an unresponsive site would block the sender
            receivers = on_time if len(on_time) >= self._contract.quorum else connected  # the round waits for late ones, too
            senders = self._journal.settle_senders(at.round, at.phase, self._finished) if at.phase else None
            order = Order(WORK, at.round, at.phase, senders, tuple(sorted(receivers)))
            orders = dict.fromkeys(inboxes, (order, {}))
        hides = self._peer_to_peer or self._sums is not None
        outcome = self._collect(phase, self._journal.stamp(orders), {} if hides else declared)
        self._unsent = sites.keys() - outcome.sent
        self._journal.check_quorum(sites, self._contract.quorum)
        upheld = 0
        if self._sums is None:
            self._screen(outcome, at.round, inboxes)
            upheld = self._judge(outcome, inboxes, sites)
            self._finished = tuple(sorted(outcome.replies))
        self._check_count(outcome, len(outcome.replies) + upheld, at.round, inboxes)
        yield from outcome.replies.items() if self._sums is None else self._open_sum(self._sums, outcome, phase, at, inboxes)

    def _open_sum(
        self, sums: SecureSums, outcome: PhaseOutcome, phase: Phase, at: At, inboxes: Mapping[str, Message]
    ) -> Replies:
        """Yield the replies of the sites in the sum, without messages, and the sum of the masked updates."""
        inbox = next(iter(inboxes.values()))

        def refuse(site: str, order: Order, why: str) -> None:
            self._leave_out(site, order, why)
            outcome.refused.add(site)

        model = digest_order(Order(WORK, at.round, at.phase), inbox | self.scaling)
        count, trained = count_words(phase, inbox), outcome.replies
        try:
            opened, up, down = sums.open(
                at.round, self._journal.attempt, model, count, trained, lambda sent: self._ask(sent, outcome), refuse
            )
            total = opened.add_words()
        except Rejected as problem:
            raise Setback(at.round, str(problem), diverged=False) from None
        self._finished = tuple(sorted(opened.answers[Stage.UNMASK]))
        for i in opened.present:
            losses = trained[i].train if i in trained else {}
            yield i, Reply({}, losses, up[i], down[i] + count_bytes(inboxes[i] | self.scaling))
        yield FixedTotal(opened.present, torch.from_numpy(total.view(np.int64)), is_weighted(phase))

    def _collect(self, phase: Phase, orders: Mapping[str, tuple[Order, Message]], declared: Spec) -> PhaseOutcome:
        """Send the orders of a phase, and return the results. declared: all that an answer may hold."""
        outcome = PhaseOutcome()
        for i, (answer, message) in self._ask(orders, outcome):
            if answer.accused and isinstance(phase, Compare):
                outcome.accusations[i] = answer
                continue
            if answer.problem is not None:
                self._leave_out(i, answer.order, answer.problem)
                continue
            why = _find_fault(answer, message, phase, declared, i)
            if why is None and self._sums is None:
                why = find_sums_fault(phase, message)
            if why is not None:
                is_finite = all(torch.isfinite(tensor).all() for tensor in message.values())
                self._leave_out(i, answer.order, why if is_finite else f"{why}; its operator reads why")
                (outcome.refused if is_finite else outcome.diverged).add(i)
                continue
            about = f"site {i!r} left out the message of "
            self._remarks += [about + self._limit_quote(i, remark) for remark in answer.remarks]
            outcome.replies[i] = Reply(message, dict(answer.train), answer.up, answer.down or count_bytes(orders[i][1]))
        return outcome

    def _screen(self, outcome: PhaseOutcome, round: int, inboxes: Mapping[str, Message]) -> None:
        """Refuse or shorten the messages that are too far from the others; record norms and counts of the used messages."""
        messages = {i: get_screened(reply.message) for i, reply in outcome.replies.items() if reply.message}
        if not messages:
            return
        contract, sent = self._contract, {i: inboxes[i] for i in messages}
        newcomers = [i for i in messages if contract.sites.is_newcomer(i, round)]
        refused, norms, shortened = screen(
            messages, sent, contract.sites, self._journal.examples, contract.algorithm, newcomers
        )
        for i, message in shortened.items():
            self._remarks.append(f"site {i!r} joined lately, and its update is shortened to the median norm of the others'")
            outcome.replies[i] = outcome.replies[i]._replace(message=message)
        for i, why in refused.items():
            self._remarks.append(f"site {i!r} is left out: {why}")
            del outcome.replies[i], messages[i]
        outcome.refused |= refused.keys()
        self._journal.note_replies(round, norms, {i: int(m[N_K]) for i, m in messages.items() if N_K in m})

    def _judge(self, outcome: PhaseOutcome, asked: Collection[str], sites: Collection[str]) -> int:
        """Exclude each site that most sites accuse of another seed set; return the number of upheld accusers.

        An accuser without a majority is left out itself, so that no single site can exclude another one. sites: all sites of
        the federation. Raises RunError where too few sites are left.
        """
        votes = Counter(i for answer in outcome.accusations.values() for i in set(answer.accused))
        convicted = {i for i in asked if 2 * votes[i] > len(asked)}
        excluded: dict[str, str] = {}
        for answer in outcome.accusations.values():
            reason = answer.problem or "they do not say in what"
            for i in convicted.intersection(answer.accused):
                excluded.setdefault(i, f"most sites say that it has another public seed set: {reason}")
        upheld = [
            i for i, answer in outcome.accusations.items() if i not in convicted and convicted.issuperset(answer.accused)
        ]
        for i in outcome.accusations.keys() - convicted - set(upheld):
            excluded[i] = "it says that another site has another public seed set, and most sites do not"
        if excluded:
            outcome.replies = {i: reply for i, reply in outcome.replies.items() if i not in excluded}
            self._remarks += [f"site {i!r} is left out for good: {why}" for i, why in sorted(excluded.items())]
            self._journal.exclude(excluded)
            self._journal.check_quorum(sites, self._contract.quorum)
        return len(upheld)

    def _check_count(self, outcome: PhaseOutcome, count: int, round: int, asked: Collection[str]) -> None:
        """Raise Setback or TooFew where too few sites did the phase. count: of the sites that did it."""
        wanted = min(self._contract.quorum, len(asked))
        if 2 * len(outcome.diverged) > len(asked):
            raise Setback(round, "most sites diverged", diverged=True)
        if count < wanted <= count + len(outcome.refused):
            names = ", ".join(sorted(outcome.refused))
            raise Setback(round, f"the messages of {names} cannot be used, and {wanted} sites are needed", diverged=False)
        if count < wanted:
            raise TooFew(f"{count} of {len(asked)} sites did their part, and {self._contract.quorum} are needed")

    def score(self, orders: Mapping[str, ScoreOrder]) -> Iterator[tuple[str, ClientScores]]:
        """As `Engine.score`: each site has its own list of evaluations. A site that missed the round is not asked."""
        asked = {*self._finished, *self._contract.sites.evaluators} - self._journal.excluded.keys()
        number = self._journal.attempt
        sent = {
            i: (Order(EVALUATE, order.round - 1, 0, attempt=number), order.inbox | self.scaling)
            for i, order in orders.items()
            if i in asked
        }
        for i, (answer, _) in self._ask(sent, PhaseOutcome()):
            pairs, why = [(score.model, score.data) for score in answer.scores], answer.problem
            if not self._scored.issuperset(pairs) or len(set(pairs)) < len(pairs):  # a mean would count both
                why = "a score is of a model or of rows that are not scored, or is repeated"
            if why is not None:
                self._leave_out(i, answer.order, why)
            else:
                yield i, (tuple(replace(score, client=i) for score in answer.scores), ())

    def _ask(
        self, orders: Mapping[str, tuple[Order, Message]], outcome: PhaseOutcome
    ) -> Iterator[tuple[str, tuple[SiteAnswer, Message]]]:
        """Send orders to the connected sites, and yield (site, (answer, message)) as they come; refuse unreadable ones."""
        connected = self._transport.list_connected()
        for i in orders:
            if i not in connected:
                self._leave_out(i, orders[i][0], "it is not connected")
        sent = {i: pack_message(*orders[i]) for i in orders if i in connected}
        outcome.sent |= sent.keys()
        waiting = set(sent)
        for i, content in self._transport.ask(sent, self._contract.sites.deadline):
            if i not in waiting:
                continue  # a second answer
            order = orders[i][0]
            try:
                answer, message = self._sizes.open_answer(order, content)
            except MalformedMessage as problem:
                self._leave_out(i, order, str(problem))
                outcome.refused.add(i)
                waiting.discard(i)
                continue
            place = answer.order.kind, answer.order.round, answer.order.phase
            if place != (order.kind, order.round, order.phase):
                self._remarks.append(f"site {i!r} answered to another order than the last: ignored")
                continue
            waiting.discard(i)
            if answer.problem == LEAVES:
                self._remarks.append(f"site {i!r} left the federation in good order, and gets no more orders")
                self._journal.exclude({i: LEFT})
                continue
            yield i, (answer, message)
        for i in sorted(waiting):
            self._leave_out(i, orders[i][0], "it did not answer in time")

    def _leave_out(self, site: str, order: Order, why: str) -> None:
        subject = f"the scores of site {site!r} are" if order.kind == EVALUATE else f"site {site!r} is"
        self._remarks.append(f"{subject} left out: {self._limit_quote(site, why)}")

    def _limit_quote(self, site: str, text: str) -> str:
        """Return the text of a site, or a notice where the texts of this site exceed `_LOG_LIMIT` characters."""
        self._written[site] += len(text)
        return text if self._written[site] <= _LOG_LIMIT else f"(site {site!r} has sent more text than is logged)"


def _find_fault(answer: SiteAnswer, message: Message, phase: Phase, declared: Spec, site: str) -> str | None:
    """Return in one clause why an answer to an order of work cannot be used, or None where it can be used."""
    try:
        release_metrics(answer.train, phase.terms, site)
    except Refused:  # the names come from the site, so no log should hold them
        return f"it sends losses that its phase does not declare; those are {', '.join(phase.terms) or 'none'}"
    return find_message_fault(message, declared, site)
