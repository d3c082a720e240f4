"""Files that are whole or not there."""

import os
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save

from fedmutual.config import read_tables
from fedmutual.errors import ConfigError, RunError
from fedmutual.files import read_json, write_bytes
from fedmutual.rundir.record_files import read_records
from fedmutual.rundir.schema import Evaluation
from fedmutual.tensor_files import read_tensors, write_tensors


@pytest.mark.parametrize("length", range(60, 400, 5))
def test_tensors_come_back_whatever_the_length_of_their_header(tmp_path, length):
    """A header of 128 or 640 bytes makes a file begin as a pickle does."""
    written = {"a" * length: torch.arange(3), "b": torch.tensor(0.5)}
    write_tensors(tmp_path / "x.safetensors", written, {"round": "3"})
    tensors, about = read_tensors(tmp_path / "x.safetensors")
    assert about == {"round": "3"}
    assert tensors.keys() == written.keys()
    assert all(torch.equal(tensors[k], v) for k, v in written.items())


def test_the_same_tensors_are_the_same_bytes(tmp_path):
    about = {k: k for k in "abcdefgh"}
    for name in ("x", "y"):
        write_tensors(tmp_path / name, {"w": torch.zeros(3), "v": torch.ones(2)}, about)
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_pickles_of_both_kinds_are_named_and_not_opened(tmp_path):
    (tmp_path / "old").write_bytes(pickle.dumps({"w": 1}))
    with zipfile.ZipFile(tmp_path / "new", "w") as file:
        file.writestr("data.pkl", pickle.dumps(1))
    for name in ("old", "new"):
        with pytest.raises(RunError, match="is a pickle"):
            read_tensors(tmp_path / name)


def test_tensors_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(RunError, match="there is no such file"):
        read_tensors(tmp_path / "x")
    write_tensors(tmp_path / "x", {"w": torch.zeros(3)}, {})

    def forbidden(*args, **named):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.open", forbidden)  # a superuser may read whatever its mode
    with pytest.raises(RunError, match=r"x: cannot be read \(Permission denied\)"):
        read_tensors(tmp_path / "x")


@pytest.mark.parametrize("about", ["{", "[1]", "3"])
def test_a_header_that_says_nothing_of_ours(tmp_path, about):
    (tmp_path / "x").write_bytes(save({"w": torch.zeros(3)}, metadata={"fedmutual": about}))
    with pytest.raises(RunError, match="x: is truncated or no safetensors file"):
        read_tensors(tmp_path / "x")


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    write_bytes(tmp_path / "x", b"old")

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match=r"cannot be written .*; free some space, then resume"):
        write_bytes(tmp_path / "x", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


@pytest.fixture
def tokens(monkeypatch):
    """The names of part files, foreseen by somebody who shares the folder."""
    monkeypatch.setattr("fedmutual.files.token_hex", lambda size: "0" * 2 * size)
    return f"{os.getpid()}-{'0' * 16}.part"


@pytest.mark.parametrize("kind", ["link to a file", "link to nothing", "file"])
def test_a_foreign_part_file_is_neither_followed_nor_written(tmp_path, tokens, kind):
    """A symbolic link in place of a part file would redirect the write to another file of the user."""
    part, victim = tmp_path / f".x.{tokens}", tmp_path / "victim"
    if kind == "link to a file":
        victim.write_bytes(b"mine")
    if kind == "file":
        part.write_bytes(b"theirs")
    else:
        part.symlink_to(victim)
    with pytest.raises(RunError, match=r"x: cannot be written \(File exists\)"):
        write_bytes(tmp_path / "x", b"new")
    assert not (tmp_path / "x").exists()
    assert victim.exists() == (kind == "link to a file")
    assert not victim.exists() or victim.read_bytes() == b"mine"


@pytest.mark.process
def test_what_a_killed_process_of_the_same_number_left_is_in_nobodys_way(tmp_path):
    """In a container every process of a service may have the same number."""
    (tmp_path / f".x.{os.getpid()}.part").write_bytes(b"cut short")
    for content in (b"one", b"two"):
        write_bytes(tmp_path / "x", content)
        assert (tmp_path / "x").read_bytes() == content
    assert len(list(tmp_path.iterdir())) == 2


DEEP = 200_000


def test_brackets_in_brackets_are_one_sentence_and_no_traceback(tmp_path):
    (tmp_path / "x.json").write_text("[" * DEEP)
    with pytest.raises(RunError, match="damaged or is not JSON"):
        read_json(tmp_path / "x.json")
    with pytest.raises(RunError, match="line 1 is cut off"):
        list(read_records(tmp_path / "x.json", Evaluation))
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_tables(_written(tmp_path / "x.toml", "a = " + "[" * DEEP))
    (tmp_path / "x").write_bytes(save({"w": torch.zeros(3)}, metadata={"fedmutual": "[" * DEEP}))
    with pytest.raises(RunError, match="truncated or no safetensors file"):
        read_tensors(tmp_path / "x")


def _written(path, text):
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"format": 2}', "\udce4".encode("utf-8", "surrogateescape")])
def test_json_of_another_format_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RunError, match=r"x\.json: is "):
        read_json(path)
