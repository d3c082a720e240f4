"""Experiments as files: what is read, what is refused and in which words; and that every real cell is a valid one."""

import pytest

from committed import read_committed_experiments
from fedmutual.errors import ConfigError
from fedmutual_papers.claims import judge
from fedmutual_papers.experiment_files import read_experiment, read_experiments
from fedmutual_papers.measured_cell import read_measured_cells
from fedmutual_papers.plan import Scale, list_jobs
from fedmutual_papers.store import ResultStore

pytestmark = pytest.mark.long

IDS = ["table1", "v1-tables", "curves", "dh", "mh", "oh", "newcomer", "rounds", "v1-local", "catfish", "alphabeta"]
IDS += ["stability", "fairness", "tuned", "rotated-mnist", "pacs", "office-home", "h2l-ablation", "h2l-figures", "benchmark"]
IDS += ["privacy", "proxyfl"]
REAL = read_committed_experiments()
THAN, ARM, MEASURES = 'than = "fedavg"', 'arm = "fml"', '["global_test"]\nfigures'


def test_a_cell_is_a_configuration_with_arms(papers):
    table, looker = read_experiment(papers, "table9"), read_experiment(papers, "looker")
    assert [c.name for c in table.cells] == [c.name for c in looker.cells] == ["digits/iid", "digits/noniid"]
    assert [c.id for c in looker.cells] == ["table9/digits/iid", "table9/digits/noniid"]
    assert list(looker.cells[0].arms) == [*table.cells[0].arms, "independent"] == ["fedavg", "fml", "independent"]
    assert [a.paper for a in table.cells[0].arms.values()] == [80.0, 81.5]
    assert [a.paper for a in looker.cells[0].arms.values()] == [None, None, None]  # of another measure
    assert [len(table.choose_cells(only)) for only in (["*noniid"], [])] == [1, 2]


def test_numbers_in_names_sort_as_numbers(papers):
    cell = (papers / "table9/digits/iid.toml").read_text()
    for name in ("n2000", "n500", "n100"):
        (papers / f"table9/{name}.toml").write_text(cell)
    assert [c.name for c in read_experiment(papers, "table9").cells][-3:] == ["n100", "n500", "n2000"]


@pytest.mark.parametrize(("id", "only", "message"), [
    ("tabel9", [], "there is no experiment 'tabel9'; did you mean 'table9'?"),
    ("table9", ["digits/idd"], "--only 'digits/idd' matches no cell of table9; did you mean 'digits/iid'?"),
])  # fmt: skip
def test_the_nearest_name_is_named(papers, id, only, message):
    with pytest.raises(ConfigError) as problem:
        read_experiment(papers, id).choose_cells(only)
    assert str(problem.value) == message


@pytest.mark.parametrize(("file", "before", "after", "message"), [
    ("digits/iid.toml", "[cell]", "[cells]", "key 'cell.row': field required"),
    ("digits/iid.toml", "paper = 81.50", "papers = 81.50", "unknown key 'cell.arms.fml.papers'; did you mean 'paper'?"),
    ("digits/iid.toml", "paper = 81.50", 'needs = "federation"', "but 'federation' is not defined"),
    ("digits/iid.toml", "paper = 81.50", 'needs = "fml"', "arm 'fml' needs arm 'fml', but 'fml' is not defined, or"),
    ("digits/iid.toml", "alpha = 0.4", "alhpa = 0.4", "unknown key 'algorithm.alhpa'"),
    ("digits/iid.toml", '"fedavg" }', '"fedavgg" }', "iid.toml, arm 'fedavg': key 'algorithm.name'"),
    ("digits/iid.toml", "rounds = 2", 'rounds = "x"', "iid.toml, arm 'fedavg': key 'rounds'"),
    ("digits/iid.toml", 'algorithm = { name = "fml", alpha = 0.4, beta = 0.6 }', "algorithm = 3", "key 'algorithm"),
    ("digits/iid.toml", "training = { local_epochs = 1, batch_size = 16 }", "training = 3", "key 'training'"),
    ("index.toml", MEASURES, '["global_tset"]\nfigures', "no measure 'global_tset'; did you mean 'global_test'?"),
    ("index.toml", THAN, "", "needs 'than' or 'less'"),
    ("index.toml", "order = 1", "order = ", "not valid TOML"),
    ("index.toml", THAN, f'{THAN}\ntimes = 3\nless = "x"', "needs 'than' without 'less', because it has 'times'"),
    ("index.toml", THAN, f'{THAN}\nper = "client"', "'global_test', which is no measure of each client"),
    ("index.toml", THAN, f'{THAN}\nreadings = [{{ arm = "fml" }}]', "has a reading without a name; give it a 'name'"),
    ("index.toml", MEASURES, '["rounds_to"]\nfigures', "'rounds_to' needs a number: 'rounds_to:0.9'"),
    ("index.toml", MEASURES, '["noise:x"]\nfigures', "measure 'noise:x' needs a number: 'noise:0.9'"),
    ("index.toml", MEASURES, '["noise:nan"]\nfigures', "needs a number"),
    ("index.toml", MEASURES, '["bwt:2"]\nfigures', "measure 'bwt' takes no number; remove ':2'"),
    ("index.toml", ARM, 'arm = "fmll"', "'FML is better than FedAvg.' has no arm 'fmll'; did you mean 'fml'?"),
    ("index.toml", THAN, 'than = "fedagv"', "has no arm 'fedagv'; did you mean 'fedavg'?"),
    ("index.toml", ARM, f'{ARM}\ncells = "digit/*"', "no cell 'digit/*'; did you mean 'digits/iid'?"),
    ("index.toml", ARM, f'{ARM}\nless = "idd"', "matches no cell 'idd'; "),
    ("index.toml", THAN, 'than = "fedavg@digits/idd"', "no cell 'digits/idd'; did you mean 'digits/iid'?"),
    ("index.toml", 'measure = "global_test"\n', 'measure = "own_validation"\nper = "client"\nof = "most"\n', "remove 'of'"),
    ("index.toml", 'figures = ["global_test"]', 'figures = ["swing_own"]', "'swing_own' has no curve that could be drawn"),
    ("index.toml", "order = 1", 'notes = ["rte"]', "names 'rte', which notes.toml does not have; did you mean 'rate'?"),
    ("index.toml", "order = 1", 'code = "their"', "'their', which notes.toml does not have; did you mean 'theirs'?"),
])  # fmt: skip
def test_an_error_names_its_file(papers, file, before, after, message):
    (papers / "notes.toml").write_text(NOTES)
    path = papers / "table9" / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(ConfigError) as problem:
        read_experiment(papers, "table9")
    assert message in str(problem.value)
    assert str(path) in str(problem.value)


