"""Results as files: small, read back equal, and nothing else is taken for one."""

import json

import pytest

from fedmutual.errors import RunError
from fedmutual.reproduce import Scale, Store, read_experiment
from fedmutual.reproduce.looks import looks
from fedmutual.reproduce.plan import jobs
from made_results import result


@pytest.fixture
def planned(papers):
    def plan(scale=None, seeds=(0,)):
        return {(j.arm, j.seed): j for j in jobs(read_experiment(papers, "table9").cells[0], seeds, scale or Scale())}

    return plan


def keep(store, job, curve=(0.5, 0.7), **more):
    scale = {"limit": job.scale.rounds, "changed": dict(job.scale.changed)}
    store.add(job, result(job.arm, job.seed, curve, fingerprint=job.fingerprint, **{**scale, **more}))


def test_kept_and_found_again(store, planned):
    job = planned()["fml", 0]
    keep(store, job)
    again = Store(store.folder)
    assert again.find(job).curves["global_test"] == (0.5, 0.7)
    assert again.find(job).target == 0.8  # the paper's FedAvg, out of the cell
    assert again.find(job, "0") is not None
    assert again.find(job, "another version") is None
    assert again.find(planned()["fedavg", 0]) is None


def test_a_file_has_a_line_a_run_and_holds_each_once(store, planned):
    for seed in (1, 0, 1):
        keep(store, planned(seeds=(seed,))["fml", seed])
    text = (store.folder / "table9/digits/iid.json").read_text()
    assert [run["seed"] for run in json.loads(text)["runs"]] == [0, 1]
    assert len(text.splitlines()) == 7


def test_new_results_go_to_the_first_folder_and_both_are_read(tmp_path, planned):
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    keep(Store(shipped), planned()["fml", 0])
    both = Store(own, shipped)
    keep(both, planned()["fedavg", 0])
    assert len(Store(own, shipped).of("table9/digits/iid")) == 2
    assert len(Store(own).of("table9/digits/iid")) == len(Store(shipped).of("table9/digits/iid")) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "damaged or no JSON"),
        ('{"format": 2}', "not of format 1"),
        ('{"format": 1}', "it has no list of runs"),
        ('{"format": 1, "runs": [{"arm": "fml"}]}', "seed: field required"),
    ],
)
def test_a_damaged_file_is_named(store, text, said):
    store.folder.mkdir()
    (store.folder / "bad.json").write_text(text)
    with pytest.raises(RunError, match=said) as problem:
        Store(store.folder)
    assert str(store.folder / "bad.json") in str(problem.value)


def test_a_curve_that_is_cut_off_is_damage(store, planned):
    keep(store, planned()["fml", 0])
    path = store.folder / "table9/digits/iid.json"
    path.write_text(path.read_text().replace("[0.5, 0.7]", "[0.5]"))
    with pytest.raises(RunError, match="has not a value for each evaluated round"):
        Store(store.folder)


def test_the_fullest_scale_is_shown(store, planned, papers):
    experiment = read_experiment(papers, "table9")
    for arm in ("fml", "fedavg"):
        keep(store, planned(Scale(1))[arm, 0], curve=(0.4,))
    look = looks(experiment, store)[0]
    assert look.words == "shortened: 1 of 2 rounds"
    keep(store, planned()["fml", 0])
    assert looks(experiment, store)[0].words == "shortened: 1 of 2 rounds"  # all arms before more rounds
    keep(store, planned()["fedavg", 0])
    assert looks(experiment, store)[0].words == ""
    assert looks(experiment, store, Scale(1))[0].words == "shortened: 1 of 2 rounds"  # what is asked for comes first
    assert looks(experiment, store)[1].words == ""
    assert not looks(experiment, store)[1].run


def test_results_of_another_configuration_are_not_shown(store, planned, papers):
    keep(store, planned()["fml", 0])
    path = papers / "table9/digits/iid.toml"
    path.write_text(path.read_text().replace("alpha = 0.4", "alpha = 0.5"))
    assert not looks(read_experiment(papers, "table9"), store)[0].run
