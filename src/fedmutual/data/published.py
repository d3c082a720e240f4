"""Published data sets: digits (inside scikit-learn), MNIST, CIFAR-10 and CIFAR-100 (through torchvision)."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedmutual.config import DataConfig
from fedmutual.data.examples import Arrays, Part, Published, Source, rows_first
from fedmutual.downloads import first_line, patient
from fedmutual.errors import DataError

VARIABLE = "FEDMUTUAL_DATA"
CACHE = Path("~/.cache/fedmutual")


@dataclass(frozen=True)
class _Set:
    kind: str  # its class in torchvision.datasets
    folder: str  # where torchvision keeps it, below its root
    mean: tuple[float, ...]
    std: tuple[float, ...]


# mean and std of the training images over 255, a value a channel: as given with each set's usual recipes
_SETS = {
    "mnist": _Set("MNIST", "MNIST", (0.1307,), (0.3081,)),
    "cifar10": _Set("CIFAR10", "cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": _Set("CIFAR100", "cifar-100-python", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def digits(config: DataConfig) -> Source:
    """1,797 handwritten digits, 8 x 8 pixels of 0 to 16 (Alpaydin and Kaynak 1998; in scikit-learn). No test set."""
    images, labels = _digits()
    x = rows_first(images.astype(np.uint8), "digits")
    part = Part(Arrays(x.numpy()), labels.copy(), lambda i: f"example {i} of digits")
    # over 16, the mean and standard deviation of all its pixels
    return Source("digits", part, classes=tuple("0123456789"), published=Published(16.0, (0.3053,), (0.3760,)))


@cache
def _digits() -> tuple[Any, Any]:
    """Images [1797, 8, 8] and labels [1797]: a table of text, which is read once for all runs of a process."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images, found.target


def through_torchvision(config: DataConfig) -> Source:
    """MNIST, CIFAR-10 or CIFAR-100, in torchvision's layout under the data root.

    Raises:
        DataError: it is not there and could not be downloaded, or its files are damaged.
    """
    about = _SETS[config.name]
    root = config.root or (Path(os.environ[VARIABLE]).expanduser() if os.environ.get(VARIABLE) else None)
    if root is None:
        root = CACHE.expanduser()
        if not (root / about.folder).is_dir():
            _download(about, root)
    elif not (root / about.folder).is_dir():
        told = "data.root" if config.root else f"${VARIABLE}"
        raise DataError(
            f"data {config.name!r} is not at {root / about.folder} ({told} says to look there); put it there, or unset "
            f"{told} and it is downloaded into {CACHE}"
        )
    try:
        kind = _kind(about)
        train, test = kind(root, train=True), kind(root, train=False)
    except Exception as problem:  # a damaged file fails in many ways
        raise DataError(
            f"data {config.name!r} at {root / about.folder} cannot be read ({first_line(problem)}); delete that "
            "folder, and put it there again or have it downloaded"
        ) from None
    classes = tuple("0123456789") if about.kind == "MNIST" else tuple(train.classes)
    return Source(
        place=config.name,
        train=_part(train, f"{config.name}'s training set"),
        test=_part(test, f"{config.name}'s test set"),
        classes=classes,
        published=Published(255.0, about.mean, about.std),
    )


def _kind(about: _Set) -> Callable[..., Any]:
    from torchvision import datasets  # seconds to import, and only those who read these sets need it

    kind: Callable[..., Any] = getattr(datasets, about.kind)
    return kind


def _part(dataset: Any, place: str) -> Part:
    x = rows_first(np.asarray(dataset.data), place)
    return Part(Arrays(x.numpy()), np.asarray(dataset.targets), lambda i: f"example {i} of {place}")


def _download(about: _Set, root: Path) -> None:
    """Fetch into a folder beside, then move: what lies in the cache is whole, whoever else downloads it too."""
    partial: Path | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=root))
        with patient():
            _kind(about)(partial, download=True)
        with contextlib.suppress(FileExistsError):
            (partial / about.folder).rename(root / about.folder)
    except Exception as problem:  # no network, no space, no rights, a broken archive
        raise DataError(
            f"data {about.kind} is not at {root / about.folder} and could not be downloaded ({first_line(problem)}); "
            f"connect to the internet, or set ${VARIABLE} or data.root to a folder that has it in torchvision's layout"
        ) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
