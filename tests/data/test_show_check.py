import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedmutual import data
from fedmutual.errors import DataError
from own_data import config, everything, folder, image, npz

SHARDS = {"kind": "shards", "clients": 5, "classes_per_client": 2}


def drawn(width: int, **tables: Any) -> list[list[str]]:
    """The words of each line, as a terminal of this width shows them."""
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(data.draw(data.load(config(**tables))))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    return [line.split() for line in lines if line.strip()]


def test_classes_across_the_page() -> None:
    lines = drawn(200, partition=SHARDS, split={"holdout": 0.1})
    assert lines[0] == ["client", "train", "valid", "hold", *"0123456789"]
    federation = data.load(config(partition=SHARDS, split={"holdout": 0.1}))
    most = max(max(c["counts"]["private"]) for c in federation.partition["clients"].values())
    for id, line in zip("01234", lines[2:], strict=False):
        held = federation.partition["clients"][id]["counts"]["private"]
        assert line[:4] == [
            id,
            *(str(sum(federation.partition["clients"][id]["counts"][k])) for k in ("private", "validation", "holdout")),
        ]
        assert [cell.strip("▁▂▃▄▅▆▇█") for cell in line[4:]] == [str(n) if n else "·" for n in held]
        assert all("█" in cell for cell, n in zip(line[4:], held, strict=True) if n == most)
    assert lines[7][:3] == ["test", "set", "359"]
    assert "fingerprint " + federation.partition["fingerprint"][:12] in " ".join(lines[8])


def test_public_and_test_rows() -> None:
    split = {"private": 0.6, "public": 0.2, "validation": 0.1, "test": 0.1}
    lines = drawn(200, partition={"clients": 2}, split=split)
    assert lines[0] == ["client", "train", "public", "valid", "test", *"0123456789"]
    counts = data.load(config(partition={"clients": 2}, split=split)).partition["clients"]["0"]["counts"]
    assert lines[2][:5] == ["0", *(str(sum(counts[kind])) for kind in ("private", "public", "validation", "test"))]
    output = problems(partition={"clients": 20}, split=split)
    assert "fewer than 30 public examples" in output
    assert "fewer than 30 test examples; one example of 9 is 11 % of a score" in output


def test_many_clients_and_classes_as_bars(tmp_path: Path) -> None:
    x = np.arange(4000, dtype=np.float32)[:, None]
    about = npz(tmp_path / "a.npz", x=x, y=np.arange(4000) % 60)
    assert drawn(50, partition=SHARDS)[0][3:] == ["10", "classes,", "a", "bar", "each"]
    lines = drawn(80, data=about, partition={"clients": 12})
    assert lines[0][:3] == ["client", "train", "valid"]
    assert " ".join(lines[0][3:]) == "60 classes, a bar each"
    assert "".join(word for line in lines[2:4] for word in line[3:] or line).count("▁") < 60


def test_bars_are_scaled_by_the_shown_classes(tmp_path: Path) -> None:
    x, y = (
        np.arange(200, dtype=np.float32)[:, None],
        np.array([["ill", "well"][k % 2] if k < 40 else "" for k in range(200)]),
    )
    about = npz(tmp_path / "a.npz", x=x, y=y) | {"unlabelled": True}
    lines = drawn(200, data=about, partition={"clients": 1}, split={"test": 0.2, "validation": 0.2})
    assert any("█" in cell for cell in lines[2])  # although most rows have no label
    numbers = npz(tmp_path / "b.npz", x=x, y=x[:, 0])
    lines = drawn(12, data=numbers, partition={"clients": 1}, training={"task": "regression", "batch_size": 2})
    assert not any("bar" in line for line in lines)


def test_a_bar_tells_how_many() -> None:
    from fedmutual.data.show import make_bar

    assert [make_bar(n, 80) for n in (0, 1, 10, 11, 40, 79, 80)] == ["·", "▁", "▁", "▂", "▄", "█", "█"]


def problems(**tables: Any) -> str:
    return "\n".join(data.find_problems(config(**tables)))


def test_data_check_reports_nothing_for_digits() -> None:
    assert data.find_problems(config(partition={"clients": 5})) == []


