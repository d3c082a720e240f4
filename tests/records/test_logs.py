"""Logs that cannot be read or written: one sentence with the file, and the line where there is one."""

import errno
import os

import pytest

from fedmutual.errors import RunError
from fedmutual.events import Finished
from fedmutual.rundir.logs import TextLog
from fedmutual.rundir.record_files import rewind, sync_logs
from log_lines import read_lines

WHOLE = b'{"round": 1}\n{"round": 2}\n'


def test_lines_come_back_and_those_of_unsaved_rounds_go(tmp_path):
    path = tmp_path / "m.jsonl"
    assert read_lines(path) == []
    rewind(path, bool)
    assert not path.exists()
    path.write_bytes(WHOLE + b'{"rou')
    rewind(path, lambda round: round < 2)
    assert read_lines(path) == [{"round": 1}]


def test_a_log_that_is_not_utf_8_is_damaged_in_that_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(WHOLE + b'{"round": "\xff"}\n')
    with pytest.raises(RunError, match=r"m\.jsonl: line 3 is not what fedmutual writes .* begin again in another folder"):
        rewind(path, bool)
    path.unlink()
    path.mkdir()
    with pytest.raises(RunError, match=r"m\.jsonl: cannot be read \(Is a directory\)"):
        rewind(path, bool)


@pytest.mark.parametrize("line", ['{"round": "1"}', '{"round": null}', '{"round": [1]}', "{}", "[1]", "1", "{"])
def test_a_line_whose_round_is_no_number_is_damaged(tmp_path, line):
    path = tmp_path / "m.jsonl"
    path.write_bytes(WHOLE + f"{line}\n".encode())
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"m\.jsonl: line 3 is not what fedmutual writes"):
        rewind(path, lambda round: round < 2)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl", "clients/a/metrics.jsonl"])
def test_a_failed_sync_names_the_log(tmp_path, monkeypatch, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(WHOLE)

    def refuse(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sync_logs(tmp_path)
    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(RunError, match=rf"{name}: cannot be written \({os.strerror(errno.ENOSPC)}\)"):
        sync_logs(tmp_path)
    assert path.read_bytes() == WHOLE


def test_a_text_log_that_cannot_be_written(tmp_path):
    (tmp_path / "log.txt").mkdir()
    with pytest.raises(RunError, match=r"log\.txt: cannot be written \(Is a directory\)"):
        TextLog(tmp_path)(Finished(rounds=3))


def test_no_line_is_appended_where_a_link_leads(tmp_path):
    """The maker of a folder could otherwise redirect another user's log lines into any file of that user."""
    victim, path = tmp_path / "profile", tmp_path / "log.txt"
    victim.write_text("as it was")
    path.symlink_to(victim)
    with pytest.raises(RunError, match=r"log\.txt: cannot be written"):
        TextLog(tmp_path)(Finished(rounds=1))
    assert victim.read_text() == "as it was"
