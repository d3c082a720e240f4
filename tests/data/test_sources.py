from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmutual import data
from own_data import config, everything, folder, image, npz

HALF = {"test": 0.5}


def values(federation: data.Federation) -> dict[str, list[float]]:
    """First value of each example, by share."""
    shares = {"test": federation.test} | {i: s.private for i, s in federation.clients.items()}
    return {name: sorted(everything(rows)[0].flatten(1)[:, 0].tolist()) for name, rows in shares.items()}


def test_digits_as_scikit_learn_has_them() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    federation = data.load(config(data={"name": "digits"}, partition={"clients": 1}))
    assert federation.space.shape == (1, 8, 8)
    assert federation.space.classes == tuple("0123456789")
    rows = federation.clients["0"].private
    x, y = everything(rows)
    assert np.array_equal(y.numpy(), digits.target[rows.index])
    assert torch.allclose(x[:, 0].double() * 0.3760 + 0.3053, torch.from_numpy(digits.images[rows.index] / 16), atol=1e-6)
    assert (digits.images / 16).mean() == pytest.approx(0.3053, abs=5e-5)  # the constants it is scaled with
    assert (digits.images / 16).std() == pytest.approx(0.3760, abs=5e-5)


LAYOUTS = {(6, 4, 5): (1, 4, 5), (6, 1, 4, 5): (1, 4, 5), (6, 4, 5, 3): (3, 4, 5), (6, 3, 4, 5): (3, 4, 5), (6, 7): (7,)}


@pytest.mark.parametrize(("layout", "shape"), LAYOUTS.items())
def test_arrays_of_any_layout(tmp_path: Path, layout: tuple[int, ...], shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).integers(0, 256, layout).astype(np.uint8)
    federation = data.load(config(data=npz(tmp_path / "a.npz", x=x, y=np.array([0, 1] * 3)), split=HALF))
    assert federation.space.shape == shape
    first, _ = everything(federation.test)
    expected_rows = torch.from_numpy(x[federation.test.index]).float()
    if layout == (6, 4, 5, 3):
        expected_rows = expected_rows.permute(0, 3, 1, 2)
    assert torch.allclose(first.flatten(1), expected_rows.flatten(1) / (1 if layout == (6, 7) else 255))


def test_arrays_with_test_rows(tmp_path: Path) -> None:
    x = np.arange(8, dtype=np.float32)[:, None]
    y = np.array([0, 1] * 4)
    one = npz(tmp_path / "one.npz", x=x, y=y, x_test=x[:4] + 100, y_test=y[:4])
    two = npz(tmp_path / "two.npz", x=x, y=y) | {"test": str(tmp_path / "t.npz")}
    npz(tmp_path / "t.npz", x=x[:4] + 100, y=y[:4])
    for about in (one, two):
        federation = data.load(config(data=about))
        assert values(federation)["test"] == [100, 101, 102, 103]
        assert len(federation.test) == 4


