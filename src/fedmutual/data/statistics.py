"""Statistics of the training rows of all clients: rows, classes, missing values, mean and deviation of each input.

With `data.mean = "federated"` inputs are standardised by them. Each client sums its own rows (`sum_rows`), and only sums of
clients are added (`add_sums`): as integers, so that the order of clients changes no bit, and so that real sites can mask
what they send. An input is a channel of images, or a column of a table.

A number v becomes the integer round(v * 2^96), and the integer becomes DIGITS digits in base 2^32; the last digit has the
sign. Each digit is one 64-bit word. Words are added without regard to carries, and `decode_total` carries once, at the end,
so words may be masked (`sites.secure_sum`). Unlike an update of a model (`aggregation`), a number is never clipped.
"""

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmutual.calling import find_image_shape, list_tensors
from fedmutual.config import ColumnConfig
from fedmutual.data.draws import Index
from fedmutual.data.examples import list_names
from fedmutual.data.space import Space
from fedmutual.errors import ConfigError, DataError, format_count

if TYPE_CHECKING:
    from fedmutual.data.prepared import Prepared

Words = npt.NDArray[np.int64]
_CONSTANT = Fraction(1, 2**44)  # a smaller variance, as a fraction of the mean square, is rounding: sums are of float64
DIGITS = 6
FRACTION_BITS = 96
RANGE = 2.0 ** (32 * DIGITS - 1 - FRACTION_BITS)  # a number must be smaller, about 4e28
_TOO_LARGE = (
    "the values are too large for the statistics of the federation; fix them, for example 1e30 in place of a missing value"
)
_BASE = 2**32
_CHUNK = 2**20  # values that are summed at a time
_CARRIES = 2**26  # of 20 sites, digits and random carries together stay below 2^63


@dataclass(frozen=True)
class Layout:
    """What is summed, in which order. It is public, and must be the same at all clients."""

    inputs: tuple[str, ...]  # the names of columns, or the numbers of channels or features
    classes: tuple[str, ...]  # () where rows have no class: targets are numbers, labels or masks
    values: int = 1  # of an input in a row: 1, or the pixels of a channel
    categories: tuple[str, ...] = ()  # inputs that are no numbers: their missing values alone are counted

    @property
    def count(self) -> int:
        """The number of words of a client's sums."""
        return 1 + len(self.classes) + len(self.inputs) * (1 + 2 * DIGITS)


class Moments(NamedTuple):
    """The numbers by which inputs are standardised: (x - mean) / std, one mean and one divisor for each input."""

    mean: tuple[float, ...]  # of each input
    std: tuple[float, ...]  # the divisor of each input


@dataclass(frozen=True)
class Statistics:
    """The statistics of the training rows of all clients together, computed from the sums of `Layout`.

    `rows` is the number of rows, and `inputs` are the names of columns, or the numbers of channels or features.
    """

    rows: int
    classes: dict[str, int]  # class -> rows
    inputs: tuple[str, ...]
    missing: tuple[int, ...]  # of each input
    mean: tuple[float | None, ...]  # of each input, over its present values; None: of a category, or of no value
    std: tuple[float | None, ...]  # of the population (divided by n); 0 for a constant

    def record(self) -> dict[str, Any]:
        """Return the entry of environment.json."""
        return asdict(self)

    @property
    def moments(self) -> Moments:
        """The mean and the divisor of each input. A constant input, and one without a value, is divided by 1."""
        return Moments(tuple(mean or 0.0 for mean in self.mean), tuple(std or 1.0 for std in self.std))


