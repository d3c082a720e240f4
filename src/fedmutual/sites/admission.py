"""The orders that a site carries out: one inbox for each phase and for each finished round's scores.

A site begins orders in ascending sequence of (attempt, round, phase); the scores of a round come after its last phase. So a
place is answered once within an attempt, and a repeated order gets the first answer again. A server goes back when all
sites diverged, or when other sites answer after a crash than before. Then the server raises the attempt: at most `ATTEMPTS`
times in a federation, and over at most the last `ROUNDS_BACK` rounds of the site. An order of a new attempt replaces the
later phases of the old attempt; the site works from its state before that order.
"""

from dataclasses import dataclass

from fedmutual.rundir.record_files import is_scored_on_resume
from fedmutual.sites.journal import BegunOrder, Journal
from fedmutual.sites.protocol import ATTEMPTS, EVALUATE, Order, Place

BEYOND = "the contract has no such round or phase"
NOT_DUE = "the contract has no scores after this round"
UNFINISHED = "it sends only the scores of the round that it has just finished"
ANSWERED = "it has already answered this order with other tensors, and answers once"
PAST = "it has already passed this place, and goes back only in a new attempt of the server"
SPENT = f"the server may begin {ATTEMPTS} new attempts in the life of a federation, and this would be one more"
FORGOTTEN = (
    "it no longer has its state from before this order: restore states of the same round at the server and at the site"
)


class Declined(RuntimeError):
    """A site does not carry out an order. The message may leave the site: it contains no private value."""


@dataclass(frozen=True)
class Bounds:
    """The rounds and phases that the contract allows a server to ask for."""

    rounds: int
    start: int  # phases of the start
    phases: int  # phases of a round
    evaluate_every: int

    def place(self, order: Order) -> Place:
        """Return the (round, phase) of an order. Raises Declined where the contract has no such place."""
        phases = self.phases if order.round >= 0 else self.start
        if not (-1 <= order.round < self.rounds and order.phase < phases):
            raise Declined(BEYOND)
        if order.kind != EVALUATE:
            return order.round, order.phase
        number = order.round + 1
        if order.round < 0 or not is_scored_on_resume(number, number, self.evaluate_every, self.rounds):
            raise Declined(NOT_DUE)
        return order.round, self.phases


def find_answer(journal: Journal, order: Order, inbox: str) -> bytes | None:
    """Return the earlier answer to this order, or None. inbox: the digest of the order.

    Raises:
        OSError: the saved answer cannot be read.
    """
    if order.kind == EVALUATE:
        return journal.find_scores_answer(order.round, inbox)
    return journal.find_answer((order.round, order.phase), inbox)


def admit(journal: Journal, order: Order, inbox: str, bounds: Bounds) -> bool:
    """Begin an order without an earlier answer, and return whether the journal dropped later phases. inbox: its digest.

    Raises:
        Declined: the order must not be carried out. Nothing was changed.
        RunError: the journal cannot be written.
    """
    place, begun = bounds.place(order), journal.begun
    if order.attempt > ATTEMPTS:
        raise Declined(SPENT)
    if begun is not None:
        position, last = (order.attempt, place), (begun.attempt, begun.place)
        if position == last and inbox != begun.inbox:
            raise Declined(ANSWERED)
        if position < last:
            raise Declined(ANSWERED if any(e.place == place for e in journal.entries) else PAST)
    if order.kind == EVALUATE:
        if not any(e.round == order.round and e.last for e in journal.entries):
            raise Declined(UNFINISHED)
    elif _is_forgotten(journal, place):
        raise Declined(FORGOTTEN)
    return journal.begin(BegunOrder(order.attempt, *place, inbox))


def _is_forgotten(journal: Journal, place: Place) -> bool:
    """Return whether the site's state before a place is lost: of earlier rounds the journal has only the last state."""
    if journal.entries and place[1] > 0 and place[0] < journal.entries[-1].round:
        return True
    return journal.find_before(place) is None and journal.forgotten
