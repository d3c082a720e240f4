"""What a reader hands over: examples by number, unscaled, with their labels by the names their owner gives them."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedmutual.data.draws import Index, Names
from fedmutual.errors import DataError

_CHANNELS = (1, 3, 4)  # the usual ones
_LISTED = 3


class BadRows(DataError):
    """Examples that cannot be used, each with its sentence; the message holds the first few."""

    def __str__(self) -> str:
        said = list(dict.fromkeys(map(str, self.args)))  # what is wrong with the whole may come with every batch
        more = len(said) - _LISTED
        return "; ".join(said[:_LISTED]) + (f"; and {more} more" if more > 0 else "")


class Examples(Protocol):
    """x by number, as stored."""

    def __len__(self) -> int:
        """How many."""
        ...

    def take(self, rows: Sequence[int]) -> Tensor:
        """These examples as a new tensor [B, *shape], channels first; uint8, or numbers to be taken as they are."""
        ...

    def digest(self) -> bytes:
        """What tells these examples from others."""
        ...


@dataclass(frozen=True)
class Part:
    """The training part of a data set, or its test part, of n examples."""

    x: Examples
    labels: npt.NDArray[Any]  # [n] of names (text), or of whole numbers that count classes
    where: Callable[[int], str]  # what messages call an example: "a.png", "row 7 of b.csv"
    groups: Names | None = None  # [n], where data.group_by is set
    domains: Names | None = None  # [n], where there are such
    bases: Index | None = None  # [n] the number of the image each was made of, where domains are made of the same ones


@dataclass(frozen=True)
class Published:
    """How a published data set is scaled."""

    divisor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Source:
    """A data set as its reader found it."""

    place: str  # what messages call it
    train: Part
    test: Part | None = None
    classes: tuple[str, ...] | None = None  # what labels that are numbers stand for
    columns: tuple[str, ...] | None = None  # the names of a table's features
    published: Published | None = None
    notes: tuple[str, ...] = ()


class Arrays:
    """Examples in memory."""

    def __init__(self, x: npt.NDArray[Any]) -> None:
        self._x = torch.from_numpy(np.ascontiguousarray(x))

    def __len__(self) -> int:
        return len(self._x)

    def take(self, rows: Sequence[int]) -> Tensor:
        """As `Examples.take`."""
        return self._x[torch.as_tensor(rows, dtype=torch.int64)]

    def digest(self) -> bytes:
        """Over all bytes."""
        about = repr((self._x.dtype, tuple(self._x.shape))).encode()
        return hashlib.sha256(about + hashlib.sha256(self._x.numpy().data).digest()).digest()


class FromDataset:
    """The x of a torch Dataset's items, read as they are needed; tensors, arrays or PIL images of one shape."""

    def __init__(self, dataset: "Dataset[Any]", place: str) -> None:
        self._dataset, self.place = dataset, place
        self._like: Tensor | None = None

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def take(self, rows: Sequence[int]) -> Tensor:
        """As `Examples.take`. Raises BadRows where an item cannot be read or differs in shape or type from the first."""
        found, bad = [], []
        if self._like is None:
            self._like = self._read(0)
        for row in rows:
            try:
                x = self._read(row)
            except Exception as problem:  # a user's dataset may fail in any way
                bad.append(f"example {row} of {self.place} cannot be read ({type(problem).__name__}: {problem})")
                continue
            found.append(x)
            if (x.shape, x.dtype) != (self._like.shape, self._like.dtype):
                bad.append(
                    f"example {row} of {self.place} is {said(x)}, and the first is {said(self._like)}; "
                    "let the dataset return one shape and type"
                )
        if bad:
            raise BadRows(*bad)
        return torch.stack(found)

    def digest(self) -> bytes:
        """Over the number of examples and up to 64 of them, evenly spaced: to read all may take hours."""
        return hashlib.sha256(repr(len(self)).encode() + Arrays(self.take(spaced(len(self), 64)).numpy()).digest()).digest()

    def steady(self) -> bool:
        """Whether items are the same at a second reading; up to 16 of them are read."""
        rows = spaced(len(self), 16)
        return torch.equal(self.take(rows), self.take(rows))

    def _read(self, row: int) -> Tensor:
        item = self._dataset[row]
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise DataError(f"{self.place}: its items must be (x, y), and one is {type(item).__name__}")
        return rows_first(np.asarray(item[0])[None], f"{self.place}: x")[0]


class Joined:
    """Two parts, one numbered after the other."""

    def __init__(self, first: Examples, second: Examples) -> None:
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    def take(self, rows: Sequence[int]) -> Tensor:
        """As `Examples.take`."""
        offset = len(self._first)
        of_second = torch.tensor([r >= offset for r in rows])
        if not of_second.any():
            return self._first.take(rows)
        second = self._second.take([r - offset for r in rows if r >= offset])
        if of_second.all():
            return second
        first = self._first.take([r for r in rows if r < offset])
        found = first.new_empty(len(rows), *first.shape[1:])
        found[~of_second], found[of_second] = first, second
        return found

    def digest(self) -> bytes:
        """Of both."""
        return self._first.digest() + self._second.digest()


def rows_first(x: npt.NDArray[Any], what: str) -> Tensor:
    """Any usual layout as a tensor [n, F] or [n, C, H, W]. `what` begins messages.

    Images may be [n, H, W], or channels first, or channels last: 1, 3 or 4 of them, fewer than the second axis has.
    """
    if x.dtype.kind not in "biuf":
        raise DataError(f"{what} holds {x.dtype.name} values, and examples must be numbers")
    if x.ndim not in (2, 3, 4) or 0 in x.shape[1:]:
        raise DataError(
            f"{what} has the shape {list(x.shape)}; tables are [examples, features], images [examples, height, width] with "
            "channels before or after"
        )
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in _CHANNELS and x.shape[3] < x.shape[1]:
        x = np.moveaxis(x, 3, 1)
    kept = x if x.dtype == np.uint8 else x.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(kept))


def spaced(size: int, most: int) -> list[int]:
    """Up to so many of the numbers below a size, evenly spaced."""
    return sorted({round(i) for i in np.linspace(0, size - 1, most)})


def said(x: Tensor) -> str:
    """A tensor's type and shape, for a sentence."""
    return f"{str(x.dtype).removeprefix('torch.')} of shape {list(x.shape)}"


def listed(names: Sequence[object], most: int = 10) -> str:
    """Names for a sentence, the first few of many."""
    more = len(names) - most
    return ", ".join(repr(str(n)) for n in islice(names, most)) + (f" and {more} more" if more > 0 else "")
