"""Where runs are trained: cells that ask for the same run otherwise, a command given again otherwise, runs that grow."""

import shutil

import pytest

from committed import read_committed_experiments
from fedmutual import numerics
from fedmutual.errors import ConfigError, RunError
from fedmutual.rundir.folder import lock_folder
from fedmutual_papers.experiment_files import read_experiment
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.run import count_work, train_cells
from fedmutual_papers.store import ResultStore

pytestmark = pytest.mark.long

INDEX = """
title = "Table 7: turned digits"
paper = "a made-up paper"
about = "Two nodes."
measures = ["acc"]
differences = ["None."]
"""
CELL = """
rounds = 3
data = { name = "digits", angles = [0, 90], per_class = 20 }
partition = { kind = "domains" }
split = { private = 0.65, public = 0.10, validation = 0.10, test = 0.15 }
algorithm = { name = "independent" }
model = { personal = ["mlp"] }
training = { local_steps = 1, batch_size = 8 }
records = { best_by = "validation" }
engine = { device = "cpu", name = "inprocess", threads = 1 }

[cell]
row = "a"
column = "digits"

[cell.arms.independent]
"""
CLOSER = CELL.replace('"validation" }', '"validation", keep_best = true }').replace('row = "a"', 'row = "b"\nnode = "0"')


class Stopped(Exception):
    """As by a key that was pressed."""


@pytest.fixture
def reproduce_turned(tmp_path):
    """Reproduce a cell "turned/a" or "turned/b", the first closely looked at or not -> (what was done, what was said)."""
    folder = tmp_path / "papers/turned"
    folder.mkdir(parents=True)
    (folder / "index.toml").write_text(INDEX)
    (folder / "a.toml").write_text(CELL)
    (folder / "b.toml").write_text(CLOSER)

    def call(name, rounds=None, stop=None, **here):
        cells = read_experiment(tmp_path / "papers", "turned").choose_cells([name])
        messages, out = [], tmp_path / "out"

        def watch(label):
            def observer(event):
                if stop is not None and type(event).__name__ == "RoundDone" and event.round == stop:
                    raise Stopped

            return observer

        given = {k.replace("_", ".", 1): v for k, v in here.items()}
        store = ResultStore(out / "results")
        return train_cells(cells, 1, Scale(rounds), out, store, given, watch, messages.append), messages

    return call


def runs(tmp_path):
    return sorted(p for p in (tmp_path / "out/runs").iterdir() if not p.name.startswith("."))


@pytest.fixture
def shorter(reproduce_turned, tmp_path):
    """The folder of a run of one round, with which a run of three may begin."""
    reproduce_turned("a", rounds=1)
    (folder,) = runs(tmp_path)
    return folder


def read_log(tmp_path, rounds=3):
    """Return log.txt of the run of so many rounds."""
    (run,) = (tmp_path / "out/runs").glob(f"*-{rounds}-*")
    return (run / "log.txt").read_text()


def test_a_cell_that_needs_the_best_weights_of_a_run_that_kept_none_has_it_trained_again(reproduce_turned, tmp_path):
    reproduce_turned("a")
    assert reproduce_turned("b")[0].trained == 1
    assert [p.name.endswith("-best") for p in runs(tmp_path)] == [False, True]
    assert [reproduce_turned(name)[0].trained for name in "ab"] == [0, 0]
    (client,) = {r.closeup.client for r in ResultStore(tmp_path / "out/results").list_results("turned/b")}
    assert client == "0"


def test_what_is_kept_for_one_cell_serves_another(reproduce_turned, tmp_path):
    reproduce_turned("b")
    shutil.rmtree(tmp_path / "out/results")
    assert reproduce_turned("a")[0].trained == 1  # its folder was looked into
    assert reproduce_turned("b")[0].trained == 1
    assert len(runs(tmp_path)) == 1


