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
        self._messages: dict[str, dict[Place, Message]] = {i: {} for i in senders}
        self._reasons: dict[str, str] = {}  # sender -> why its last message was refused, until `take_reason`
        self._round: int | None = None  # the current round; None: before the first order of this process
        self._lock = Lock()
        self.refused: Counter[str] = Counter()
        """Sender -> number of refused messages; the key "" counts the messages of all unknown senders."""

    def put(self, sender: str, content: bytes) -> None:
        """Store a message. Raises MalformedMessage, with the reason, where the message is refused."""
        try:
            if sender not in self._senders:
                raise MalformedMessage(f"{clean_text(repr(sender))} is none of the other sites")
            answer, message = read_answer(content, self._limit)
            place = answer.order.round, answer.order.phase
            self._check_message(answer, message, sender)
            with self._lock:
                self._store(sender, place, message)
                self._reasons.pop(sender, None)
        except MalformedMessage as problem:
            is_known = sender in self._senders
            with self._lock:
                self.refused[sender if is_known else ""] += 1
                if is_known:
                    self._reasons[sender] = str(problem)
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
            return {i: messages[place] for i, messages in self._messages.items() if place in messages}

    def take_reason(self, sender: str) -> str | None:
        """Return why the sender's last message was refused, and forget the reason; None where it was not refused."""
        with self._lock:
            return self._reasons.pop(sender, None)

    def _check_message(self, answer: SiteAnswer, message: Message, sender: str) -> None:
        """Raise MalformedMessage unless the phase has messages, and the message holds exactly the declared tensors."""
        order = answer.order
        declared = self._declared((order.round, order.phase)) if order.kind == WORK else None
        if declared is None:
            raise MalformedMessage("it is of a phase after which sites send nothing to each other")
        if answer != SiteAnswer(Order(WORK, order.round, order.phase)):
            raise MalformedMessage("its message has a header that messages between sites do not have")
        why = find_message_fault(message, declared, sender) if message else "its message is empty"
        if why is not None:
            raise MalformedMessage(why)

    def _store(self, sender: str, place: Place, message: Message) -> None:
        messages, round = self._messages[sender], place[0]
        if self._round is not None and round < self._round:
            raise MalformedMessage(f"it is of round {round + 1}, which is over")
        if place in messages:
            if not _is_same(messages[place], message):
                raise MalformedMessage("it differs from an earlier message of this phase")
            return
        if round != self._round:
            self._messages[sender] = {p: m for p, m in messages.items() if p[0] in (self._round, round)}
        self._messages[sender][place] = message


def _is_same(message: Message, other: Message) -> bool:
    return message.keys() == other.keys() and all(torch.equal(message[k], other[k]) for k in message)
