"""Which orders a site carries out: of each phase, and of each finished round's scores, one inbox, whatever the server asks.

Orders are begun in ascending order of (attempt, round, phase), a round's scores after its last phase. So within an attempt a
place is answered once; the same order again has the same answer again. A server that must go back, because all sites
diverged or because after a crash other sites answer than before, raises the attempt: at most `ATTEMPTS` times in the life
of a federation, and at most over the last `ROUNDS_BACK` rounds that the site took part in. What an order of a new attempt
replaces is dropped; the site works from its state before that order.
"""

from dataclasses import dataclass

from fedmutual.rundir.logs import stays_scored
from fedmutual.sites.journal import BegunOrder, Journal, Place
from fedmutual.sites.protocol import ATTEMPTS, EXAM, Order

BEYOND = "the contract has no such round or phase"
NOT_DUE = "the contract has no scores after this round"
UNFINISHED = "it tells scores of the round that it has just finished, and of no other"
ANSWERED = "it was asked for this before with other tensors, and answers once"
PAST = "it is past this, and goes back only in a new attempt of the server's"
SPENT = f"the server may begin {ATTEMPTS} new attempts in the life of a federation, and this would be one more"
FORGOTTEN = "it no longer has its state from before this: server and site must be given back a state of the same round"


class Declined(RuntimeError):
    """An order that a site does not carry out. The sentence may leave the site: it holds nothing of its own."""


@dataclass(frozen=True)
class Bounds:
    """What the contract lets a server ask for."""

    rounds: int
    start: int  # phases of the start
    phases: int  # phases of a round
    evaluate_every: int

    def place(self, order: Order) -> Place:
        """Where in the run an order belongs. Raises Declined where the contract has no such place."""
        phases = self.phases if order.round >= 0 else self.start
        if not (-1 <= order.round < self.rounds and order.phase < phases):
            raise Declined(BEYOND)
        if order.kind != EXAM:
            return order.round, order.phase
        number = order.round + 1
        if order.round < 0 or not stays_scored(number, number, self.evaluate_every, self.rounds):
            raise Declined(NOT_DUE)
        return order.round, self.phases


def find_answer(diary: Journal, order: Order, inbox: str) -> bytes | None:
    """What was answered to this very order before. inbox: its digest."""
    if order.kind == EXAM:
        return diary.scores(order.round, inbox)
    return diary.answer((order.round, order.phase), inbox)


def admit(diary: Journal, order: Order, inbox: str, bounds: Bounds) -> bool:
    """Begin an order that was not answered before -> whether later phases were dropped for it. inbox: its digest.

    Raises:
        Declined: it is not to be carried out. Nothing was changed.
        RunError: it cannot be written down.
    """
    place, begun = bounds.place(order), diary.begun
    if order.attempt > ATTEMPTS:
        raise Declined(SPENT)
    if begun is not None:
        asked, last = (order.attempt, place), (begun.attempt, begun.place)
        if asked == last and inbox != begun.inbox:
            raise Declined(ANSWERED)
        if asked < last:
            raise Declined(ANSWERED if any(e.place == place for e in diary.entries) else PAST)
    if order.kind == EXAM:
        if not any(e.round == order.round and e.last for e in diary.entries):
            raise Declined(UNFINISHED)
    elif _is_forgotten(diary, place):
        raise Declined(FORGOTTEN)
    return diary.begin(BegunOrder(order.attempt, *place, inbox))


def _is_forgotten(diary: Journal, place: Place) -> bool:
    """Whether the site's state before a place is no longer known: of earlier rounds it has the ends alone."""
    if diary.entries and place[1] > 0 and place[0] < diary.entries[-1].round:
        return True
    return diary.before(place) is None and diary.forgotten
