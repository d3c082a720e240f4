"""Unscaled examples by number, with labels under the owner's class names: the result of every reader of data."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from fedmutual.calling import Inputs, list_tensors, map_inputs
from fedmutual.config import ColumnConfig
from fedmutual.core import format_tensor
from fedmutual.data.convert import (
    BY_NAME,
    IDS,
    IMAGES,
    SERIES,
    Form,
    Where,
    convert_array,
    convert_decimals,
    convert_input,
    find_forms,
    find_rounded,
    name_inputs,
    pad_inputs,
    view_array,
)
from fedmutual.data.draws import Index, Names
from fedmutual.errors import BadRows, DataError

_DESCRIPTIONS = {SERIES: "series, arrays [examples, channels, time]", IDS: "ids, whole numbers"}
_TARGETS = ("labels", "label", "targets", "target", "y")  # of an item that is a dictionary
TEXT = ("input_ids", "attention_mask")  # the inputs that text becomes
WANTED_ITEMS = "items must be (x, y), or a dictionary with the entry 'label'"


class Examples:
    """Inputs x by row number, as they are stored: one tensor, or several by name. Each way of storing is a subclass."""

    def __len__(self) -> int:
        """Return the number of examples."""
        raise NotImplementedError

    def take(self, rows: Sequence[int]) -> Inputs:
        """Return the examples of `rows` as a new tensor [B, *shape], channels first; or several tensors by name.

        uint8 pixels, numbers that are used without a divisor (float32), or integers (int64).

        Raises:
            DataError: an example cannot be read; `BadRows` has a sentence for each of these examples.
        """
        raise NotImplementedError

    def take_one(self, rows: Sequence[int]) -> Tensor:
        """Return the examples of `rows` [B, *shape], which have one input; of several inputs the first."""
        return list_tensors(self.take(rows))[0]

    def digest(self) -> bytes:
        """Return bytes that identify these examples: other examples have other bytes."""
        raise NotImplementedError

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms in which networks can get the examples; the first one is the usual one."""
        return (IMAGES,)

    def with_form(self, form: Form) -> "Examples":
        """Return the examples in another one of their forms."""
        return self


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
    labels: npt.NDArray[Any]  # [n, ...] class names (text), class numbers, or other targets
    where: Where
    groups: Names | None = None  # [n], where data.group_by is set
    domains: Names | None = None  # [n], where the data name domains
    bases: Index | None = None  # [n] number of the original image, where all domains show the same images


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
    # of a published data set: the divisor, and the mean and standard deviation after it, a value a channel
    published: tuple[float, tuple[float, ...], tuple[float, ...]] | None = None
    notes: tuple[str, ...] = ()
    read: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # of files: aspect -> description -> how many

    @property
    def parts(self) -> list[Part]:
        """The training part, and the test part if there is one."""
        return [self.train] if self.test is None else [self.train, self.test]

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms in which networks can get the examples; the first one is the usual one."""
        return self.train.x.forms if self.plans is None else (IMAGES,)

    def name_row(self, row: int) -> str:
        """Return the name of a row in messages, by the row's number over both parts."""
        first = len(self.train.x)
        return self.train.where(row) if self.test is None or row < first else self.test.where(row - first)

    def with_form(self, form: Form) -> "Source":
        """Return the data set with its examples in another form.

        Raises:
            DataError: the examples of a part cannot have this form.
        """
        if form == IMAGES:
            return self
        for name, part in zip(("", "test "), self.parts, strict=False):
            if form not in part.x.forms:
                raise DataError(
                    f"{self.place}: the network takes {_DESCRIPTIONS[form]}, and the {name}examples are "
                    f"{format_tensor(part.x.take_one([0])[0])}; give it {_DESCRIPTIONS[form]}"
                )
        test = self.test and replace(self.test, x=self.test.x.with_form(form))
        return replace(self, train=replace(self.train, x=self.train.x.with_form(form)), test=test)


