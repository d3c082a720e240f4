"""The journal of a party: one file of its owner alone, whose transactions are on the disk completely or not at all."""

import os
import shutil
import sqlite3
import stat
from contextlib import closing

import pytest

from fedmutual.errors import RunError
from fedmutual.rundir.checkpoint import read_checkpoint
from fedmutual.sites import journal as journals
from fedmutual.sites.journal import FILE, Journal
from fedmutual.sites.protocol import WORK, Order, pack_message, read_answer
from fedmutual.sites.server_journal import ServerJournal
from fedmutual.sites.site_journal import SiteJournal
from wards import SITES, contract, halves

pytestmark = pytest.mark.sites

MLP = {"north": SITES["north"]}


def test_the_file_and_those_beside_it_are_their_owners_alone_from_the_start(tmp_path, monkeypatch):
    modes, connect = [], sqlite3.connect

    def watch(path, **options):
        modes.append(stat.S_IMODE((tmp_path / FILE).stat().st_mode))
        return connect(path, **options)

    monkeypatch.setattr(sqlite3, "connect", watch)
    mask = os.umask(0)
    try:
        journal = Journal(tmp_path)
        journal.set_fact("attempt", 1)
    finally:
        os.umask(mask)
    assert modes == [0o600]
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == dict.fromkeys(
        (FILE, f"{FILE}-wal", f"{FILE}-shm"), 0o600
    )
    (level,), (mode,) = journal.read("PRAGMA synchronous") + journal.read("PRAGMA journal_mode")
    assert (level, mode) == (2, "wal")  # FULL


def foreign(path):
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE facts (name, value)")
        database.commit()
    path.chmod(0o600)


def tampered(path):
    Journal(path.parent).close()
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TRIGGER t AFTER INSERT ON sent BEGIN DELETE FROM sent; END")


def write(content):
    def spoil(path):
        path.write_bytes(content)
        path.chmod(0o600)

    return spoil


def cut(path):
    with closing(Journal(path.parent)) as journal:
        journal.write_content(bytes(100_000), "reply", 0)
    path.write_bytes(path.read_bytes()[:50_000])


def flip(path):
    with closing(Journal(path.parent)) as journal:
        journal.write_content(bytes(100_000), "reply", 0)
    content = bytearray(path.read_bytes())
    content[4096:8192] = os.urandom(4096)
    path.write_bytes(content)


def link(path):
    Journal(path.parent / "other").close()
    path.symlink_to(path.parent / "other" / FILE)


def link_hard(path):
    Journal(path.parent / "other").close()
    os.link(path.parent / "other" / FILE, path)


def link_beside(end):
    def spoil(path):
        Journal(path.parent).close()
        path.with_name(f"{FILE}-{end}").symlink_to(path.parent / "elsewhere")

    return spoil


def open_to_others(path):
    Journal(path.parent).close()
    path.chmod(0o640)


UNUSABLE = {
    "no database": (write(b"nonsense" * 1000), "cannot be read, or is damaged"),
    "cut short": (cut, "cannot be read, or is damaged"),
    "a page of noise": (flip, "cannot be read, or is damaged"),
    "another program's": (foreign, "its tables are not those of this version"),
    "with a trigger": (tampered, "its tables are not those of this version"),
    "a link": (link, "is a link, or other users"),
    "a hard link": (link_hard, "is a link, or other users"),
    "a link as its log": (link_beside("wal"), "is a link, or other users"),
    "a link as its undo": (link_beside("journal"), "is a link, or other users"),
    "open to others": (open_to_others, "chmod 600"),
    "a folder": (lambda path: path.mkdir(), "is a link, or other users"),
}


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_file_is_refused_in_one_sentence(tmp_path, case, read_only):
    spoil, words = UNUSABLE[case]
    spoil(tmp_path / FILE)
    with pytest.raises(RunError, match=words) as caught:
        Journal(tmp_path, read_only)
    assert str(caught.value).startswith(f"{tmp_path / FILE}")
    assert "\n" not in str(caught.value)


def test_a_damaged_value_is_refused_in_one_sentence(tmp_path):
    """In pages that fit together."""
    journal = ServerJournal(tmp_path)
    journal.write("INSERT INTO facts VALUES (?, ?)", ("attempt", "{"), ("setbacks", '"many"'))
    journal.write_content(b"junk", "stage", 0)
    for read in (lambda: journal.attempt, lambda: journal.setbacks, lambda: journal.read_tensors("stage", 0)):
        with pytest.raises(RunError, match="cannot be read, or is damaged") as caught:
            read()
        assert "\n" not in str(caught.value)


def vacuum(path, monkeypatch):
    copy = path.with_name("copy")
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"VACUUM INTO '{copy}'")
    copy.chmod(0o600)
    copy.replace(path)


def update_sqlite(path, monkeypatch):
    monkeypatch.setattr(journals, "_TABLES", [sql.removesuffix(" STRICT") for sql in journals._TABLES])


