"""Rows by index, as the core asks for them: one store of all examples, shared by every client through row numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import pairwise
from multiprocessing import current_process
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedmutual.core import Batch
from fedmutual.data.augment import Augment
from fedmutual.data.draws import Index
from fedmutual.data.examples import BadRows, Examples
from fedmutual.data.labels import Targets
from fedmutual.data.scaling import Scaling
from fedmutual.errors import DataError

RESIDENT = 4 * 2**30  # bytes: what is kept in memory unless data.resident says otherwise
_CHUNK = 1024
Where = Callable[[int], str]


class Store(Protocol):
    """All examples, scaled, by their number."""

    labels: Tensor  # [N] int64; float32 where targets are numbers
    where: Where  # what messages call a row

    def to(self, device: torch.device) -> "Store":
        """The same examples, handed out on that device."""
        ...

    def relabelled(self, labels: Tensor) -> "Store":
        """The same examples with other labels [N]."""
        ...

    def batches(self, plan: Iterable[Tensor]) -> Iterable[Batch]:
        """(x [B, *shape] float32, y [B]) for each index tensor [B] of the plan."""
        ...


class Rows:
    """Some rows of a store: a client's share, or the test set. This is the `Data` of the core."""

    def __init__(self, store: Store, index: Index, augment: Augment | None = None, group_codes: Index | None = None) -> None:
        """group_codes: the number of each row's group (`data.group_by`), for all rows of the store [N]; None: no groups."""
        self._store, self._augment, self._group_codes = store, augment, group_codes
        self.index = index  # row numbers in the store [n]

    def __len__(self) -> int:
        return len(self.index)

    @property
    def labels(self) -> Index:
        """The classes of the rows [n]."""
        return self._store.labels[torch.from_numpy(self.index)].numpy()

    @property
    def groups(self) -> Index | None:
        """The number of each row's group [n]; None where the data have no groups."""
        return None if self._group_codes is None else self._group_codes[self.index]

    @property
    def store(self) -> Store:
        """Where the rows are."""
        return self._store

    def where(self, position: int) -> str:
        """What messages call the row at this position."""
        return self._store.where(int(self.index[position]))

    def with_index(self, index: Index) -> "Rows":
        """Other rows of the same store, augmented alike."""
        return Rows(self._store, index, self._augment, self._group_codes)

    def over(self, store: Store) -> "Rows":
        """All rows of another store, augmented as these are."""
        return Rows(store, np.arange(len(store.labels)), self._augment)

    def shuffled(self, fraction: float, rng: np.random.Generator) -> "Rows":
        """The same rows; that fraction of their labels is dealt anew among those that had them."""
        places = torch.from_numpy(rng.choice(self.index, round(fraction * len(self.index)), replace=False))
        labels = self._store.labels.clone()
        labels[places] = labels[places[torch.from_numpy(rng.permutation(len(places)))]]
        return Rows(self._store.relabelled(labels), self.index, self._augment, self._group_codes)

    def unlabelled(self, positions: Sequence[int]) -> "Rows":
        """The same rows; the labels of those at these positions cannot be read: they are -1, of numbers NaN."""
        labels = self._store.labels.clone()
        labels[torch.from_numpy(self.index[list(positions)])] = torch.nan if labels.is_floating_point() else -1
        return Rows(self._store.relabelled(labels), self.index, self._augment, self._group_codes)

    def to(self, device: torch.device) -> "Rows":
        """The same rows, handed out on that device."""
        return Rows(self._store.to(device), self.index, self._augment, self._group_codes)

    def rows(self, plan: Iterable[Tensor], rng: torch.Generator | None = None) -> Iterable[Batch]:
        """As `fedmutual.core.Data.rows`."""
        index = torch.from_numpy(self.index)
        batches = self._store.batches(index.index_select(0, i) for i in plan)
        augment = self._augment
        if rng is None or augment is None:
            return batches
        return ((augment(x, rng), y) for x, y in batches)


def union(shares: Sequence[Rows]) -> Rows:
    """Shares of one store's examples in one place, each row once, with the labels that their owners have."""
    labels = shares[0]._store.labels.clone()
    for share in shares:
        own = torch.from_numpy(share.index)
        labels[own] = share._store.labels[own]
    whole = shares[0].with_index(np.unique(np.concatenate([s.index for s in shares])))
    if torch.equal(labels, whole._store.labels):
        return whole
    return Rows(whole._store.relabelled(labels), whole.index, whole._augment, whole._group_codes)


class Chained:
    """Rows of several stores, one after the other, as of clients that bring their own data: test sets, public rows."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def groups(self) -> Index | None:
        """The number of each row's group [n], different in each part; None where a part has no groups."""
        numbers, first = [], 0
        for part in self.parts:
            own = part.groups
            if own is None:
                return None
            numbers.append(own + first)
            first += int(own.max(initial=-1)) + 1
        return np.concatenate(numbers)

    def to(self, device: torch.device) -> "Chained":
        """The same rows, handed out on that device."""
        return Chained([part.to(device) for part in self.parts])

    def rows(self, plan: Iterable[Tensor], rng: torch.Generator | None = None) -> Iterator[Batch]:
        """As `fedmutual.core.Data.rows`."""
        starts = np.cumsum([0, *map(len, self.parts)]).tolist()
        indices = list(plan)
        places = [[(index >= start) & (index < end) for index in indices] for start, end in pairwise(starts)]
        own = [
            [i[at] - start for i, at in zip(indices, held, strict=True) if at.any()]
            for held, start in zip(places, starts[:-1], strict=True)
        ]
        reading = [iter(part.rows(plans, rng)) for part, plans in zip(self.parts, own, strict=True)]
        for index, held in zip(indices, zip(*places, strict=True), strict=True):
            found = [(at, next(batches)) for at, batches in zip(held, reading, strict=True) if at.any()]
            yield found[0][1] if len(found) == 1 else _merged(len(index), found)


