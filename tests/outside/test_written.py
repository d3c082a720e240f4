"""The run folders that today's code writes: their files and keys are those of the snapshot, and none of a sample is lost."""

import re
import shutil

import pytest

from outside import samples as sample_folders
from outside.layout import flatten, read_layout
from outside.state import federate, forget

pytestmark = pytest.mark.long

OLD_STATE = r"[a-z]+/(state/)?wards/(answers/|diary\.json|left\.jsonl|conduct\.json)"  # of version 0.2; now journal.sqlite
ONLY_FLARE = "server/wards/progress.json"  # written where NVIDIA FLARE carries the messages, not by `run_sites`


@pytest.mark.parametrize("name", sample_folders.COMMANDS)
def test_a_command_writes_the_files_and_keys_of_the_snapshot(name, samples, cli, snapshots):
    shutil.rmtree(samples / name)
    cli.run(*sample_folders.words(name))
    layout = read_layout(samples / name)
    assert flatten(read_layout(sample_folders.FOLDER / name)) <= flatten(layout), "a user's script reads what is missing"
    snapshots.check("run_folders", name, layout)


@pytest.mark.sites
def test_real_sites_write_the_files_and_keys_of_the_snapshot(samples, snapshots):
    committed = read_layout(samples / sample_folders.SITES)
    forget(samples)
    federate(samples)
    layout = read_layout(samples / sample_folders.SITES)
    missing = flatten(committed) - flatten(layout)
    assert all(line.startswith(ONLY_FLARE) or re.match(OLD_STATE, line) for line in missing), missing
    snapshots.check("run_folders", sample_folders.SITES, layout | {ONLY_FLARE: committed[ONLY_FLARE]})


def test_the_files_and_keys_of_kits(samples, cli, snapshots):
    pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")
    cli.run("provision", "sites/federation.toml", "--out", "kits")
    layout = read_layout(samples / "kits")
    ours = {file: keys if file.endswith(("kit.json", "federation.json")) else {} for file, keys in layout.items()}
    snapshots.check("run_folders", "kits", ours)  # NVIDIA FLARE's own files have other keys in other versions of it


def test_the_samples_are_small_and_of_no_machine():
    files = [path for path in sample_folders.FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1_450_000
    for path in files:
        if path.suffix != ".safetensors":
            assert not re.search(r"(?<![\w@:.])/(home|root|tmp|work|Users)/", path.read_text(encoding="utf-8")), path
