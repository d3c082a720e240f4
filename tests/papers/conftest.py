"""A made-up paper over scikit-learn's digits: two cells, an experiment over them, and one whose arms need another."""

import io

import pytest
from rich.console import Console

from fedmutual_papers import reproduce as command
from fedmutual_papers.store import ResultStore

CELL = """
rounds = 2
data = {{ name = "digits" }}
partition = {{ {partition}, clients = 3, examples = 40 }}
split = {{ test = 0.5 }}
algorithm = {{ name = "fml", alpha = 0.4, beta = 0.6 }}
model = {{ shared = "mlp" }}
training = {{ local_epochs = 1, batch_size = 16 }}
engine = {{ device = "cpu", threads = 1, name = "inprocess" }}

[cell]
row = "{row}"
column = "digits MLP"
noise = [0.1]

[cell.arms.fedavg]
set = {{ "algorithm.name" = "fedavg" }}
paper = 80.00

[cell.arms.fml]
paper = 81.50
"""
INDEX = """
title = "Table 9: digits"
paper = "a made-up paper"
about = "Accuracy of the global model."
order = 1
measures = ["global_test"]
figures = ["global_test"]
differences = ["Digits of 8 by 8 pixels."]

[[claims]]
text = "FML is better than FedAvg."
measure = "global_test"
arm = "fml"
than = "fedavg"
"""
LOOKER = """
title = "Figure 9: on their own data"
paper = "a made-up paper"
about = "The product."
order = 2
cells = "table9/*"
measures = ["own_validation", "swing_own", "rounds_to:0.5", "noise:0.1", "gain_small"]
figures = ["own_validation"]
differences = ["None."]

[[claims]]
text = "FML serves clients better than training alone."
measure = "own_validation"
arm = "fml"
than = "independent"
per = "client"

[add.independent]
set = { "algorithm.name" = "independent" }
"""

NEWCOMER = """
title = "A newcomer"
paper = "a made-up paper"
about = "A third client comes later."
measures = ["own_validation"]
differences = ["None."]
"""
NEWCOMER_CELL = """
rounds = 1
data = { name = "digits" }
partition = { kind = "iid", clients = 3 }
training = { local_epochs = 1, batch_size = 16 }
engine = { device = "cpu", name = "inprocess" }

[cell]
row = "20 examples"
column = "digits MLP"

[cell.arms.federation]
set = { rounds = 2 }
clients = ["0", "1"]
shown = false

[cell.arms.scratch]
title = "From scratch"
clients = ["2"]
examples = 20
set = { "algorithm.name" = "independent" }
"""
GIVEN = """
[cell.arms.given]
needs = "federation"
clients = ["2"]
examples = 20
set = { "model.start" = "server" }
"""


@pytest.fixture
def papers(tmp_path, monkeypatch):
    """The folder of the made-up experiments, in an empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    return write_papers(tmp_path / "papers")


def write_papers(root):
    for name, text in {
        "table9/index.toml": INDEX,
        "table9/digits/iid.toml": CELL.format(partition='kind = "iid"', row="IID"),
        "table9/digits/noniid.toml": CELL.format(partition='kind = "shards", classes_per_client = 4', row="Non-IID"),
        "looker/index.toml": LOOKER,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture(scope="package")
def pages_folder(tmp_path_factory):
    """A folder into which the made-up experiments were reproduced, beside the one of their files."""
    root = write_papers(tmp_path_factory.mktemp("made") / "papers")
    for id in ("table9", "looker"):
        silent, out = Console(file=io.StringIO()), root.parent / "out"
        assert not command.train(id, (), 2, None, {}, out, None, root, lambda label: lambda event: None, silent)
    return out


@pytest.fixture
def reproduce(cli, papers):
    """Call `fedmutual reproduce` on the made-up experiments -> (exit code, standard output, standard error)."""

    def call(*arguments):
        return cli("reproduce", *arguments, "--experiments", papers)

    return call


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    return ResultStore(tmp_path / "results")


@pytest.fixture
def newcomer(papers):
    """The file of a cell in which a third client comes later, of an experiment "newcomer" beside the others."""
    (papers / "newcomer").mkdir()
    (papers / "newcomer/index.toml").write_text(NEWCOMER)
    (papers / "newcomer/digits.toml").write_text(NEWCOMER_CELL)
    return papers / "newcomer/digits.toml"


@pytest.fixture
def dependent_arm():
    """An arm for the newcomer's cell that starts from its federation."""
    return GIVEN
