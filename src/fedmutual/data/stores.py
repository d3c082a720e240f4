"""Stores of scaled examples by row number: all in memory, or read as needed."""

from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import current_process
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from fedmutual.calling import Inputs, Shape, get_shape, list_tensors, map_inputs
from fedmutual.core import Batch
from fedmutual.cpu import use_threads
from fedmutual.data.convert import Where, view_array
from fedmutual.data.draws import Index
from fedmutual.data.examples import Examples
from fedmutual.data.scaling import Scaling, subtract_mean
from fedmutual.data.targets import Targets
from fedmutual.errors import BadRows, DataError
from fedmutual.parent_process import end_with_parent

RESIDENT = 4 * 2**30  # bytes: smaller data are kept in memory, unless data.resident decides
_CHUNK = 1024


class _Labelled:
    """The part that both stores have: the labels of all rows, and the name of a row in messages."""

    def __init__(self, labels: Targets | Index, where: Where) -> None:
        self.labels, self.where = view_array(labels), where  # targets by `core.TargetKind`: of classes int64 [N]

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
        self.x = map_inputs(lambda one: _allocate(one, len(labels)), scaling(examples.take([0])))
        self._on_devices: dict[torch.device, ResidentStore] = {}
        self._moved_examples: dict[torch.device, Inputs] = {}  # relabelled copies share these tensors
        sentences: list[str] = []
        with use_threads(1):  # memory limits the speed of scaling; on a busy machine several threads wait for each other
            for start in range(0, len(labels), _CHUNK):
                rows = range(start, min(start + _CHUNK, len(labels)))
                try:
                    part = check_finite(scaling(examples.take(rows)), rows, where)
                    tree_map(lambda all_rows, some, rows=rows: all_rows[rows.start : rows.stop].copy_(some), self.x, part)
                except BadRows as problem:
                    sentences += problem.args
        if sentences:
            raise BadRows(*sentences)

    @property
    def device(self) -> torch.device:
        """The device that holds the examples."""
        return list_tensors(self.x)[0].device

    def to(self, device: torch.device) -> "ResidentStore":
        """Return a store of these examples on `device`; the copy is made once."""
        if device == self.device:
            return self
        if device not in self._on_devices:
            if device not in self._moved_examples:
                self._moved_examples[device] = map_inputs(lambda one: one.contiguous().to(device), self.x)
            self._on_devices[device] = self._change(x=self._moved_examples[device], labels=self.labels.to(device))
        return self._on_devices[device]

    def standardize(self, mean: Sequence[float], std: Sequence[float]) -> "ResidentStore":
        """Return a store of these examples minus `mean`, over `std`, a value for each channel or feature."""
        return self._change(x=map_inputs(lambda one: subtract_mean(one.clone(), mean, std), self.x), _moved_examples={})

    def batches(self, plan: Iterable[Tensor]) -> "ResidentBatches":
        """Return (x [B, *shape], one tensor or several by name; y [B, ...]) for each index tensor [B] of the plan."""
        return ResidentBatches(self, list(plan))

    def take(self, index: Tensor) -> Batch:
        """Return the rows of `index` [...], which lies on the store's device, as x [..., *shape] and y [..., *target]."""
        flat = index.reshape(-1)

        def select(one: Tensor) -> Tensor:
            if one.is_contiguous():
                x = one.index_select(0, flat)
            else:
                x = one.permute(0, 2, 3, 1).index_select(0, flat).permute(0, 3, 1, 2)
            return x.reshape(*index.shape, *x.shape[1:]) if index.dim() != 1 else x

        y = self.labels.index_select(0, flat)
        return map_inputs(select, self.x), y.reshape(*index.shape, *y.shape[1:])


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
        return self._change(_scaling=self._scaling.model_copy(update={"mean": tuple(mean), "std": tuple(std)}))

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
            yield tree_map(lambda t: t.to(self._device, non_blocking=True), batch)

    def __getitem__(self, row: int) -> Any:
        return self.__getitems__([row])

    def __getitems__(self, rows: list[int]) -> tuple[list[int], Inputs | DataError]:
        try:
            return rows, self._scaling(self._examples.take(rows))
        except DataError as problem:
            return rows, problem


Store = ResidentStore | StreamedStore
"""All examples, scaled, by row number."""


def _prepare_worker(number: int) -> None:
    """Prepare a worker process of a DataLoader. number: the index of the worker, which DataLoader passes."""
    end_with_parent()


def _name_by_number(row: int) -> str:
    return f"example {row}"


def _return_unchanged(batch: Any) -> Any:
    return batch


def check_finite(x: Inputs, rows: Sequence[int], where: Where) -> Inputs:
    """Return inputs x [B, ...] themselves.

    Raises:
        BadRows: rows hold NaN or infinite values; the message names these rows.
    """
    for name, one in {"": x}.items() if isinstance(x, Tensor) else x.items():
        if one.sum().isfinite():  # one pass is enough for finite data, the usual case
            continue
        bad_rows = np.flatnonzero(~one.reshape(len(one), -1).isfinite().all(1).numpy())
        if len(bad_rows):
            fault = f"holds NaN or infinite values{f' in {name!r}' if name else ''}; fix or remove it"
            raise BadRows(*(f"{where(rows[i])} {fault}" for i in bad_rows.tolist()))
    return x


def _allocate(x: Tensor, rows: int) -> Tensor:
    """Return memory for an input of all rows, of the type and shape of x [1, ...]."""
    layout = torch.channels_last if x.dim() == 4 else torch.contiguous_format
    return torch.empty((rows, *x.shape[1:]), dtype=x.dtype, memory_format=layout)


def make_store(
    examples: Examples, labels: Targets | Index, scaling: Scaling, where: Where, resident: bool | None, workers: int
) -> tuple[Store, Shape]:
    """Return the store, and the shape of one example.

    resident: whether all examples are kept in memory; None: if they take less than 4 GiB.
    workers: the processes that read examples which are not in memory.

    Raises:
        DataError: an example cannot be read, or holds NaN or infinite values.
    """
    first = scaling(examples.take([0]))
    shape, size = get_shape(first), sum(one.nbytes for one in list_tensors(first))
    if resident or (resident is None and len(labels) * size < RESIDENT):
        return ResidentStore(examples, labels, scaling, where), shape
    return StreamedStore(examples, labels, scaling, where, workers), shape
