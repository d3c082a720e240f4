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
REAL = [*read_committed_experiments().values()]


def test_a_cell_is_a_configuration_with_arms(papers):
    table, looker = read_experiment(papers, "table9"), read_experiment(papers, "looker")
    assert table.names == looker.names == ["digits/iid", "digits/noniid"]
    assert [c.id for c in looker.cells] == ["table9/digits/iid", "table9/digits/noniid"]
    assert list(table.cells[0].arms) == ["fedavg", "fml"]
    assert list(looker.cells[0].arms) == ["fedavg", "fml", "independent"]
    assert [a.paper for a in table.cells[0].arms.values()] == [80.0, 81.5]
    assert [a.paper for a in looker.cells[0].arms.values()] == [None, None, None]  # of another measure
    assert [c.name for c in table.choose_cells(["*noniid"])] == ["digits/noniid"]
    assert len(table.choose_cells([])) == 2


def test_numbers_in_names_sort_as_numbers(papers):
    cell = (papers / "table9/digits/iid.toml").read_text()
    for name in ("n2000", "n500", "n100"):
        (papers / f"table9/{name}.toml").write_text(cell)
    assert read_experiment(papers, "table9").names[-3:] == ["n100", "n500", "n2000"]


@pytest.mark.parametrize(
    ("id", "only", "message"),
    [
        ("tabel9", [], "there is no experiment 'tabel9'; did you mean 'table9'?"),
        ("table9", ["digits/idd"], "--only 'digits/idd' matches no cell of table9; did you mean 'digits/iid'?"),
    ],
)
def test_the_nearest_name_is_named(papers, id, only, message):
    with pytest.raises(ConfigError) as problem:
        read_experiment(papers, id).choose_cells(only)
    assert str(problem.value) == message


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("digits/iid.toml", "[cell]", "[cells]", "key 'cell.row': field required"),
        ("digits/iid.toml", "paper = 81.50", "papers = 81.50", "unknown key 'cell.arms.fml.papers'; did you mean 'paper'?"),
        (
            "digits/iid.toml",
            "paper = 81.50",
            'needs = "federation"',
            "but 'federation' is not defined",
        ),
        ("digits/iid.toml", "paper = 81.50", 'needs = "fml"', "arm 'fml' needs arm 'fml', but 'fml' is not defined, or"),
        ("digits/iid.toml", "alpha = 0.4", "alhpa = 0.4", "unknown key 'algorithm.alhpa'"),
        ("digits/iid.toml", '"fedavg" }', '"fedavgg" }', "iid.toml, arm 'fedavg': key 'algorithm.name'"),
        ("index.toml", '["global_test"]\nfigures', '["global_tset"]\nfigures', "no measure 'global_tset'; did you mean"),
        ("index.toml", 'than = "fedavg"', "", "needs 'than' or 'less'"),
        ("index.toml", "order = 1", "order = ", "not valid TOML"),
        (
            "index.toml",
            'than = "fedavg"',
            'than = "fedavg"\ntimes = 3\nless = "x"',
            "needs 'than' without 'less', because it has 'times'",
        ),
        ("index.toml", 'than = "fedavg"', 'than = "fedavg"\nper = "client"', "'global_test' is no measure of each client"),
        (
            "index.toml",
            '["global_test"]\nfigures',
            '["rounds_to"]\nfigures',
            "'rounds_to' needs a number: 'rounds_to:0.9'",
        ),
        ("index.toml", '["global_test"]\nfigures', '["noise:x"]\nfigures', "measure 'noise:x' needs a number: 'noise:0.9'"),
        ("index.toml", '["global_test"]\nfigures', '["noise:nan"]\nfigures', "needs a number"),
        ("index.toml", '["global_test"]\nfigures', '["bwt:2"]\nfigures', "measure 'bwt' takes no number; remove ':2'"),
        ("index.toml", 'arm = "fml"', 'arm = "fmll"', "'FML is better than FedAvg.' has no arm 'fmll'; did you mean 'fml'?"),
        ("index.toml", 'than = "fedavg"', 'than = "fedagv"', "has no arm 'fedagv'; did you mean 'fedavg'?"),
        (
            "index.toml",
            'arm = "fml"',
            'arm = "fml"\ncells = "digit/*"',
            "no cell 'digit/*'; did you mean 'digits/iid'?",
        ),
        ("index.toml", 'arm = "fml"', 'arm = "fml"\nless = "idd"', "matches no cell 'idd'; "),
        ("index.toml", 'than = "fedavg"', 'than = "fedavg@digits/idd"', "no cell 'digits/idd'; did you mean 'digits/iid'?"),
        (
            "index.toml",
            'measure = "global_test"\n',
            'measure = "own_validation"\nper = "client"\nof = "most"\n',
            "is of every client; remove 'of'",
        ),
        (
            "index.toml",
            'figures = ["global_test"]',
            'figures = ["swing_own"]',
            "'swing_own' has no curve that could be drawn",
        ),
    ],
)
def test_an_error_names_its_file(papers, file, before, after, message):
    path = papers / "table9" / file
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))
    with pytest.raises(ConfigError) as problem:
        [list(list_jobs(cell, [0], Scale())) for cell in read_experiment(papers, "table9").cells]
    assert message in str(problem.value)
    assert str(path) in str(problem.value)


