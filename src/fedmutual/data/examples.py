"""Unscaled examples by number, with labels under the owner's class names: the result of every reader of data."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedmutual.config import ColumnConfig
from fedmutual.core import format_tensor
from fedmutual.data.draws import Index, Names
from fedmutual.errors import DataError

Form = Literal["images", "series", "ids"]
"""How networks get an array [n, ...]. An array of three axes is [n, H, W] as images of one channel, and [n, C, T] as series
of C channels; arrays of more or fewer axes are equal in both forms. Ids are whole numbers that stay int64."""

IMAGES: Form = "images"
SERIES: Form = "series"
IDS: Form = "ids"
_DESCRIPTIONS = {SERIES: "series, arrays [examples, channels, time]", IDS: "ids, whole numbers"}
_CHANNELS = (1, 3, 4)  # gray, RGB, RGBA
LARGEST_EXACT = 2**24  # float32 holds every whole number up to this one
_LISTED = 3
_CHUNK = 1024


class BadRows(DataError):
    """Examples that cannot be used. `args` holds one sentence for each example; the message shows the first three."""

    def __str__(self) -> str:
        sentences = list_problems(self)
        omitted = len(sentences) - _LISTED
        return "; ".join(sentences[:_LISTED]) + (f"; and {omitted} more" if omitted > 0 else "")


def list_problems(problem: DataError) -> list[str]:
    """Return all sentences of an error about data, each once: one for each unusable example of `BadRows`."""
    if not isinstance(problem, BadRows):
        return [str(problem)]
    return list(dict.fromkeys(map(str, problem.args)))  # a fault of the whole data set is raised for every batch


class Examples(Protocol):
    """Inputs x by row number, as they are stored."""

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return the examples of `rows` as a new tensor [B, *shape], channels first.

        uint8 pixels, numbers that are used without a divisor (float32), or ids (int64).

        Raises:
            DataError: an example cannot be read; `BadRows` has a sentence for each of these examples.
        """
        ...

    def digest(self) -> bytes:
        """Return bytes that identify these examples: other examples have other bytes."""
        ...


class ColumnPlan(NamedTuple):
    """How one column of a table is read into numbers.

    A category is its position in `vocabulary`, and a date is its days since 1970-01-01. Missing cells are NaN, and so are
    categories outside the vocabulary.
    """

    name: str
    settings: ColumnConfig
    vocabulary: tuple[str, ...] = ()  # of a category


@dataclass(frozen=True)
class Part:
    """The training part of a data set, or its test part, of n examples."""

    x: Examples
    labels: npt.NDArray[Any]  # [n] class names (text) or class numbers
    where: Callable[[int], str]  # the name of an example in messages: "a.png", "row 7 of b.csv"
    groups: Names | None = None  # [n], where data.group_by is set
    domains: Names | None = None  # [n], where the data name domains
    bases: Index | None = None  # [n] number of the original image, where all domains show the same images


@dataclass(frozen=True)
class Published:
    """The scaling of a published data set: x / divisor, minus `mean`, over `std`, one value a channel."""

    divisor: float
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Source:
    """A data set as its reader found it, before labels are matched and inputs are scaled."""

    place: str  # the name in messages
    train: Part
    test: Part | None = None
    classes: tuple[str, ...] | None = None  # class names, where labels are class numbers
    columns: tuple[str, ...] | None = None  # the names of a table's features; with `plans`, of its columns
    label_columns: tuple[str, ...] = ()  # the names of a table's columns of labels
    plans: tuple[ColumnPlan, ...] | None = None  # how the columns of a table that is not encoded yet are read
    published: Published | None = None
    notes: tuple[str, ...] = ()

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms in which networks can get the examples; the first one is the usual one."""
        return list_forms(self.train.x) if self.plans is None else (IMAGES,)

    def with_form(self, form: Form) -> "Source":
        """Return the data set with its examples in another form.

        Raises:
            DataError: the examples of a part cannot have this form.
        """
        if form == IMAGES:
            return self
        for name, part in {"": self.train, "test ": self.test}.items():
            if part is not None and form not in list_forms(part.x):
                raise DataError(
                    f"{self.place}: the network takes {_DESCRIPTIONS[form]}, and the {name}examples are "
                    f"{format_tensor(part.x.take([0])[0])}; give it {_DESCRIPTIONS[form]}"
                )
        test = self.test and replace(self.test, x=set_form(self.test.x, form))
        return replace(self, train=replace(self.train, x=set_form(self.train.x, form)), test=test)


class ArrayExamples:
    """Examples in memory, from one array [n, *shape] that networks can take unchanged."""

    def __init__(self, x: npt.NDArray[Any]) -> None:
        self._x = torch.from_numpy(np.ascontiguousarray(x))

    def __len__(self) -> int:
        return len(self._x)

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return the examples of `rows` [B, *shape]; see `Examples.take`."""
        return self._x[torch.as_tensor(rows, dtype=torch.int64)]

    def digest(self) -> bytes:
        """Return the SHA-256 digest of the type, the shape and all bytes."""
        about = repr((self._x.dtype, tuple(self._x.shape))).encode()
        return hashlib.sha256(about + hashlib.sha256(self._x.numpy().data).digest()).digest()


