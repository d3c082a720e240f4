"""`score`: a model on a labelled file, by class name, with Wilson's interval."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import binomtest
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score

import fedmutual
from fedmutual.losses import Classification, Regression
from own_data import RUN, folder

pytestmark = pytest.mark.run


@pytest.fixture
def digits(small, cli):
    """The folder of a finished run on digits, with 40 labelled digits in forty.npz."""
    cli("run", small, "--set", "rounds=1", "--out", "r")
    digits = load_digits()
    np.savez("forty.npz", x=digits.images[:40].astype(np.uint8), y=digits.target[:40])
    return small.parent / "r"


@pytest.fixture
def table(tmp_path, in_tmp_path, cli):
    """The folder of a finished run on a table whose labels the run renames."""
    rng = np.random.default_rng(0)
    rows = [(rng.normal(k % 2, 0.2), rng.normal(), "sick" if k % 2 else "well") for k in range(60)]
    (tmp_path / "t.csv").write_text("pulse,age,state\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    data = '{ name = "csv", root = "t.csv", label = "state", labels = { sick = "ill" } }'
    (tmp_path / "t.toml").write_text(RUN.format(name="t", data=data))
    cli.run("run", "t.toml", "--out", "t")
    return tmp_path / "t"


@pytest.mark.parametrize("client", [None, "1"])
def test_scores_are_those_of_the_predictions(digits, cli, client):
    out, _ = cli.run("score", digits, "forty.npz", "--json", *([] if client is None else ["--client", client]))
    scores, targets = json.loads(out), load_digits().target[:40]
    predicted = [int(p.label) for p in fedmutual.predict(digits, ["forty.npz"], client)]
    hits = int((np.array(predicted) == targets).sum())
    interval = binomtest(hits, 40).proportion_ci(0.95, "wilson")
    assert scores["accuracy"] == pytest.approx(hits / 40)
    assert scores["accuracy_interval"] == pytest.approx([interval.low, interval.high])
    assert scores["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(targets, predicted))
    assert scores["model"].startswith("shared" if client is None else "personal model of client '1'")
    assert scores["examples"] == 40


@pytest.mark.parametrize("client", [None, "1"])
def test_rows_that_the_model_was_trained_on_are_counted(digits, cli, client):
    clients = json.loads((digits / "partition.json").read_text())["clients"]
    chosen = [clients[client]] if client else clients.values()
    expected = sum(row < 40 for c in chosen for row in c["private"]["rows"])
    out, err = cli.run("score", digits, "forty.npz", "--json", *(["--client", client] if client else []))
    assert json.loads(out)["training_rows"] == expected
    assert f"note: forty.npz: {expected} rows of 40 are in the training data" in err


def test_the_remark_on_trained_rows_is_a_warning_at_the_line_of_the_caller(digits):
    with pytest.warns(fedmutual.RemarkWarning, match="are in the training data") as caught:
        fedmutual.Run(digits).score("forty.npz")
    assert caught[0].filename == __file__


def test_rows_of_a_table_that_the_model_was_trained_on_are_counted(table, cli, tmp_path):
    new = "pulse,age,state\n0.123,0.5,sick\n0.456,0.5,well\n"
    for text, file, expected in (((tmp_path / "t.csv").read_text(), "again.csv", None), (new, "new.csv", 0)):
        (tmp_path / file).write_text(text)
        code, out, err = cli("score", table, file, "--json")
        training_rows = json.loads(out)["training_rows"]
        assert (code, "training data" in err) == (0, training_rows > 0)
        assert training_rows == expected if expected is not None else 0 < training_rows < 60
    (tmp_path / "t.csv").write_text(new * 10)
    _, out, err = cli("score", table, "again.csv", "--json")
    assert (json.loads(out)["training_rows"], err) == (None, "")


def test_labels_of_a_table_are_renamed_as_the_run_renames_them(table, cli, tmp_path):
    (tmp_path / "new.csv").write_text("age,state,name,pulse\n0,sick,Ann,1\n0,well,Bob,0\n0,ill,Cid,0\n")
    out, _ = cli.run("score", "t", "new.csv", "--json")
    scores = json.loads(out)
    predicted = np.array([p.label for p in fedmutual.predict("t", ["new.csv"])])
    assert scores["accuracy"] == pytest.approx((predicted == ["ill", "well", "ill"]).mean())
    assert set(scores["recall"]) == {"ill", "well"}


def test_a_folder_of_images_is_scored_by_its_class_folders(tmp_path, in_tmp_path, cli):
    folder(tmp_path / "images", {"cat": 12, "dog": 12, "owl": 12})
    folder(tmp_path / "new", {"dog": 3, "owl": 2}, size=(9, 9))
    given = '{ name = "folder", root = "images", size = [8, 9], mean = [0.4, 0.3, 0.6], std = [0.2, 0.1, 0.3] }'
    (tmp_path / "p.toml").write_text(RUN.format(name="p", data=given))
    (tmp_path / "images" / "cat" / "a.heic").touch()
    cli("run", "p.toml", "--out", "p")
    assert "1 file is not read: 1 .heic (cat/a.heic)" in (tmp_path / "p" / "log.txt").read_text()
    (tmp_path / "new" / "owl" / "b.nrrd").touch()
    out, err = cli.run("score", "p", "new", "--json")
    assert "1 .nrrd (owl/b.nrrd)" in " ".join(err.split())
    scores = json.loads(out)
    files = sorted((tmp_path / "new").rglob("*.png"))
    right = [p.label == f.parent.name for p, f in zip(fedmutual.predict("p", files), files, strict=True)]
    assert (scores["examples"], scores["accuracy"]) == (5, pytest.approx(np.mean(right)))
    assert scores["recall"]["cat"] is None
    assert "recall of owl" in cli("score", "p", "new")[1]


def test_numbers_count_the_classes_of_a_run_that_has_names(tmp_path, in_tmp_path, cli):
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    x = rng.normal(y[:, None], 0.3, (60, 4)).astype(np.float32)
    np.savez("d.npz", x=x, y=y, classes=np.array(["well", "ill"]))
    (tmp_path / "n.toml").write_text(RUN.format(name="n", data='{ name = "npz", root = "d.npz" }'))
    cli("run", "n.toml", "--out", "n")
    np.savez("new.npz", x=x[:10], y=y[:10])
    scores = json.loads(cli("score", "n", "new.npz", "--json")[1])
    net = fedmutual.Run("n").global_model()
    with torch.no_grad():
        assert scores["accuracy"] == pytest.approx((net(torch.from_numpy(x[:10])).argmax(1).numpy() == y[:10]).mean())
    np.savez("bad.npz", x=x[:2], y=np.array([0, 2]))
    err = cli.fail("score", "n", "bad.npz")
    assert err.count("\n") == 1
    assert "row 1 of 'x' in bad.npz: its label 2 is no class of the model" in err


def test_a_file_that_cannot_be_scored_is_refused_in_a_sentence(digits, table, cli, tmp_path):
    np.savez("x.npz", x=np.zeros((2, 8, 8)))
    (tmp_path / "n.csv").write_text("pulse,age\n1,2\n")
    (tmp_path / "c.csv").write_text("pulse,age,state\n1,2,dead\n")
    (tmp_path / "b.csv").write_text("pulse,age,state\n1,2,\n")
    for run, file, sentence in (
        (digits, "x.npz", "x.npz: there is no array 'y'"),
        (digits, "missing.npz", "missing.npz: there is no such file"),
        (digits, "n.csv", "n.csv: contains no labelled examples for this model"),
        ("t", "n.csv", "n.csv: there is no column 'state', which has the labels"),
        ("t", "c.csv", "its class 'dead' is none of the classes 'ill', 'well'"),
        ("t", "b.csv", "the label in line 2 is missing"),
        ("t", "x.npz", "x.npz: there is no array 'y'"),
    ):
        code, out, err = cli("score", run, file)
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert sentence in err
    with pytest.raises(fedmutual.UserError, match=r"^n\.csv: contains no labelled examples for this model; give it"):
        fedmutual.Run(digits).score("n.csv", label="age")


def test_groups_are_scored_beside_all_other_rows(table, cli, tmp_path):
    draw = np.random.default_rng(1)
    rows = [(draw.normal(k % 2, 0.6), draw.normal(), ("well", "sick")[k % 2], "abc"[k % 3]) for k in range(90)]
    (tmp_path / "new.csv").write_text("pulse,age,state,ward\n" + "".join(f"{a},{b},{c},{w}\n" for a, b, c, w in rows))
    out, _ = cli.run("score", table, "new.csv", "--by", "ward", "--json")
    scores, names = json.loads(out), {"well": "well", "sick": "ill"}
    predicted = fedmutual.predict(table, ["new.csv"])
    hits = np.array([p.label == names[c] for p, (*_, c, _) in zip(predicted, rows, strict=True)])
    wards = np.array([w for *_, w in rows])
    assert [*scores["groups"]] == ["a", "b", "c"]
    for ward, group in scores["groups"].items():
        own, others = hits[wards == ward], hits[wards != ward]
        wilson = binomtest(int(own.sum()), 30).proportion_ci(0.95, "wilson")
        assert (group["examples"], group["value"]) == (30, pytest.approx(own.mean(), abs=1e-9))
        assert group["interval"] == pytest.approx([wilson.low, wilson.high], abs=1e-9)
        assert group["difference"] == pytest.approx(own.mean() - others.mean(), abs=1e-9)
        assert group["difference_interval"][0] < group["difference"] < group["difference_interval"][1]
    shown, _ = cli.run("score", table, "new.csv", "--by", "ward")
    assert "minus others, points" in shown
    frame = pd.read_csv("new.csv")
    for rows_to_score, label in (("new.csv", None), (frame, "state")):
        again = fedmutual.Run(table).score(rows_to_score, label=label, by="ward").groups
        assert {name: [*one] for name, one in again.items()} == {
            name: [tuple(v) if isinstance(v, list) else v for v in one.values()] for name, one in scores["groups"].items()
        }
    assert "there is no column 'shift', which names the groups" in cli.fail("score", table, "new.csv", "--by", "shift")
    with pytest.raises(fedmutual.DataError, match="have no column 'shift'"):
        fedmutual.Run(table).score(frame, label="state", by="shift")


def test_kept_groups_of_test_rows_are_in_card_and_page(table, cli, tmp_path, monkeypatch):
    monkeypatch.setattr("fedmutual.studies.export.find_spec", lambda name: None)  # no ONNX, which takes a second
    lines = (tmp_path / "t.csv").read_text().splitlines()
    wards = ["ward", *("ab*"[k % 3] for k in range(60))]
    (tmp_path / "t.csv").write_text("".join(f"{line},{ward}\n" for line, ward in zip(lines, wards, strict=True)))
    text = (tmp_path / "t.toml").read_text().replace('label = "state"', 'label = "state", drop = ["ward"]')
    (tmp_path / "t.toml").write_text(text)
    cli.run("run", "t.toml", "--out", "w")
    scores = json.loads(cli.run("score", "w", "--client", "1", "--by", "ward", "--keep", "--json")[0])["groups"]
    cli.run("score", "w", "--by", "ward", "--keep")
    first, shared = json.loads((tmp_path / "w" / "subgroups.json").read_text())["models"]
    assert (first["client"], first["role"], first["by"], shared["client"]) == ("1", "personal", "ward", None)
    assert {name: list(group.values()) for name, group in scores.items()} == first["groups"]
    fedmutual.Run("w").export("model", "1")
    card, a = (tmp_path / "model" / "README.md").read_text(), scores["a"]
    assert f"| a | {a['examples']} | {100 * a['value']:.1f} | {100 * a['interval'][0]:.1f} to " in card
    assert "| \\* | " in card
    assert card.count("Test rows by ward") == 1, "the card of a client's model has no other model's groups"
    cli.run("report", "w")
    page = (tmp_path / "report.html").read_text()
    assert "Test rows by ward" in page
    assert "seed 0, personal model of 1, round 1" in page
    for words in (("--by", "ward", "t.csv"), ()):
        assert "--keep is for groups of the run's own test rows" in cli.fail("score", "w", *words, "--keep")


def test_groups_of_another_metric_have_intervals_by_the_bootstrap(small, cli, monkeypatch):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(90, 2)).astype("float32")
    np.savez("n.npz", x=x, y=(x @ [2.0, -1.0]).astype("float32"), ward=np.array(["a", "b"])[(x[:, 0] > 0).astype(int)])
    data = '{ name = "npz", root = "n.npz" }'
    (small.parent / "n.toml").write_text(RUN.format(name="n", data=data).replace("batch_size = 8", 'task = "regression"'))
    cli.run("run", "n.toml", "--out", "n")
    scores = json.loads(cli.run("score", "n", "n.npz", "--by", "ward", "--json")[0])
    a, b = (scores["groups"][i] for i in "ab")
    assert a["examples"] + b["examples"] == scores["examples"] == 90
    assert a["difference"] == pytest.approx(a["value"] - b["value"]) == -b["difference"]
    assert a["interval"][0] < a["value"] < a["interval"][1]
    assert a["difference_interval"] == [-end for end in reversed(b["difference_interval"])], "of one difference"
    scored = Regression.score
    monkeypatch.setattr(Regression, "score", lambda *values: {**scored(*values), "r2": [0.25]})
    assert json.loads(cli.run("score", "n", "n.npz", "--json")[0])["r2"] == 0.25, "one output has no name"
    assert "R2                                 0.25 " in cli.run("score", "n", "n.npz")[0]


def test_a_score_that_is_not_finite_is_null_in_json(digits, cli, monkeypatch):
    scores = {"examples": 40, "accuracy": float("nan"), "loss": float("inf")}
    monkeypatch.setattr(Classification, "score", lambda *_: scores)
    out, _ = cli.run("score", digits, "forty.npz", "--json")
    record = json.loads(out, parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert [record[name] for name in ("accuracy", "loss", "accuracy_interval")] == [None] * 3
