"""States of clients stored in the run folder: equal bits, bounded memory, and one sentence for an unusable state."""

import errno
import gc
import os
import weakref
from pathlib import Path

import pytest

import fedmutual
import toy
from fedmutual.algorithms import FML
from fedmutual.config import parse_config
from fedmutual.engines.inprocess import ClientStore, DiskStorage
from fedmutual.engines.loop import Paused
from fedmutual.engines.select import EngineChoice, plan_disk_storage
from fedmutual.errors import RunError
from fedmutual.events import RoundDone
from fedmutual.federation.networks import Workload
from fedmutual.tensor_files import read_tensors, write_tensors
from kills import same

pytestmark = pytest.mark.long

CONFIG = {
    "name": "disk-backed",
    "rounds": 3,
    "data": {"name": "digits"},
    "partition": {"clients": 5, "examples": 60},
    "split": {"test": 0.4, "holdout": 0.2},
    "algorithm": {"name": "fml"},
    "model": {"shared": "cnn1", "personal": ["mlp", "cnn1", "mlp", "mlp", "cnn1"], "part": "features"},
    "training": {"local_epochs": 1, "batch_size": 16},
    "optimizer": {"name": "adam", "amsgrad": True, "lr": 1e-3},
    "engine": {"name": "inprocess", "device": "cpu", "participation": 0.6},
    "records": {"checkpoint_every": 2, "copies": True, "keep_best": True},
}


def config(**engine):
    return parse_config(CONFIG | {"engine": CONFIG["engine"] | engine})


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    return fedmutual.run(config(), tmp_path_factory.mktemp("in-memory") / "run").folder


def list_stored(folder):
    return sorted((folder / "clients").glob("*/.*stored-*"))


def count_stored(folder, counts):
    """Return an observer that appends the number of stored states after each round to `counts`."""
    return lambda event: counts.append(len(list_stored(folder))) if isinstance(event, RoundDone) else None


@pytest.mark.parametrize(
    "engine",
    [
        {"resident": 1},
        {"resident": 2},
        pytest.param({"name": "processes", "workers": 2, "resident": 1}, marks=pytest.mark.process),
    ],
)
def test_clients_stored_on_disk_have_the_bits_of_clients_in_memory(in_memory, tmp_path, engine):
    counts = []
    fedmutual.run(config(**engine), tmp_path / "run", observers=[count_stored(tmp_path / "run", counts)])
    assert same(tmp_path / "run", in_memory) == []
    assert min(counts) > 0
    assert list_stored(tmp_path / "run") == []


def cut(file):
    file.write_bytes(file.read_bytes()[:100])


def write_pickle(file):
    file.write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")


def reshape(file):
    tensors, header = read_tensors(file)
    write_tensors(file, {name: tensor[None] for name, tensor in tensors.items()}, header)


@pytest.mark.parametrize("damage", [Path.unlink, cut, write_pickle, reshape])
def test_a_damaged_state_is_named_and_a_resumed_run_does_without_it(in_memory, tmp_path, damage):
    folder = tmp_path / "run"

    def observe(event):
        if isinstance(event, RoundDone) and event.round == 3:
            for file in list_stored(folder):
                damage(file)

    with pytest.raises(RunError) as error:
        fedmutual.run(config(resident=1), folder, observers=[observe])
    assert str(error.value).count("\n") == 0
    assert ".stored-" in str(error.value)
    assert "--resume" in str(error.value)
    assert list_stored(folder) == []
    fedmutual.run(config(resident=1), folder, resume=True)
    assert same(folder, in_memory) == []


def test_states_that_lie_in_a_run_folder_are_removed_unread(in_memory, tmp_path):
    def stop(event):
        if isinstance(event, RoundDone) and event.round == 2:
            raise Paused

    folder = tmp_path / "run"
    with pytest.raises(Paused):
        fedmutual.run(config(resident=1), folder, observers=[stop])
    for client in "01234":
        file = folder / "clients" / client / f".stored-{os.getpid()}.safetensors"
        write_pickle(file)
        write_pickle(file.with_name(f".{file.name}.1-ab.part"))
    fedmutual.run(config(resident=1), folder, resume=True)
    assert same(folder, in_memory) == []
    assert list_stored(folder) == []


def test_a_full_disk_is_named(in_memory, tmp_path, monkeypatch):
    real = Path.open

    def open_on_a_full_disk(path, *arguments, **options):
        if ".stored-" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_on_a_full_disk)
        with pytest.raises(RunError, match=r"stored-.*: cannot be written \(No space left on device\); free some space"):
            fedmutual.run(config(resident=1), tmp_path / "run")
    assert list(tmp_path.rglob(".*.part")) == []
    fedmutual.run(config(resident=1), tmp_path / "run", resume=True)
    assert same(tmp_path / "run", in_memory) == []


@pytest.mark.parametrize(("reads", "stored"), [(False, 6), (True, 0)])
def test_a_process_keeps_at_most_the_allowed_number_of_clients(tmp_path, reads, stored):
    alive = weakref.WeakSet()

    def make(id):
        client = toy.client(id, FML().algorithm())
        alive.add(client.nets["personal"])
        return client

    store, most = ClientStore(), []
    store.hold(make, "012345", DiskStorage(tmp_path, 2))
    for id in "012345054321":
        store.run(id, lambda client: None, reads=reads)
        gc.collect()
        most.append(len(alive))
    assert max(most) == 2
    assert len(list_stored(tmp_path)) == stored


@pytest.mark.parametrize(
    ("engine", "workers", "resident", "memory", "expected"),
    [
        ("inprocess", 1, None, 200, None),  # 10 clients of 10 bytes: half of the memory
        ("inprocess", 1, None, 199, 4),  # a quarter of the memory is 49 bytes
        ("processes", 2, None, 199, 2),
        ("processes", 8, None, 8, 1),
        ("cluster", 2, None, 8, None),  # the memory of the nodes is not known
        ("cluster", 2, 3, 8, 3),
        ("inprocess", 1, 3, 1000, 3),
        ("stacked", 1, 3, 8, None),
    ],
)
def test_the_number_of_clients_in_memory(engine, workers, resident, memory, expected):
    work = {str(i): Workload(1, 1, 10) for i in range(10)}
    disk = plan_disk_storage(resident, EngineChoice(engine, workers, ""), work, Path("run"), memory)
    assert (disk and disk.resident) == expected


def test_a_run_whose_states_exceed_the_memory_is_remarked(in_memory, tmp_path, monkeypatch):
    monkeypatch.setattr("fedmutual.studies.run.count_memory", lambda: 10**6)
    fedmutual.run(config(), tmp_path / "run")
    assert same(tmp_path / "run", in_memory) == []
    assert "are stored in the run folder (engine.resident)" in (tmp_path / "run" / "log.txt").read_text()
    assert list_stored(tmp_path / "run") == []
