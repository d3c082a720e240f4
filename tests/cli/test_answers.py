"""Models of every task answer: `predict`, the exported program and `score` agree with each other and with scikit-learn."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_diabetes, load_digits
from sklearn.metrics import f1_score, mean_absolute_error, roc_auc_score

import fedmutual
from fedmutual import data
from fedmutual.studies import score
from fedmutual.studies.trained_run import choose_model

pytestmark = pytest.mark.long

CONFIG = """
name = "answers"
rounds = 1
data = {data}
partition = {{ kind = "iid", clients = 2 }}
model = {{ shared = "{network}" }}
training = {{ task = "{task}", local_epochs = 1, batch_size = 8 }}
optimizer = {{ lr = 0.01 }}
engine = {{ device = "cpu" }}
"""


def train(cli, task, network, data):
    Path("a.toml").write_text(CONFIG.format(task=task, network=network, data=data))
    cli.run("run", "a.toml", "--out", "r")


def run_programs(x):
    """Return the answers of both exported programs for raw inputs x, after checking that they are equal."""
    about = json.loads(Path("model/model.json").read_text())
    answers = torch.export.load("model/model.pt2").module()(torch.from_numpy(x))
    (by_onnx,) = onnxruntime.InferenceSession("model/model.onnx").run([about["output"]["name"]], {"x": x})
    np.testing.assert_allclose(by_onnx, answers, atol=1e-5)
    return about, answers.numpy()


def print_json(cli, *arguments):
    out, _ = cli.run(*arguments, "--json")
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def few_resamples(monkeypatch):
    """Let `score` take fewer resamples, each of which costs 10 ms with several labels."""
    monkeypatch.setattr("fedmutual.results.estimate.RESAMPLES", 40)


def test_numbers(in_tmp_path, cli):
    table = load_diabetes(as_frame=True)
    frame = (table.data * 20).assign(progress=table.target / 100)
    frame[:300].to_csv("old.csv", index=False)
    frame[300:340].sample(frac=1, axis=1, random_state=0).to_csv("new.csv", index=False)
    train(cli, "regression", "mlp", '{ name = "csv", root = "old.csv", label = "progress" }')
    predictions = fedmutual.predict("r", "new.csv", "1")
    answers = [p.numbers[0] for p in predictions]
    for name in ("label", "probability"):
        with pytest.raises(fedmutual.RunError, match=r"client '1'.*numbers"):
            getattr(predictions[0], name)
    assert [line["numbers"] for line in print_json(cli, "predict", "r", "new.csv", "--client", "1")] == [
        [a] for a in answers
    ]
    cli.run("export", "r", "--client", "1", "--to", "model")
    x = frame[300:340][list(table.data)].to_numpy(np.float32)
    about, by_program = run_programs(x)
    np.testing.assert_allclose(by_program[:, 0], answers, rtol=1e-5)
    assert about["output"] == {"name": "numbers", "dtype": "float32", "kind": "numbers", "classes": []}
    in_memory = fedmutual.Run("r").predict(frame[300:340][list(table.data)[::-1]], "1")
    np.testing.assert_allclose(in_memory["progress"], answers)
    (score,) = print_json(cli, "score", "r", "new.csv", "--client", "1")
    errors = np.abs(frame["progress"][300:340] - answers)
    assert score["mean_absolute_error"] == pytest.approx(mean_absolute_error(frame["progress"][300:340], answers), rel=1e-5)
    half = 1.96 * errors.std() / len(errors) ** 0.5  # of the mean of 40 errors: a bootstrap interval is near the normal one
    assert score["mean_absolute_error_interval"] == pytest.approx([errors.mean() - half, errors.mean() + half], rel=0.05)
    card = Path("model/README.md").read_text()
    assert "It predicts a number: progress." in card
    assert "accura" not in card
    assert "Student's t over" not in card  # the table has no line over clients
    assert "mean absolute error, 40 examples" in cli("score", "r", "new.csv", "--client", "1")[1]


def test_several_labels(in_tmp_path, cli, few_resamples):
    images, digits = load_digits(return_X_y=True)
    y, names = np.stack([digits % 2 == 0, digits > 4], 1), ["even", "high"]
    images = images.astype("float32")
    np.savez("old.npz", x=images[:300], y=y[:300], classes=names)
    np.savez("new.npz", x=images[300:360], y=y[300:360])
    train(cli, "multilabel", "mlp", '{ name = "npz", root = "old.npz" }')
    cli.run("export", "r", "--to", "model")
    about, answers = run_programs(images[300:360])
    assert (about["output"]["kind"], about["output"]["classes"]) == ("labels", names)
    lines = print_json(cli, "predict", "r", "new.npz")
    np.testing.assert_allclose([[line["probabilities"][n] for n in names] for line in lines], answers, atol=1e-6)
    for line, p in zip(lines, answers, strict=True):
        assert set(line["labels"]) == {name for name, probability in zip(names, p, strict=True) if probability >= 0.5}
    (score,) = print_json(cli, "score", "r", "new.npz")
    assert score["auroc"] == pytest.approx(roc_auc_score(y[300:360], answers))
    assert score["f1"] == pytest.approx(f1_score(y[300:360], answers > 0.5, average="macro", zero_division=0))
    assert list(score["label_auroc"]) == names
    low, high = score["auroc_interval"]
    assert low < score["auroc"] < high
    assert list(fedmutual.Run("r").predict(images[300:360])) == names


def test_several_label_columns_of_a_table(in_tmp_path, cli, few_resamples):
    x, digits = load_digits(return_X_y=True, as_frame=True)
    labels = {"even": digits % 2 == 0, "high": (digits > 4).astype(int)}
    frame = x.assign(**labels)
    frame[:300].to_csv("old.csv", index=False)
    frame[300:360].sample(frac=1, axis=1, random_state=0).to_csv("new.csv", index=False)
    train(cli, "multilabel", "mlp", '{ name = "csv", root = "old.csv", label = ["even", "high"] }')
    (score,) = print_json(cli, "score", "r", "new.csv")
    answers = fedmutual.Run("r").predict(x[300:360])
    assert list(answers) == ["even", "high"]
    assert score["auroc"] == pytest.approx(roc_auc_score(np.stack([*labels.values()], 1)[300:360], answers))
    assert [line["probabilities"]["high"] for line in print_json(cli, "predict", "r", "new.csv")] == pytest.approx(
        list(answers["high"])
    )
    frame.drop(columns="high")[:9].to_csv("new.csv", index=False)
    assert "there is no column 'high', which has the labels" in cli.fail("score", "r", "new.csv")


def test_masks(in_tmp_path, cli):
    images = (load_digits().images[:120] / 16).astype("float32")
    masks = (images > 0.4).astype("int64")
    np.savez("old.npz", x=images[:90], y=masks[:90], classes=["paper", "ink"])
    np.savez("new.npz", x=images[90:], y=masks[90:])
    train(cli, "segmentation", "unet", '{ name = "npz", root = "old.npz" }')
    cli.run("export", "r", "--client", "0", "--to", "model")
    about, answers = run_programs(images[90:, None])
    assert (about["output"]["kind"], answers.shape) == ("masks", (30, 2, 8, 8))
    predictions = fedmutual.predict("r", "new.npz", "0")
    assert [p.mask for p in predictions] == [tuple(map(tuple, m)) for m in answers.argmax(1).tolist()]
    line = print_json(cli, "predict", "r", "new.npz", "--client", "0")[3]
    assert line["mask"] == answers[3].argmax(0).tolist()
    assert line["pixels"]["ink"] == pytest.approx(answers[3].argmax(0).mean())
    (score,) = print_json(cli, "score", "r", "new.npz", "--client", "0")
    by_class = f1_score(masks[90:].ravel(), answers.argmax(1).ravel(), average=None, labels=[0, 1])
    assert list(score["class_dice"].values()) == pytest.approx(by_class)
    assert "Dice, 30 examples" in cli("score", "r", "new.npz", "--client", "0")[1]
    table = fedmutual.Run("r").predict(images[90:, None], "0")
    assert np.stack([np.stack(table[name]) for name in ("paper", "ink")], 1) == pytest.approx(answers, abs=1e-5)


@pytest.mark.parametrize(
    ("values", "renames", "declared"),
    [
        ([0, 1], '{ 0 = "paper" }', {}),
        ([0, 1], '{ 0 = "paper", 1 = "ink" }', {}),
        ([0, 255], '{ 0 = "paper", 255 = "ink" }', {}),
        ([-1, 1], '{ 1 = "ink" }', {}),
        ([0, 255], '{ 255 = "ink" }', {"classes": ["paper", "ink"]}),
        ([0, 255], '{ 0 = "paper", 255 = "ink" }', {"classes": ["paper", "ink"]}),
    ],
)
def test_values_of_masks_are_scored_under_the_names_that_they_were_learned_under(in_tmp_path, values, renames, declared):
    images = (load_digits().images[:40] / 16).astype("float32")
    np.savez("old.npz", x=images, y=np.array(values)[(images > 0.4).astype(int)], **declared)
    about = f'{{ name = "npz", root = "old.npz", labels = {renames} }}'
    Path("a.toml").write_text(CONFIG.format(task="segmentation", network="unet", data=about))
    fedmutual.run(fedmutual.load_config("a.toml"), "r")
    answering = choose_model(Path("r"), "0")
    learned = data.prepare(fedmutual.load_config("a.toml"))[""]
    assert answering.takes.classes == learned.space.classes
    source = score._read_labelled(Path("old.npz"), None, answering, None)
    assert score._read_targets(source, answering).tolist() == learned.targets.tolist()
    if not declared:
        np.savez("new.npz", x=images[:1], y=np.full((1, 8, 8), 5))
        with pytest.raises(fedmutual.UserError, match="its mask holds 5, which is no class"):
            fedmutual.Run("r").score("new.npz", "0")


@pytest.mark.parametrize(
    ("y", "sentence"),
    [
        (np.full(10, 3.5), "targets have the shape"),
        (np.full((10, 8, 8), 2), "its mask holds 2, which is no class"),
        (np.zeros((10, 4, 4), int), "masks are [4, 4] and images [8, 8]"),
    ],
)
def test_labelled_files_with_other_targets_are_refused(in_tmp_path, cli, y, sentence):
    images = np.zeros((10, 8, 8), "float32")
    np.savez("old.npz", x=images, y=np.ones((10, 8, 8), int))
    np.savez("new.npz", x=images, y=y)
    train(cli, "segmentation", "unet", '{ name = "npz", root = "old.npz", classes = ["paper", "ink"] }')
    err = cli.fail("score", "r", "new.npz")
    assert sentence in err
    assert err.count("\n") == 1


def test_a_table_without_the_column_of_numbers_is_refused(in_tmp_path, cli):
    frame = pd.DataFrame({"a": [1.0, 2.0] * 10, "b": [3.0, 4.0] * 10, "y": [0.5, 1.5] * 10})
    frame.to_csv("old.csv", index=False)
    frame.assign(y="high").to_csv("new.csv", index=False)
    train(cli, "regression", "mlp", '{ name = "csv", root = "old.csv", label = "y" }')
    assert "'high' is not a finite number" in cli.fail("score", "r", "new.csv")


@pytest.mark.parametrize("name", ["os:abort", "hostile:Task"])
def test_a_task_that_a_hostile_folder_names_is_not_imported(in_tmp_path, cli, name):
    np.savez("old.npz", x=np.zeros((20, 2), "float32"), y=np.arange(20.0))
    train(cli, "regression", "mlp", '{ name = "npz", root = "old.npz" }')
    Path("hostile.py").write_text('open("taken", "w").close()\nclass Task: pass\n')
    about = Path("r/environment.json")
    about.write_text(about.read_text().replace('"task": "regression"', f'"task": "{name}"'))
    for command in (("predict", "r", "old.npz"), ("score", "r", "old.npz"), ("export", "r", "--to", "model")):
        assert "look at that code" in cli.fail(*command)
    assert not Path("taken").exists()
