"""Which files of a folder are images of which class, and which files are reported as not read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmutual import data
from fedmutual.config import DataConfig
from fedmutual.data.examples import Source
from fedmutual.data.table import read_metadata
from own_data import config, folder, image, refused


def write(root: Path, *names: str) -> dict[str, Any]:
    """Write images, and files of four bytes whose endings are not those of images; return the table [data]."""
    for k, name in enumerate(names):
        if name.endswith((".png", ".jfif", ".JPG", ".gif")):
            image(root / name, k)
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(b"data")
    return {"name": "folder", "root": str(root)}


def read(about: Mapping[str, Any], **tables: Any) -> Source:
    return data.prepare(config(data=about, **tables))[""].source


def list_read(source: Source, root: Path) -> dict[str, str]:
    """Return file -> class of the training part."""
    return {str(Path(source.train.where(i)).relative_to(root)): str(label) for i, label in enumerate(source.train.labels)}


CLASSES = ("cat/0.png", "cat/1.png", "dog/0.png", "dog/1.png")


@pytest.mark.parametrize(
    ("more", "sentences"),
    [
        ([], []),
        (["dog/x.heic", "dog/y.HEIC", "cat/z.nrrd"], ["3 files are not read: 2 .heic (dog/x.heic), 1 .nrrd (cat/z.nrrd)"]),
        (["cat/scan", "cat/IM.0001"], ["2 files are not read: 2 without an ending (cat/IM.0001)"]),
        (["loose.png"], ["1 file is not read: 1 outside the folders of the classes (loose.png)"]),
        (["cat/Thumbs.db"], ["1 .db (cat/Thumbs.db)"]),
        (["cat/.DS_Store", ".git/a", "cat/._0.png", "__MACOSX/cat/._0.png"], ["4 hidden (.git/a)"]),
        (["metadata.csv"], ["1 file is not read: 1 .csv (metadata.csv)"]),
    ],
)
def test_files_that_are_not_read_are_counted_by_ending(
    tmp_path: Path, more: Sequence[str], sentences: Sequence[str]
) -> None:
    source = read(write(tmp_path, *CLASSES, *more))
    assert list_read(source, tmp_path) == {name: name[:3] for name in CLASSES}
    assert [note.startswith(f"{tmp_path}: ") for note in source.notes] == [True] * len(sentences)
    for sentence, note in zip(sentences, source.notes, strict=True):
        assert sentence in note


def test_images_in_folders_inside_a_class_and_of_all_endings_are_read(tmp_path: Path) -> None:
    names = (*CLASSES, "cat/patient7/0.png", "cat/patient7/left/1.JPG", "dog/2.jfif", "dog/3.gif")
    source = read(write(tmp_path, *names))
    assert list_read(source, tmp_path) == {name: name[:3] for name in names}
    (note,) = source.notes
    assert note.startswith(f"{tmp_path}: 2 images in folders inside the folders of the classes, for example cat/patient7/")
    (tmp_path / "dog" / "up").symlink_to(tmp_path, target_is_directory=True)  # no loop
    assert len(read({"name": "folder", "root": str(tmp_path)}).train.labels) == len(names)


def test_a_folder_beside_train_and_test_is_reported(tmp_path: Path) -> None:
    capital = write(tmp_path / "Capital", *(f"{part}/{name}" for part in ("Train", "Test") for name in CLASSES))
    assert (len(read(capital).train.labels), read(capital).notes) == (len(CLASSES), ())
    about = write(tmp_path / "all", *(f"{part}/{name}" for part in ("train", "test", "val") for name in CLASSES))
    (note,) = read(about).notes
    assert "4 files are not read: 4 outside the folders of the classes (val/cat/0.png)" in note
    elsewhere = write(tmp_path / "b", *CLASSES, "cat/a.nrrd") | {"root": str(tmp_path / "all" / "train")}
    (note,) = read(elsewhere | {"test": str(tmp_path / "b")}).notes
    assert note.startswith(f"{tmp_path / 'b'}: 1 file is not read: 1 .nrrd (cat/a.nrrd)")


@pytest.mark.parametrize("parts", [("train", "val"), ("Training", "Testing"), ("train", "valid")])
def test_a_training_and_a_test_folder_of_other_names(tmp_path: Path, parts: tuple[str, str]) -> None:
    about = write(tmp_path, *(f"{part}/{name}" for part in parts for name in CLASSES))
    first, second = (tmp_path / part for part in parts)
    refused(f"has the folders {parts[0]!r} and {parts[1]!r}", data=about)
    fixed = {"root": str(first), "test": str(second)}
    refused(f"set data.root = '{first}' and data.test = '{second}'", data=about | {"classes": ["cat", "dog"]})
    source = read(about | fixed)
    assert source.test is not None
    assert sorted(set(source.test.labels)) == ["cat", "dog"]


@pytest.mark.parametrize(
    "names",
    [
        ["photo/cat/0.png", "photo/dog/0.png", "sketch/cat/0.png", "sketch/dog/0.png"],
        ["cat/left/0.png", "cat/right/0.png", "dog/left/0.png", "dog/right/1.png"],
        ["cat/0.png", "dog/0.png", "more/cat/1.png", "more/dog/1.png"],  # `more` may be a test folder
        ["animals/cat/0.png", "animals/dog/0.png"],
    ],
)
def test_folders_with_an_unclear_level_of_classes_are_refused_until_a_key_states_it(
    tmp_path: Path, names: list[str]
) -> None:
    about = write(tmp_path, *names)
    refused("may be the classes; if so, set partition.kind = 'domains'", "if not, name the classes in data", data=about)
    classes = sorted({name.partition("/")[0] for name in names})
    source = read(about | {"classes": [*classes, "plants"]})
    assert sorted(set(source.train.labels)) == classes
    if names[0].startswith("photo"):
        assert sorted(set(read(about, partition={"kind": "domains"}).train.labels)) == ["cat", "dog"]


def test_domains_whose_level_of_classes_is_unclear_are_refused(tmp_path: Path) -> None:
    names = (f"{part}/{domain}/{name}" for part in ("first", "second") for domain in ("photo", "sketch") for name in CLASSES)
    about = write(tmp_path, *names)
    refused("if so, let data.root name the folder of the domains", data=about, partition={"kind": "domains"})


def test_patients_of_one_class_each_are_no_classes(tmp_path: Path) -> None:
    names = [f"{name}/patient{k}/0.png" for name, numbers in (("cat", (1, 2)), ("dog", (3, 4))) for k in numbers]
    assert list_read(read(write(tmp_path, *names)), tmp_path) == {name: name[:3] for name in names}


def test_a_class_without_readable_images_names_its_files(tmp_path: Path) -> None:
    about = write(tmp_path, *CLASSES, "owl/a.heic", "owl/b.heic")
    refused("the folder of class 'owl' holds no images (2 .heic (a.heic))", data=about)


def test_a_few_of_many_endings_are_listed(tmp_path: Path) -> None:
    (note,) = read(write(tmp_path, *CLASSES, *(f"cat/a.x{k}y" for k in range(14)))).notes
    assert "14 files are not read" in note
    assert " and 4 more; " in note


def test_groups_name_images_in_inner_folders(tmp_path: Path) -> None:
    about = folder(tmp_path, {"cat": 2, "dog": 2})
    image(tmp_path / "cat" / "inner" / "0.png")
    files = ["cat/00.png", "cat/01.png", "dog/00.png", "dog/01.png", "cat/inner/0.png"]
    rows = [f"{f.replace('/', chr(92))};p{k}" for k, f in enumerate(files)]  # as Windows and Excel write them
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name;patient", *rows]))
    source = read(about | {"group_by": "patient"})
    assert source.train.groups is not None
    assert np.unique(source.train.groups).tolist() == ["p0", "p1", "p2", "p3", "p4"]
    assert not any("metadata" in note for note in source.notes)


def test_links_between_two_classes_are_no_more_images(tmp_path: Path) -> None:
    about = write(tmp_path, *CLASSES)
    for one, other in (("cat", "dog"), ("dog", "cat")):
        (tmp_path / one / "linked").symlink_to(tmp_path / other)
    assert len(read(about | {"classes": ["cat", "dog"]}).train.x) == 8  # each class, and once the class that it links to


def test_file_names_of_digits_keep_their_zeros(tmp_path: Path) -> None:
    names = ["001", "002", "010", "1.0"]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,label", *(f"{name},{k}" for k, name in enumerate(names))]))
    labels, _ = read_metadata(tmp_path / "metadata.csv", names, DataConfig(), labelled=True, numbers=True)
    assert labels is not None
    assert labels.tolist() == ["0", "1", "2", "3"]
