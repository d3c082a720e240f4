"""Data sets by name, and the choice of the reader; domains of the same images, turned by angles."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches

import numpy as np
import torch
from torch import Tensor

from fedmutual.config import Config, DataConfig
from fedmutual.config.checks import check_data_effects
from fedmutual.config.keys import FEDERATED
from fedmutual.core import At
from fedmutual.data import arrays, labels, objects, published
from fedmutual.data.draws import Index, make_numpy_generator, split_by_class
from fedmutual.data.examples import Examples, Part, Source, merge_parts
from fedmutual.data.folder import read_folder
from fedmutual.errors import ConfigError, DataError, format_count
from fedmutual.metric import TargetKind


def _read_table(config: DataConfig, numbers: bool = False) -> Source:
    from fedmutual.data import table  # imports pandas, which takes 0.3 s

    return table.read_table(config, numbers)


def _read_saved(config: DataConfig) -> Source:
    from fedmutual.data import saved  # a reader of an extra

    return saved.read_saved(config)


_READERS: dict[str, tuple[Callable[[DataConfig], Source], str]] = {
    "digits": (
        published.read_digits,
        "1,797 handwritten digits of 8 x 8 pixels, inside scikit-learn: needs no file and no network",
    ),
    "mnist": (
        published.read_torchvision,
        "70,000 handwritten digits of 28 x 28 pixels, 10,000 of them for testing (torchvision)",
    ),
    "cifar10": (
        published.read_torchvision,
        "60,000 colour photographs of 32 x 32 pixels in 10 classes, 10,000 of them for testing (torchvision)",
    ),
    "cifar100": (
        published.read_torchvision,
        "60,000 colour photographs of 32 x 32 pixels in 100 classes, 10,000 of them for testing (torchvision)",
    ),
    "rotated-mnist": (
        published.read_torchvision,
        "1,000 training images of mnist, 100 a class, turned by 0, 20, 40 and 60 degrees: 4 domains",
    ),
    "pacs": (
        published.read_domains,
        "9,991 images of 7 classes in 4 domains (art painting, cartoon, photo, sketch); download it yourself",
    ),
    "office-home": (
        published.read_domains,
        "15,588 images of 65 classes in 4 domains (art, clipart, product, real world); download it yourself",
    ),
    "tiny-imagenet": (
        published.read_tiny_imagenet,
        "110,000 images of 64 x 64 pixels in 200 classes, in the published folder; download it yourself",
    ),
    "medmnist": (arrays.read_medmnist, "a data set of MedMNIST: its npz file in data.root; download it yourself"),
    "femnist": (
        published.read_femnist,
        "handwritten characters of 62 classes, a domain for each writer: LEAF's json files, made by you",
    ),
    "folder": (read_folder, "your own images in data.root: class/image, train and test above, or domain/class/image"),
    "npz": (
        arrays.read_npz,
        "your own arrays in the file data.root: x, y; optional: x_test, y_test, classes, domain, and groups",
    ),
    "csv": (_read_table, "your own table in the file data.root: a column of labels (data.label), and columns of features"),
    "parquet": (_read_table, "a table as csv, in a Parquet file (the extra `parquet`)"),
    "datasets": (_read_saved, "a folder that Hugging Face's datasets saved on disk (the extra `datasets`)"),
    "module:factory": (
        objects.read_from_factory,
        "your own code: it returns a torch Dataset, a (train, test) pair of them, or arrays",
    ),
}
"""The values of data.name, each with its reader and a description."""

NAMES: dict[str, str] = {name: about for name, (_, about) in _READERS.items()}
"""The values of data.name, each with a description."""

OF_DOMAINS = ("domains", "file")
"""The partition kinds for data with domains: by domain, or from an earlier run's file."""

FILES = ("folder", "tiny-imagenet", *published.DOMAIN_SETS)
"""Data sets of image files; the files are resized when they are read."""

