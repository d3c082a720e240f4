"""Messages between sites: how a site makes its own after a phase, and uses those of other sites.

FedH2L has no server that computes. Every site does the work of the server in other engines: it calls `Phase.receive` and
`Phase.send` itself. The coordinator only orders the phases, and names the sites with usable messages.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from threading import Lock

import torch

from fedmutual.algorithms.peers import make_forwarded_message
from fedmutual.config import Config
from fedmutual.core import Algorithm, At, Message, Phase, Spec, Unusable
from fedmutual.engines.loop import count_bytes, receive_usable
from fedmutual.sites.protocol import (
    WORK,
    Limit,
    MalformedMessage,
    Order,
    Place,
    SiteAnswer,
    clean_text,
    find_message_fault,
    pack_message,
    read_answer,
)
from fedmutual.sites.site_journal import MESSAGE, SiteJournal
from fedmutual.sites.sizes import count_bytes as count_declared_bytes


class Mailbox:
    """The unread messages that one site received, in memory, which may arrive from other threads while the site works.

    A site sends its messages after a phase, before it answers the server, to the sites that do the same phase. So an honest
    message belongs to the current phase of this site, or to the next phase, where the order for this site is still on its
    way. After a pause or a restart of this site, the next phase may be in any later round, for the other sites continued.
    The server orders a phase when every order of the phase before is answered or given up, so no sender is further ahead.
    Hence two rounds of each sender are stored: the current round and one later round. A newer later round replaces an older
    one. Every other message is refused.
    """

    def __init__(self, senders: Collection[str], declared: Callable[[Place], Spec | None], limit: Limit) -> None:
        """senders: the other sites. declared: returns the tensors of a message, or None where a phase has no messages.

        limit: the largest size of a message.
        """
        self._declared, self._limit = declared, limit
        self._messages: dict[str, dict[Place, Message | str]] = {i: {} for i in senders}  # str: why one was refused
        self._unreadable: dict[str, str] = {}  # sender -> why a message was refused that is of no phase with messages
        self._round: int | None = None  # the current round; None: before the first order of this process
        self._lock = Lock()

    def put(self, sender: str, content: bytes) -> None:
        """Store a message. Raises MalformedMessage, with the reason, where the message is refused."""
        if sender not in self._messages:
            raise MalformedMessage(f"{clean_text(repr(sender))} is none of the other sites")
        place: Place | None = None
        try:
            answer, message = read_answer(content, self._limit)
            order = answer.order
            declared = self._declared((order.round, order.phase)) if order.kind == WORK else None
            if declared is None:
                raise MalformedMessage("it is of a phase after which sites send nothing to each other")
            place = order.round, order.phase
            if answer != SiteAnswer(Order(WORK, *place)):
                raise MalformedMessage("its message has a header that messages between sites do not have")
            why = find_message_fault(message, declared, sender) if message else "its message is empty"
            if why is not None:
                raise MalformedMessage(why)
            with self._lock:
                self._store(sender, place, message)
                self._unreadable.pop(sender, None)
        except MalformedMessage as problem:
            with self._lock:
                if place is None:
                    self._unreadable[sender] = str(problem)
                elif not self._is_over(place) and place not in self._messages[sender]:
                    self._keep(sender, place, str(problem))
            raise

    def begin(self, round: int) -> None:
        """Set the current round, from 0. Keep only its messages, and those of each sender's newest later round."""
        with self._lock:
            self._round = round
            for i, messages in self._messages.items():
                rounds = {round, max((place[0] for place in messages if place[0] > round), default=round)}
                self._messages[i] = {place: message for place, message in messages.items() if place[0] in rounds}

    def read(self, sender: str, place: Place) -> Message | str | None:
        """Return the sender's message of a round and phase, or why it was refused; None where nothing has come.

        The answer is the same at each call, because a site may carry out an order again.
        """
        with self._lock:
            return self._messages[sender].get(place, self._unreadable.get(sender))

    def _store(self, sender: str, place: Place, message: Message) -> None:
        if self._is_over(place):
            raise MalformedMessage(f"it is of round {place[0] + 1}, which is over")
        earlier = self._messages[sender].get(place)
        if not isinstance(earlier, dict):
            self._keep(sender, place, message)
        elif earlier.keys() != message.keys() or not all(torch.equal(earlier[k], message[k]) for k in message):
            raise MalformedMessage("it differs from an earlier message of this phase")

    def _keep(self, sender: str, place: Place, content: Message | str) -> None:
        if place[0] != self._round:
            rounds = self._round, place[0]
            self._messages[sender] = {p: c for p, c in self._messages[sender].items() if p[0] in rounds}
        self._messages[sender][place] = content

    def _is_over(self, place: Place) -> bool:
        return self._round is not None and place[0] < self._round


