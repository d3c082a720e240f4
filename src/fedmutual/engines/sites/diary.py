"""What a site did, on its disk: its state after each phase of the round it is in, and what it answered.

A phase is saved before it is answered. Who is asked again, because the answer was lost or the server started anew, gives the
same answer again and trains nothing twice; who is asked for a phase with other tensors goes back to where it was before it.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedmutual.core import Client, Message
from fedmutual.errors import RunError
from fedmutual.records.checkpoint import COMMIT, client_state, file_name, load_client
from fedmutual.records.files import read_json, write_bytes, write_json, write_tensors

DIARY = "diary.json"
Place = tuple[int, int]  # round, phase


class Entry(NamedTuple):
    """One phase that was done."""

    round: int
    phase: int
    inbox: str  # digest of what was ordered
    last: bool  # whether it ended a round

    @property
    def place(self) -> Place:
        """Where in the run."""
        return self.round, self.phase


class Diary:
    """The entries, and the files that belong to them."""

    def __init__(self, folder: Path, site: str, run: str) -> None:
        """folder: the federation's at this site. run: its identity, which files must be of.

        Raises:
            RunError: the folder holds another run's state.
        """
        self._folder, self._site, self._run = folder, site, run
        self.entries: list[Entry] = []
        if (folder / DIARY).exists():
            about = read_json(folder / DIARY)
            if about.get("run") != run:
                raise RunError(
                    f"{folder}: holds the state of this federation with another site.toml, other data or another contract; "
                    "give back what it was begun with, or name another state.folder"
                )
            self.entries = [Entry(*entry) for entry in about["entries"]]

    def known(self, place: Place, inbox: str) -> bytes | None:
        """What was answered to this very order, if it was."""
        entry = next((e for e in self.entries if e.place == place and e.inbox == inbox), None)
        return self.reply(entry) if entry else None

    def before(self, place: Place) -> Entry | None:
        """The last entry before a place."""
        return max((e for e in self.entries if e.place < place), default=None, key=lambda e: e.place)

    @property
    def forgotten(self) -> bool:
        """Whether entries were dropped, so that before the first one there is something that is no longer known."""
        return (self._folder / DIARY).exists() and bool(read_json(self._folder / DIARY)["dropped"])

    def load(self, client: Client, entry: Entry) -> None:
        """Give a freshly made client its state after a phase."""
        load_client(client, self._state(entry), self._run, entry.round + 1)

    def reply(self, entry: Entry) -> bytes:
        """What was answered after a phase."""
        return self._reply(entry).read_bytes()

    def write(self, client: Client, entry: Entry, reply: bytes) -> None:
        """Save a phase that was done, with what will be answered.

        Raises:
            RunError: the disk is full, or cannot be written. What was saved before is untouched.
        """
        about = {"format": "1", "run": self._run, "round": str(entry.round + 1)}
        write_tensors(self._state(entry), client_state(client), about)
        write_bytes(self._reply(entry), reply)
        kept = [e for e in self.entries if e.place < entry.place]
        first = max((n for n, e in enumerate(kept) if e.round < entry.round), default=0)
        entries = [*kept[first:], entry]
        said = {"format": 1, "run": self._run, "dropped": bool(first) or self.forgotten}
        write_json(self._folder / DIARY, {**said, "entries": [list(e) for e in entries]})
        gone, self.entries = [e for e in self.entries if e not in entries], entries
        if entry.last:  # what `Run` reads: the site's models as those of a run of one client
            write_json(self._folder / COMMIT, {"format": 1, "run": self._run, "round": entry.round + 1, "seconds": 0.0})
        for old in gone:
            self._drop(old)

    def shared(self, message: Message, round: int) -> None:
        """Keep the shared model as it was sent after a round, for `fedmutual predict`."""
        about = {"format": "1", "run": self._run, "round": str(round + 1)}
        write_tensors(self._folder / "server" / file_name(round + 1), message, about)
        for file in (self._folder / "server").glob("round-*.safetensors"):
            if file.name != file_name(round + 1):
                file.unlink(missing_ok=True)

    def _drop(self, entry: Entry) -> None:
        """Remove an entry's files, unless another one has them by now."""
        kept = {path for e in self.entries for path in (self._state(e), self._reply(e))}
        for path in (self._state(entry), self._reply(entry)):
            if path not in kept:
                path.unlink(missing_ok=True)

    def _state(self, entry: Entry) -> Path:
        name = file_name(entry.round + 1) if entry.last else f"phase-{entry.round + 1}-{entry.phase + 1}.safetensors"
        return self._folder / "clients" / self._site / name

    def _reply(self, entry: Entry) -> Path:
        return self._folder / "answers" / f"{entry.round + 1}-{entry.phase + 1}.safetensors"


def digest(content: bytes) -> str:
    """Of what was ordered. Hex."""
    return hashlib.sha256(content).hexdigest()


def about(entries: Mapping[str, Any]) -> str:
    """A digest of named values."""
    return hashlib.sha256(repr(sorted(entries.items())).encode()).hexdigest()[:32]
