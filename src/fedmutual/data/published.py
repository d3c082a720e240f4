"""Published data sets: digits (part of scikit-learn), MNIST, CIFAR-10 and CIFAR-100 (through torchvision)."""

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
from fedmutual.data.examples import ArrayExamples, Part, Published, Source, convert_array
from fedmutual.errors import DataError
from fedmutual.network_timeout import limit_waiting, shorten_error

VARIABLE = "FEDMUTUAL_DATA"
CACHE = Path("~/.cache/fedmutual")


@dataclass(frozen=True)
class _DataSet:
    kind: str  # the class in torchvision.datasets
    folder: str  # torchvision's folder below its root
    mean: tuple[float, ...]
    std: tuple[float, ...]


# mean and std of the training images / 255, one value a channel: the usual published values
_SETS = {
    "mnist": _DataSet("MNIST", "MNIST", (0.1307,), (0.3081,)),
    "cifar10": _DataSet("CIFAR10", "cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": _DataSet("CIFAR100", "cifar-100-python", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def read_digits(config: DataConfig) -> Source:
    """Return 1,797 handwritten digits, 8 x 8 pixels of 0 to 16, without a test set.

    Alpaydin and Kaynak 1998; the copy in scikit-learn.
    """
    images, labels = _load_digits()
    x = convert_array(images.astype(np.uint8), "digits")
    part = Part(ArrayExamples(x.numpy()), labels.copy(), lambda i: f"example {i} of digits")
    # mean and standard deviation of all pixels / 16
    return Source("digits", part, classes=tuple("0123456789"), published=Published(16.0, (0.3053,), (0.3760,)))


@cache
def _load_digits() -> tuple[Any, Any]:
    """Return images [1797, 8, 8] and labels [1797]; the text file is parsed once in a process."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images, digits.target


def read_torchvision(config: DataConfig) -> Source:
    """Return MNIST, CIFAR-10 or CIFAR-100 from torchvision's layout under the data root.

    Raises:
        DataError: the data are missing and cannot be downloaded, or the files are damaged.
    """
    data_set = _SETS[config.name]
    root = config.root or (Path(os.environ[VARIABLE]).expanduser() if os.environ.get(VARIABLE) else None)
    if root is None:
        root = CACHE.expanduser()
        if not (root / data_set.folder).is_dir():
            _download(data_set, root)
    elif not (root / data_set.folder).is_dir():
        setting = "data.root" if config.root else f"${VARIABLE}"
        raise DataError(
            f"data {config.name!r} is not at {root / data_set.folder} (the path of {setting}); put the data there, or unset "
            f"{setting} to download the data into {CACHE}"
        )
    try:
        make_dataset = _get_dataset_class(data_set)
        train, test = make_dataset(root, train=True), make_dataset(root, train=False)
    except Exception as problem:  # damaged files raise many kinds of errors
        raise DataError(
            f"data {config.name!r} at {root / data_set.folder} cannot be read ({shorten_error(problem)}); delete the "
            "folder, and copy or download the data again"
        ) from None
    classes = tuple("0123456789") if data_set.kind == "MNIST" else tuple(train.classes)
    return Source(
        place=config.name,
        train=_make_part(train, f"{config.name}'s training set"),
        test=_make_part(test, f"{config.name}'s test set"),
        classes=classes,
        published=Published(255.0, data_set.mean, data_set.std),
    )


def _get_dataset_class(data_set: _DataSet) -> Callable[..., Any]:
    from torchvision import datasets  # takes seconds to import; only these data sets need it

    dataset_class: Callable[..., Any] = getattr(datasets, data_set.kind)
    return dataset_class


def _make_part(dataset: Any, place: str) -> Part:
    x = convert_array(np.asarray(dataset.data), place)
    return Part(ArrayExamples(x.numpy()), np.asarray(dataset.targets), lambda i: f"example {i} of {place}")


def _download(data_set: _DataSet, root: Path) -> None:
    """Download into a temporary folder, then rename it: the cache never holds partial data, even with parallel downloads."""
    partial: Path | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix="partial-", dir=root))
        with limit_waiting():
            _get_dataset_class(data_set)(partial, download=True)
        with contextlib.suppress(FileExistsError):
            (partial / data_set.folder).rename(root / data_set.folder)
    except Exception as problem:  # no network, no space, no rights, a broken archive
        raise DataError(
            f"data {data_set.kind} is not at {root / data_set.folder} and could not be downloaded "
            f"({shorten_error(problem)}); "
            f"connect to the internet, or set ${VARIABLE} or data.root to a folder that has it in torchvision's layout"
        ) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
