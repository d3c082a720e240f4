"""Tiny-ImageNet in its published folder: train/CLASS/images/*, and val/images/* with their classes in val_annotations.txt.

Le & Yang, Tiny ImageNet Visual Recognition Challenge, 2015, http://cs231n.stanford.edu/tiny-imagenet-200.zip. The images of
the folder test have no labels and are not read.
"""

from pathlib import Path

import numpy as np

from fedmutual.config import DataConfig
from fedmutual.data.arrays import require_root
from fedmutual.data.examples import Part, Source
from fedmutual.data.images import EXTENSIONS, ImageExamples
from fedmutual.errors import DataError

ANNOTATIONS = "val_annotations.txt"  # a line an image: its file, its class, and a box that is not read; tabs between


def read_tiny_imagenet(config: DataConfig) -> Source:
    """Return the training images, and as test set the validation images, which alone have labels beside them.

    Raises:
        DataError: a folder or the annotations are missing, a line names no image of the folder, or the first image cannot be
            read.
        ConfigError: data.root is not set.
    """
    root = require_root(config)
    train = root / "train"
    folders = sorted(f for f in train.iterdir() if f.is_dir()) if train.is_dir() else []
    by_class = {folder.name: _list_images(folder / "images") for folder in folders}
    if not by_class:
        raise DataError(f"{train}: has no folder of a class; key 'data.root' names the folder tiny-imagenet-200")
    first, images = _make_part([(f, name) for name, files in by_class.items() for f in files], root, config, None)
    test, _ = _make_part(_read_annotations(root / "val", set(by_class)), root, config, images)
    return Source(str(root), first, test)


def _list_images(folder: Path) -> list[Path]:
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in EXTENSIONS) if folder.is_dir() else []
    if not files:
        raise DataError(f"{folder}: there are no images; Tiny-ImageNet has those of a class in CLASS/images")
    return files


def _read_annotations(folder: Path, classes: set[str]) -> list[tuple[Path, str]]:
    """Return (file, class) for each image of the validation folder that the annotations name."""
    path = folder / ANNOTATIONS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read ({problem})") from None
    files, labelled_files = {f.name: f for f in _list_images(folder / "images")}, []
    for number, line in enumerate(lines, 1):
        name, _, rest = line.partition("\t")
        label = rest.partition("\t")[0]
        if name not in files or label not in classes:  # a name with a path in it is none of the folder
            raise DataError(f"{path}: line {number} names no image of {folder / 'images'} with a class of train")
        labelled_files.append((files[name], label))
    if not labelled_files:
        raise DataError(f"{path}: names no image")
    return labelled_files


def _make_part(
    labelled: list[tuple[Path, str]], root: Path, config: DataConfig, like: ImageExamples | None
) -> tuple[Part, ImageExamples]:
    files = [file for file, _ in labelled]
    x = ImageExamples(files, root, config.size, like)
    return Part(x, np.array([label for _, label in labelled]), lambda i: str(files[i])), x