@pytest.mark.parametrize(("before", "after", "message"), [
    ("rounds = 2", 'rounds = "x"', "iid.toml, arm 'fedavg': key 'rounds'"),
    ('algorithm = { name = "fml", alpha = 0.4, beta = 0.6 }', "algorithm = 3", "iid.toml, arm 'fedavg': key 'algorithm"),
    ("training = { local_epochs = 1, batch_size = 16 }", "training = 3", "iid.toml, arm 'fedavg': key 'training'"),
])  # fmt: skip
def test_a_table_of_a_wrong_kind_is_an_error_when_a_cell_is_read(papers, before, after, message):
    path = papers / "table9/digits/iid.toml"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(ConfigError) as problem:
        read_experiment(papers, "table9")
    assert message in str(problem.value)


def test_a_claim_about_arms_that_share_no_cell_is_refused(papers):
    path = papers / "table9/digits/iid.toml"
    path.write_text(path.read_text().replace("[cell.arms.fml]", "[cell.arms.ours]"))
    other = papers / "table9/digits/noniid.toml"
    other.write_text(other.read_text().replace("[cell.arms.fedavg]", "[cell.arms.theirs]"))
    with pytest.raises(ConfigError, match=r"'FML is better than FedAvg\.' has 'fml' and 'fedavg' in no cell"):
        read_experiment(papers, "table9")


def test_a_folder_that_is_not_there_has_no_experiment_to_name(tmp_path):
    with pytest.raises(ConfigError, match=r"nope: contains no experiment, no \*/index.toml; name another folder"):
        read_experiment(tmp_path / "nope", "table1")


NOTES = """
[differences]
rate = "One rate for all."

[code]
theirs = ["It never shuffles."]
"""


def test_differences_that_experiments_share_stand_in_one_place(papers):
    (papers / "notes.toml").write_text(NOTES)
    index = papers / "table9/index.toml"
    named = index.read_text().replace(
        'figures = ["global_test"]', 'figures = ["global_test"]\nnotes = ["rate"]\ncode = "theirs"'
    )
    index.write_text(named)
    experiment = read_experiment(papers, "table9")
    assert experiment.differences == ("Digits of 8 by 8 pixels.", "One rate for all.")
    assert experiment.code == ("It never shuffles.",)
    assert read_experiment(papers, "looker").code == ()
    for before, after, message in (
        ('["rate"]', '["rte"]', "key 'notes' names 'rte', which notes.toml does not have; did you mean 'rate'?"),
        ('"theirs"', '"their"', "key 'code' names 'their', which notes.toml does not have; did you mean 'theirs'?"),
    ):
        index.write_text(named.replace(before, after))
        with pytest.raises(ConfigError) as problem:
            read_experiment(papers, "table9")
        assert str(problem.value) == f"{index}: {message}"


def test_a_plain_configuration_is_not_a_cell(papers):
    (papers / "table9/plain.toml").write_text("rounds = 2")
    with pytest.raises(ConfigError, match=r"plain.toml: has no table \[cell\]"):
        read_experiment(papers, "table9")


def test_a_folder_without_experiments(tmp_path):
    with pytest.raises(ConfigError, match="contains no experiment"):
        read_experiments(tmp_path)


def test_all_ids_are_there():
    assert [e.id for e in REAL] == IDS


@pytest.mark.parametrize("experiment", REAL, ids=lambda e: e.id)
def test_every_real_cell_is_valid(experiment, tmp_path):
    planned = [job for cell in experiment.cells for job in list_jobs(cell, [0], Scale())]
    assert len(planned) == sum(len(c.arms) for c in experiment.cells)
    assert len({job.fingerprint for job in planned}) > 1
    unrun = read_measured_cells(experiment, ResultStore(tmp_path))
    for claim in experiment.index.claims:  # no claim is idle, no arm or cell misspelt
        assert judge(claim, unrun).lines, claim.text
    assert len(experiment.differences) > 2


def test_table_1_is_whole():
    table = REAL[0]
    assert len(table.cells) == 24
    assert all(list(c.arms)[:3] == ["fedavg", "fedprox", "fml"] for c in table.cells)
    papers = {(c.about.column, c.about.row, k): a.paper for c in table.cells for k, a in c.arms.items()}
    assert papers["MNIST MLP", "Non-IID 3", "fml"] == 93.77
    assert papers["CIFAR-100 CNN1", "IID", "fedprox"] == 32.41
    assert papers["CIFAR-10 CNN2", "Non-IID 2", "fedavg"] == 81.17
    assert round(sum(v for v in papers.values() if v is not None), 2) == SUM_OF_TABLE_1


SUM_OF_TABLE_1 = 5422.25  # added up from the printed table


def test_curves_dh_rounds_and_stability_ask_for_the_runs_of_table_1():
    prints = {
        id: {j.fingerprint for c in e.cells for j in list_jobs(c, [0], Scale())} for id, e in zip(IDS, REAL, strict=True)
    }
    assert prints["rounds"] < prints["table1"]
    assert prints["stability"] < prints["table1"]
    (control,) = (
        j.fingerprint for c in REAL[0].cells for j in list_jobs(c, [0], Scale()) if j.arm == "fml-from-server"
    )  # which the figures leave out
    assert prints["table1"] - {control} < prints["dh"]
    assert prints["table1"] - {control} < prints["curves"]
    assert prints["v1-local"] == prints["v1-tables"]
    assert prints["v1-tables"].isdisjoint(prints["table1"])  # another split
