"""Stores of scaled examples by row number: all in memory, or read as needed."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import current_process
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedmutual.core import Batch
from fedmutual.data.draws import Index
from fedmutual.data.examples import BadRows, Examples, Where
from fedmutual.data.scaling import Scaling, subtract_mean
from fedmutual.data.targets import Targets
from fedmutual.errors import DataError
from fedmutual.parent_process import end_with_parent

RESIDENT = 4 * 2**30  # bytes: smaller data are kept in memory, unless data.resident decides
_CHUNK = 1024


class _Labelled:
    """The part that both stores have: the labels of all rows, and the name of a row in messages."""

    def __init__(self, labels: Targets | Index, where: Where) -> None:
        self.labels, self.where = torch.from_numpy(labels), where  # targets by `core.TargetKind`: of classes int64 [N]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without devices and open files, which `where` may hold."""
        return self.__dict__ | {"where": _name_by_number, "_on_devices": {}, "_moved_examples": {}}

    def _change(self, **attributes: Any) -> Self:
        """Return a store of the same examples in which these attributes differ."""
        other = object.__new__(type(self))
        other.__dict__ |= self.__dict__ | {"_on_devices": {}} | attributes
        return other

    def replace_labels(self, labels: Tensor) -> Self:
        """Return a store of these examples with other labels [N]; the examples are not copied."""
        return self._change(labels=labels)


class ResidentStore(_Labelled):
    """All examples in memory, scaled once.

    Images have their channels last in memory, which makes convolutions on a CPU fast.
    """

    def __init__(self, examples: Examples, labels: Targets | Index, scaling: Scaling, where: Where) -> None:
        """Read and scale all examples. labels: the targets [N, ...].

        Raises:
            BadRows: examples cannot be read, or hold NaN or infinite values.
        """
        super().__init__(labels, where)
        first = scaling(examples.take([0]))
        shape, layout = (len(labels), *first.shape[1:]), torch.channels_last if first.dim() == 4 else torch.contiguous_format
        self.x = torch.empty(shape, dtype=first.dtype, memory_format=layout)
        self._on_devices: dict[torch.device, ResidentStore] = {}
        self._moved_examples: dict[torch.device, Tensor] = {}  # relabelled copies share these tensors
        sentences: list[str] = []
        with _use_one_thread():
            for start in range(0, len(labels), _CHUNK):
                rows = range(start, min(start + _CHUNK, len(labels)))
                try:
                    self.x[rows.start : rows.stop] = check_finite(scaling(examples.take(rows)), rows, where)
                except BadRows as problem:
                    sentences += problem.args
        if sentences:
            raise BadRows(*sentences)

    @property
    def device(self) -> torch.device:
        """The device that holds the examples."""
        return self.x.device

    def to(self, device: torch.device) -> "ResidentStore":
        """Return a store of these examples on `device`; the copy is made once."""
        if device == self.device:
            return self
        if device not in self._on_devices:
            if device not in self._moved_examples:
                self._moved_examples[device] = self.x.contiguous().to(device)
            self._on_devices[device] = self._change(x=self._moved_examples[device], labels=self.labels.to(device))
        return self._on_devices[device]

    def standardize(self, mean: Sequence[float], std: Sequence[float]) -> "ResidentStore":
        """Return a store of these examples minus `mean`, over `std`, a value for each channel or feature."""
        return self._change(x=subtract_mean(self.x.clone(), mean, std), _moved_examples={})

    def batches(self, plan: Iterable[Tensor]) -> "ResidentBatches":
        """Return (x [B, *shape] float32 or, for ids, int64; y [B, ...]) for each index tensor [B] of the plan."""
        return ResidentBatches(self, list(plan))

    def take(self, index: Tensor) -> Batch:
        """Return the rows of `index` [...], which lies on the store's device, as x [..., *shape] and y [..., *target]."""
        flat = index.reshape(-1)
        if self.x.is_contiguous():
            x = self.x.index_select(0, flat)
        else:
            x = self.x.permute(0, 2, 3, 1).index_select(0, flat).permute(0, 3, 1, 2)
        y = self.labels.index_select(0, flat)
        return x.reshape(*index.shape, *x.shape[1:]) if index.dim() != 1 else x, y.reshape(*index.shape, *y.shape[1:])


