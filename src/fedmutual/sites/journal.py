"""The journal of one party of a federation: one SQLite file in its folder, in which everything is written in transactions.

A block `with journal.change()` is one transaction: after a kill or a power failure at any moment, all its changes are on the
disk or none. Networks and optimisers are in files beside it, as in every run folder; a row names a file that is complete.
`site_journal` has what a site writes, `server_journal` what the server writes, and `ledger` what left a site.
"""

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedmutual.core import Message
from fedmutual.errors import RunError
from fedmutual.files import sync_folder
from fedmutual.rundir.file_names import CHECKPOINT

FILE = "journal.sqlite"
OLD_JOURNAL, OLD_LEDGER = "diary.json", "left.jsonl"
"""Files of a site of version 0.2 and before."""
_OLD = (OLD_JOURNAL, OLD_LEDGER, "attempts.json", "conduct.json", "statistics.json", "secure-sum.json", CHECKPOINT)
_STRICT = " STRICT" if sqlite3.sqlite_version_info >= (3, 37) else ""
_TABLES = [
    f"CREATE TABLE {columns}{_STRICT}"
    for columns in (
        "facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",  # JSON
        # a site: its finished phases; the scores of a round have the number after the last phase
        "phases (round INTEGER, phase INTEGER, inbox TEXT NOT NULL, last INTEGER NOT NULL, state TEXT NOT NULL, "
        "PRIMARY KEY (round, phase))",
        "sent (number INTEGER PRIMARY KEY, line TEXT NOT NULL)",  # JSON: see `ledger`
        "ledgers (name TEXT PRIMARY KEY, lines INTEGER NOT NULL, digest TEXT NOT NULL)",  # see `privacy.budget`
        "opened (round INTEGER PRIMARY KEY, digest TEXT NOT NULL)",  # secure sums
        # the server: its orders in this round, and what it knows of the sites
        "orders (phase INTEGER, site TEXT, digest TEXT NOT NULL, senders TEXT, PRIMARY KEY (phase, site))",
        "excluded (site TEXT PRIMARY KEY, why TEXT NOT NULL)",
        "examples (site TEXT PRIMARY KEY, number INTEGER NOT NULL)",
        "norms (round INTEGER, site TEXT, norm REAL NOT NULL, PRIMARY KEY (round, site))",
        # tensors: the answers and updates of a site, the closed stages of a secure sum at the server
        "contents (kind TEXT, round INTEGER, phase INTEGER, site TEXT, piece INTEGER, content BLOB NOT NULL, "
        "PRIMARY KEY (kind, round, phase, site, piece))",
    )
]
_PIECE = 2**28  # bytes of a value; SQLite has at most 10^9 in one
_UNREADABLE = "cannot be read, or is damaged"


