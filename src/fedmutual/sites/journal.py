"""The journal of a site on its disk: the state after each phase of the current round, and the answers to the server.

A site records an order when it begins the order, and saves the result before it answers. Where the server repeats an order,
because the answer was lost or the server restarted, the site sends the saved answer and does not train again. `admission`
decides which orders a site begins.
"""

from pathlib import Path
from typing import NamedTuple

from fedmutual.core import Client, Message
from fedmutual.errors import RunError
from fedmutual.files import Table, read_json, write_bytes
from fedmutual.privacy.budget import LedgerDigests, PrivacyBudget
from fedmutual.rundir.checkpoint import (
    collect_client_state,
    load_client,
    make_file_name,
    remove_checkpoint,
    write_checkpoint,
)
from fedmutual.rundir.file_names import client_folder, server_folder
from fedmutual.rundir.record_files import check_record
from fedmutual.rundir.schema import Saved
from fedmutual.sites.protocol import Place
from fedmutual.sites.state_files import FIX, StateRecord, write_state_record
from fedmutual.tensor_files import write_tensors

JOURNAL_FILE = "diary.json"
ROUNDS_BACK = 3  # earlier rounds with a saved state: the most that a new attempt can go back


class JournalEntry(NamedTuple):
    """One finished phase. Rounds and phases count from 0; round -1 is the start."""

    round: int
    phase: int
    inbox: str  # digest of the order
    last: bool  # whether it ended a round

    @property
    def place(self) -> Place:
        """Round and phase."""
        return self.round, self.phase


class BegunOrder(NamedTuple):
    """The last order that was begun, finished or not: its attempt, round and phase, and its digest (`inbox`)."""

    attempt: int
    round: int
    phase: int
    inbox: str

    @property
    def place(self) -> Place:
        """Round and phase."""
        return self.round, self.phase


class ScoredRound(NamedTuple):
    """The last round whose scores were sent, from 0, and the digest of the order to score (`inbox`)."""

    round: int
    inbox: str


class _JournalRecord(StateRecord):
    """The contents of the file."""

    run: str
    entries: list[JournalEntry]
    dropped: bool
    begun: BegunOrder | None = None
    scored: ScoredRound | None = None
    ledgers: dict[str, tuple[int, str]] | None = None  # None: of version 0.2 or before