class ResidentBatches:
    """Batches of resident rows by row numbers. Iterating takes one batch at a time; a stacking engine takes all at once."""

    def __init__(self, store: ResidentStore, plan: list[Tensor]) -> None:
        self.store, self.plan = store, plan

    def __iter__(self) -> Iterator[Batch]:
        return map(self.store.take, self.list_row_numbers())

    def list_row_numbers(self) -> Sequence[Tensor]:
        """Return the row numbers [B] of each batch, on the store's device."""
        if not self.plan:
            return ()
        row_numbers = torch.cat(self.plan).to(self.store.device)  # one transfer: one in each step would stall a GPU
        return torch.split(row_numbers, [len(i) for i in self.plan])


class StreamedStore(_Labelled, Dataset[Any]):
    """Examples that are read and scaled on demand, for data larger than memory.

    As a torch Dataset, the store gives one batch at a time. A batch that cannot be read is its DataError: the loader would
    wrap an error that its worker process raises.
    """

    def __init__(self, examples: Examples, labels: Targets | Index, scaling: Scaling, where: Where, workers: int) -> None:
        super().__init__(labels, where)
        self._examples, self._scaling, self._workers = examples, scaling, workers
        self._device = torch.device("cpu")

    def to(self, device: torch.device) -> "StreamedStore":
        """Return a store that moves each batch to `device`."""
        return self._change(_device=device)

    def standardize(self, mean: Sequence[float], std: Sequence[float]) -> "StreamedStore":
        """Return a store of these examples minus `mean`, over `std`, a value for each channel or feature."""
        return self._change(_scaling=replace(self._scaling, mean=tuple(mean), std=tuple(std)))

    def batches(self, plan: Iterable[Tensor]) -> Iterator[Batch]:
        """Yield the batches of `plan`; see `ResidentStore.batches`.

        Raises:
            DataError: a row cannot be read, or holds NaN or infinite values.
        """
        loader: DataLoader[Any] = DataLoader(
            self,
            batch_sampler=(i.tolist() for i in plan),
            collate_fn=_return_unchanged,
            num_workers=0 if current_process().daemon else self._workers,  # a daemon process may not start processes
            worker_init_fn=_prepare_worker,
            generator=torch.Generator(),  # otherwise the loader draws from torch's global stream, which dropout uses
        )
        for rows, x in loader:
            if isinstance(x, DataError):
                raise x
            batch = check_finite(x, rows, self.where), self.labels[torch.tensor(rows)]
            yield tuple(t.to(self._device, non_blocking=True) for t in batch)

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])

    def __getitems__(self, rows: list[int]) -> tuple[list[int], Tensor | DataError]:
        try:
            return rows, self._scaling(self._examples.take(rows))
        except DataError as problem:
            return rows, problem


Store = ResidentStore | StreamedStore
"""All examples, scaled, by row number."""


def _prepare_worker(number: int) -> None:
    """Prepare a worker process of a DataLoader. number: the index of the worker, which DataLoader passes."""
    end_with_parent()


@contextmanager
def _use_one_thread() -> Iterator[None]:
    """Limit torch to one thread for a while.

    Memory bounds the speed of scaling. More threads gain nothing, and on a busy machine they wait seconds for each other.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _name_by_number(row: int) -> str:
    return f"example {row}"


def _return_unchanged(batch: Any) -> Any:
    return batch


def check_finite(x: Tensor, rows: Sequence[int], where: Where) -> Tensor:
    """Return x [B, ...] itself.

    Raises:
        BadRows: rows hold NaN or infinite values; the message names these rows.
    """
    if x.sum().isfinite():  # one pass is enough for finite data, the usual case
        return x
    bad_rows = np.flatnonzero(~x.flatten(1).isfinite().all(1).numpy())
    if len(bad_rows):
        raise BadRows(*(f"{where(rows[i])} holds NaN or infinite values; fix or remove it" for i in bad_rows.tolist()))
    return x


def make_store(
    examples: Examples, labels: Targets | Index, scaling: Scaling, where: Where, resident: bool | None, workers: int
) -> tuple[Store, tuple[int, ...]]:
    """Return the store, and the shape of one example.

    resident: whether all examples are kept in memory; None: if they take less than 4 GiB.
    workers: the processes that read examples which are not in memory.

    Raises:
        DataError: an example cannot be read, or holds NaN or infinite values.
    """
    first = scaling(examples.take([0]))
    shape = tuple(first.shape[1:])
    if resident or (resident is None and len(labels) * first.nbytes < RESIDENT):
        return ResidentStore(examples, labels, scaling, where), shape
    return StreamedStore(examples, labels, scaling, where, workers), shape