@pytest.mark.parametrize("prepare", [vacuum, update_sqlite])
def test_a_copy_by_another_tool_or_version_of_sqlite_is_used(tmp_path, monkeypatch, prepare):
    with closing(ServerJournal(tmp_path)) as journal:
        journal.raise_attempt()
    prepare(tmp_path / FILE, monkeypatch)
    again = ServerJournal(tmp_path)
    assert (again.attempt, again.read("PRAGMA journal_mode")) == (1, [("wal",)])


def test_a_secret_in_the_log_of_a_killed_process_is_erased_at_the_next_start(tmp_path):
    journal, again = Journal(tmp_path / "killed"), tmp_path / "again"
    journal.set_fact("sum", "the secret" * 50)
    journal.read("PRAGMA secure_delete = ON")
    journal.set_fact("sum", None)
    shutil.copytree(tmp_path / "killed", again)
    assert b"the secret" in (again / f"{FILE}-wal").read_bytes()
    with closing(Journal(again)):
        assert not [path.name for path in again.iterdir() if b"the secret" in path.read_bytes()]


OLD = ("diary.json", "left.jsonl", "attempts.json", "conduct.json", "secure-sum.json", "checkpoint.json")


@pytest.mark.parametrize("is_empty_file", [True, False])
@pytest.mark.parametrize("name", OLD)
def test_the_state_of_an_older_version_is_refused_and_says_what_to_do(tmp_path, name, is_empty_file):
    (tmp_path / name).write_text("{}")
    if is_empty_file:
        (tmp_path / FILE).touch(mode=0o600)
    with pytest.raises(RunError, match=rf"has {name} and no complete .*; finish the federation with that version"):
        ServerJournal(tmp_path)


def test_a_look_writes_nothing(tmp_path):
    assert Journal(tmp_path / "none", read_only=True).get_fact("attempt") is None
    assert not (tmp_path / "none").exists()
    ServerJournal(tmp_path).raise_attempt()
    assert Journal(tmp_path, read_only=True).get_fact("attempt") == 1
    with pytest.raises(RunError, match="cannot be written"):
        Journal(tmp_path, read_only=True).set_fact("attempt", 2)


def test_values_of_any_length_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "_PIECE", 7)
    journal = Journal(tmp_path)
    for content in (b"", b"1234567", os.urandom(50), b"short"):
        journal.write_content(content, "reply", 3, 1)
        assert journal.read_content("reply", 3, 1) == content
    assert journal.read_content("reply", 3) is None


def test_a_block_that_raises_changes_nothing(tmp_path):
    journal = ServerJournal(tmp_path)

    def interrupt():
        with journal.change():
            journal.exclude({"west": "why"})
            journal.raise_attempt()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert (journal.excluded, journal.attempt) == ({}, 0)
    journal.raise_attempt()
    assert ServerJournal(tmp_path).attempt == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a process that starts as a copy of this one")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_a_transaction_leaves_all_of_it_or_nothing(tmp_path, when):
    """benchmarks/journal_kills.py does this at each transaction of a federation."""
    with closing(ServerJournal(tmp_path)) as journal:
        journal.raise_attempt()
    child = os.fork()
    if not child:
        if when == "before":
            journals.commit = lambda database: os._exit(1)
        ServerJournal(tmp_path).exclude({"west": "why"})
        os._exit(1)
    os.waitpid(child, 0)
    after = ServerJournal(tmp_path)
    assert (after.attempt, after.excluded) == (1, {} if when == "before" else {"west": "why"})


def test_a_kill_between_the_journal_and_the_files_of_the_run_is_mended(tmp_path, monkeypatch):
    """`fedmutual.Run` reads checkpoint.json, which is written after the transaction."""
    _, sites = halves(tmp_path, contract(tmp_path, sites=MLP), MLP)
    north = sites["north"]
    state = north.experiment.make_server_state()
    north.carry_out(pack_message(Order(WORK, 0, 0), state))
    with monkeypatch.context() as broken:
        broken.setattr(SiteJournal, "publish", lambda self: None)
        north.carry_out(pack_message(Order(WORK, 1, 0), state))
    assert read_checkpoint(north.folder).round == 1
    (again,) = halves(tmp_path, tmp_path / "federation.toml", MLP)[1].values()
    assert read_checkpoint(again.folder).round == 2
    assert {path.name for path in (again.folder / "clients" / "north").iterdir()} == {
        "round-1.safetensors",
        "round-2.safetensors",
    }
    assert read_answer(again.carry_out(pack_message(Order(WORK, 2, 0), state)))[0].problem is None
    for path in again.folder.glob(f"{FILE}*"):
        path.unlink()
    with pytest.raises(RunError, match="the journal is lost"):  # the site does not begin again
        halves(tmp_path, tmp_path / "federation.toml", MLP)