class Journal:
    """The finished phases of a site, and the files of each phase."""

    def __init__(self, folder: Path, site: str, run: str, budget: PrivacyBudget | None = None) -> None:
        """Open the journal, or begin an empty one.

        folder: the federation's folder at this site. run: the identity of the run, which the file must have.
        budget: each entry of the journal records its ledgers; None for training without noise.

        Raises:
            RunError: the folder holds another run's state, or the file in it is damaged.
        """
        self._folder, self._site, self._run, self._budget = folder, site, run, budget
        self.entries: list[JournalEntry] = []
        self.begun: BegunOrder | None = None  # None: no order yet
        self.forgotten = False  # whether entries were dropped, so that the state before the first entry is lost
        self._scored: ScoredRound | None = None
        if (folder / JOURNAL_FILE).exists():
            self._read_record(read_json(folder / JOURNAL_FILE))

    def _read_record(self, about: Table) -> None:
        if about.get("run") != self._run:
            raise RunError(
                f"{self._folder}: holds the state of this federation with another site.toml, other data, another contract "
                "or another version of fedmutual; restore the files with which it began, or name another state.folder"
            )
        record = check_record(self._folder / JOURNAL_FILE, _JournalRecord, about, FIX)
        self.entries, self.forgotten, self._scored = record.entries, record.dropped, record.scored
        last = self.entries[-1] if self.entries else None
        # Older versions had no attempts.
        self.begun = record.begun or (BegunOrder(0, *last.place, last.inbox) if last else None)

    def find_answer(self, place: Place, inbox: str) -> bytes | None:
        """Return the saved answer to an order of work with this digest (inbox), or None. Raises OSError as `read_reply`."""
        entry = next((e for e in self.entries if e.place == place and e.inbox == inbox), None)
        return self.read_reply(entry) if entry else None

    def find_scores_answer(self, round: int, inbox: str) -> bytes | None:
        """Return the saved answer to an order to score with this digest (inbox), or None."""
        is_saved = self._scored == ScoredRound(round, inbox) and self._make_scores_path(round).exists()
        return self._make_scores_path(round).read_bytes() if is_saved else None

    def find_before(self, place: Place) -> JournalEntry | None:
        """Return the last entry before a round and phase, or None."""
        return max((e for e in self.entries if e.place < place), default=None, key=lambda e: e.place)

    def load(self, client: Client, entry: JournalEntry) -> None:
        """Load the saved state after a phase into a new client.

        Raises:
            RunError: the file is missing or damaged, or belongs to another run, round or network.
        """
        load_client(client, self._make_state_path(entry), self._run, entry.round + 1)

    def read_reply(self, entry: JournalEntry) -> bytes:
        """Return the saved answer after a phase. Raises OSError if the file cannot be read."""
        return self._make_reply_path(entry).read_bytes()

    def begin(self, begun: BegunOrder) -> bool:
        """Record a begun order, and drop entries and scores from its place on; return whether entries were dropped.

        Raises:
            RunError: the disk is full, or cannot be written. Nothing was changed.
        """
        entries = [e for e in self.entries if e.place < begun.place]
        scored = self._scored if self._scored and self._scored.round < begun.round else None
        self._write_record(entries, begun, scored, self.forgotten)
        if self._scored and scored is None:
            self._make_scores_path(self._scored.round).unlink(missing_ok=True)
        dropped, self.begun, self._scored = self._replace(entries), begun, scored
        if dropped:
            ended = max((e.round for e in entries if e.last), default=None)
            self._commit(ended)
            self._remove(dropped)
        return bool(dropped)

    def write(self, client: Client, entry: JournalEntry, reply: bytes) -> None:
        """Save a finished phase with its answer, before the site sends the answer.

        Raises:
            RunError: the disk is full, or cannot be written. What was saved before is untouched.
        """
        about = {"format": "1", "run": self._run, "round": str(entry.round + 1)}
        write_tensors(self._make_state_path(entry), collect_client_state(client), about)
        write_bytes(self._make_reply_path(entry), reply)
        ends = {e.round: e for e in self.entries if e.round < entry.round}  # round -> its last entry
        earlier = [ends[round] for round in sorted(ends)[-ROUNDS_BACK:]]
        entries = [*earlier, *(e for e in self.entries if e.round == entry.round), entry]
        forgotten = self.forgotten or len(ends) > ROUNDS_BACK
        self._write_record(entries, self.begun, self._scored, forgotten)
        dropped, self.forgotten = self._replace(entries), forgotten
        if entry.last:
            self._commit(entry.round)
        self._remove(dropped)

    def write_scores(self, round: int, inbox: str, reply: bytes) -> None:
        """Save the answer to an order to score. It replaces the scores of the round before.

        Raises:
            RunError: the disk is full, or cannot be written. What was saved before is untouched.
        """
        before, scored = self._scored, ScoredRound(round, inbox)
        write_bytes(self._make_scores_path(round), reply)
        self._write_record(self.entries, self.begun, scored, self.forgotten)
        self._scored = scored
        if before is not None and before.round != round:
            self._make_scores_path(before.round).unlink(missing_ok=True)

    def save_shared(self, message: Message, round: int) -> None:
        """Save the shared model that the server sent after a round, from 0, for `fedmutual predict`.

        Raises:
            RunError: the file cannot be written.
        """
        about = {"format": "1", "run": self._run, "round": str(round + 1)}
        write_tensors(server_folder(self._folder) / make_file_name(round + 1), message, about)
        for file in server_folder(self._folder).glob("round-*.safetensors"):
            if file.name != make_file_name(round + 1):
                file.unlink(missing_ok=True)

    def _write_record(
        self, entries: list[JournalEntry], begun: BegunOrder | None, scored: ScoredRound | None, forgotten: bool
    ) -> None:
        ledgers = dict(self._budget.recorded) if self._budget else {}
        record = _JournalRecord(
            run=self._run, dropped=forgotten, entries=entries, begun=begun, scored=scored, ledgers=ledgers
        )
        write_state_record(self._folder / JOURNAL_FILE, record)

    def _commit(self, round: int | None) -> None:
        """Write the file that names the last finished round for `Run`; remove this file where round is None."""
        if round is None:
            remove_checkpoint(self._folder)
        else:
            write_checkpoint(self._folder, Saved(run=self._run, round=round + 1, seconds=0.0))

    def _replace(self, entries: list[JournalEntry]) -> list[JournalEntry]:
        """Replace the entries, and return the dropped entries."""
        dropped, self.entries = [e for e in self.entries if e not in entries], entries
        return dropped

    def _remove(self, dropped: list[JournalEntry]) -> None:
        """Remove the files of dropped entries that no remaining entry uses."""
        used = {path for e in self.entries for path in (self._make_state_path(e), self._make_reply_path(e))}
        for path in {path for e in dropped for path in (self._make_state_path(e), self._make_reply_path(e))} - used:
            path.unlink(missing_ok=True)

    def _make_state_path(self, entry: JournalEntry) -> Path:
        name = make_file_name(entry.round + 1) if entry.last else f"phase-{entry.round + 1}-{entry.phase + 1}.safetensors"
        return client_folder(self._folder, self._site) / name

    def _make_reply_path(self, entry: JournalEntry) -> Path:
        return self._folder / "answers" / f"{entry.round + 1}-{entry.phase + 1}.safetensors"

    def _make_scores_path(self, round: int) -> Path:
        return self._folder / "answers" / f"{round + 1}-scores.safetensors"


def read_recorded_ledgers(state: Path) -> dict[Path, LedgerDigests | None]:
    """Return each federation's journal in a state folder -> the lines of privacy ledgers that the journal records.

    None: version 0.2 or before wrote the journal, which then records no ledgers.

    Raises:
        RunError: a journal is damaged.
    """
    paths = sorted(state.glob(f"*/{JOURNAL_FILE}"))
    return {path: check_record(path, _JournalRecord, read_json(path, FIX), FIX).ledgers for path in paths}