class Journal:
    """The journal of a site or of the server. Its methods raise RunError where the file cannot be read or written."""

    def __init__(self, folder: Path, read_only: bool = False) -> None:
        """Open the journal in a federation's folder, or begin an empty one. One process writes to it at a time.

        read_only: nothing is written; a missing journal is empty. Raises RunError where the file is damaged, was
        written by another program, is a link, or is open to other users; or the folder has the state of an older version.
        """
        self.folder, self.path = folder, folder / FILE
        try:
            self._database = self._open(read_only)
        except (sqlite3.Error, OSError) as problem:
            raise self._make_error(_UNREADABLE, problem) from None

    def _open(self, read_only: bool) -> sqlite3.Connection:
        _check_file(self.path)
        has_log, has_index = (self.path.with_name(f"{FILE}-{end}").exists() for end in ("wal", "shm"))
        if read_only and not self.path.exists():
            database = sqlite3.connect(":memory:", isolation_level=None)
        elif read_only:  # without a log of changes nobody writes, and SQLite needs no file beside it
            mode = f"mode=ro&readonly_shm={int(has_index)}" if has_log else "immutable=1"
            database = sqlite3.connect(f"{self.path.resolve().as_uri()}?{mode}", uri=True, isolation_level=None)
        else:
            if not self.path.exists():  # only this user can read it; SQLite gives the files beside it the same rights
                self.folder.mkdir(parents=True, exist_ok=True)
                os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600))
                sync_folder(self.folder)
            database = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
            database.execute("PRAGMA synchronous = FULL")
        # a reader of all pages would keep a running site from erasing the log, which may have a secret
        is_checked = not (read_only and has_log)
        if is_checked and database.execute("PRAGMA quick_check(1)").fetchall() != [("ok",)]:
            raise sqlite3.DatabaseError("its pages do not fit together")
        tables = [sql for (sql,) in database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")]
        if tables and [sql.removesuffix(" STRICT") for sql in tables] != [sql.removesuffix(" STRICT") for sql in _TABLES]:
            raise sqlite3.DatabaseError("its tables are not those of this version of fedmutual")
        if not tables:
            _check_no_older_state(self.folder)
            if read_only:  # a process was killed before it had written its tables
                database.close()
                database = sqlite3.connect(":memory:", isolation_level=None)
        if not read_only:
            is_logged = database.execute("PRAGMA journal_mode").fetchall() == [("wal",)]  # else new, or a tool's copy
            # a process that was killed may have left a secret in the log
            database.execute(f"PRAGMA {'wal_checkpoint(TRUNCATE)' if is_logged else 'journal_mode = WAL'}").fetchall()
        if not tables:
            with _begin(database):
                for sql in _TABLES:
                    database.execute(sql)
        return database

    def close(self) -> None:
        """Close the file, which needs no other file then."""
        self._database.close()

    @contextmanager
    def change(self, erase: bool = False) -> Iterator[None]:
        """Make all changes of the block one transaction. A block in a block belongs to the outer transaction.

        erase: overwrite what is deleted, so that the disk holds no copy of a secret. Where an error is raised, nothing was
        changed.
        """
        if self._database.in_transaction:
            yield
            return
        try:
            self._database.execute(f"PRAGMA secure_delete = {'ON' if erase else 'FAST'}")
            with _begin(self._database):
                yield
            if erase:
                self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as problem:
            raise self._make_error("cannot be written", problem) from None

    def read(self, sql: str, *values: Any) -> list[Any]:
        """Return the rows of a query."""
        try:
            return self._database.execute(sql, values).fetchall()
        except sqlite3.Error as problem:
            raise self._make_error(_UNREADABLE, problem) from None

    def write(self, sql: str, *rows: tuple[Any, ...]) -> None:
        """Execute a statement for each row of values, in this transaction."""
        with self.change(), closing(self._database.cursor()) as cursor:
            cursor.executemany(sql, rows)

    def get_fact(self, name: str, kind: Any = Any) -> Any:
        """Return a value by its name; None where it was never set. kind: its type, as pydantic reads types."""
        rows = self.read("SELECT value FROM facts WHERE name = ?", name)
        try:
            return TypeAdapter(kind).validate_json(rows[0][0]) if rows else None
        except ValidationError as problem:
            raise self._make_error(_UNREADABLE, ValueError(f"{name}: {problem.errors()[0]['msg']}")) from None

    def set_fact(self, name: str, value: Any) -> None:
        """Set a value that JSON can hold."""
        self.write("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, to_json(value).decode()))

    def read_content(self, kind: str, round: int, phase: int = 0, site: str = "") -> bytes | None:
        """Return bytes of a kind, of a round and a phase; None where there are none."""
        pieces = self.read(
            "SELECT content FROM contents WHERE kind = ? AND round = ? AND phase = ? AND site = ? ORDER BY piece",
            *(kind, round, phase, site),
        )
        return b"".join(content for (content,) in pieces) if pieces else None

    def write_content(self, content: bytes, kind: str, round: int, phase: int = 0, site: str = "") -> None:
        """Write or replace bytes."""
        place = (kind, round, phase, site)
        pieces = range(0, max(len(content), 1), _PIECE)
        with self.change():
            self.write("DELETE FROM contents WHERE kind = ? AND round = ? AND phase = ? AND site = ?", place)
            self.write(
                "INSERT INTO contents VALUES (?, ?, ?, ?, ?, ?)",
                *((*place, start // _PIECE, content[start : start + _PIECE]) for start in pieces),
            )

    def read_tensors(self, kind: str, round: int, phase: int = 0, site: str = "") -> Message:
        """Return tensors, as `read_content`; {} where there are none."""
        content = self.read_content(kind, round, phase, site)
        try:
            return {} if content is None else load(content)
        except (SafetensorError, ValueError) as problem:
            raise self._make_error(_UNREADABLE, problem) from None

    def write_tensors(self, tensors: Message, kind: str, round: int, phase: int = 0, site: str = "") -> None:
        """Write or replace tensors."""
        cpu_tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        self.write_content(save(cpu_tensors), kind, round, phase, site)

    def _make_error(self, why: str, problem: Exception) -> RunError:
        return RunError(
            f"{self.path}: {why} ({getattr(problem, 'strerror', None) or problem}); free some space if the disk or a "
            "quota is full, else restore the newest copy of this folder, or begin a federation of another name"
        )


@contextmanager
def _begin(database: sqlite3.Connection) -> Iterator[None]:
    """Make the block one transaction, which is undone where the block raises an error."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        commit(database)
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def commit(database: sqlite3.Connection) -> None:
    """End a transaction: its changes are on the disk when this function returns."""
    database.execute("COMMIT")


def _check_file(path: Path) -> None:
    """Raise RunError where the journal, or a file of SQLite beside it, is a link or is not this user's alone."""
    for file in (path, *(path.with_name(f"{FILE}-{end}") for end in ("wal", "shm", "journal"))):
        try:
            about = os.lstat(file)
        except (FileNotFoundError, NotADirectoryError):  # `doctor` names a folder below a file
            continue
        is_open = os.name == "posix" and (about.st_uid != os.geteuid() or about.st_mode & 0o077)
        if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1 or is_open:
            raise RunError(
                f"{file}: is a link, or other users of this machine may read or write it; give the command as the user who "
                f"runs the site or the server, or replace it by a copy of the file itself, and run `chmod 600 {file}`"
            )


def _check_no_older_state(folder: Path) -> None:
    """Raise RunError where a folder without a journal holds the state of a federation."""
    older = next((name for name in _OLD if (folder / name).exists()), None)
    if older is not None:
        raise RunError(
            f"{folder}: has {older} and no complete {FILE}: this site left the federation, or an older version of fedmutual "
            "wrote this state, or the journal is lost; finish the federation with that version, restore the file, or "
            "begin a federation of another name, whose folder is empty"
        )
