"""Unread messages of other sites: for each sender at most the messages of the current round and of one later round.

A site sends its messages after a phase, before it answers the server, to the sites that do the same phase. Therefore an
honest message belongs to the current phase of this site, or to the next phase, where the order for this site is still on its
way. After a pause or a restart of this site, the next phase may be in any later round, for the other sites continued. The
server orders a phase when every order of the phase before is answered or given up, so that no sender is further ahead.
Hence the mailbox stores two rounds of each sender: the current round and one later round. A newer later round replaces an
older one. Every other message is refused and counted.
"""

from collections import Counter
from collections.abc import Callable, Collection
from threading import Lock

import torch

from fedmutual.core import Message, Spec
from fedmutual.sites.protocol import (
    WORK,
    Limit,
    MalformedMessage,
    Order,
    Place,
    SiteAnswer,
    clean_text,
    find_message_fault,
    read_answer,
)


class Mailbox:
    """The messages that one site received, in memory. Messages may arrive from other threads while the site works."""

    def __init__(self, senders: Collection[str], declared: Callable[[Place], Spec | None], limit: Limit) -> None:
        """senders: the other sites. declared: returns the tensors of a message, or None where a phase has no messages.

        limit: the largest size of a message.
        """
        self._senders, self._declared, self._limit = frozenset(senders), declared, limit
        self._messages: dict[str, dict[Place, Message | str]] = {i: {} for i in senders}  # str: why one was refused
        self._unreadable: dict[str, str] = {}  # sender -> why a message was refused that is of no phase with messages
        self._round: int | None = None  # the current round; None: before the first order of this process
        self._lock = Lock()
        self.refused: Counter[str] = Counter()
        """Sender -> number of refused messages; the key "" counts the messages of all unknown senders."""

    def put(self, sender: str, content: bytes) -> None:
        """Store a message. Raises MalformedMessage, with the reason, where the message is refused."""
        place: Place | None = None
        try:
            if sender not in self._senders:
                raise MalformedMessage(f"{clean_text(repr(sender))} is none of the other sites")
            answer, message = read_answer(content, self._limit)
            declared = self._find_declared(answer.order)
            place = answer.order.round, answer.order.phase
            _check_message(answer, message, declared, sender)
            with self._lock:
                self._store(sender, place, message)
                self._unreadable.pop(sender, None)
        except MalformedMessage as problem:
            with self._lock:
                self.refused[sender if sender in self._senders else ""] += 1
                if sender in self._senders:
                    self._store_reason(sender, place, str(problem))
            raise

    def begin(self, round: int) -> None:
        """Set the current round, from 0. Keep only its messages, and those of each sender's newest later round."""
        with self._lock:
            self._round = round
            for i, messages in self._messages.items():
                rounds = {round, max((place[0] for place in messages if place[0] > round), default=round)}
                self._messages[i] = {place: message for place, message in messages.items() if place[0] in rounds}

    def read_messages(self, place: Place) -> dict[str, Message]:
        """Return the messages of a round and phase: sender -> message."""
        with self._lock:
            found = {i: messages.get(place) for i, messages in self._messages.items()}
        return {i: message for i, message in found.items() if isinstance(message, dict)}

    def read_reason(self, sender: str, place: Place) -> str | None:
        """Return why the sender's message of a round and phase was refused; None where none was refused.

        The answer is the same at each call, because a site may carry out an order again.
        """
        with self._lock:
            found = self._messages[sender].get(place)
            return found if isinstance(found, str) else self._unreadable.get(sender)

    def _find_declared(self, order: Order) -> Spec:
        """Return the declared tensors of a phase's messages; raise MalformedMessage if the phase has no messages."""
        declared = self._declared((order.round, order.phase)) if order.kind == WORK else None
        if declared is None:
            raise MalformedMessage("it is of a phase after which sites send nothing to each other")
        return declared

    def _store(self, sender: str, place: Place, message: Message) -> None:
        if self._is_over(place):
            raise MalformedMessage(f"it is of round {place[0] + 1}, which is over")
        earlier = self._messages[sender].get(place)
        if isinstance(earlier, dict):
            if not _is_same(earlier, message):
                raise MalformedMessage("it differs from an earlier message of this phase")
            return
        self._keep(sender, place, message)

    def _store_reason(self, sender: str, place: Place | None, reason: str) -> None:
        if place is None:
            self._unreadable[sender] = reason
        elif not self._is_over(place) and place not in self._messages[sender]:
            self._keep(sender, place, reason)

    def _keep(self, sender: str, place: Place, content: Message | str) -> None:
        if place[0] != self._round:
            rounds = self._round, place[0]
            self._messages[sender] = {p: c for p, c in self._messages[sender].items() if p[0] in rounds}
        self._messages[sender][place] = content

    def _is_over(self, place: Place) -> bool:
        return self._round is not None and place[0] < self._round


def _check_message(answer: SiteAnswer, message: Message, declared: Spec, sender: str) -> None:
    """Raise MalformedMessage unless the message has a plain header and holds exactly the declared tensors."""
    order = answer.order
    if answer != SiteAnswer(Order(WORK, order.round, order.phase)):
        raise MalformedMessage("its message has a header that messages between sites do not have")
    why = find_message_fault(message, declared, sender) if message else "its message is empty"
    if why is not None:
        raise MalformedMessage(why)


def _is_same(message: Message, other: Message) -> bool:
    return message.keys() == other.keys() and all(torch.equal(message[k], other[k]) for k in message)
