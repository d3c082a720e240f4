"""Published data sets in their published files: digits, MNIST, CIFAR, PACS, Office-Home, Tiny-ImageNet, LEAF's FEMNIST."""

import contextlib
import gzip
import importlib.util
import json
import os
import shutil
import string
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedmutual.config import DataConfig
from fedmutual.data.arrays import require_root
from fedmutual.data.convert import convert_array
from fedmutual.data.examples import ArrayExamples, Part, Source, list_names
from fedmutual.data.folder import list_images, make_image_part, read_folder
from fedmutual.data.images import ImageExamples
from fedmutual.errors import ConfigError, DataError, shorten_error
from fedmutual.files import limit_waiting

VARIABLE = "FEDMUTUAL_DATA"
CACHE = Path("~/.cache/fedmutual")

# name -> the class in torchvision.datasets, its folder, mean and std of the training images / 255: the usual values
_TORCHVISION: dict[str, tuple[str, str, tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ("MNIST", "MNIST", (0.1307,), (0.3081,)),
    "cifar10": ("CIFAR10", "cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ("CIFAR100", "cifar-100-python", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
_IMAGENET = (255.0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

DOMAIN_SETS: dict[str, tuple[tuple[str, ...], tuple[str, ...], bool]] = {
    "pacs": (("PACS",), ("art_painting", "cartoon", "photo", "sketch"), True),
    "office-home": (("OfficeHome", "OfficeHomeDataset_10072016"), ("Art", "Clipart", "Product", "Real World"), False),
}
"""Data sets with domains: possible folder names below the data root, the domains, whether all images have one size."""

ANNOTATIONS = "val_annotations.txt"  # of Tiny-ImageNet; a line an image: its file, its class, and a box that is not read
FEMNIST_CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
_SIDE = 28  # of FEMNIST's images
_LARGEST = float(np.finfo(np.float32).max)  # of a pixel


def read_digits(config: DataConfig) -> Source:
    """Return 1,797 handwritten digits, 8 x 8 pixels of 0 to 16, without a test set.

    Alpaydin and Kaynak 1998; the copy in scikit-learn.
    """
    images, labels = _load_digits()
    x = convert_array(images.astype(np.uint8), "digits")
    part = Part(ArrayExamples(x), labels.copy(), lambda i: f"example {i} of digits")
    # mean and standard deviation of all pixels / 16
    return Source("digits", part, classes=tuple(string.digits), published=(16.0, (0.3053,), (0.3760,)))


@cache
def _load_digits() -> tuple[Any, Any]:
    """Return images [1797, 8, 8] and labels [1797]; the text file is parsed once in a process.

    As `sklearn.datasets.load_digits` reads them, whose import takes longer than that of torch.
    """
    package = importlib.util.find_spec("sklearn")
    assert package is not None  # scikit-learn is required
    assert package.origin is not None
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int)


def read_torchvision(config: DataConfig) -> Source:
    """Return MNIST, CIFAR-10 or CIFAR-100 from torchvision's layout under the data root.

    Raises:
        DataError: the data are missing and cannot be downloaded, or the files are damaged.
    """
    name = config.name
    kind, folder, mean, std = _TORCHVISION[name]
    root = config.root or (Path(os.environ[VARIABLE]).expanduser() if os.environ.get(VARIABLE) else None)
    if root is None:
        root = CACHE.expanduser()
        if not (root / folder).is_dir():
            _download(kind, folder, root)
    elif not (root / folder).is_dir():
        setting = "data.root" if config.root else f"${VARIABLE}"
        raise DataError(
            f"data {name!r} is not at {root / folder} (the path of {setting}); put the data there, or unset "
            f"{setting} to download the data into {CACHE}"
        )
    try:
        from torchvision import datasets  # takes seconds to import; only these data sets need it

        train, test = (getattr(datasets, kind)(root, train=is_train) for is_train in (True, False))
    except Exception as problem:  # damaged files raise many kinds of errors
        raise DataError(
            f"data {name!r} at {root / folder} cannot be read ({shorten_error(problem)}); delete the "
            "folder, and copy or download the data again"
        ) from None

    def make_part(dataset: Any, place: str) -> Part:
        x = convert_array(np.asarray(dataset.data), place)
        return Part(ArrayExamples(x), np.asarray(dataset.targets), lambda i: f"example {i} of {place}")

    return Source(
        name,
        make_part(train, f"{name}'s training set"),
        make_part(test, f"{name}'s test set"),
        classes=tuple(string.digits if kind == "MNIST" else train.classes),
        published=(255.0, mean, std),
    )


def _download(kind: str, folder: str, root: Path) -> None:
    """Download into a temporary folder, then rename it: the cache never holds partial data, even with parallel downloads."""
    partial: Path | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=root))
        with limit_waiting():
            from torchvision import datasets

            getattr(datasets, kind)(partial, download=True)
        with contextlib.suppress(FileExistsError):
            (partial / folder).rename(root / folder)
    except Exception as problem:  # no network, no space, no rights, a broken archive
        raise DataError(
            f"data {kind} is not at {root / folder} and could not be downloaded ({shorten_error(problem)}); "
            f"connect to the internet, or set ${VARIABLE} or data.root to a folder that has it in torchvision's layout"
        ) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def read_domains(config: DataConfig) -> Source:
    """Return PACS or Office-Home from the data root or from data.root itself, scaled as for ImageNet.

    Raises:
        ConfigError: data.size is missing, but the images differ in size.
        DataError: the data are missing or cannot be read.
    """
    folders, domains, has_one_size = DOMAIN_SETS[config.name]
    if config.size is None and not has_one_size:
        raise ConfigError(
            f"data.name = {config.name!r} needs the key 'data.size', because its images differ in size; set, for "
            "example, data.size = [96, 96]"
        )
    root = config.root or Path(os.environ.get(VARIABLE) or CACHE).expanduser()
    candidates = [root / name for name in folders] + ([root] if config.root is not None else [])

    def normalize(names: Any) -> set[str]:  # copies spell "Real World" in several ways
        return {name.casefold().replace("_", " ") for name in names}

    for candidate in filter(Path.is_dir, candidates):
        if normalize(domains) <= normalize(p.name for p in candidate.iterdir() if p.is_dir()):
            source = read_folder(config.model_copy(update={"root": candidate}), domains=True)
            return replace(source, published=_IMAGENET)
    raise DataError(
        f"data {config.name!r} is not at {candidates[0]} and cannot be downloaded; put the folders {list_names(domains)} "
        "there, each with a folder of images for every class, or set data.root to their folder"
    )


def read_tiny_imagenet(config: DataConfig) -> Source:
    """Return Tiny-ImageNet: train/CLASS/images/*, and as test set val/images/*, with classes in val_annotations.txt.

    Le & Yang, Tiny ImageNet Visual Recognition Challenge, 2015, http://cs231n.stanford.edu/tiny-imagenet-200.zip. The
    images of the folder test have no labels and are not read.

    Raises:
        DataError: a folder or the annotations are missing, a line names no image of the folder, or the first image cannot be
            read.
        ConfigError: data.root is not set.
    """
    root = require_root(config)
    train, folder = root / "train", root / "val"
    folders = sorted(f for f in train.iterdir() if f.is_dir()) if train.is_dir() else []
    by_class = {folder.name: list_images(folder / "images") for folder in folders}
    if not by_class:
        raise DataError(f"{train}: has no folder of a class; key 'data.root' names the folder tiny-imagenet-200")
    path, files = folder / ANNOTATIONS, {f.name: f for f in list_images(folder / "images")}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{path}: cannot be read ({problem})") from None
    annotated = [line.split("\t")[:2] for line in lines]
    for number, line in enumerate(annotated, 1):
        if len(line) < 2 or line[0] not in files or line[1] not in by_class:  # a name with a path is none of the folder
            raise DataError(f"{path}: line {number} names no image of {folder / 'images'} with a class of train")
    if not annotated:
        raise DataError(f"{path}: names no image")
    labels = [name for name, of_class in by_class.items() for _ in of_class]
    images = ImageExamples([f for of_class in by_class.values() for f in of_class], root, config, None)
    test_images = ImageExamples([files[name] for name, _ in annotated], root, config, images)
    return Source(str(root), make_image_part(images, labels), make_image_part(test_images, [c for _, c in annotated]))


def read_femnist(config: DataConfig) -> Source:
    """Return FEMNIST from data.root, the folder above LEAF's train and test; each writer is a domain.

    Caldas et al., LEAF: A Benchmark for Federated Settings, 2018, https://arxiv.org/abs/1812.01097,
    https://github.com/TalwalkarLab/leaf. A json file holds, for each writer in `user_data`, `x`: images as lists of 784
    numbers from 0 to 1, and `y`: class numbers from 0 to 61.

    Raises:
        DataError: a folder or its json files are missing or damaged, or a writer has rows in one part only.
        ConfigError: data.root is not set.
    """
    root = require_root(config)
    train, test = (_read_leaf(root / part) for part in ("train", "test"))
    alone = np.setxor1d(train.domains, test.domains)  # type: ignore[arg-type]
    if len(alone):
        raise DataError(
            f"{root}: writer {str(alone[0])!r} has examples in one of train and test only; let LEAF split by sample "
            "(preprocess.sh -t sample)"
        )
    return Source(str(root), train, test, FEMNIST_CLASSES)


def _read_leaf(folder: Path) -> Part:
    """Return the rows of all writers in the json files of a folder."""
    images, labels, writers = [], [], list[str]()
    for path in sorted(folder.glob("*.json")):
        place = str(path)
        try:
            for writer, rows in json.loads(path.read_bytes())["user_data"].items():
                place = f"{path}: writer {writer!r}"
                x, y = np.asarray(rows["x"]), np.asarray(rows["y"])
                if len(x) == len(y) == 0:
                    continue
                is_image = x.shape == (*y.shape, _SIDE**2) and x.dtype.kind in "if" and (abs(x) <= _LARGEST).all()
                is_label = y.ndim == 1 and y.dtype.kind == "i" and ((y >= 0) & (y < len(FEMNIST_CLASSES))).all()
                if not is_image or not is_label:
                    raise DataError(
                        f"{place}: needs images x of {_SIDE**2} numbers, and for each a label y from 0 to "
                        f"{len(FEMNIST_CLASSES) - 1}; x is {list(x.shape)} and y {list(y.shape)}"
                    )
                images.append(x.astype(np.float32).reshape(-1, 1, _SIDE, _SIDE))
                labels.append(y)
                writers += [writer] * len(y)
        except OSError as problem:
            raise DataError(f"{path}: cannot be read ({problem.strerror or problem})") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise DataError(f"{place}: is no json of LEAF's FEMNIST ({type(problem).__name__}: {problem})") from None
    if not images:
        raise DataError(f"{folder}: there are no json files of LEAF; key 'data.root' names the folder above train and test")
    x, numbers = np.concatenate(images), np.concatenate(labels).astype(np.int64)
    return Part(ArrayExamples(x), numbers, lambda i: f"example {i} of {folder}", domains=np.array(writers))