TABLES = ("csv", "parquet")
"""Data sets that are tables in files."""

_ROTATED: dict[str, tuple[str, tuple[float, ...], int]] = {"rotated-mnist": ("mnist", (0, 20, 40, 60), 100)}


def is_drawn_by_seed(config: DataConfig) -> bool:
    """Return whether the seed decides which examples the data set has."""
    return config.per_class is not None or config.name in _ROTATED


def read_source(config: Config, targets: TargetKind = "classes") -> Source:
    """Return the configured data set. targets: their kind, which decides where a file or a folder has them.

    Raises:
        UserError: the data set is unknown, missing or unreadable; one sentence says why.
    """
    data_config, kind, numbers = config.data, config.partition.kind, targets != "classes"
    name, angles, per_class = _ROTATED.get(data_config.name, (data_config.name, None, None))
    angles, per_class = data_config.angles or angles, data_config.per_class or per_class
    if name in published.DOMAIN_SETS and kind not in OF_DOMAINS:
        raise ConfigError(f"data.name = {name!r} is a set of domains; set partition.kind = 'domains'")
    if angles is None:
        if per_class is not None:
            raise ConfigError("key 'data.per_class' needs the key 'data.angles'; set it, or remove data.per_class")
        source = _read_by_name(data_config, kind == "domains", targets)
        return merge_parts(source) if kind == "pfllib" else source  # PFLlib divides all rows
    if kind not in OF_DOMAINS:
        setting = "key 'data.angles'" if data_config.angles else f"data.name = {data_config.name!r}"
        raise ConfigError(f"{setting} makes a domain of each angle; set partition.kind = 'domains'")
    if numbers and per_class is not None:
        raise ConfigError("key 'data.per_class' is for classes, but the task learns numbers; remove the key")
    source = _read_by_name(data_config.model_copy(update={"name": name}), False, targets)
    return _make_rotated_domains(source, config, angles, per_class)


def _read_by_name(config: DataConfig, by_domain: bool, targets: TargetKind) -> Source:
    """Return the data set without rotation. by_domain: the folders above the class folders are domains."""
    name = "module:factory" if ":" in config.name else config.name
    if name not in _READERS:
        similar = get_close_matches(name.lower(), NAMES, 1)
        fix = f"did you mean {similar[0]!r}?" if similar else f"there are {', '.join(NAMES)}"
        raise ConfigError(f"key 'data.name': there is no data set {name!r}; {fix}")
    check_data_effects(config)
    if config.columns and not {config.mean, config.std} <= {None, FEDERATED}:
        raise ConfigError(
            "keys 'data.mean' and 'data.std' have no effect with data.columns, which standardises each column; "
            "remove them, or set both to 'federated'"
        )
    elsewhere = {**dict.fromkeys(config.label_columns, "label"), **dict.fromkeys(config.drop or (), "drop")}
    elsewhere |= {config.group_by: "group_by"} if config.group_by is not None else {}
    for key, columns in (("columns", list(config.columns)), ("replace", list(config.replace))):
        for column in (c for c in columns if c in elsewhere):
            fix = "rename labels by data.labels" if (key, elsewhere[column]) == ("replace", "label") else "remove one"
            raise ConfigError(f"key 'data.{key}' has {column!r}, which data.{elsewhere[column]} names; {fix}")
    if name == "folder":
        return read_folder(config, by_domain, targets)
    return _read_table(config, targets != "classes") if name in TABLES else _READERS[name][0](config)


