"""What a site writes into its journal: the orders that it began, the finished phases, and the answers to the server.

A site begins orders in ascending sequence of (attempt, round, phase); the scores of a round come after its last phase. So a
place is answered once within an attempt, and a repeated order gets the first answer again, without training. A server goes
back when all sites diverged, or when other sites answer after a crash than before. Then the server raises the attempt: at
most `ATTEMPTS` times in a federation, and over at most the last `ROUNDS_BACK` rounds of the site. An order of a new attempt
replaces the later phases of the old attempt; the site works from its state before that order.
"""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from fedmutual.core import Client, Message
from fedmutual.errors import RunError
from fedmutual.privacy.budget import LedgerDigests, PrivacyBudget
from fedmutual.rundir.checkpoint import (
    load_client,
    make_file_name,
    read_checkpoint,
    remove_checkpoint,
    save_client,
    write_checkpoint,
)
from fedmutual.rundir.file_names import client_folder, server_folder
from fedmutual.rundir.record_files import is_scored_on_resume
from fedmutual.rundir.schema import Saved
from fedmutual.sites.journal import FILE, Journal
from fedmutual.sites.protocol import ATTEMPTS, EVALUATE, Order, Place
from fedmutual.tensor_files import write_tensors

ROUNDS_BACK = 3  # earlier rounds with a saved state: the most that a new attempt can go back
REPLY, MESSAGE, UPDATE = "reply", "message", "update"  # kinds of contents: answers, messages to peers, updates to be masked

BEYOND = "the contract has no such round or phase"
NOT_DUE = "the contract has no scores after this round"
NO_TRAINING = "it trains nothing, and only scores the shared model (sites.evaluators)"
NOT_JOINED = "it takes part from a later round on (sites.joins)"
UNFINISHED = "it sends only the scores of the round that it has just finished"
ANSWERED = "it has already answered this order with other tensors, and answers once"
PAST = "it has already passed this place, and goes back only in a new attempt of the server"
SPENT = f"the server may begin {ATTEMPTS} new attempts in the life of a federation, and this would be one more"
FORGOTTEN = (
    "it no longer has its state from before this order: restore states of the same round at the server and at the site"
)


class Declined(RuntimeError):
    """A site does not carry out an order. The message may leave the site: it contains no private value."""


