"""Domains made of the same images: each image turned clockwise by every one of data.angles."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedmutual.config import Config
from fedmutual.core import At
from fedmutual.data import labels
from fedmutual.data.draws import Index, by_class, generator, many
from fedmutual.data.examples import Examples, Part, Source
from fedmutual.errors import ConfigError, DataError


def rotated(source: Source, config: Config, angles: Sequence[float], per_class: int | None) -> Source:
    """The images of a source as domains named "0", "20", ..., each turned by so many degrees.

    per_class: so many training images of each class, drawn by the config's seed, and no test part; None: all there are.

    Raises:
        ConfigError: these are no images, or have domains of their own; the angles or per_class cannot be met.
        DataError: a class has fewer images.
    """
    names = [f"{angle:g}" for angle in angles]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"key 'data.angles' has {twice} twice; name each angle once")
    if source.train.x.take([0]).dim() != 4:
        raise ConfigError("key 'data.angles' is for images, and the examples are tables of features; take it out")
    if source.train.domains is not None:
        raise ConfigError(f"key 'data.angles': {source.place} has domains of its own; take the key or these domains out")
    if per_class is None:
        trains = len(source.train.x)
        test = None if source.test is None else _part(source.test, np.arange(len(source.test.x)), angles, names, trains)
        return replace(source, train=_part(source.train, np.arange(trains), angles, names, 0), test=test)
    if config.data.test is not None:
        raise ConfigError("key 'data.test' has no effect with 'data.per_class', which draws training images; take one out")
    return replace(source, train=_part(source.train, _drawn(source, config, per_class), angles, names, 0), test=None)


class Rotated:
    """Images of another store, turned: all by the first angle, then all by the next."""

    def __init__(self, images: Examples, index: Index, angles: Sequence[float]) -> None:
        self._images, self._index, self._angles = images, index, angles

    def __len__(self) -> int:
        return len(self._angles) * len(self._index)

    def take(self, rows: Sequence[int]) -> Tensor:
        """As `Examples.take`."""
        turns, places = np.divmod(np.asarray(rows, dtype=np.int64), len(self._index))
        x = self._images.take(self._index[places].tolist())
        for k in np.unique(turns):
            at = torch.from_numpy(turns == k)
            x[at] = turned(x[at], self._angles[k])
        return x

    def digest(self) -> bytes:
        """Of all the images there, of which are taken, and of the angles."""
        about = repr([float(angle) for angle in self._angles]).encode() + self._index.tobytes()
        return hashlib.sha256(self._images.digest() + about).digest()


def turned(x: Tensor, degrees: float) -> Tensor:
    """Images [B, C, H, W] turned clockwise about their centre: bilinear, black where there was nothing."""
    from torchvision.transforms import InterpolationMode  # seconds to import, and only those who turn images need it
    from torchvision.transforms.v2 import functional

    if degrees % 360 == 0:
        return x
    found: Tensor = functional.rotate(x, -degrees, InterpolationMode.BILINEAR, fill=[0.0])  # theirs counts the other way
    return found


def _drawn(source: Source, config: Config, per_class: int) -> Index:
    """Which training images."""
    classes, (own, *_) = labels.match(source, config.data)
    rng = generator(At(config.seed, -1, config.rounds).rng("images"))
    picked = []
    for name, rows in zip(classes, by_class(own, len(classes), rng), strict=True):
        if 0 < len(rows) < per_class:
            raise DataError(
                f"{source.place}: class {name!r} has {many(len(rows), 'training image')}, and data.per_class asks for "
                f"{per_class}; lower it"
            )
        picked.append(rows[:per_class])
    return np.sort(np.concatenate(picked))


def _part(part: Part, index: Index, angles: Sequence[float], names: Sequence[str], first: int) -> Part:
    """The images at `index` of one part; they are numbered from `first`, the same in all domains."""
    n = len(index)
    return Part(
        Rotated(part.x, index, angles),
        np.tile(part.labels[index], len(angles)),
        _where(part.where, index, names),
        None if part.groups is None else np.tile(part.groups[index], len(angles)),
        np.repeat(names, n),
        np.tile(np.arange(first, first + n), len(angles)),
    )


def _where(of_image: Callable[[int], str], index: Index, names: Sequence[str]) -> Callable[[int], str]:
    def where(row: int) -> str:
        turn, place = divmod(row, len(index))
        return f"{of_image(int(index[place]))}, turned by {names[turn]} degrees"

    return where
