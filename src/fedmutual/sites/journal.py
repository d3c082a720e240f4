"""What a site did, on its disk: its state after each phase of the round it is in, and what it answered.

A phase is written down when it is begun, and saved before it is answered. A site that is asked again, because the answer
was lost or the server started anew, gives the same answer again and trains nothing twice. `admission` says which orders
are begun.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from fedmutual.core import Client, Message
from fedmutual.errors import RunError
from fedmutual.files import read_json, write_bytes, write_json
from fedmutual.rundir.checkpoint import COMMIT, client_state, file_name, load_client
from fedmutual.tensor_files import write_tensors

DIARY = "diary.json"
ROUNDS_BACK = 3  # earlier rounds whose state is kept: so far a new attempt can go back
Place = tuple[int, int]  # round, phase; the scores of a round have the number after its last phase


class JournalEntry(NamedTuple):
    """One phase that was done."""

    round: int
    phase: int
    inbox: str  # digest of what was ordered
    last: bool  # whether it ended a round

    @property
    def place(self) -> Place:
        """Where in the run."""
        return self.round, self.phase


class BegunOrder(NamedTuple):
    """The last order that was begun, whatever came of it."""

    attempt: int
    round: int
    phase: int
    inbox: str

    @property
    def place(self) -> Place:
        """Where in the run."""
        return self.round, self.phase


class ScoredRound(NamedTuple):
    """The last round whose scores were answered."""

    round: int
    inbox: str


class _Record(BaseModel):
    """The file."""

    model_config = ConfigDict(strict=True)

    run: str
    entries: list[JournalEntry]
    dropped: bool
    begun: BegunOrder | None = None
    scored: ScoredRound | None = None


class Journal:
    """The entries, and the files that belong to them."""

    def __init__(self, folder: Path, site: str, run: str) -> None:
        """folder: the federation's at this site. run: its identity, which files must be of.

        Raises:
            RunError: the folder holds another run's state, or the file in it is damaged.
        """
        self._folder, self._site, self._run = folder, site, run
        self.entries: list[JournalEntry] = []
        self.begun: BegunOrder | None = None  # None: nothing was asked yet
        self.forgotten = False  # whether entries were dropped: before the first one something is no longer known
        self._scored: ScoredRound | None = None
        if (folder / DIARY).exists():
            self._read(read_json(folder / DIARY))

    def _read(self, about: dict[str, Any]) -> None:
        if about.get("run") != self._run:
            raise RunError(
                f"{self._folder}: holds the state of this federation with another site.toml, other data, another contract "
                "or another version of fedmutual; give back what it was begun with, or name another state.folder"
            )
        try:
            record = _Record.model_validate_json(json.dumps(about))
        except ValidationError as problem:
            where = problem.errors()[0]
            raise RunError(
                f"{self._folder / DIARY}: is damaged: {'.'.join(map(str, where['loc']))}: {where['msg']}; look for a copy"
            ) from None
        self.entries, self.forgotten, self._scored = record.entries, record.dropped, record.scored
        last = self.entries[-1] if self.entries else None
        self.begun = record.begun or (
            BegunOrder(0, *last.place, last.inbox) if last else None
        )  # older versions had no attempts

    def answer(self, place: Place, inbox: str) -> bytes | None:
        """What was answered to this very order of work, if it was."""
        entry = next((e for e in self.entries if e.place == place and e.inbox == inbox), None)
        return self.reply(entry) if entry else None

    def scores(self, round: int, inbox: str) -> bytes | None:
        """What was answered to this very order to score, if it was."""
        known = self._scored == ScoredRound(round, inbox) and self._scores(round).exists()
        return self._scores(round).read_bytes() if known else None

    def before(self, place: Place) -> JournalEntry | None:
        """The last entry before a place."""
        return max((e for e in self.entries if e.place < place), default=None, key=lambda e: e.place)

    def load(self, client: Client, entry: JournalEntry) -> None:
        """Give a freshly made client its state after a phase."""
        load_client(client, self._state(entry), self._run, entry.round + 1)

    def reply(self, entry: JournalEntry) -> bytes:
        """What was answered after a phase."""
        return self._reply(entry).read_bytes()

    def begin(self, begun: BegunOrder) -> bool:
        """Write down that an order is begun; entries and scores from its place on are dropped -> whether entries were.

        Raises:
            RunError: the disk is full, or cannot be written. Nothing was changed.
        """
        entries = [e for e in self.entries if e.place < begun.place]
        scored = self._scored if self._scored and self._scored.round < begun.round else None
        self._write(entries, begun, scored, self.forgotten)
        if self._scored and scored is None:
            self._scores(self._scored.round).unlink(missing_ok=True)
        gone, self.begun, self._scored = self._replace(entries), begun, scored
        if gone:
            ended = max((e.round for e in entries if e.last), default=None)
            self._commit(ended)
            self._remove(gone)
        return bool(gone)

    def write(self, client: Client, entry: JournalEntry, reply: bytes) -> None:
        """Save a phase that was done, with what will be answered.

        Raises:
            RunError: the disk is full, or cannot be written. What was saved before is untouched.
        """
        about = {"format": "1", "run": self._run, "round": str(entry.round + 1)}
        write_tensors(self._state(entry), client_state(client), about)
        write_bytes(self._reply(entry), reply)
        ends = {e.round: e for e in self.entries if e.round < entry.round}  # the last one of each earlier round
        earlier = [ends[round] for round in sorted(ends)[-ROUNDS_BACK:]]
        entries = [*earlier, *(e for e in self.entries if e.round == entry.round), entry]
        forgotten = self.forgotten or len(ends) > ROUNDS_BACK
        self._write(entries, self.begun, self._scored, forgotten)
        gone, self.forgotten = self._replace(entries), forgotten
        if entry.last:
            self._commit(entry.round)
        self._remove(gone)

    def write_scores(self, round: int, inbox: str, reply: bytes) -> None:
        """Save what will be answered to an order to score, in the place of the round's before.

        Raises:
            RunError: the disk is full, or cannot be written. What was saved before is untouched.
        """
        before, scored = self._scored, ScoredRound(round, inbox)
        write_bytes(self._scores(round), reply)
        self._write(self.entries, self.begun, scored, self.forgotten)
        self._scored = scored
        if before is not None and before.round != round:
            self._scores(before.round).unlink(missing_ok=True)

    def shared(self, message: Message, round: int) -> None:
        """Keep the shared model as it was sent after a round, for `fedmutual predict`."""
        about = {"format": "1", "run": self._run, "round": str(round + 1)}
        write_tensors(self._folder / "server" / file_name(round + 1), message, about)
        for file in (self._folder / "server").glob("round-*.safetensors"):
            if file.name != file_name(round + 1):
                file.unlink(missing_ok=True)

    def _write(
        self, entries: list[JournalEntry], begun: BegunOrder | None, scored: ScoredRound | None, forgotten: bool
    ) -> None:
        about = {"format": 1, "run": self._run, "dropped": forgotten, "entries": [list(e) for e in entries]}
        write_json(self._folder / DIARY, about | {"begun": begun and list(begun), "scored": scored and list(scored)})

    def _commit(self, round: int | None) -> None:
        """Write the file that `Run` reads: the site's models as those of a run of one client. None: no round was ended."""
        if round is None:
            (self._folder / COMMIT).unlink(missing_ok=True)
        else:
            write_json(self._folder / COMMIT, {"format": 1, "run": self._run, "round": round + 1, "seconds": 0.0})

    def _replace(self, entries: list[JournalEntry]) -> list[JournalEntry]:
        """Take other entries -> those that are dropped."""
        gone, self.entries = [e for e in self.entries if e not in entries], entries
        return gone

    def _remove(self, gone: list[JournalEntry]) -> None:
        """Remove dropped entries' files, unless another entry has them by now."""
        kept = {path for e in self.entries for path in (self._state(e), self._reply(e))}
        for path in {path for e in gone for path in (self._state(e), self._reply(e))} - kept:
            path.unlink(missing_ok=True)

    def _state(self, entry: JournalEntry) -> Path:
        name = file_name(entry.round + 1) if entry.last else f"phase-{entry.round + 1}-{entry.phase + 1}.safetensors"
        return self._folder / "clients" / self._site / name

    def _reply(self, entry: JournalEntry) -> Path:
        return self._folder / "answers" / f"{entry.round + 1}-{entry.phase + 1}.safetensors"

    def _scores(self, round: int) -> Path:
        return self._folder / "answers" / f"{round + 1}-scores.safetensors"