def _make_rotated_domains(source: Source, config: Config, angles: Sequence[float], per_class: int | None) -> Source:
    """Return the images of a source as domains named "0", "20", ...: each shows all images, turned clockwise by an angle.

    per_class: the number of training images of each class, drawn by the seed, without a test part; None: all images.

    Raises:
        ConfigError: the data are no images or have domains, or the angles or per_class do not fit.
        DataError: a class has fewer than `per_class` images, a label is wrong (`match_labels`), or an image cannot be read.
    """
    names = [f"{angle:g}" for angle in angles]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ConfigError(f"key 'data.angles' has {repeated} twice; name each angle once")
    if source.train.x.take_one([0]).dim() != 4:
        raise ConfigError("key 'data.angles' is for images, but the examples are tables of features; remove the key")
    if source.train.domains is not None:
        raise ConfigError(
            f"key 'data.angles' makes domains, but {source.place} already has domains; remove the key or the domains"
        )

    def turn(part: Part, index: Index, first: int) -> Part:
        """Return the images `index` at all angles. Their numbers begin at `first` and are equal in all domains."""

        def where(row: int) -> str:
            number, place = divmod(row, len(index))
            return f"{part.where(int(index[place]))}, turned by {names[number]} degrees"

        return Part(
            RotatedExamples(part.x, index, angles),
            np.tile(part.labels[index], len(angles)),
            where,
            None if part.groups is None else np.tile(part.groups[index], len(angles)),
            np.repeat(names, len(index)),
            np.tile(np.arange(first, first + len(index)), len(angles)),
        )

    if per_class is None:
        train_total = len(source.train.x)
        test = source.test and turn(source.test, np.arange(len(source.test.x)), train_total)
        return replace(source, train=turn(source.train, np.arange(train_total), 0), test=test)
    if config.data.test is not None:
        raise ConfigError(
            "key 'data.test' has no effect with 'data.per_class', which draws training images; remove one of the keys"
        )
    return replace(source, train=turn(source.train, _draw_images(source, config, per_class), 0), test=None)


def _draw_images(source: Source, config: Config, per_class: int) -> Index:
    """Return the numbers of `per_class` random training images of each class, sorted."""
    classes, (class_numbers, *_) = labels.match_labels(source, config.data)
    rng = make_numpy_generator(At(config.seed, -1, config.rounds).rng("images"))
    picked = []
    for name, rows in zip(classes, split_by_class(class_numbers, len(classes), rng), strict=True):
        if 0 < len(rows) < per_class:
            raise DataError(
                f"{source.place}: class {name!r} has {format_count(len(rows), 'training image')}, and data.per_class "
                f"asks for {per_class}; lower it"
            )
        picked.append(rows[:per_class])
    return np.sort(np.concatenate(picked))


class RotatedExamples(Examples):
    """Rotated images of another store: all images at the first angle, then all at the next angle."""

    def __init__(self, images: Examples, index: Index, angles: Sequence[float]) -> None:
        self._images, self._index, self._angles = images, index, angles

    def __len__(self) -> int:
        return len(self._angles) * len(self._index)

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return the images of `rows` [B, C, H, W]; see `Examples.take`."""
        angle_numbers, positions = np.divmod(np.asarray(rows, dtype=np.int64), len(self._index))
        x = self._images.take_one(self._index[positions].tolist())
        for number in np.unique(angle_numbers):
            selected = torch.from_numpy(angle_numbers == number)
            x[selected] = rotate_images(x[selected], self._angles[number])
        return x

    def digest(self) -> bytes:
        """Return a digest of all stored images, of the selected images and of the angles."""
        selection = repr([float(angle) for angle in self._angles]).encode() + self._index.tobytes()
        return hashlib.sha256(self._images.digest() + selection).digest()


def rotate_images(x: Tensor, degrees: float) -> Tensor:
    """Return images [B, C, H, W] turned clockwise about their centre: bilinear, with black corners."""
    from torchvision.transforms import InterpolationMode  # takes seconds to import; only rotation needs it
    from torchvision.transforms.v2 import functional

    if degrees % 360 == 0:
        return x
    # torchvision turns counterclockwise.
    rotated: Tensor = functional.rotate(x, -degrees, InterpolationMode.BILINEAR, fill=[0.0])
    return rotated