@pytest.mark.parametrize(("key", "value"), [
    ("engine_threads", 2), ("records_checkpoint_every", 2), ("records_keep_best", True), ("data_workers", 1),
])  # fmt: skip
def test_a_stopped_command_given_again_otherwise_goes_on(reproduce_turned, tmp_path, key, value):
    with pytest.raises(Stopped):
        reproduce_turned("a", stop=3)
    assert reproduce_turned("a", **{key: value})[0].trained == 1
    (run,) = runs(tmp_path)
    assert "resumed" in (run / "log.txt").read_text()


def test_a_release_keeps_results_and_a_numerics_version_trains_again(reproduce_turned, monkeypatch):
    reproduce_turned("a")
    monkeypatch.setattr("fedmutual.__version__", "9.0.0")
    assert reproduce_turned("a")[0].trained == 0
    monkeypatch.setattr("fedmutual.numerics.VERSION", numerics.VERSION + 1)
    assert reproduce_turned("a")[0].trained == 1


def test_a_longer_run_is_not_begun_with_one_that_kept_too_little(reproduce_turned, shorter, tmp_path):
    reproduce_turned("b", rounds=2)
    assert "resumed" not in read_log(tmp_path, 2)
    reproduce_turned("b")
    assert "resumed, going on with round 3" in read_log(tmp_path)


def test_a_run_that_another_process_trains_is_not_copied(reproduce_turned, shorter, tmp_path):
    with lock_folder(shorter):
        assert reproduce_turned("a")[0].trained == 1
    assert "resumed" not in read_log(tmp_path)


@pytest.mark.parametrize("name", [
    "config.toml", "environment.json", "checkpoint.json", "server/round-1.safetensors", "clients/0/round-1.safetensors",
])  # fmt: skip
def test_a_damaged_shorter_run_is_not_copied(reproduce_turned, shorter, tmp_path, name):
    (shorter / name).write_text("damaged")
    assert reproduce_turned("a")[0].trained == 1
    assert "resumed" not in read_log(tmp_path)


def test_only_saved_files_are_copied(reproduce_turned, shorter, tmp_path):
    for name in ("server/round-7.safetensors", "clients/0/.round-1.safetensors.9.part"):
        (shorter / name).symlink_to("nowhere")  # no file that could be copied
    reproduce_turned("a", rounds=2)
    assert "resumed, going on with round 2" in read_log(tmp_path, 2)


def test_a_copy_that_fails_is_one_sentence_and_leaves_nothing(reproduce_turned, shorter, tmp_path):
    (shorter / "server/notes").symlink_to("nowhere")
    with pytest.raises(RunError, match=r"-3-.*: cannot be begun with a copy of .*-1-.* \(not every file of it"):
        reproduce_turned("a")
    assert [*(tmp_path / "out/runs").iterdir()] == [shorter]


@pytest.mark.parametrize(("before", "after", "message"), [
    (", keep_best = true", "", "records.keep_best = true"),
    ('data = { name = "digits", angles = [0, 90], per_class = 20 }\npartition = { kind = "domains" }',
     'data = { name = "digits" }\npartition = { kind = "iid", clients = 2 }', "partition.kind = 'domains'"),
    ("validation = 0.10, ", "", "split.validation"),
    ('node = "0"', 'node = "9"', "there is no client '9'; set 'node' to one of 0, 90"),
])  # fmt: skip
def test_what_a_node_needs_is_looked_at_before_its_run_is_trained(reproduce_turned, tmp_path, before, after, message):
    path = tmp_path / "papers/turned/b.toml"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(ConfigError, match=message) as problem:
        reproduce_turned("b")
    assert str(path) in str(problem.value)
    assert not (tmp_path / "out").exists()


def test_a_round_of_many_steps_is_not_compared_with_a_round_of_one_step():
    cells = {c.name: c for c in read_committed_experiments()["rotated-mnist"].cells}
    work = {j.arm: count_work(j) for j in list_jobs(cells["shared/public-10"], [0], Scale())}
    assert (work["fedavg-matched"], work["fedh2l"]) == (9_975, 10_000)  # 57 rounds of 175 steps