class UserArrayExamples:
    """Examples in memory, from an array [n, ...] of the user, which is converted when examples are taken."""

    def __init__(self, x: npt.NDArray[Any], name: str, where: Callable[[int], str], form: Form = IMAGES) -> None:
        """name: of the array in messages. where: row -> the name of the row in messages.

        Raises:
            DataError: the values are not numbers, or networks take no array of this shape.
        """
        self.forms = find_forms(x, name)
        # decimal numbers are converted here, once, so that float64 takes no memory
        self._x = x if IDS in self.forms else x.astype(np.float32, copy=False)
        self._name, self._where, self._form = name, where, form

    def __len__(self) -> int:
        return len(self._x)

    def with_form(self, form: Form) -> "UserArrayExamples":
        """Return the examples in another form."""
        return UserArrayExamples(self._x, self._name, self._where, form)

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return the examples of `rows` [B, *shape]; see `Examples.take`.

        Raises:
            BadRows: float32 cannot hold a whole number; or the form is ids, and a value is no whole number.
        """
        index = np.asarray(rows, dtype=np.int64)
        return convert_array(self._x[index], self._name, self._form, lambda k: self._where(int(index[k])))

    def digest(self) -> bytes:
        """Return the digest that `ArrayExamples` would return for these examples."""
        chunks = (self.take(range(k, min(k + _CHUNK, len(self)))) for k in range(0, len(self), _CHUNK))
        content = hashlib.sha256()
        for x in chunks:
            content.update(x.numpy().data)
        about = repr((x.dtype, (len(self), *x.shape[1:]))).encode()
        return hashlib.sha256(about + content.digest()).digest()


class DatasetExamples:
    """The inputs x of a torch Dataset's items, read on demand: tensors, arrays or PIL images of one shape."""

    def __init__(self, dataset: "Dataset[Any]", place: str, form: Form = IMAGES) -> None:
        self._dataset, self.place, self._form = dataset, place, form
        self._first_item: Tensor | None = None

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms in which networks can get the examples.

        Raises:
            DataError: the first item cannot be read, or is not (x, y), or its x cannot be used.
        """
        self.take([0])  # with a sentence about the item
        return find_forms(np.asarray(self._dataset[0][0])[None], f"{self.place}: x")

    def with_form(self, form: Form) -> "DatasetExamples":
        """Return the examples in another form."""
        return DatasetExamples(self._dataset, self.place, form)

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return the examples of `rows` [B, *shape]; see `Examples.take`.

        Raises:
            BadRows: an item cannot be read, or has another shape or type than the first item.
            DataError: the first item is not (x, y), or its x cannot be used.
        """
        examples, sentences = [], list[str]()
        if self._first_item is None:
            try:
                self._first_item = self._read_row(0)
            except DataError:
                raise
            except Exception as problem:  # a user's dataset may fail in any way
                raise BadRows(self._describe_unreadable(0, problem)) from None
        for row in rows:
            try:
                x = self._read_row(row)
            except BadRows as problem:
                sentences += problem.args
                continue
            except Exception as problem:  # a user's dataset may fail in any way
                sentences.append(self._describe_unreadable(row, problem))
                continue
            examples.append(x)
            if (x.shape, x.dtype) != (self._first_item.shape, self._first_item.dtype):
                sentences.append(
                    f"example {row} of {self.place} is {format_tensor(x)}, but the first is "
                    f"{format_tensor(self._first_item)}; "
                    "let the dataset return one shape and type"
                )
        if sentences:
            raise BadRows(*sentences)
        return torch.stack(examples)

    def digest(self) -> bytes:
        """Return a digest of the number of examples and of up to 64 evenly spaced examples.

        Reading all examples may take hours.

        Raises:
            DataError: as `take`.
        """
        return hashlib.sha256(
            repr(len(self)).encode() + ArrayExamples(self.take(choose_evenly(len(self), 64)).numpy()).digest()
        ).digest()

    def is_repeatable(self) -> bool:
        """Return whether up to 16 items have equal inputs when they are read twice.

        Raises:
            DataError: as `take`.
        """
        rows = choose_evenly(len(self), 16)
        return torch.equal(self.take(rows), self.take(rows))

    def _describe_unreadable(self, row: int, problem: Exception) -> str:
        return f"example {row} of {self.place} cannot be read ({type(problem).__name__}: {problem})"

    def _read_row(self, row: int) -> Tensor:
        item = self._dataset[row]
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise DataError(f"{self.place}: items must be (x, y), but one is {type(item).__name__}; fix __getitem__")
        name = f"example {row} of {self.place}"
        return convert_array(np.asarray(item[0])[None], f"{self.place}: x", self._form, lambda _: name)[0]


