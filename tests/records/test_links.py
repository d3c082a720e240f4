"""A run folder that somebody else made may hold links: a resumed run neither writes nor removes anything behind them."""

import shutil

import pytest


@pytest.mark.parametrize("part", ["server", "clients", "clients/0", "log.txt"])
def test_resume_refuses_a_link_and_changes_nothing_behind_it(part, cli, small, tmp_path):
    assert cli("run", small, "--set", "rounds=1", "--out", "run")[0] == 0
    link, outside = tmp_path / "run" / part, tmp_path / "outside"
    shutil.move(link, outside)
    if outside.is_dir():
        (outside / "round-7.safetensors").write_text("of another run")
    link.symlink_to(outside)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert f"run/{part}" in cli.fail("run", small, "--set", "rounds=2", "--out", "run", "--resume")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