def test_a_claim_about_arms_that_share_no_cell_is_refused(papers):
    for name, arm in (("iid", "fml"), ("noniid", "fedavg")):
        path = papers / f"table9/digits/{name}.toml"
        path.write_text(path.read_text().replace(f"[cell.arms.{arm}]", "[cell.arms.other]"))
    with pytest.raises(ConfigError, match=r"'FML is better than FedAvg\.' has 'fml' and 'fedavg' in no cell"):
        read_experiment(papers, "table9")


def test_a_plain_configuration_is_not_a_cell(papers):
    (papers / "table9/plain.toml").write_text("rounds = 2")
    with pytest.raises(ConfigError, match=r"plain.toml: has no table \[cell\]"):
        read_experiment(papers, "table9")


def test_a_folder_that_is_not_there_has_no_experiment_to_name(tmp_path):
    for read in (lambda root: read_experiment(root, "table1"), read_experiments):
        with pytest.raises(ConfigError, match=r"nope: contains no experiment, no \*/index.toml; name another folder"):
            read(tmp_path / "nope")


NOTES = """
[differences]
rate = "One rate for all."

[code]
theirs = ["It never shuffles."]
"""


def test_differences_that_experiments_share_stand_in_one_place(papers):
    (papers / "notes.toml").write_text(NOTES)
    index = papers / "table9/index.toml"
    index.write_text(index.read_text().replace("order = 1", 'notes = ["rate"]\ncode = "theirs"'))
    experiment = read_experiment(papers, "table9")
    assert experiment.differences == ("Digits of 8 by 8 pixels.", "One rate for all.")
    assert (experiment.code, read_experiment(papers, "looker").code) == (("It never shuffles.",), ())


def test_all_ids_are_there():
    assert list(REAL) == IDS


@pytest.mark.parametrize("experiment", REAL.values(), ids=lambda e: e.id)
def test_every_real_cell_is_valid(experiment, tmp_path):
    planned = [job for cell in experiment.cells for job in list_jobs(cell, [0], Scale())]
    assert len(planned) == sum(len(c.arms) for c in experiment.cells)
    assert len({job.fingerprint for job in planned}) > 1
    unrun = read_measured_cells(experiment, ResultStore(tmp_path))
    for claim in experiment.index.claims:  # no claim is idle, no arm or cell misspelt
        assert judge(claim, unrun).lines, claim.text
    assert len(experiment.differences) > 2


def test_table_1_is_whole():
    table = REAL["table1"]
    assert len(table.cells) == 24
    assert all(list(c.arms)[:3] == ["fedavg", "fedprox", "fml"] for c in table.cells)
    papers = {(c.about.column, c.about.row, k): a.paper for c in table.cells for k, a in c.arms.items()}
    assert papers["MNIST MLP", "Non-IID 3", "fml"] == 93.77
    assert papers["CIFAR-100 CNN1", "IID", "fedprox"] == 32.41
    assert papers["CIFAR-10 CNN2", "Non-IID 2", "fedavg"] == 81.17
    assert round(sum(v for v in papers.values() if v is not None), 2) == 5422.25  # added up from the printed table


def test_curves_dh_rounds_and_stability_ask_for_the_runs_of_table_1():
    jobs = {id: [j for c in e.cells for j in list_jobs(c, [0], Scale())] for id, e in REAL.items()}
    prints = {id: {j.fingerprint for j in of_experiment} for id, of_experiment in jobs.items()}
    control = {j.fingerprint for j in jobs["table1"] if j.arm == "fml-from-server"}  # which the figures leave out
    assert len(control) == 1
    assert prints["rounds"] | prints["stability"] < prints["table1"]
    assert prints["table1"] - control < prints["dh"]
    assert prints["table1"] - control < prints["curves"]
    assert prints["v1-local"] == prints["v1-tables"]
    assert prints["v1-tables"].isdisjoint(prints["table1"])  # another split
