"""Messages between sites: how a site makes its own after a phase, and uses those of other sites.

FedH2L has no server that computes. Every site does the work of the server in other engines: it calls `Phase.receive` and
`Phase.send` itself. The coordinator only orders the phases, and names the sites with usable messages.
"""

from dataclasses import replace

from fedmutual.algorithms.peers import Peering, make_forwarded_message
from fedmutual.core import Algorithm, At, Message, Phase, Spec, Unusable
from fedmutual.engines.loop import count_bytes, receive_usable
from fedmutual.sites.mailbox import Mailbox
from fedmutual.sites.protocol import Order, Place, SiteAnswer, pack_message
from fedmutual.sites.site_journal import MESSAGE, SiteJournal
from fedmutual.sites.sizes import MessageSizes
from fedmutual.sites.sizes import count_bytes as count_declared_bytes

PeerMessages = dict[str, bytes]
"""Receiving site -> bytes of the message to this site."""


def is_peer_to_peer(algorithm: Algorithm) -> bool:
    """Return whether sites send messages to each other, because no phase needs a server that computes."""
    return all(isinstance(phase, Peering) for phase in algorithm.phases)


class PeerMailbox:
    """The messages that one site sends and receives."""

    def __init__(
        self, algorithm: Algorithm, state: Message, site: str, sites: tuple[str, ...], journal: SiteJournal, rounds: int
    ) -> None:
        """state: the public state before the first round. journal: has the site's own messages of this round."""
        self._algorithm, self._state, self._site, self._journal = algorithm, state, site, journal
        self._others, self._rounds = tuple(i for i in sites if i != site), rounds
        self.mail = Mailbox(
            self._others, self._declare_message, MessageSizes(algorithm, state, sites, by_hand=True).peer_message_limit
        )

    def receive(self, sender: str, content: bytes) -> None:
        """Store a message of another site. Raises MalformedMessage, with the reason, where the message is refused."""
        self.mail.put(sender, content)

    def _declare_message(self, place: Place) -> Spec | None:
        """Return the declared tensors of a message of this round and phase, or None where sites send no message."""
        round, number = place
        phases = self._algorithm.start if round < 0 else self._algorithm.phases
        if round >= self._rounds or number + 1 >= len(phases):
            return None
        return phases[number].leaves(self._state) or None

    def make_peer_messages(self, order: Order, at: At) -> PeerMessages:
        """Return the messages to other sites after a phase, made from the site's stored message.

        Raises:
            RunError: the stored message is damaged.
        """
        message = self._read_message(order)
        content = pack_message(SiteAnswer(Order(order.kind, order.round, order.phase)), message)
        return dict.fromkeys(self._list_receivers(order, message, at), content)

    def count_sent_bytes(self, order: Order, message: Message, at: At) -> int:
        """Return the number of bytes of a message of this site that go to other sites."""
        return count_bytes(message) * len(self._list_receivers(order, message, at))

    def read_inbox(self, order: Order, at: At) -> tuple[Message, int, list[str], dict[str, str]]:
        """Return (inbox of a phase, received bytes, the sites whose message did not arrive, site -> fault of its message).

        A fault may depend on private rows of the sender, and the server cannot read the message. So a fault is for the
        operator alone, and the bytes of a faulty message are counted as those of a usable one.

        Raises:
            RunError: the site's own message is damaged.
            Unusable: as `receive_usable`.
        """
        self.mail.begin(order.round)
        phases, state, missing, faults, faulty = self._list_phases(order), self._state, list[str](), dict[str, str](), 0
        for number, phase in enumerate(phases[: order.phase]):
            earlier_order, earlier_at, flaws = replace(order, phase=number), replace(at, phase=number), dict[str, str]()
            replies, absent = self._collect_replies(earlier_order, earlier_at, flaws)
            state = receive_usable(phase, state, replies, earlier_at, flaws.__setitem__)
            missing += absent
            faults |= flaws
            faulty += count_declared_bytes(phase.leaves(self._state)) * len(flaws.keys() - {self._site})
        inbox = phases[order.phase].send(state, self._site, at)
        return inbox, count_bytes(inbox) + faulty, missing, faults

    def _collect_replies(self, order: Order, at: At, faults: dict[str, str]) -> tuple[dict[str, Message], list[str]]:
        """Return (messages of the named sites and of this site, the sites without a message). faults: gets site -> fault."""
        own_message, messages = self._read_message(order), self.mail.read_messages((order.round, order.phase))
        replies, missing = {self._site: own_message} if own_message else {}, list[str]()
        for i in (i for i in self._others if i in (order.senders or ())):
            if i in messages:
                replies[i] = messages[i]
            elif self._is_receiver(self._site, i, own_message, order, at):
                reason = self.mail.read_reason(i, (order.round, order.phase))
                if reason is None:
                    missing.append(i)
                else:
                    faults[i] = reason
        return dict(sorted(replies.items())), missing

    def _list_receivers(self, order: Order, message: Message, at: At) -> tuple[str, ...]:
        """Return the other sites that receive this site's message."""
        candidates = self._others if order.asked is None else [i for i in self._others if i in order.asked]
        return tuple(i for i in candidates if self._is_receiver(i, self._site, message, order, at))

    def _is_receiver(self, receiver: str, sender: str, message: Message, order: Order, at: At) -> bool:
        """Return whether a site needs the sender's message of a phase. message: one that the sender may have sent."""
        phases = self._list_phases(order)
        if not message or order.phase + 1 == len(phases):
            return False
        phase, following = phases[order.phase : order.phase + 2]
        try:
            state = phase.receive(self._state, {sender: message}, at)
        except Unusable:  # this site's message does not fit the rows of another sender; the receivers are the same
            state = self._state | make_forwarded_message({sender: message})
        return bool(following.send(state, receiver, replace(at, phase=order.phase + 1)))

    def _read_message(self, order: Order) -> Message:
        return self._journal.read_tensors(MESSAGE, order.round, order.phase)

    def _list_phases(self, order: Order) -> tuple[Phase, ...]:
        return self._algorithm.start if order.round < 0 else self._algorithm.phases