def test_clients_and_classes() -> None:
    output = problems(partition=SHARDS)
    assert "client '0' has training examples of 2 of 10 classes: only '0', '3'" in output
    output = problems(
        partition={"kind": "shards", "clients": 5, "classes_per_client": 6, "examples": 20}, split={"holdout": 0.2}
    )
    assert "clients '0', '1', '2', '3', '4' have fewer than 30 training examples" in output
    assert (
        "clients '0', '1', '2', '3', '4' have fewer than 30 hold-out examples; one example of 4 is 25 % of a score" in output
    )
    assert "client '0' has no training examples of 4 of 10 classes" in output
    output = problems(partition={"kind": "dirichlet", "clients": 12, "alpha": 0.1, "min_size": 5})
    assert "12 of 12 clients lack training examples of some class" in output
    assert "clients differ much in size" in output


def test_classes_of_very_different_size(tmp_path: Path) -> None:
    x = np.arange(200, dtype=np.float32)[:, None]
    y = np.where(np.arange(200) < 190, "common", "rare")
    output = problems(data=npz(tmp_path / "a.npz", x=x, y=y, x_test=x + 500, y_test=y))
    assert "classes are imbalanced: 'common' has 190 training examples and 'rare' has 10; read balanced accuracy" in output


@pytest.mark.parametrize(
    ("task", "y"),
    [
        ("survival", np.stack([np.arange(1, 61), np.arange(60) % 2], 1)),
        ("multilabel", np.stack([np.arange(60) % 2, np.arange(60) % 3 == 0], 1).astype(int)),
        ("segmentation", np.arange(60 * 16).reshape(60, 4, 4) % 2),
        ("regression", np.arange(60.0)),
    ],
)
@pytest.mark.parametrize("own", [False, True], ids=["one data set", "own data"])
def test_rows_without_a_class_are_not_counted_by_class(tmp_path: Path, task: str, y: Any, own: bool) -> None:
    x = np.random.default_rng(0).random((60, 4, 4) if task == "segmentation" else (60, 3)).astype("float32")
    file = npz(tmp_path / "a.npz", x=x, y=y)
    tables: dict[str, Any] = {"training": {"task": task, "batch_size": 2}}
    tables |= {"data": {"name": "npz"}, "partition": {}, "clients": {"a": {"data": file}}} if own else {"data": file}
    sentences = [*problems(**tables).splitlines(), *data.load(config(**tables)).notes]
    assert not [sentence for sentence in sentences if "class" in sentence]
    heading, _, first, *_ = drawn(100, **tables)
    assert heading == ["client", "train", "valid"]
    assert len(first) == 3


def test_labels_that_look_alike(tmp_path: Path) -> None:
    """The rarer are to be called as the most frequent is. What the user lists as classes is meant."""
    x = np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)
    y = np.array(
        ["sick", "well", "sick", "Sick", "sick ", "well", "lung  cancer", "Lung cancer", "sick", "lung  cancer"] * 40
    )
    about = npz(tmp_path / "a.npz", x=x, y=y)
    problem = (
        "classes 'Sick', 'sick' and 'sick ' look alike; if they are one, write "
        'data.labels = { Sick = "sick", "sick " = "sick" }'
    )
    with pytest.raises(DataError, match=re.escape(problem)):
        data.load(config(data=about))
    remarks = problems(data=about | {"labels": {"sick ": "sick"}})
    assert 'write data.labels = { "sick " = "sick", Sick = "sick" }' in remarks
    assert (
        "classes 'Lung cancer' and 'lung  cancer' look alike; if they are one, write "
        'data.labels = { "sick " = "sick", "Lung cancer" = "lung  cancer" }'
    ) in remarks
    assert any("look alike" in note for note in data.load(config(data=about | {"labels": {"sick ": "sick"}})).notes)
    merged = about | {"labels": {"Sick": "sick", "sick ": "sick", "Lung cancer": "lung  cancer"}}
    assert data.load(config(data=merged)).space.classes == ("lung  cancer", "sick", "well")
    assert "look alike" not in problems(data=merged)
    assert "look alike" not in problems(data=about | {"classes": sorted(set(y.tolist()))})


