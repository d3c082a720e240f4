"""Domains of the same images: each domain shows all images, turned clockwise by one of data.angles."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedmutual.config import Config
from fedmutual.core import At
from fedmutual.data import labels
from fedmutual.data.draws import Index, make_numpy_generator, split_by_class
from fedmutual.data.examples import Examples, Part, Source
from fedmutual.errors import ConfigError, DataError, format_count


def make_rotated_domains(source: Source, config: Config, angles: Sequence[float], per_class: int | None) -> Source:
    """Return the images of a source as domains named "0", "20", ...: the angle in degrees.

    per_class: the number of training images of each class, drawn by the seed, without a test part; None: all images.

    Raises:
        ConfigError: the data are no images or have domains, or the angles or per_class do not fit.
        DataError: a class has fewer than `per_class` images, a label is wrong (`match_labels`), or an image cannot be read.
    """
    names = [f"{angle:g}" for angle in angles]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise ConfigError(f"key 'data.angles' has {repeated} twice; name each angle once")
    if source.train.x.take([0]).dim() != 4:
        raise ConfigError("key 'data.angles' is for images, but the examples are tables of features; remove the key")
    if source.train.domains is not None:
        raise ConfigError(
            f"key 'data.angles' makes domains, but {source.place} already has domains; remove the key or the domains"
        )
    if per_class is None:
        train_total = len(source.train.x)
        test = (
            None
            if source.test is None
            else _make_part(source.test, np.arange(len(source.test.x)), angles, names, train_total)
        )
        return replace(source, train=_make_part(source.train, np.arange(train_total), angles, names, 0), test=test)
    if config.data.test is not None:
        raise ConfigError(
            "key 'data.test' has no effect with 'data.per_class', which draws training images; remove one of the keys"
        )
    return replace(
        source, train=_make_part(source.train, _draw_images(source, config, per_class), angles, names, 0), test=None
    )


class RotatedExamples:
    """Rotated images of another store: all images at the first angle, then all at the next angle."""

    def __init__(self, images: Examples, index: Index, angles: Sequence[float]) -> None:
        self._images, self._index, self._angles = images, index, angles

    def __len__(self) -> int:
        return len(self._angles) * len(self._index)

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return the images of `rows` [B, C, H, W]; see `Examples.take`."""
        angle_numbers, positions = np.divmod(np.asarray(rows, dtype=np.int64), len(self._index))
        x = self._images.take(self._index[positions].tolist())
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


def _draw_images(source: Source, config: Config, per_class: int) -> Index:
    """Return the numbers of `per_class` random training images of each class, sorted."""
    classes, (class_numbers, *_) = labels.match_labels(source, config.data)
    rng = make_numpy_generator(At(config.seed, -1, config.rounds).rng("images"))
    picked = []
    for name, rows in zip(classes, split_by_class(class_numbers, len(classes), rng), strict=True):
        if 0 < len(rows) < per_class:
            raise DataError(
                f"{source.place}: class {name!r} has {format_count(len(rows), 'training image')}, and data.per_class "
                "asks for "
                f"{per_class}; lower it"
            )
        picked.append(rows[:per_class])
    return np.sort(np.concatenate(picked))


def _make_part(part: Part, index: Index, angles: Sequence[float], names: Sequence[str], first: int) -> Part:
    """Return the images `index` of one part at all angles. Image numbers begin at `first` and are equal in all domains."""
    n = len(index)
    return Part(
        RotatedExamples(part.x, index, angles),
        np.tile(part.labels[index], len(angles)),
        _make_row_namer(part.where, index, names),
        None if part.groups is None else np.tile(part.groups[index], len(angles)),
        np.repeat(names, n),
        np.tile(np.arange(first, first + n), len(angles)),
    )


def _make_row_namer(of_image: Callable[[int], str], index: Index, names: Sequence[str]) -> Callable[[int], str]:
    def where(row: int) -> str:
        turn, place = divmod(row, len(index))
        return f"{of_image(int(index[place]))}, turned by {names[turn]} degrees"

    return where