class ConcatExamples:
    """The examples of two parts: the second part's rows are numbered after the first part's."""

    def __init__(self, first: Examples, second: Examples) -> None:
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms in which networks can get the examples of both parts."""
        return tuple(form for form in list_forms(self._first) if form in list_forms(self._second))

    def with_form(self, form: Form) -> "ConcatExamples":
        """Return the examples in another form."""
        return ConcatExamples(set_form(self._first, form), set_form(self._second, form))

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return the examples of `rows` [B, *shape]; see `Examples.take`."""
        offset = len(self._first)
        of_second = torch.tensor([r >= offset for r in rows])
        if not of_second.any():
            return self._first.take(rows)
        second = self._second.take([r - offset for r in rows if r >= offset])
        if of_second.all():
            return second
        first = self._first.take([r for r in rows if r < offset])
        joined = first.new_empty(len(rows), *first.shape[1:])
        joined[~of_second], joined[of_second] = first, second
        return joined

    def digest(self) -> bytes:
        """Return the digests of both parts, one after the other."""
        return self._first.digest() + self._second.digest()


def join_examples(source: Source) -> Examples:
    """Return the examples of the training part, followed by those of the test part.

    Raises:
        DataError: the parts differ in shape or type, or their first examples cannot be read.
    """
    if source.test is None:
        return source.train.x
    first, second = (p.x.take([0])[0] for p in (source.train, source.test))
    if first.shape != second.shape:
        raise DataError(
            f"{source.place}: training examples have the shape {list(first.shape)} and test examples "
            f"{list(second.shape)}; make them equal"
        )
    if first.dtype != second.dtype:  # bytes are divided by 255, and other numbers are not
        raise DataError(
            f"{source.place}: training examples are {format_tensor(first)} and test examples {format_tensor(second)}; "
            "make them equal"
        )
    return ConcatExamples(source.train.x, source.test.x)


def merge_parts(first: Part, second: Part) -> Part:
    """Return both parts as one; the second part's rows are numbered after the first part's."""
    offset = len(first.x)
    groups, domains = (
        None if one is None or other is None else np.concatenate([one, other])
        for one, other in ((first.groups, second.groups), (first.domains, second.domains))
    )
    return Part(
        ConcatExamples(first.x, second.x),
        np.concatenate([first.labels, second.labels]),
        lambda i: first.where(i) if i < offset else second.where(i - offset),
        groups,
        domains,
    )


def list_forms(examples: Examples) -> tuple[Form, ...]:
    """Return the forms in which networks can get the examples; files of images and encoded tables have one."""
    forms: tuple[Form, ...] = getattr(examples, "forms", (IMAGES,))
    return forms


def set_form(examples: Examples, form: Form) -> Examples:
    """Return the examples in another one of their forms."""
    return examples.with_form(form)  # type: ignore[attr-defined, no-any-return]


