"""Results as files: small, read back equal, and nothing else is taken for one."""

import json

import pytest

from fedmutual.errors import RunError
from fedmutual_papers.collect import get_command
from fedmutual_papers.experiment_files import read_experiment
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.pages import make_page
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.prose import describe_origins, describe_state, describe_verdict
from fedmutual_papers.store import ClientResult, ResultStore
from fedmutual_papers.tables import make_entry
from made_results import result

pytestmark = pytest.mark.long


@pytest.fixture
def planned(papers):
    def plan(scale=None, seeds=(0,)):
        return {(j.arm, j.seed): j for j in list_jobs(read_experiment(papers, "table9").cells[0], seeds, scale or Scale())}

    return plan


@pytest.fixture
def look(papers, store):
    """Read the cells of an experiment with the results in the store."""
    return lambda id="table9", wanted=None: read_measured_cells(read_experiment(papers, id), store, wanted)


def keep(store, job, curve=(0.5, 0.7), **more):
    scale = {"limit": job.scale.rounds, "changed": dict(job.scale.changed)}
    store.add(job.cell.id, result(job.arm, job.seed, curve, fingerprint=job.fingerprint, **{**scale, **more}))


def test_kept_and_found_again(store, planned):
    job, other = planned()["fml", 0], planned()["fedavg", 0]
    keep(store, job)
    reopened = ResultStore(store.folder)
    assert job.find_result(reopened).curves["global_test"] == (0.5, 0.7)
    assert [job.find_result(reopened, 1) is None, job.find_result(reopened, 2) is None] == [False, True]
    assert other.find_result(reopened) is None
    assert "numerics" not in (store.folder / "table9/digits/iid.json").read_text()  # of the first version, as it was before


def test_a_cell_that_confirms_has_other_seeds(papers, store, planned, look):
    text = (papers / "table9/digits/iid.toml").read_text().replace('row = "IID"', 'row = "later"\nfirst_seed = 200')
    (papers / "table9/digits/later.toml").write_text(text)
    for job in planned(seeds=(0, 1, 200)).values():
        keep(store, job)
    assert {m.cell.about.row: m.seeds for m in look()} == {"IID": [0, 1], "later": [200], "Non-IID": []}


def test_a_file_has_a_line_a_run_and_holds_each_once(store, planned):
    for seed in (1, 0, 1):
        keep(store, planned(seeds=(seed,))["fml", seed])
    text = (store.folder / "table9/digits/iid.json").read_text()
    assert [run["seed"] for run in json.loads(text)["runs"]] == [0, 1]
    assert len(text.splitlines()) == 7


def test_new_results_go_to_the_first_folder_and_both_are_read(tmp_path, planned):
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    keep(ResultStore(shipped), planned()["fml", 0])
    keep(ResultStore(own, shipped), planned()["fedavg", 0])
    counts = [
        len(ResultStore(*folders).list_results("table9/digits/iid")) for folders in ((own, shipped), (own,), (shipped,))
    ]
    assert counts == [2, 1, 1]


@pytest.mark.parametrize(("before", "after", "message"), [
    (None, "{", "damaged or is not JSON"),
    (None, '{"format": 2}', "is of format 2"),
    (None, '{"format": 1}', "is damaged: runs: field required; restore it, or take it away"),
    (None, '{"format": 1, "runs": [{"arm": "fml"}]}', "runs.0.seed: field required"),
    ("[0.5, 0.7]", "[0.5, 7.5]", "curves.global_test.1"),
    ("[0.5, 0.7]", "[0.5, -0.1]", "curves.global_test.1"),
    ("[0.5, 0.7]", "[0.5]", "does not have one value for each evaluated round"),
    ('"last": 0.25', '"last": 25.0', "clients.0.last"),
    ('"best": {"0": 0.5}', '"best": {"0": 50}', "transfer.acc.best.0"),
    (', "best": {"0": 0.5}', "", "transfer.acc of seed 0 of 'fml' has no 'best'"),
    (', "down": 5', "", "traffic of seed 0 of 'fml' has no 'down'"),
    ('"steps": 7.0', '"step": 7.0', "runs.0.budget.step.*: input should be 'steps'"),
    ("[0.1, 0.25]", "[0.25]", "does not have one value for each evaluated round"),
    ('"0.1": 2.5', '"0.1": NaN', "runs.0.noise.0.1: input should be a finite number"),
    ('"0.1": 2.5', '"0.1": -Infinity', "runs.0.noise.0.1: input should be a finite number"),
    ("[0.5, 0.7]", "[0.5, NaN]", "runs.0.curves.global_test.1: input should be a finite number"),
    ('"seconds": 1.0', '"seconds": Infinity', "runs.0.seconds: input should be a finite number"),
    ('"optimizer.lr": 0.3', '"optimizer.lr": NaN', "runs.0.changed: value error, Out of range"),
])  # fmt: skip
def test_a_damaged_file_is_named(store, planned, before, after, message):
    clients = {"0": ClientResult(network="mlp", examples=4, last=0.25, best=0.25, curve=(0.1, 0.25))}
    more = {"noise": {"0.1": 2.5}, "changed": {"optimizer.lr": 0.3}}
    more |= {"traffic": {"up": 5, "down": 5}, "budget": {"steps": 7.0}}
    job = planned()["fml", 0]
    keep(store, job, transfer={"acc": {"last": {"0": 0.5}, "best": {"0": 0.5}}}, **more)
    store.add(job.cell.id, job.find_result(store).model_copy(update={"clients": clients}))
    path = store.folder / "table9/digits/iid.json"
    assert before is None or before in path.read_text()
    path.write_text(path.read_text().replace(before, after) if before else after)
    with pytest.raises(RunError, match=message) as problem:
        ResultStore(store.folder)
    assert str(path) in str(problem.value)