class ArrayExamples(Examples):
    """Examples in memory that networks can take unchanged: one array or tensor [n, *shape], or several tensors by name."""

    def __init__(self, x: npt.NDArray[Any] | Inputs) -> None:
        self._x = view_array(x) if isinstance(x, np.ndarray) else x

    def __len__(self) -> int:
        return len(list_tensors(self._x)[0])

    def take(self, rows: Sequence[int]) -> Inputs:
        """Return the examples of `rows` [B, *shape]; see `Examples.take`."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        return map_inputs(lambda one: one[index], self._x)

    def digest(self) -> bytes:
        """Return the digest of all inputs."""
        return digest_inputs(self._x)


def digest_inputs(x: Inputs) -> bytes:
    """Return the SHA-256 digest of the type, the shape and all bytes of an input; of several, with their names."""
    if not isinstance(x, Tensor):
        return hashlib.sha256(b"".join(f"{name}\0".encode() + digest_inputs(one) for name, one in x.items())).digest()
    about = repr((x.dtype, tuple(x.shape))).encode()
    return hashlib.sha256(about + hashlib.sha256(x.numpy().data).digest()).digest()


class UserArrayExamples(ArrayExamples):
    """Examples in memory, from an array [n, ...] of the user, which is converted when examples are first taken."""

    def __init__(self, x: npt.NDArray[Any], name: str, where: Where, form: Form = IMAGES) -> None:
        """name: of the array in messages. where: row -> the name of the row in messages.

        Raises:
            DataError: the values are not numbers, or networks take no array of this shape.
        """
        self._forms = find_forms(x, name)
        # decimal numbers are converted here, once, so that float64 takes no memory
        self._array = x if IDS in self._forms else convert_decimals(x, where)
        self._name, self._where, self._form = name, where, form

    @cached_property
    def _x(self) -> Tensor:  # type: ignore[override]
        return convert_array(self._array, self._name, self._form, self._where)

    def __len__(self) -> int:
        return len(self._array)

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms in which networks can get the examples."""
        return self._forms

    def with_form(self, form: Form) -> "UserArrayExamples":
        """Return the examples in another form."""
        return UserArrayExamples(self._array, self._name, self._where, form)


class OneInput(Examples):
    """One of several inputs, by its name."""

    def __init__(self, examples: Examples, name: str) -> None:
        self._examples, self._name = examples, name

    def __len__(self) -> int:
        return len(self._examples)

    def take(self, rows: Sequence[int]) -> Inputs:
        """Return the input of `rows` [B, *shape]."""
        x = self._examples.take(rows)
        return x if isinstance(x, Tensor) else x[self._name]


