"""`export`: a folder that answers as `predict` does without fedmutual, with a card that says what the model is."""

import json
import re
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import binomtest
from sklearn.datasets import load_digits

import fedmutual
from fedmutual.models import build

pytestmark = pytest.mark.long

TABLE = """
name = "t"
rounds = 1
data = { name = "csv", root = "t.csv", mean = [50.0, -1.0], std = [4.0, 2.0] }
partition = { kind = "iid", clients = 2 }
split = { test = 0.3 }
model = { shared = "mlp" }
training = { local_epochs = 1, batch_size = 8 }
engine = { device = "cpu" }
"""


@pytest.fixture
def digits(small, cli):
    """The folder of a finished run of FML on digits."""
    cli("run", small, "--set", "rounds=1", "--out", "r")
    return small.parent / "r"


@pytest.fixture
def raw():
    """Five digits as the run's reader holds them: 0 to 16."""
    x = load_digits().images[3:8].astype(np.uint8)
    np.savez("five.npz", x=x)
    return torch.tensor(x, dtype=torch.float32)[:, None]


@pytest.fixture
def without_onnx(monkeypatch):
    """Make `export` find no package onnx: a conversion takes a second, and only some tests read the program."""
    monkeypatch.setattr("fedmutual.studies.export.find_spec", lambda name: None)


def predicted(run, file, client=None):
    """The probabilities [B, C] of `predict`, in the order of the classes."""
    classes = [str(digit) for digit in range(10)]
    return torch.tensor([[dict(p.ranked)[c] for c in classes] for p in fedmutual.predict(run, [file], client)])


OWN = """
name = "own"
rounds = 1
algorithm = { name = "fml", alpha = 0.5 }
model = { shared = "mlp" }
training = { local_epochs = 1, batch_size = 8 }
engine = { device = "cpu" }
[clients.north]
data = { name = "csv", root = "first.csv" }
algorithm = { alpha = 0.9 }
optimizer = { lr = 0.03 }
[clients.south]
data = { name = "csv", root = "second.csv" }
"""


def test_the_card_of_a_client_states_its_own_settings_and_that_of_all_clients_no_client(in_tmp_path, cli, without_onnx):
    for name in ("first.csv", "second.csv"):
        Path(name).write_text("pulse,label\n" + "".join(f"{k / 7},{k % 2}\n" for k in range(30)))
    Path("own.toml").write_text(OWN)
    cli.run("run", "own.toml", "--out", "r")
    cards = {}
    for client in ("north", "south", None):
        cli.run("export", "r", "--to", f"to-{client}", *(["--client", client] if client else []))
        cards[client] = Path(f"to-{client}/README.md").read_text().replace("\\", "")
    assert "alpha = 0.9)" in cards["north"]
    assert "alpha = 0.5" not in cards["north"]
    assert "Data: csv, the data of one of 2 clients." in cards["north"]
    assert "this client alone: algorithm.alpha = 0.9, optimizer.lr = 0.03." in cards["north"]
    assert "alpha = 0.5)" in cards["south"]
    assert "client alone" not in cards["south"]
    assert "alpha = 0.5)" in cards[None]
    assert (
        "between clients: algorithm.alpha = 0.9 (1 client), 0.5 (1 client); optimizer.lr = 0.03 (1 client)," in cards[None]
    )
    assert not any(word in cards[None] for word in ("north", "south"))


@pytest.mark.parametrize("client", [None, "1"])
def test_the_exported_programs_answer_as_predict_does(digits, raw, cli, client):
    choice = [] if client is None else ["--client", client]
    cli.run("export", digits, "--to", "model", *choice)
    expected = predicted(digits, "five.npz", client)
    program = torch.export.load("model/model.pt2").module()
    assert torch.allclose(program(raw), expected, atol=1e-6)
    assert torch.allclose(program(raw[:1]), expected[:1], atol=1e-6)
    session = onnxruntime.InferenceSession("model/model.onnx")
    (answers,) = session.run(["probabilities"], {"x": raw.numpy()})
    assert torch.allclose(torch.from_numpy(answers), expected, atol=1e-6)