def test_a_file_that_cannot_be_written_names_its_own_option(store, planned):
    store.folder.mkdir()
    (store.folder / "table9").write_text("in the way")
    with pytest.raises(RunError, match=r"iid\.json: cannot be written .*; choose another folder with --results$"):
        keep(store, planned()["fml", 0])


def test_the_fullest_scale_is_shown(store, planned, look):
    for arm in ("fml", "fedavg"):
        keep(store, planned(Scale(1))[arm, 0], curve=(0.4,))
    assert look()[0].words == "shortened: 1 of 2 rounds"
    keep(store, planned()["fml", 0])
    assert look()[0].words == "shortened: 1 of 2 rounds"  # all arms before more rounds
    keep(store, planned()["fedavg", 0])
    assert [(measured.words, measured.run) for measured in look()] == [("", True), ("", False)]
    assert look(wanted=Scale(1))[0].words == "shortened: 1 of 2 rounds"  # what is asked for comes first


def test_results_of_another_configuration_are_not_shown(store, planned, look, papers):
    keep(store, planned()["fml", 0])
    path = papers / "table9/digits/iid.toml"
    path.write_text(path.read_text().replace("alpha = 0.4", "alpha = 0.5"))
    assert not look()[0].run


def lend(papers, before="", after=""):
    """Make another experiment "other", whose one cell is that of table9 but for some text of it."""
    (papers / "other").mkdir()
    text = (papers / "table9/digits/iid.toml").read_text()
    assert before in text
    (papers / "other/index.toml").write_text((papers / "table9/index.toml").read_text())
    (papers / "other/same.toml").write_text(text.replace(before, after) if before else text)


@pytest.mark.parametrize(("changed", "words"), [((), ""), (("rounds = 2", "rounds = 4"), "shortened: 2 of 4 rounds")])
def test_results_of_another_cell_are_shown_also_as_the_start_of_a_longer_run(store, planned, look, papers, changed, words):
    for seed in (0, 1):
        keep(store, planned(seeds=(seed,))["fml", seed])
    lend(papers, *changed)
    (measured,) = look("other")
    assert {arm: sorted(by_seed) for arm, by_seed in measured.results.items()} == {"fml": [0, 1], "fedavg": []}
    assert measured.words == words


def test_results_impossible_for_another_cell_are_not_an_error(store, papers, look):
    changed = Scale(None, (("partition.classes_per_client", 3),))
    (job,) = (j for j in list_jobs(read_experiment(papers, "table9").cells[1], [0], changed) if j.arm == "fml")
    keep(store, job)
    assert [measured.run for measured in look()] == [False, True]


def test_a_key_set_to_what_the_cell_has_marks_nothing(store, planned, papers, look):
    cell = read_experiment(papers, "table9").cells[0]
    same, other = ("training.batch_size", 16), ("optimizer.lr", 0.3)
    assert Scale(None, (same,)).fit_to(cell) == Scale()
    assert Scale(None, (same, other)).fit_to(cell) == Scale(None, (other,))
    assert Scale(None, (("algorithm.alpha", 0.4),)).fit_to(cell) == Scale()
    keep(store, planned()["fml", 0], changed={"training.batch_size": 16})  # as an earlier version kept it
    assert (look()[0].run, look()[0].words) == (True, "")


def test_results_of_several_numerics_versions_say_so(store, planned, papers, look):
    for seed, version in ((0, 1), (1, 2)):
        for arm in ("fml", "fedavg"):
            keep(store, planned(seeds=(seed,))[arm, seed], numerics=version)
    page = make_page(read_experiment(papers, "table9"), look())
    assert describe_verdict(page.judged[0], 1).endswith("; made by numerics versions 1 and 2")
    assert "2 seeds; made by numerics versions 1 and 2" in page.tables[0].footnotes


def test_what_a_known_run_was_not_asked_for_is_not_run_and_no_gap_of_the_method(store, planned, papers, look):
    keep(store, planned()["fml", 0])
    lend(papers, "noise = [0.1]", 'node = "0"\nnoise = [0.1]')
    (measured,) = look("other")
    named = ("global_test", "separation", "noise:0.1", "projected")
    shown = [make_entry(measured, "fml", name, "last", 1) for name in named]
    assert [cell.text for cell in shown] == ["70.0", "not run", "not run", "n/a"]
    assert "has results, but this number of its weights was not computed" in shown[1].note


def test_a_run_that_several_cells_look_at_is_counted_once(store, planned, papers, look):
    keep(store, planned()["fml", 0])
    (papers / "table9/digits/twin.toml").write_text((papers / "table9/digits/iid.toml").read_text())
    assert sum(measured.run for measured in look()) == 2
    (line,) = describe_origins(look())
    assert ": 1 run;" in line
    state = "2 of 3 cells (settings) were run, 2 of them not with every method, with 1 seed."
    assert describe_state(look()).startswith(state)


@pytest.mark.parametrize("arguments", [["--out", "/disk/of mine"], ["--out=/disk/mine"]])
def test_the_recorded_command_names_no_folder_of_this_machine(arguments, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/env/bin/fedmutual", "reproduce", "mine", *arguments, "--only", "a b"])
    assert get_command() == "fedmutual reproduce mine --only 'a b'"