def find_forms(x: npt.NDArray[Any], name: str) -> tuple[Form, ...]:
    """Return the forms that an array [n, ...] can have, judged by its shape, its type, and the first two rows.

    Raises:
        DataError: the values are not numbers, or networks take no array of this shape.
    """
    if x.dtype.kind not in "biuf":
        raise DataError(f"{name} holds {x.dtype.name} values; examples must be numbers")
    if x.ndim not in (2, 3, 4, 5) or 0 in x.shape[1:]:
        raise DataError(
            f"{name} has the shape {list(x.shape)}; tables are [examples, features], series [examples, channels, time], "
            "images [examples, height, width] and volumes [examples, channels, depth, height, width], with channels before "
            "or after"
        )
    are_whole = x.dtype.kind in "iu" or (x.dtype.kind == "f" and bool((x[:2] == np.trunc(x[:2])).all()))
    return (IMAGES, *((SERIES,) if x.ndim == 3 else ()), *((IDS,) if are_whole else ()))


def convert_array(x: npt.NDArray[Any], name: str, form: Form = IMAGES, where: Callable[[int], str] | None = None) -> Tensor:
    """Return an array in any usual layout as a tensor [n, F], [n, C, T], [n, C, H, W] or [n, C, D, H, W].

    uint8 stays uint8, ids are int64, and the rest is float32. Images may be [n, H, W], unless the form is another one.
    Images and volumes have their channels first, or last: 1, 3 or 4 channels, fewer than the second axis has.
    `name` begins the messages; `where` names a row of the array in messages.

    Raises:
        DataError: the values are not numbers, or networks take no array of this shape.
        BadRows: float32 cannot hold a whole number; or the form is ids, and a value is no whole number.
    """
    find_forms(x, name)
    where = where or (lambda row: f"{name}: row {row}")
    if x.ndim == 3 and form == IMAGES:
        x = x[:, None]
    elif x.ndim > 3 and x.shape[-1] in _CHANNELS and x.shape[-1] < x.shape[1]:
        x = np.moveaxis(x, -1, 1)
    if form == IDS:
        values = _convert_exactly(x, np.int64, where, "is no whole number of 64 bits, but the network takes ids; correct it")
    elif x.dtype == np.uint8:
        values = x
    elif x.dtype.kind in "iu" and x.dtype.itemsize > 2:
        fix = "divide or standardise the numbers, or round them yourself: x.astype('float32')"
        values = _convert_exactly(x, np.float32, where, f"is a whole number above 2^24, which float32 would round; {fix}")
    else:
        values = x.astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(values))


def _convert_exactly(
    x: npt.NDArray[Any], dtype: type[np.float32] | type[np.int64], where: Callable[[int], str], fault: str
) -> npt.NDArray[Any]:
    """Return x [n, ...] in another type. Raises BadRows where a value changes; `fault`: what is wrong, and the fix."""
    with np.errstate(invalid="ignore"):
        values = x.astype(dtype)
        if dtype is np.float32 and -LARGEST_EXACT <= x.min(initial=0) <= x.max(initial=0) <= LARGEST_EXACT:
            return values
        changed = (values.astype(x.dtype) != x) | (np.sign(values) != np.sign(x))  # a number out of range may come back
    bad = np.flatnonzero(changed.reshape(len(x), -1).any(1))
    if len(bad):
        raise BadRows(*(f"{where(int(k))} holds {x[k][changed[k]].flat[0]}, which {fault}" for k in bad))
    return values


def choose_evenly(size: int, most: int) -> list[int]:
    """Return at most `most` different numbers from 0 to `size` - 1, evenly spaced and sorted."""
    return sorted({round(i) for i in np.linspace(0, size - 1, most)})


def list_names(names: Sequence[object], most: int = 10) -> str:
    """Return the first `most` names, quoted and joined by commas, and the number of the others."""
    omitted = len(names) - most
    return ", ".join(repr(str(n)) for n in islice(names, most)) + (f" and {omitted} more" if omitted > 0 else "")


def describe_columns(columns: Sequence[object], wanted: str) -> str:
    """Return the columns of a table for a message, and the column whose name is nearly that of the missing one."""
    names = [str(c) for c in columns]
    similar = [c for c in names if c.strip().casefold() == wanted.strip().casefold()] or get_close_matches(wanted, names, 1)
    return f"it has {list_names(names)}" + (f"; did you mean {similar[0]!r}?" if similar else "")