def test_examples_that_are_there_twice(tmp_path: Path) -> None:
    x = np.arange(80, dtype=np.float32)[:, None]
    y = np.arange(80) % 2
    about = npz(
        tmp_path / "a.npz",
        x=np.append(x, [[5.0]], 0),
        y=np.append(y, 0),
        x_test=x[20:23] + np.array([[100], [0], [0]]),
        y_test=y[20:23],
    )
    output = problems(data=about)
    assert "2 of 3 test examples equal a training example, for instance row 1 of 'x_test' in" in output
    assert "equals row 21 of 'x' in" in output
    assert "equal examples have different labels, for instance row 5 of 'x' in" in output or "row 80 of 'x' in" in output
    clean = problems(data=npz(tmp_path / "b.npz", x=x, y=y, x_test=x + 100, y_test=y))
    assert "equal" not in clean


def test_inputs_that_tell_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = "\n".join(f"{a:.4f},7,{b:.4f},{'x' if i % 2 else 'y'}" for i, (a, b) in enumerate(rng.normal(5, 2, (200, 2))))
    (tmp_path / "a.csv").write_text(f"age,site,dose,label\n{rows}\n")
    about = {"name": "csv", "root": str(tmp_path / "a.csv")}
    output = problems(data=about)
    assert "constant in all training examples, so without information: feature 'site'" in output
    line = next(s for s in output.splitlines() if s.startswith("the training examples suggest"))
    federation = data.load(config(data=about))
    training_rows = np.loadtxt(tmp_path / "a.csv", delimiter=",", skiprows=1, usecols=(0, 1, 2))[
        federation.pool_clients().private.index
    ]
    mean = ", ".join(f"{v:.4g}" for v in training_rows.mean(0))
    std = ", ".join(f"{v:.4g}" for v in (*training_rows.std(0)[:1], 1, *training_rows.std(0)[2:]))
    assert line == f"the training examples suggest data.mean = [{mean}] and data.std = [{std}]"
    scaled_source = about | {"mean": training_rows.mean(0).tolist(), "std": [1.0, 1.0, 1.0]}
    assert "suggest data.mean" not in problems(data=scaled_source)


def test_blank_images(tmp_path: Path) -> None:
    about = folder(tmp_path, {"cat": 4, "dog": 4}, mode="L")
    image(tmp_path / "dog" / "09.png", 9, mode="L")
    from PIL import Image

    Image.new("L", (5, 6), 7).save(tmp_path / "dog" / "09.png")
    assert f"1 image with a single value in all pixels: {tmp_path / 'dog' / '09.png'}" in problems(data=about)


@pytest.mark.parametrize("resident", [True, False])
def test_data_that_cannot_be_used(tmp_path: Path, resident: bool) -> None:
    x = np.arange(24, dtype=np.float32).reshape(12, 2)
    x[4, 1] = np.nan
    given = config(data=npz(tmp_path / "a.npz", x=x, y=[0, 1] * 6) | {"resident": resident})
    with pytest.raises(DataError, match=r"^row 4 of 'x' in .*a\.npz holds NaN or infinite values; fix or remove it$"):
        data.find_problems(given)


def test_examples_held_by_two_clients_are_reported(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    y = np.arange(40) % 2
    of = {"a": npz(tmp_path / "a.npz", x=x, y=y), "b": npz(tmp_path / "b.npz", x=x[:20] + 9, y=y[:20], x_test=x, y_test=y)}
    clients = {i: {"data": {"root": about["root"]}} for i, about in of.items()}
    tables = {"data": {"name": "npz"}, "partition": {}, "clients": clients, "split": {"preset": "v1"}}
    output = problems(**tables)
    shares = data.load(config(**tables)).clients
    both = np.isin(x[:, 0], everything(shares["a"].private)[0][:, 0].numpy()).sum()
    line = next(s for s in output.splitlines() if "that client 'b' is scored on" in s)
    assert line.startswith(f"{both} of the ")
    assert "equal a training example of client 'a', for instance row " in line
    assert "that client 'a' is scored on" not in output
    clients["b"]["data"] |= {"mean": [0.5, 0, 0], "std": [2.0, 1, 1]}  # rows are the same ones, however they are scaled
    assert line in problems(**tables).splitlines()