def test_a_table(tmp_path: Path) -> None:
    rows = [f"{i},{'yes' if i % 2 else ' no'},p{i // 2},{i * 10},north" for i in range(12)]
    (tmp_path / "a.csv").write_text("\n".join(["age,ill,patient,score,domain", *rows]))
    about = {"name": "csv", "root": str(tmp_path / "a.csv"), "label": "ill", "group_by": "patient"}
    federation = data.load(config(data=about, split=HALF))
    assert federation.space.columns == ("age", "score")
    assert federation.space.shape == (2,)
    assert federation.space.classes == ("no", "yes")
    x, y = everything(federation.test)
    assert torch.equal(x[:, 1], x[:, 0] * 10)
    assert torch.equal(y, (x[:, 0] % 2).long())
    assert {int(v) // 2 for v in x[:, 0]}.isdisjoint(
        {int(v) // 2 for v in everything(federation.pool_clients().private)[0][:, 0]}
    )


def test_a_table_with_a_test_file_in_another_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,label\n1,10,0\n2,20,1\n3,30,0\n4,40,1\n")
    (tmp_path / "t.csv").write_text("label,b,a\n0,50,5\n1,60,6\n")
    about = {
        "name": "csv",
        "root": str(tmp_path / "a.csv"),
        "test": str(tmp_path / "t.csv"),
        "mean": [1, 10],
        "std": [2, 10],
    }
    federation = data.load(config(data=about, partition={"clients": 1}))
    assert everything(federation.test)[0].tolist() == [[2.0, 4.0], [2.5, 5.0]]  # (5 - 1) / 2, (50 - 10) / 10


def test_folders_of_images(tmp_path: Path) -> None:
    about = folder(tmp_path, {"cat": 6, "dog": 6})
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    federation = data.load(config(data=about, split=HALF))
    assert federation.space.shape == (3, 6, 5)
    assert federation.space.classes == ("cat", "dog")
    x, y = everything(federation.test)
    assert torch.equal(y, (x[:, 0, 1, 1] * 255 >= 40).long())  # cats have the values 0 to 5, dogs 40 to 45
    assert (x[:, :, 0, 0] == 1).all()
    assert torch.allclose(x[:, 2, 1, 1], 1 - x[:, 0, 1, 1])  # red, green, blue in this order


def test_folders_of_training_and_test_images_of_domains(tmp_path: Path) -> None:
    for domain in ("photo", "sketch"):
        folder(tmp_path / "train" / domain, {"cat": 2, "dog": 2}, mode="L")
        folder(tmp_path / "test" / domain, {"cat": 1, "dog": 1}, mode="L")
    about = {"name": "folder", "root": str(tmp_path), "size": [4, 4]}
    federation = data.load(config(data=about, partition={"kind": "domains"}))
    assert list(federation.clients) == ["photo", "sketch"]
    assert federation.space.shape == (1, 4, 4)
    assert [len(s.validation) for s in federation.clients.values()] == [2, 2]
    assert len(federation.test) == 4
    assert any(note.startswith("images are read as gray") for note in federation.notes)


def test_groups_of_images(tmp_path: Path) -> None:
    about = folder(tmp_path, {"cat": 8, "dog": 8})
    lines = [f"{c}/{i:02}.png,p{i % 4}" for c in ("cat", "dog") for i in range(8)]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,patient", *lines]))
    federation = data.load(config(data=about | {"group_by": "patient"}, split=HALF, partition={"clients": 1}))
    groups = [{int(i) % 4 for i in rows.index} for rows in (federation.test, federation.clients["0"].private)]
    assert len(groups[0]) == len(groups[1]) == 2
    assert groups[0].isdisjoint(groups[1])


SOURCES = {
    "a Dataset": "def make(): return TensorDataset(torch.arange(12.)[:, None], torch.tensor([0, 1] * 6))",
    "a pair": """
        def make():
            whole = TensorDataset(torch.arange(12.)[:, None], torch.tensor([0, 1] * 6))
            return Subset(whole, range(6)), Subset(whole, range(6, 12))
        """,
    "arrays": "def make(): return torch.arange(12.)[:, None], [0, 1] * 6",
    "named arrays": "def make(): return {'x': np.arange(12.)[:, None], 'y': np.array(['a', 'b'] * 6)}",
    "items": """
        class make(Dataset):
            classes = ["a", "b"]
            def __init__(self, root): self.root = root
            def __len__(self): return 12
            def __getitem__(self, i): return np.array([i], dtype=np.float32), i % 2
        """,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_ones_own_code(kind: str, module: Callable[[str], str]) -> None:
    name = f"{module(SOURCES[kind])}:make"
    federation = data.load(config(data={"name": name, "root": "somewhere"}, split=HALF, partition={"clients": 1}))
    assert federation.space.classes in (("0", "1"), ("a", "b"))
    user_values = values(federation)
    assert sorted(user_values["test"] + user_values["0"]) == list(range(12))
    if kind == "a pair":
        assert user_values["test"] == list(range(6, 12))
    x, y = everything(federation.test)
    assert torch.equal(y, x[:, 0].long() % 2)


def test_a_dataset_of_pictures_with_groups(module: Callable[[str], str], tmp_path: Path) -> None:
    for i in range(8):
        image(tmp_path / "images" / f"{i}.png", i)
    name = module("""
        from torchvision.datasets import ImageFolder
        class make(Dataset):
            patient = [f"p{i // 2}" for i in range(8)]
            targets = torch.tensor([0, 1] * 4)
            def __len__(self): return 8
            def __getitem__(self, i):
                from PIL import Image
                return Image.open(f"images/{i}.png").convert("RGB"), i % 2
        """)
    federation = data.load(
        config(data={"name": f"{name}:make", "group_by": "patient"}, split=HALF, partition={"clients": 1})
    )
    assert federation.space.shape == (3, 6, 5)
    x, y = everything(federation.test)
    assert torch.equal((x[:, 0, 1, 1] * 255).round().long() % 2, y)


def test_declared_numeric_targets_may_be_more_exact_than_the_items(module: Callable[[str], str]) -> None:
    name = module("""
        class make(Dataset):
            targets = np.linspace(0, 1, 12) / 3
            def __len__(self): return 12
            def __getitem__(self, i): return torch.tensor([float(i)]), torch.tensor(self.targets[i], dtype=torch.float32)
        """)
    about = {"data": {"name": f"{name}:make"}, "training": {"task": "regression"}, "partition": {"clients": 1}}
    assert len(data.load(config(**about, split=HALF)).pool_clients().private) > 0


CHANGING = """
    class make(Dataset):
        targets = [0, 1] * 6
        def __len__(self): return 12
        def __getitem__(self, i): return torch.rand(3), i % 2
    """


@pytest.mark.parametrize(("source", "is_told"), [(CHANGING, True), (SOURCES["items"], False)])
def test_items_that_change_between_readings_are_remarked(source: str, is_told: bool, module: Callable[[str], str]) -> None:
    name = f"{module(source)}:make"
    federation = data.load(config(data={"name": name, "root": "x"}, split=HALF, partition={"clients": 1}))
    note = f"{name}: its items differ between two readings"
    assert any(n.startswith(note) for n in federation.notes) == is_told


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ("01 02", ("01", "02")),
        ("01 1", ("01", "1")),
        ("1_0 2_0", ("1_0", "2_0")),
        ("0 +1", ("0", "1")),
        ("7 10000000000000000000", ("7", "10000000000000000000")),
    ],
)
def test_labels_of_a_table_that_are_codes_are_names(tmp_path: Path, labels: str, classes: tuple[str, ...]) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,label\n" + "".join(f"{i},{labels.split()[i % 2]}\n" for i in range(12)))
    federation = data.load(config(data={"name": "csv", "root": str(path)}, split=HALF, partition={"clients": 1}))
    assert federation.space.classes == classes