def sum_rows(layout: Layout, chunks: Iterable[Tensor], labels: Sequence[int], hide_carries: bool = False) -> Words:
    """Return the words [layout.count] of one client's rows.

    chunks: examples [B, inputs, ...], before a mean is subtracted; NaN is a missing value. labels: the class number of each
    row; not read where the layout has no classes. hide_carries: see `encode_number`.

    Raises:
        DataError: a sum is infinite, or beyond the range of fixed point. The message names the input.
    """
    rows, missing = 0, np.zeros(len(layout.inputs), np.int64)
    totals, squares = ([Fraction()] * len(layout.inputs) for _ in range(2))
    for chunk in chunks:
        rows += len(chunk)
        x = chunk.numpy().astype(np.float64).reshape(len(chunk), len(layout.inputs), -1)
        is_missing = np.isnan(x)
        missing += is_missing.sum((0, 2))
        x = np.where(is_missing, 0.0, x)
        with np.errstate(over="ignore"):  # an infinite sum is refused below
            sums = x.sum((0, 2)), np.square(x).sum((0, 2))
        for name, *pair in zip(layout.inputs, *sums, strict=True):
            if not np.isfinite(pair).all():
                raise DataError(f"input {name!r}: {_TOO_LARGE}")
        for into, of_chunk in zip((totals, squares), sums, strict=True):
            into[:] = [one + Fraction(float(other)) for one, other in zip(into, of_chunk, strict=True)]
    counts = np.bincount(np.asarray(labels, dtype=np.int64), minlength=len(layout.classes)) if layout.classes else ()
    words = [rows, *map(int, counts)]
    for name, lacking, total, square in zip(layout.inputs, missing.tolist(), totals, squares, strict=True):
        numbers = (Fraction(), Fraction()) if name in layout.categories else (total, square)
        try:
            words += [lacking, *(word for number in numbers for word in encode_number(number, hide_carries))]
        except ValueError:
            raise DataError(f"input {name!r}: {_TOO_LARGE}") from None
    return np.array(words, dtype=np.int64)


def add_sums(parts: Iterable[Words]) -> Words:
    """Return the sum of the words of several clients, each int64 [Layout.count]."""
    total: Words = np.sum(np.stack(list(parts)), axis=0, dtype=np.int64)
    return total


def read_sums(layout: Layout, words: Words) -> Statistics:
    """Return the statistics that summed words stand for.

    Raises:
        ValueError: no rows have such sums, so that a client sent wrong words.
    """
    rows, *value_words = words.tolist()
    counts, value_words = value_words[: len(layout.classes)], value_words[len(layout.classes) :]
    if rows < 1 or any(count < 0 for count in counts) or (layout.classes and sum(counts) != rows):
        raise ValueError("the counts of rows and classes contradict each other")
    missing, means, stds = [], list[float | None](), list[float | None]()
    for number, name in enumerate(layout.inputs):
        lacking, *digits = value_words[number * (1 + 2 * DIGITS) :][: 1 + 2 * DIGITS]
        present = rows * layout.values - lacking
        if lacking < 0 or present < 0:
            raise ValueError(f"input {name!r} lacks more values than there are, or fewer than none")
        missing.append(lacking)
        if name in layout.categories or not present:
            means.append(None)
            stds.append(None)
            continue
        mean, square = decode_total(digits[:DIGITS]) / present, decode_total(digits[DIGITS:]) / present
        variance, noise = square - mean**2, square * _CONSTANT
        if square < 0 or variance < -noise:
            raise ValueError(f"the squares of input {name!r} are too small for its mean")
        means.append(float(mean))
        stds.append(0.0 if variance <= noise else math.sqrt(variance))
    return Statistics(
        rows, dict(zip(layout.classes, counts, strict=True)), layout.inputs, tuple(missing), tuple(means), tuple(stds)
    )


def check_layouts(layouts: Mapping[str, Layout]) -> None:
    """Raise DataError, which names two clients, unless all clients have one layout."""
    first_client, first = next(iter(layouts.items()))
    for client, layout in layouts.items():
        for field in ("inputs", "classes", "categories", "values"):
            own, other = getattr(layout, field), getattr(first, field)
            if own != other:
                raise DataError(
                    f"statistics need the same {field} at all clients: client {client!r} has {_describe(own)}, and client "
                    f"{first_client!r} has {_describe(other)}; give all clients the same columns, classes and image size"
                )


def _describe(values: tuple[str, ...] | int) -> str:
    return str(values) if isinstance(values, int) else f"{len(values)} ({list_names(values, 3)})"


def encode_number(value: Fraction, hide_carries: bool = False) -> list[int]:
    """Return a number as DIGITS words, from the lowest digit to the highest; each word fits into a signed 64-bit integer.

    hide_carries: add a random multiple of the base to each digit, and subtract as many carries from the next digit. The sum
    of the numbers is unchanged, and the sums of single digits reveal nothing else, for example not how many numbers were
    negative. At most 20 such numbers can be added.

    Raises:
        ValueError: the number is not below RANGE.
    """
    if abs(value) >= RANGE:
        raise ValueError(f"it is not below {RANGE:.1g}, the range of a fixed-point sum")
    integer = round(value * 2**FRACTION_BITS)
    words = [integer >> 32 * place for place in range(DIGITS)]
    words = [*(word % _BASE for word in words[:-1]), words[-1]]
    for place in range(DIGITS - 1) if hide_carries else ():
        carries = secrets.randbelow(_CARRIES)
        words[place] += carries * _BASE
        words[place + 1] -= carries
    return words