def test_the_weights_are_those_of_the_network_alone(digits, raw, cli, without_onnx):
    cli("export", digits, "--to", "model", "--client", "2")
    net = build("mlp", (1, 8, 8), 10, torch.Generator())
    net.load_state_dict(load_file("model/weights.safetensors"))
    about = json.loads(Path("model/model.json").read_text())
    mean, std = (torch.tensor(about["scaling"][key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    p = net.eval()((raw / about["scaling"]["divisor"] - mean) / std).softmax(1)
    assert torch.allclose(p, predicted(digits, "five.npz", "2"), atol=1e-6)
    assert about["input"]["shape"] == [1, 8, 8]
    assert about["output"]["classes"] == [str(digit) for digit in range(10)]
    assert (about["client"], about["round"], about["network"]) == ("2", 1, "mlp")


def test_a_program_of_a_table_takes_the_columns_in_the_order_of_the_card(tmp_path, in_tmp_path, cli, without_onnx):
    rng = np.random.default_rng(0)
    rows = [(50 + 4 * rng.normal(), rng.normal(), "ill" if k % 2 else "well") for k in range(60)]
    (tmp_path / "t.csv").write_text("pulse,age,label\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    (tmp_path / "t.toml").write_text(TABLE)
    cli("run", "t.toml", "--out", "t")
    cli.run("export", "t", "--to", "model")
    (tmp_path / "new.csv").write_text("age,pulse\n0.5,61\n-3,45\n")
    predictions = fedmutual.predict("t", ["new.csv"])
    about = json.loads((tmp_path / "model/model.json").read_text())
    assert about["input"]["columns"] == ["pulse", "age"]
    answers = torch.export.load("model/model.pt2").module()(torch.tensor([[61.0, 0.5], [45.0, -3.0]]))
    expected = [[dict(p.ranked)[c] for c in about["output"]["classes"]] for p in predictions]
    assert torch.allclose(answers, torch.tensor(expected), atol=1e-6)
    # encoded columns: the card states the raw ones
    stage = [(a, "II" if k % 3 else "I", c) for k, (a, _, c) in enumerate(rows)]
    (tmp_path / "t.csv").write_text("pulse,stage,label\n" + "".join(f"{a},{b},{c}\n" for a, b, c in stage))
    columns = 'columns = { pulse = "number", stage = ["I", "II"] }'
    (tmp_path / "t.toml").write_text(TABLE.replace("mean = [50.0, -1.0], std = [4.0, 2.0]", columns))
    cli("run", "t.toml", "--out", "encoded")
    cli.run("export", "encoded", "--to", "raw")
    assert json.loads((tmp_path / "raw/model.json").read_text())["input"]["shape"] == [2]
    card = (tmp_path / "raw/README.md").read_text()
    assert "[batch, 2]" in card
    assert "pulse, stage" in card


def test_the_card_states_the_scores_of_the_folder_with_their_intervals(digits, cli, without_onnx):
    cli("export", digits, "--to", "model", "--client", "1")
    card = Path("model/README.md").read_text()
    evaluation = json.loads((digits / "metrics.jsonl").read_text().splitlines()[-1])
    (score,) = [s for s in evaluation["scores"] if (s["model"], s["client"], s["data"]) == ("personal", "1", "validation")]
    n, k = score["examples"], round(score["accuracy"] * score["examples"])
    interval = binomtest(k, n).proportion_ci(0.95, "wilson")
    line = f"{n} | {100 * k / n:.1f} | {100 * interval.low:.1f} to {100 * interval.high:.1f} |"
    assert line in card
    assert "| global |" not in card
    assert "alpha = 0.4" in card
    assert "\nNone. " in card.partition("## Differential privacy")[2]
    assert "of client 0" not in card  # the scores of other clients are none of this client's card
    assert "of client 2" not in card


@pytest.mark.parametrize(("nets", "covers"), [("both", True), ("meme", False)])
def test_the_card_states_epsilon_and_what_it_covers(small, cli, nets, covers, without_onnx):
    privacy = ["--set", f"privacy.nets={nets}", "--set", "privacy.sigma=1.0", "--set", "algorithm.beta=1"]
    cli.run("run", small, "--set", "rounds=1", *privacy, "--out", "r")
    summary = json.loads(Path("r/summary.json").read_text())
    summary["privacy"]["clients"]["0"]["epsilon"] = 98.7  # more than that of client 1, whose model learned from what it sent
    Path("r/summary.json").write_text(json.dumps(summary))
    cli("export", "r", "--to", "model", "--client", "1")
    stated = Path("model/README.md").read_text().partition("## Differential privacy")[2].partition("##")[0]
    assert "Epsilon 98.7 at delta" in stated
    assert ("does not cover this model" not in stated) == covers


def test_names_of_a_folder_cannot_write_markup_into_the_card(digits, cli, without_onnx):
    environment = json.loads((digits / "environment.json").read_text())
    for client in environment["clients"].values():
        client["classes"][0] = "<img src=x>\n# Safe for all uses | [here](http://x)"
    (digits / "environment.json").write_text(json.dumps(environment))
    cli.run("export", digits, "--to", "model")
    card = Path("model/README.md").read_text()
    assert "<img" not in card
    assert "\n# Safe" not in card
    assert re.search(r"(?<!\\)\]\(http", card) is None


def test_an_export_overwrites_nothing_and_leaves_nothing_half_written(digits, cli, monkeypatch, tmp_path, without_onnx):
    (tmp_path / "model").mkdir()
    assert "model: exists already" in cli.fail("export", digits, "--to", "model")
    assert list((tmp_path / "model").iterdir()) == []
    before = sorted(p.name for p in tmp_path.iterdir())
    monkeypatch.setattr("fedmutual.studies.export.write_model_card", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    assert "other: cannot be written (full)" in cli.fail("export", digits, "--to", "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_program_that_the_disk_has_no_room_for_is_left_out_with_the_reason(digits, cli, without_onnx):
    """torch itself would end the process when it cannot write to a path."""
    resource = pytest.importorskip("resource")  # not on Windows
    cli("export", digits, "--to", "first")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (Path("first/weights.safetensors").stat().st_size, before[1]))
    try:
        out, _ = cli.run("export", digits, "--to", "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert re.search(r"left out: model\.pt2 and model\.onnx: .*model\.pt2: cannot be written \(File too large\)", out)
    assert {p.name for p in Path("model").iterdir()} == {"README.md", "model.json", "weights.safetensors"}


def test_without_the_extra_onnx_is_left_out_and_the_rest_is_there(digits, cli, without_onnx):
    out, _ = cli.run("export", digits, "--to", "model")
    assert "left out: model.onnx: ONNX needs the package 'onnx': pip install \"fedmutual[onnx]\"" in out
    files = {"README.md", "model.json", "model.pt2", "weights.safetensors"}
    assert {p.name for p in (digits.parent / "model").iterdir()} == files
    assert "model.onnx: ONNX needs" in Path("model/README.md").read_text().replace("\\", "")


BRANCHING = """
import torch
from torch import nn

class Branching(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x):
        x = x.flatten(1)
        return self.layer(x) if float(x.sum()) > 0 else self.layer(-x)
"""


def test_a_network_that_cannot_be_traced_leaves_weights_and_the_reason(small, cli):
    (small.parent / "branching.py").write_text(BRANCHING)
    cli.run("run", small, "--set", "rounds=1", "--set", "model.shared=branching:Branching", "--out", "r")
    out, _ = cli.run("export", "r", "--to", "model")
    assert "left out: model.pt2 and model.onnx: torch.export cannot trace the network" in out
    assert sorted(p.name for p in (small.parent / "model").iterdir()) == ["README.md", "model.json", "weights.safetensors"]