class DatasetExamples(Examples):
    """The inputs x of a torch Dataset's items, read on demand: tensors, arrays or PIL images of one shape, or a dictionary.

    lengths: the inputs that are series ("x" if there is one input), with the steps to which each is filled up with zeros.
    """

    def __init__(
        self, dataset: "Dataset[Any]", place: str, form: Form = IMAGES, lengths: Mapping[str, int] | None = None
    ) -> None:
        self._dataset, self.place, self._form, self._lengths = dataset, place, form, lengths or {}

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms in which networks can get the examples. Raises DataError if the first item cannot be used."""
        if not isinstance(self.take([0]), Tensor):  # with a sentence about the item
            return (IMAGES,)
        return find_forms(np.asarray(split_item(self._dataset[0])[0])[None], f"{self.place}: x")

    def with_form(self, form: Form) -> "DatasetExamples":
        """Return the examples in another form."""
        return DatasetExamples(self._dataset, self.place, form, self._lengths)

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def take(self, rows: Sequence[int]) -> Inputs:
        """Return the examples of `rows` [B, *shape]; see `Examples.take`.

        Raises:
            BadRows: an item cannot be read, or has another shape or type than the first item.
            DataError: an item is not (x, y), or its x cannot be used.
        """
        examples, sentences, first = [], list[str](), self._first_item
        for row in rows:
            try:
                x = self._read_row(row)
            except BadRows as problem:
                sentences += problem.args
                continue
            examples.append(x)
            if format_tensor(x) != format_tensor(first):
                sentences.append(
                    f"example {row} of {self.place} is {format_tensor(x)}, but the first is {format_tensor(first)}; "
                    "let the dataset return one shape and type"
                )
        if sentences:
            raise BadRows(*sentences)
        return tree_map(lambda *one: torch.stack(one), *examples)  # type: ignore[no-any-return]

    def digest(self) -> bytes:
        """Return a digest of the number of examples and of up to 64 evenly spaced ones; reading all may take hours."""
        chosen = self.take(choose_evenly(len(self), 64))
        return hashlib.sha256(repr(len(self)).encode() + digest_inputs(chosen)).digest()

    @cached_property
    def _first_item(self) -> Inputs:
        return self._read_row(0)

    def _read_row(self, row: int) -> Inputs:
        name = f"example {row} of {self.place}"
        try:
            item = self._dataset[row]
            x, y = split_item(item)
            if y is not None:
                if isinstance(x, tuple) and len({np.shape(one) for one in x}) > 1:
                    raise DataError(f"{self.place}: x of its items is a tuple; {BY_NAME}")
                if not isinstance(x, Mapping) and not self._lengths:
                    return convert_array(np.asarray(x)[None], f"{self.place}: x", self._form, lambda _: name)[0]
                inputs = pad_inputs({k: np.asarray(v)[None] for k, v in name_inputs(x).items()}, self._lengths)
                return {k: convert_input(v, f"{self.place}: {k}", lambda _: name)[0] for k, v in inputs.items()}
        except DataError:
            raise
        except Exception as problem:  # a user's dataset may fail in any way
            raise BadRows(f"{name} cannot be read ({type(problem).__name__}: {problem})") from None
        raise DataError(f"{self.place}: {WANTED_ITEMS}, but one is {type(item).__name__}; fix __getitem__")


class ConcatExamples(Examples):
    """The examples of two parts: the second part's rows are numbered after the first part's."""

    def __init__(self, first: Examples, second: Examples) -> None:
        self._first, self._second = first, second

    def __len__(self) -> int:
        return len(self._first) + len(self._second)

    @property
    def forms(self) -> tuple[Form, ...]:
        """The forms in which networks can get the examples of both parts."""
        return tuple(form for form in self._first.forms if form in self._second.forms)

    def with_form(self, form: Form) -> "ConcatExamples":
        """Return the examples in another form."""
        return ConcatExamples(self._first.with_form(form), self._second.with_form(form))

    def take(self, rows: Sequence[int]) -> Inputs:
        """Return the examples of `rows` [B, *shape]; see `Examples.take`."""
        offset = len(self._first)
        of_second = torch.tensor([r >= offset for r in rows])
        if not of_second.any():
            return self._first.take(rows)
        second = self._second.take([r - offset for r in rows if r >= offset])
        if of_second.all():
            return second

        def join(one: Tensor, other: Tensor) -> Tensor:
            joined = one.new_empty(len(rows), *one.shape[1:])
            joined[~of_second], joined[of_second] = one, other
            return joined

        return tree_map(join, self._first.take([r for r in rows if r < offset]), second)  # type: ignore[no-any-return]

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
    first, second = (format_tensor(tree_map(lambda one: one[0], part.x.take([0]))) for part in source.parts)
    if first != second:  # bytes are divided by 255, and other numbers are not
        raise DataError(f"{source.place}: training examples are {first} and test examples {second}; make them equal")
    return ConcatExamples(source.train.x, source.test.x)


def merge_parts(source: Source) -> Source:
    """Return a source whose test rows are training rows, numbered after the other ones."""
    if source.test is None:
        return source
    first, second = source.parts
    groups, domains = (
        None if one is None or other is None else np.concatenate([one, other])
        for one, other in ((first.groups, second.groups), (first.domains, second.domains))
    )
    labels = np.concatenate([first.labels, second.labels])
    return replace(
        source, train=Part(ConcatExamples(first.x, second.x), labels, source.name_row, groups, domains), test=None
    )


def split_item(item: Any) -> tuple[Any, Any]:
    """Return x and y of an item of a Dataset: (x, y, ...), or a dictionary with an entry of `_TARGETS` for y.

    x of one entry is its value. Of another item y is None.
    """
    if isinstance(item, tuple | list) and len(item) >= 2:
        return item[0], item[1]
    label = next((name for name in _TARGETS if isinstance(item, Mapping) and name in item), None)
    if label is None:
        return item, None
    x = {k: v for k, v in item.items() if k != label}
    return x if len(x) != 1 else next(iter(x.values())), item[label]


def note_rounding(columns: Mapping[str, npt.NDArray[Any]], place: str, fix: str) -> list[str]:
    """Return a remark on columns [n] of numbers that float32 does not keep apart; [] without them.

    These are whole numbers above 2^24 that change, such as times in seconds, and different numbers that become equal because
    all lie within a few steps of float32, such as 1000000.01 and 1000000.02.
    """
    examples = {name: example for name, cells in columns.items() if (example := find_rounded(cells)) is not None}
    if not examples:
        return []
    cell, rounded = (f"{v:.0f}" if v == round(v) else str(v.item()) for v in next(iter(examples.values())))
    return [
        f"{place}: {list_names([*examples])} {'holds' if len(examples) == 1 else 'hold'} numbers that float32, in which "
        f"networks compute, does not keep apart ({cell} becomes {rounded}, for example); {fix}"
    ]


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