def decode_total(words: Sequence[int]) -> Fraction:
    """Return the total that the summed words of `encode_number` stand for."""
    return Fraction(sum(word << 32 * place for place, word in enumerate(words)), 2**FRACTION_BITS)


def make_layout(space: "Space", columns: Mapping[str, ColumnConfig]) -> Layout:
    """Return the kinds of values that the statistics of a data set describe: with `data.columns`, the stored cells."""
    classes = space.classes if space.targets == "classes" else ()  # a label or a pixel is not the class of a row
    if columns:
        categories = tuple(name for name, settings in columns.items() if settings.kind == "category")
        return Layout(tuple(columns), classes, categories=categories)
    shape = find_image_shape(space.shape)  # several inputs have no common statistics: data.mean refuses them
    inputs = space.columns or tuple(str(number) for number in range(shape[0]))
    return Layout(inputs, classes, values=prod(shape[1:]))


def sum_client(prepared: "Prepared", rows: Index, hide_carries: bool = False) -> Words:
    """Return the words of a client's training rows; see `sum_rows`. rows: their numbers in the data set [n].

    Raises:
        DataError: a row cannot be read, or the values are too large.
    """
    layout = _make_layout(prepared)
    labels = prepared.table.labels[rows].tolist()
    return sum_rows(layout, _read_chunks(prepared, rows, len(layout.inputs) * layout.values), labels, hide_carries)


def sum_clients(data_by_client: Mapping[str, tuple["Prepared", Index]]) -> Statistics:
    """Return the statistics of several clients in one process. data_by_client: client -> data and numbers of training rows.

    Raises:
        DataError: clients have other columns, classes or shapes; or a client's values are too large.
    """
    layouts = {client: _make_layout(prepared) for client, (prepared, _) in data_by_client.items()}
    check_layouts(layouts)
    parts = []
    for client, (prepared, rows) in data_by_client.items():
        try:
            parts.append(sum_client(prepared, rows))
        except DataError as problem:
            raise DataError(f"client {client!r}: {problem}") from None
    return read_sums(next(iter(layouts.values())), add_sums(parts))


def standardize(prepared: "Prepared", moments: Moments) -> "Prepared":
    """Return data whose inputs are standardised.

    With `data.columns`: a column's mean and std, and its fill, are those of `moments` where its settings have none.

    Raises:
        ConfigError: the data have another number of inputs than `moments`.
    """
    source, (mean, std), count = prepared.source, moments, len(_make_layout(prepared).inputs)
    if count != len(mean):
        raise ConfigError(
            f"{source.place}: has {format_count(count, 'input')}, and the statistics of the federation are of {len(mean)}; "
            "give all clients the same channels or columns"
        )
    if source.plans is not None:
        plans = []
        for plan, one_mean, one_std in zip(source.plans, mean, std, strict=True):
            changes = {"fill": one_mean} if plan.settings.fill is None else {}
            changes |= {"mean": one_mean, "std": one_std} if plan.settings.mean is None else {}
            settings = plan.settings.model_copy(update=changes if plan.settings.kind != "category" else {})
            plans.append(plan._replace(settings=settings))
        return replace(prepared, source=replace(source, plans=tuple(plans)))
    space = replace(prepared.space, scaling=prepared.space.scaling.model_copy(update=moments._asdict()))
    assert prepared.store is not None
    return replace(prepared, store=prepared.store.standardize(mean, std), space=space)


def _make_layout(prepared: "Prepared") -> Layout:
    return make_layout(prepared.space, {plan.name: plan.settings for plan in prepared.source.plans or ()})


def _read_chunks(prepared: "Prepared", rows: Index, values: int) -> Iterator[Tensor]:
    """Yield the inputs of rows, in chunks, before a mean is subtracted. values: numbers in a row."""
    chunks = torch.split(torch.from_numpy(rows), max(1, _CHUNK // values))
    if prepared.store is not None:
        yield from (list_tensors(x)[0] for x, _ in prepared.store.batches(chunks))
    else:
        yield from (prepared.examples.take_one(chunk.tolist()) for chunk in chunks)