class SiteJournal(Journal):
    """The journal of a site. Each method raises RunError where a file cannot be read or written."""

    def __init__(
        self,
        folder: Path,
        site: str,
        run: str,
        bounds: tuple[int, int, int, int],
        budget: PrivacyBudget | None = None,
        read_only: bool = False,
    ) -> None:
        """folder: the federation's folder at this site. run: the identity of the run, which the journal must have.

        bounds: what a server may ask for: the rounds, the phases of the start and of a round, with the stages of a secure
        sum, and `records.evaluate_every`. budget: each transaction records the lines of its ledgers; None for training
        without noise. Raises RunError as `Journal`, or where the folder holds another run's state.
        """
        super().__init__(folder, read_only)
        self._states, self.run, self._budget = client_folder(folder, site), run, budget
        self._rounds, self._start, self._phases, self._evaluate_every = bounds
        self.trains = True  # False: the site only scores the shared model
        if self.get_fact("run") not in (None, run):
            raise RunError(
                f"{folder}: holds the state of this federation with another site.toml, other data, another contract "
                "or another version of fedmutual; restore the files with which it began, or name another state.folder"
            )
        if not read_only:
            self.publish()

    @property
    def left(self) -> int | None:
        """The round, from 0, at whose order this site left the federation; None where it takes part."""
        left: int | None = self.get_fact("left", int)
        return left

    def find_place(self, order: Order) -> Place:
        """Return the (round, phase) of an order; of scores, the number after the last phase."""
        return order.round, self._phases if order.kind == EVALUATE else order.phase

    def _check_order(self, order: Order) -> None:
        """Raise Declined where the contract has no such order."""
        number, phases = order.round + 1, self._start if order.round < 0 else self._phases
        if not (0 <= number <= self._rounds and order.phase < phases):
            raise Declined(BEYOND)
        is_due = number > 0 and is_scored_on_resume(number, number, self._evaluate_every, self._rounds)
        if order.kind == EVALUATE and not is_due:
            raise Declined(NOT_DUE)

    @property
    def begun(self) -> tuple[int, Place, str] | None:
        """The last order that was begun, finished or not: its attempt, its place and its digest; None before the first."""
        begun: tuple[int, Place, str] | None = self.get_fact("begun", tuple[int, Place, str])
        return begun

    def is_begun(self) -> bool:
        """Return whether a phase is finished."""
        return bool(self.read("SELECT 1 FROM phases LIMIT 1"))

    def list_rounds(self, end: int | None = None) -> list[int]:
        """Return the rounds with a finished phase that are not forgotten, from 0, ascending. end: only the rounds before."""
        rounds = [number for (number,) in self.read("SELECT DISTINCT round FROM phases WHERE round >= 0 ORDER BY round")]
        return [number for number in rounds if end is None or number < end]

    def find_answer(self, order: Order, digest: str) -> bytes | None:
        """Return the earlier answer to this order, or None. digest: of the order."""
        place = self.find_place(order)
        known = self.read("SELECT 1 FROM phases WHERE round = ? AND phase = ? AND inbox = ?", *place, digest)
        return self.read_content(REPLY, *place) if known else None

    def find_before(self, place: Place) -> Place | None:
        """Return the last finished place before a place, or None."""
        earlier = self.read("SELECT round, phase FROM phases WHERE (round, phase) < (?, ?) ORDER BY 1 DESC, 2 DESC", *place)
        return earlier[0] if earlier else None

    def begin(self, order: Order, digest: str) -> bool:
        """Begin an order without an earlier answer, and return whether later phases were dropped. digest: of the order.

        Raises Declined where the order must not be carried out; then nothing was changed.
        """
        self._check_order(order)
        place, begun = self.find_place(order), self.begun
        if order.attempt > ATTEMPTS:
            raise Declined(SPENT)
        if begun is not None:
            if (order.attempt, place) == begun[:2] and digest != begun[2]:
                raise Declined(ANSWERED)
            if (order.attempt, place) < begun[:2]:
                is_answered = self.read("SELECT 1 FROM phases WHERE round = ? AND phase = ?", *place)
                raise Declined(ANSWERED if is_answered else PAST)
        if order.kind == EVALUATE:
            if self.trains and not self.read("SELECT 1 FROM phases WHERE round = ? AND last", order.round):
                raise Declined(UNFINISHED)
        elif self._is_forgotten(place):
            raise Declined(FORGOTTEN)
        dropped = self.read("SELECT 1 FROM phases WHERE (round, phase) >= (?, ?)", *place)
        with self.change():
            self.write("DELETE FROM phases WHERE (round, phase) >= (?, ?)", place)
            self._drop_replies()
            self.set_fact("run", self.run)  # with the first order: until then site.toml may change
            self.set_fact("begun", [order.attempt, place, digest])
            self._record_ledgers()
        self.publish()
        return bool(dropped)

    def _is_forgotten(self, place: Place) -> bool:
        """Return whether the site's state before a place is lost: of earlier rounds the journal has only the last state."""
        if place[1] > 0 and self.read("SELECT 1 FROM phases WHERE round > ?", place[0]):
            return True
        return self.find_before(place) is None and bool(self.get_fact("forgotten"))

    def finish(self, order: Order, digest: str, reply: bytes, client: Client | None, kept: Mapping[str, Message]) -> None:
        """Write a finished order with its answer, in the transaction in which the answer is recorded as sent.

        digest: of the order. client: whose state is saved; None: the state of the phase before is still the client's. kept:
        kind (MESSAGE, UPDATE) -> tensors of this round; those of earlier rounds are removed. Where RunError is raised, what
        was saved before is untouched.
        """
        place = self.find_place(order)
        last = order.kind == EVALUATE or order.phase + 1 == (self._start if order.round < 0 else self._phases)
        if client is None:
            states = self.read(
                "SELECT state FROM phases WHERE (round, phase) < (?, ?) ORDER BY round DESC, phase DESC LIMIT 1", *place
            )
            state = states[0][0] if states else ""  # of a site that only evaluates
        else:  # the stages of a secure sum, which follow, change no client
            is_end = last or UPDATE in kept
            state = make_file_name(place[0] + 1) if is_end else f"phase-{place[0] + 1}-{place[1] + 1}.safetensors"
            about = {"format": "1", "run": self.run, "round": str(place[0] + 1)}
            save_client(client, self._states / state, about)
        with self.change():
            self._forget_rounds(place[0])
            self.write("INSERT INTO phases VALUES (?, ?, ?, ?, ?)", (*place, digest, last, state))
            self._drop_replies()
            self.write_content(reply, REPLY, *place)
            for kind, tensors in kept.items():
                self.write("DELETE FROM contents WHERE kind = ? AND (round != ? OR ?)", (kind, place[0], kind == UPDATE))
                self.write_tensors(tensors, kind, place[0], 0 if kind == UPDATE else place[1])
            self._record_ledgers()

    def _forget_rounds(self, round: int) -> None:
        """Of `ROUNDS_BACK` earlier rounds keep the last phase and the scores, and nothing of the rounds before."""
        earlier = [r for (r,) in self.read("SELECT DISTINCT round FROM phases WHERE round < ? ORDER BY round DESC", round)]
        if len(earlier) > ROUNDS_BACK:
            self.set_fact("forgotten", True)
            self.write("DELETE FROM phases WHERE round < ?", (earlier[ROUNDS_BACK - 1],))
        self.write(
            "DELETE FROM phases WHERE round < ? AND NOT last AND phase < (SELECT max(phase) FROM phases AS others "
            "WHERE others.round = phases.round)",
            (round,),
        )

    def _drop_replies(self) -> None:
        self.write(
            "DELETE FROM contents WHERE kind = ? AND (round, phase) NOT IN (SELECT round, phase FROM phases)", (REPLY,)
        )

    def _record_ledgers(self) -> None:
        recorded = self._budget.recorded if self._budget else {}
        self.write("INSERT OR REPLACE INTO ledgers VALUES (?, ?, ?)", *((name, *about) for name, about in recorded.items()))

    def publish(self) -> None:
        """Make the files for `fedmutual.Run` those of the last finished round, and remove states that no phase needs."""
        ((ended,),) = self.read("SELECT max(round) FROM phases WHERE last")
        saved = read_checkpoint(self.folder)
        if ended is None:
            remove_checkpoint(self.folder)
        elif saved is None or (saved.run, saved.round) != (self.run, ended + 1):
            write_checkpoint(self.folder, Saved(run=self.run, round=ended + 1, seconds=0.0))
        used = {state for (state,) in self.read("SELECT state FROM phases")}
        for file in self._states.glob("*.safetensors"):
            if file.name not in used and not file.name.startswith("best"):  # records.keep_best
                file.unlink(missing_ok=True)

    def load(self, client: Client, place: Place) -> None:
        """Load the saved state after a finished place into a new client. Raises RunError as `load_client`."""
        ((state,),) = self.read("SELECT state FROM phases WHERE round = ? AND phase = ?", *place)
        load_client(client, self._states / state, self.run, place[0] + 1)

    def save_shared(self, message: Message, round: int) -> None:
        """Save the shared model that the server sent after a round, from 0, for `fedmutual predict`."""
        about, name = {"format": "1", "run": self.run, "round": str(round + 1)}, make_file_name(round + 1)
        write_tensors(server_folder(self.folder) / name, message, about)
        for file in server_folder(self.folder).glob("round-*.safetensors"):
            if file.name != name:
                file.unlink(missing_ok=True)


def read_recorded_ledgers(state: Path) -> list[LedgerDigests]:
    """Return the lines of privacy ledgers that each journal in a state folder records."""
    recorded: list[LedgerDigests] = []
    for path in sorted(state.glob(f"*/{FILE}")):
        with closing(Journal(path.parent, read_only=True)) as journal:
            rows = journal.read("SELECT name, lines, digest FROM ledgers")
        recorded.append({name: (lines, digest) for name, lines, digest in rows})
    return recorded
