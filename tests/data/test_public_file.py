"""A public seed set from a file that all participants have: with and without labels, and what does not fit."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import fedmutual

pytestmark = [pytest.mark.run, pytest.mark.filterwarnings("ignore")]

CONFIG = """
name = "p"
rounds = 1
data = {{ name = "npz", root = "own.npz" }}
partition = {{ kind = "iid", clients = 3 }}
split = {{ public_file = "{file}" }}
algorithm = {{ {settings}name = "{name}" }}
model = {{ shared = "mlp" }}
training = {{ {training} batch_size = 16 }}
"""
UNLABELLED = 'labels = false, confidence = false, local_data = "private", public_batch = 8'


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = load_digits(return_X_y=True)
    np.savez("own.npz", x=x[:300].astype(np.float32), y=y[:300])
    np.savez("labelled.npz", x=x[300:400].astype(np.float32), y=y[300:400])
    np.savez("other.npz", x=x[400:500].astype(np.float32), y=y[400:500])
    np.savez("unlabelled.npz", x=x[300:400].astype(np.float32))
    np.savez("wide.npz", x=x[300:400, :60].astype(np.float32), y=y[300:400])
    np.savez("few.npz", x=x[300:305].astype(np.float32), y=y[300:305])


def load(file: str, name: str, settings: str = "public_batch = 8", more: str = "") -> fedmutual.Config:
    training = "local_steps = 2," if name == "fedh2l" else "local_epochs = 1,"
    Path("p.toml").write_text(
        CONFIG.format(file=file, name=name, settings=settings and f"{settings}, ", training=training) + more
    )
    return fedmutual.load_config("p.toml")


@pytest.mark.parametrize(
    ("file", "name", "settings"),
    [
        ("labelled.npz", "fedmd", "public_batch = 8, transfer_epochs = 1"),
        ("labelled.npz", "fedh2l", "public_batch = 8"),
        ("unlabelled.npz", "fedh2l", UNLABELLED),
        ("unlabelled.npz", "fedmd", "public_batch = 8, labels = false"),
        ("labelled.npz", "feddf", "distill_steps = 2"),
        ("unlabelled.npz", "feddf", "distill_steps = 2"),
        ("labelled.npz", "aggregate", ""),
    ],
)
def test_methods_learn_from_a_public_file(files: None, file: str, name: str, settings: str) -> None:
    run = fedmutual.run(load(file, name, settings), "r")
    assert run.finished
    assert run.summary["bytes"]["seed"] == 0  # nobody sends what all have


@pytest.mark.parametrize(
    ("name", "settings"), [("feddf", "distill_steps = 2"), ("fedmd", "public_batch = 8, labels = false")]
)
def test_labels_of_the_file_do_not_change_what_needs_none(files: None, name: str, settings: str) -> None:
    runs = [fedmutual.run(load(f"{file}.npz", name, settings), file) for file in ("labelled", "unlabelled")]
    first, second = ((run.global_model() if name == "feddf" else run.personal_model("0")).state_dict() for run in runs)
    assert all((first[k] == second[k]).all() for k in first)


@pytest.mark.parametrize(
    ("file", "name", "settings", "sentence"),
    [
        ("unlabelled.npz", "fedmd", "public_batch = 8", "algorithm 'fedmd' learns from labels of public data"),
        ("unlabelled.npz", "fedh2l", "public_batch = 8, labels = false", "algorithm.confidence = false"),
        ("wide.npz", "fedmd", "public_batch = 8", r"wide.npz: its examples have the shape \[60\]"),
        ("few.npz", "fedmd", "public_batch = 2", "the public set has no example of class '.'"),
        ("missing.npz", "fedmd", "public_batch = 8", "missing.npz"),
        ("own.csv", "fedmd", "public_batch = 8", "is no public data for these clients .*; give an npz file"),
    ],
)
def test_a_file_that_does_not_fit(files: None, file: str, name: str, settings: str, sentence: str) -> None:
    with pytest.raises(fedmutual.UserError, match=sentence):
        fedmutual.run(load(file, name, settings), "r")


def test_a_resume_needs_the_same_file_and_one_source_is_enough(files: None) -> None:
    config = load("labelled.npz", "feddf", "distill_steps = 2")
    fedmutual.run(config, "r")
    Path("other.npz").replace("labelled.npz")
    with pytest.raises(fedmutual.UserError, match="its checkpoint belongs to another run"):
        fedmutual.run(fedmutual.load_config("p.toml", rounds=2), "r", resume=True)
    with pytest.raises(fedmutual.UserError, match=r"'split.public' and 'split.public_file' exclude each other"):
        fedmutual.run(fedmutual.load_config("p.toml", **{"split.public": 0.1}), "q")


@pytest.mark.parametrize("has_labels", [True, False])
def test_the_public_file_may_be_a_folder_of_datasets(files: None, has_labels: bool) -> None:
    saved = pytest.importorskip("datasets")
    x, y = load_digits(return_X_y=True)
    saved.Dataset.from_dict({"x": x[:120].tolist(), "label": y[:120]}).save_to_disk("own")
    rows = {"x": x[300:360].tolist()} | ({"label": y[300:360]} if has_labels else {})
    saved.Dataset.from_dict(rows).save_to_disk("public")
    config = load("public", "feddf", "distill_steps = 2")
    about = config.data.model_copy(update={"name": "datasets", "root": Path("own")})
    run = fedmutual.run(config.model_copy(update={"data": about}), "r")
    assert run.finished
    split = config.split.model_copy(update={"public_file": Path("own.csv")})
    with pytest.raises(fedmutual.UserError, match="give an npz file or a folder that datasets saved"):
        fedmutual.run(config.model_copy(update={"data": about, "split": split}), "q")
