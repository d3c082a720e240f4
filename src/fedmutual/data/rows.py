"""Rows by index, as the core asks for them: one store of all examples, shared by every client through row numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedmutual.core import Batch
from fedmutual.data.augment import Augment
from fedmutual.data.draws import Index
from fedmutual.data.examples import BadRows, Examples
from fedmutual.data.scaling import Scaling
from fedmutual.errors import DataError

RESIDENT = 4 * 2**30  # bytes: what is kept in memory unless data.resident says otherwise
_CHUNK = 1024
Where = Callable[[int], str]


class Store(Protocol):
    """All examples, scaled, by their number."""

    labels: Tensor  # [N] int64
    where: Where  # what messages call a row

    def batches(self, plan: Iterable[Tensor]) -> Iterable[Batch]:
        """(x [B, *shape] float32, y [B] int64) for each index tensor [B] of the plan."""
        ...


class Rows:
    """Some rows of a store: a client's share, or the test set. This is the `Data` of the core."""

    def __init__(self, store: Store, index: Index, augment: Augment | None = None) -> None:
        self._store, self._augment = store, augment
        self.index = index  # row numbers in the store [n]
        self._index = torch.from_numpy(index)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def labels(self) -> Index:
        """The classes of the rows [n]."""
        return self._store.labels[self._index].numpy()

    def where(self, position: int) -> str:
        """What messages call the row at this position."""
        return self._store.where(int(self.index[position]))

    def with_index(self, index: Index) -> "Rows":
        """Other rows of the same store, augmented alike."""
        return Rows(self._store, index, self._augment)

    def rows(self, plan: Iterable[Tensor], rng: torch.Generator | None = None) -> Iterable[Batch]:
        """As `fedmutual.core.Data.rows`."""
        batches = self._store.batches(self._index.index_select(0, i) for i in plan)
        augment = self._augment
        if rng is None or augment is None:
            return batches
        return ((augment(x, rng), y) for x, y in batches)


class Resident:
    """Everything in memory, scaled once."""

    def __init__(self, examples: Examples, labels: Index, scaling: Scaling, where: Where) -> None:
        self.labels, self.where = torch.from_numpy(labels), where
        self._x = torch.empty(len(labels), *scaling(examples.take([0])).shape[1:])
        bad: list[str] = []
        with _one_thread():
            for start in range(0, len(labels), _CHUNK):
                rows = range(start, min(start + _CHUNK, len(labels)))
                try:
                    self._x[rows.start : rows.stop] = finite(scaling(examples.take(rows)), rows, where)
                except BadRows as problem:
                    bad += problem.args
        if bad:
            raise BadRows(*bad)

    def batches(self, plan: Iterable[Tensor]) -> Iterable[Batch]:
        """As `Store.batches`."""
        return ((self._x.index_select(0, i), self.labels.index_select(0, i)) for i in plan)


class Streamed:
    """Rows read and scaled as they are needed: for data larger than memory."""

    def __init__(self, examples: Examples, labels: Index, scaling: Scaling, where: Where, workers: int) -> None:
        self.labels, self.where = torch.from_numpy(labels), where
        self._dataset = _Batches(examples, scaling)
        self._workers = workers

    def batches(self, plan: Iterable[Tensor]) -> Iterator[Batch]:
        """As `Store.batches`. Raises DataError where a row cannot be read or is not finite."""
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=(i.tolist() for i in plan),
            collate_fn=_whole,
            num_workers=self._workers,
            generator=torch.Generator(),  # else it would move torch's global stream, which dropout draws from
        )
        for rows, x in loader:
            if isinstance(x, DataError):
                raise x
            yield finite(x, rows, self.where), self.labels[torch.tensor(rows)]


class _Batches(Dataset[Any]):
    """Examples a batch at a time. A worker process cannot raise a DataError as it is, so it hands it back."""

    def __init__(self, examples: Examples, scaling: Scaling) -> None:
        self._examples, self._scaling = examples, scaling

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])

    def __getitems__(self, rows: list[int]) -> tuple[list[int], Tensor | DataError]:
        try:
            return rows, self._scaling(self._examples.take(rows))
        except DataError as problem:
            return rows, problem


@contextmanager
def _one_thread() -> Iterator[None]:
    """Scaling waits for memory: more threads gain nothing, and on a busy machine they wait for each other, for seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _whole(batch: Any) -> Any:
    return batch


def finite(x: Tensor, rows: Sequence[int], where: Where) -> Tensor:
    """x [B, ...] itself. Raises BadRows, naming the rows, where it holds NaN or infinite values."""
    if x.sum().isfinite():  # a single pass where all is well, as it nearly always is
        return x
    bad = np.flatnonzero(~x.flatten(1).isfinite().all(1).numpy())
    if len(bad):
        raise BadRows(*(f"{where(rows[i])} holds NaN or infinite values; mend it or leave it out" for i in bad.tolist()))
    return x


def make_store(
    examples: Examples, labels: Index, scaling: Scaling, where: Where, resident: bool | None, workers: int
) -> tuple[Store, tuple[int, ...]]:
    """Keep everything in memory if asked to, or if it takes less than 4 GiB -> (the store, the shape of an example)."""
    shape = tuple(scaling(examples.take([0])).shape[1:])
    if resident is None:
        resident = len(labels) * int(np.prod(shape)) * 4 < RESIDENT
    if resident:
        return Resident(examples, labels, scaling, where), shape
    return Streamed(examples, labels, scaling, where, workers), shape