@dataclass(eq=False)
class PeerMailbox:
    """The messages that one site sends and receives. Its methods raise RunError where the journal cannot be read."""

    algorithm: Algorithm
    state: Message  # public, before the first round
    site: str
    sites: tuple[str, ...]
    journal: SiteJournal  # has the site's own messages
    config: Config
    limit: Limit  # the largest message

    def __post_init__(self) -> None:
        self._others = tuple(i for i in self.sites if i != self.site)
        self.mail = Mailbox(self._others, self._declare_message, self.limit)
        self.receive = self.mail.put

    def _declare_message(self, place: Place) -> Spec | None:
        """Return the declared tensors of a message of this round and phase, or None where sites send no message."""
        phases = self._list_phases(place[0])
        if place[0] >= self.config.rounds or place[1] + 1 >= len(phases):
            return None
        return phases[place[1]].leaves(self.state) or None

    def make_peer_messages(self, order: Order) -> dict[str, bytes]:
        """Return site -> bytes of the message to it after a phase, made from the site's stored message."""
        message = self._read_message(order)
        content = pack_message(SiteAnswer(Order(order.kind, order.round, order.phase)), message)
        return dict.fromkeys(self._list_receivers(order, message), content)

    def count_sent_bytes(self, order: Order, message: Message) -> int:
        """Return the number of bytes of a message of this site that go to other sites."""
        return count_bytes(message) * len(self._list_receivers(order, message))

    def read_inbox(self, order: Order) -> tuple[Message, int, list[str], dict[str, str]]:
        """Return (inbox of a phase, received bytes, the sites whose message did not arrive, site -> fault of its message).

        A fault may depend on private rows of the sender, and the server cannot read the message. So a fault is for the
        operator alone, and the bytes of a faulty message are counted as those of a usable one. Raises Unusable as
        `receive_usable`.
        """
        self.mail.begin(order.round)
        phases, state, faulty = self._list_phases(order.round), self.state, 0
        missing, faults = list[str](), dict[str, str]()
        for number, phase in enumerate(phases[: order.phase]):
            earlier, flaws = replace(order, phase=number), dict[str, str]()
            replies = self._collect_replies(earlier, missing, flaws)
            state = receive_usable(phase, state, replies, self._make_place(earlier), flaws.__setitem__)
            faults |= flaws
            faulty += count_declared_bytes(phase.leaves(self.state)) * len(flaws.keys() - {self.site})
        inbox = phases[order.phase].send(state, self.site, self._make_place(order))
        return inbox, count_bytes(inbox) + faulty, missing, faults

    def _collect_replies(self, order: Order, missing: list[str], faults: dict[str, str]) -> dict[str, Message]:
        """Return the messages of the named sites and of this site. missing: gets the other sites; faults: site -> fault."""
        own_message = self._read_message(order)
        replies = {self.site: own_message} if own_message else {}
        for i in (i for i in self._others if i in (order.senders or ())):
            message = self.mail.read(i, (order.round, order.phase))
            if isinstance(message, dict):
                replies[i] = message
            elif self._is_receiver(self.site, i, own_message, order):
                if message is None:
                    missing.append(i)
                else:
                    faults[i] = message
        return dict(sorted(replies.items()))

    def _list_receivers(self, order: Order, message: Message) -> tuple[str, ...]:
        """Return the other sites that receive this site's message."""
        candidates = self._others if order.asked is None else [i for i in self._others if i in order.asked]
        return tuple(i for i in candidates if self._is_receiver(i, self.site, message, order))

    def _is_receiver(self, receiver: str, sender: str, message: Message, order: Order) -> bool:
        """Return whether a site needs the sender's message of a phase. message: one that the sender may have sent."""
        phases = self._list_phases(order.round)
        if not message or order.phase + 1 == len(phases):
            return False
        phase, following = phases[order.phase : order.phase + 2]
        try:
            state = phase.receive(self.state, {sender: message}, self._make_place(order))
        except Unusable:  # this site's message does not fit the rows of another sender; the receivers are the same
            state = self.state | make_forwarded_message({sender: message})
        return bool(following.send(state, receiver, self._make_place(replace(order, phase=order.phase + 1))))

    def _read_message(self, order: Order) -> Message:
        return self.journal.read_tensors(MESSAGE, order.round, order.phase)

    def _list_phases(self, round: int) -> tuple[Phase, ...]:
        return self.algorithm.start if round < 0 else self.algorithm.phases

    def _make_place(self, order: Order) -> At:
        return At(self.config.seed, order.round, self.config.rounds, order.phase)
