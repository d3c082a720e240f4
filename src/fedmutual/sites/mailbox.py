"""Letters of other sites that wait to be read: never more than a round's, of each sender, beside the round under way.

When can an honest letter come? A site sends its letters after a phase, before it answers the server, to the sites that do
the same phase. So a letter is of the phase that is under way here, or, while this site's order of that phase is still on its
way, of the next one. After a pause, and in a process that has just started, the next one can be of any later round, for the
others went on. The server orders a phase when every order of the phase before is answered or given up, so that no sender is
further ahead than this. Hence two rounds of each sender are kept: the one under way, and one later round, of which a newer
one takes the place of an older one. Every other letter is refused, and counted.
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
    SiteAnswer,
    clean_text,
    find_message_fault,
    read_answer,
)

Place = tuple[int, int]  # round, phase


class Mailbox:
    """Of one site, in memory. Letters come while the site works."""

    def __init__(self, senders: Collection[str], declared: Callable[[Place], Spec | None], limit: Limit) -> None:
        """senders: the other sites. declared: what a letter of a place holds; None: no letter is sent there."""
        self._senders, self._declared, self._limit = frozenset(senders), declared, limit
        self._letters: dict[str, dict[Place, Message]] = {i: {} for i in senders}
        self._reasons: dict[str, str] = {}  # why a sender's last letter was refused, until that is asked for
        self._round: int | None = None  # the one under way; None: this process was given no order yet
        self._lock = Lock()
        self.refused: Counter[str] = Counter()
        """How many letters of each sender were refused; of strangers together, under ""."""

    def put(self, sender: str, letter: bytes) -> None:
        """Keep a letter. Raises Garbled, with the reason, where it is refused."""
        try:
            if sender not in self._senders:
                raise MalformedMessage(f"{clean_text(repr(sender))} is none of the other sites")
            said, message = read_answer(letter, self._limit)
            place = said.order.round, said.order.phase
            self._check(said, message, sender)
            with self._lock:
                self._keep(sender, place, message)
                self._reasons.pop(sender, None)
        except MalformedMessage as problem:
            known = sender in self._senders
            with self._lock:
                self.refused[sender if known else ""] += 1
                if known:
                    self._reasons[sender] = str(problem)
            raise

    def begin(self, round: int) -> None:
        """A round is under way here: letters of the rounds before it are forgotten, and all but one of the rounds after."""
        with self._lock:
            self._round = round
            for i, letters in self._letters.items():
                rounds = {round, max((place[0] for place in letters if place[0] > round), default=round)}
                self._letters[i] = {place: message for place, message in letters.items() if place[0] in rounds}

    def letters(self, place: Place) -> dict[str, Message]:
        """What came of a place, by its sender."""
        with self._lock:
            return {i: letters[place] for i, letters in self._letters.items() if place in letters}

    def take_reason(self, sender: str) -> str | None:
        """Why a sender's last letter was refused, if it was; once."""
        with self._lock:
            return self._reasons.pop(sender, None)

    def _check(self, said: SiteAnswer, message: Message, sender: str) -> None:
        """Raise Garbled unless a letter is one of a phase that sends letters, and holds what is declared, and no more."""
        order = said.order
        declared = self._declared((order.round, order.phase)) if order.kind == WORK else None
        if declared is None:
            raise MalformedMessage("it is of a phase after which sites send nothing to each other")
        if said != SiteAnswer(Order(WORK, order.round, order.phase)):
            raise MalformedMessage("it says more than a letter does")
        why = find_message_fault(message, declared, sender) if message else "its letter is empty"
        if why is not None:
            raise MalformedMessage(why)

    def _keep(self, sender: str, place: Place, message: Message) -> None:
        letters, round = self._letters[sender], place[0]
        if self._round is not None and round < self._round:
            raise MalformedMessage(f"it is of round {round + 1}, which is over")
        if place in letters:
            if not _is_same(letters[place], message):
                raise MalformedMessage("it is not the same as the letter before, of the same phase")
            return
        if round != self._round:
            self._letters[sender] = {at: m for at, m in letters.items() if at[0] in (self._round, round)}
        self._letters[sender][place] = message


def _is_same(one: Message, other: Message) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