def _merged(size: int, found: Sequence[tuple[Tensor, Batch]]) -> Batch:
    """One batch of several; each goes to its own places [size] of bool."""
    whole = tuple(t.new_empty(size, *t.shape[1:]) for t in found[0][1])
    for places, batch in found:
        for into, t in zip(whole, batch, strict=True):
            into[places.to(t.device)] = t
    return whole


class Resident:
    """Everything in memory, scaled once; images with their channels last in memory, as convolutions on a CPU like them."""

    def __init__(self, examples: Examples, labels: Targets | Index, scaling: Scaling, where: Where) -> None:
        self.labels, self.where = torch.from_numpy(labels), where
        shape = (len(labels), *scaling(examples.take([0])).shape[1:])
        self._x = torch.empty(shape, memory_format=torch.channels_last if len(shape) == 4 else torch.contiguous_format)
        self._elsewhere: dict[torch.device, Resident] = {}
        self._moved: dict[torch.device, Tensor] = {}  # the examples there, which relabelled copies share
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

    def __getstate__(self) -> dict[str, Any]:
        """For another process: what names rows in messages may hold open files, and no message is left to be said."""
        return self.__dict__ | {"where": _by_number, "_elsewhere": {}, "_moved": {}}

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._x.device

    def to(self, device: torch.device) -> "Resident":
        """The same rows, resident there."""
        if device == self.device:
            return self
        if device not in self._elsewhere:
            moved = self._elsewhere[device] = copy(self)
            if device not in self._moved:
                self._moved[device] = self._x.contiguous().to(device)
            moved._x, moved.labels = self._moved[device], self.labels.to(device)
        return self._elsewhere[device]

    def relabelled(self, labels: Tensor) -> "Resident":
        """As `Store.relabelled`; the examples are not copied."""
        other = copy(self)
        other.labels, other._moved = labels, self._moved
        return other

    def batches(self, plan: Iterable[Tensor]) -> "Picked":
        """As `Store.batches`."""
        return Picked(self, list(plan))

    def take(self, index: Tensor) -> Batch:
        """Rows by number, index [...] on the store's device -> x [..., *shape], y [...]."""
        flat = index.reshape(-1)
        if self._x.is_contiguous():
            x = self._x.index_select(0, flat)
        else:
            x = self._x.permute(0, 2, 3, 1).index_select(0, flat).permute(0, 3, 1, 2)
        y = self.labels.index_select(0, flat)
        return x.reshape(*index.shape, *x.shape[1:]) if index.dim() != 1 else x, y.view(index.shape)


class Picked:
    """Batches of resident rows by their numbers: taken one by one, or by an engine that stacks clients for all at once."""

    def __init__(self, store: Resident, plan: list[Tensor]) -> None:
        self.store, self.plan = store, plan

    def __iter__(self) -> Iterator[Batch]:
        return map(self.store.take, self.numbers())

    def numbers(self) -> Sequence[Tensor]:
        """Of each batch's rows, where the store is."""
        if not self.plan:
            return ()
        numbers = torch.cat(self.plan).to(self.store.device)  # all at once: a copy a step would stall a GPU
        return torch.split(numbers, [len(i) for i in self.plan])


class Streamed:
    """Rows read and scaled as they are needed: for data larger than memory."""

    def __init__(self, examples: Examples, labels: Targets | Index, scaling: Scaling, where: Where, workers: int) -> None:
        self.labels, self.where = torch.from_numpy(labels), where
        self._dataset = _Batches(examples, scaling)
        self._workers = workers
        self._device = torch.device("cpu")

    def __getstate__(self) -> dict[str, Any]:
        """As `Resident`'s."""
        return self.__dict__ | {"where": _by_number}

    def to(self, device: torch.device) -> "Streamed":
        """The same rows, each batch moved there."""
        moved = copy(self)
        moved._device = device
        return moved

    def relabelled(self, labels: Tensor) -> "Streamed":
        """As `Store.relabelled`."""
        other = copy(self)
        other.labels = labels
        return other

    def batches(self, plan: Iterable[Tensor]) -> Iterator[Batch]:
        """As `Store.batches`. Raises DataError where a row cannot be read or is not finite."""
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=(i.tolist() for i in plan),
            collate_fn=_whole,
            num_workers=0 if current_process().daemon else self._workers,  # a worker process may have none of its own
            generator=torch.Generator(),  # else it would move torch's global stream, which dropout draws from
        )
        for rows, x in loader:
            if isinstance(x, DataError):
                raise x
            batch = finite(x, rows, self.where), self.labels[torch.tensor(rows)]
            yield tuple(t.to(self._device, non_blocking=True) for t in batch)


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


def _by_number(row: int) -> str:
    return f"example {row}"


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
    examples: Examples, labels: Targets | Index, scaling: Scaling, where: Where, resident: bool | None, workers: int
) -> tuple[Store, tuple[int, ...]]:
    """Keep everything in memory if asked to, or if it takes less than 4 GiB -> (the store, the shape of an example)."""
    shape = tuple(scaling(examples.take([0])).shape[1:])
    if resident is None:
        resident = len(labels) * int(np.prod(shape)) * 4 < RESIDENT
    if resident:
        return Resident(examples, labels, scaling, where), shape
    return Streamed(examples, labels, scaling, where, workers), shape
