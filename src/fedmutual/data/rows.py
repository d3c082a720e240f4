"""Rows by index, as the core asks for them: all clients share one store of examples and hold row numbers."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedmutual.core import Batch
from fedmutual.data.augment import Augment
from fedmutual.data.draws import Index
from fedmutual.data.stores import Store


class Rows:
    """Some rows of a store: a client's share, or the test set. This class implements the `Data` of the core."""

    def __init__(self, store: Store, index: Index, augment: Augment | None = None, group_codes: Index | None = None) -> None:
        """group_codes: the number of each row's group (`data.group_by`), for all rows of the store [N]; None: no groups."""
        self._store, self._augment, self._group_codes = store, augment, group_codes
        self.index = index  # row numbers in the store [n]

    def __len__(self) -> int:
        return len(self.index)

    @property
    def labels(self) -> Index:
        """The target of each row: of classes and numbers [n], else [n, ...]."""
        return self._store.labels[torch.from_numpy(self.index)].numpy()

    @property
    def groups(self) -> Index | None:
        """The number of each row's group [n]; None where the data have no groups."""
        return None if self._group_codes is None else self._group_codes[self.index]

    @property
    def augment(self) -> Augment | None:
        """The augmentation of images in training; None without augmentation."""
        return self._augment

    @property
    def store(self) -> Store:
        """The store that holds the rows."""
        return self._store

    def name_row(self, position: int) -> str:
        """Return the name in messages of the row at `position`."""
        return self._store.where(int(self.index[position]))

    def with_index(self, index: Index) -> "Rows":
        """Return the rows `index` of this store, with this augmentation."""
        return Rows(self._store, index, self._augment, self._group_codes)

    def with_store(self, store: Store) -> "Rows":
        """Return all rows of another store, with this augmentation."""
        return Rows(store, np.arange(len(store.labels)), self._augment)

    def shuffle_labels(self, fraction: float, rng: np.random.Generator) -> "Rows":
        """Return these rows with a random `fraction` of their labels permuted among the chosen rows."""
        places = torch.from_numpy(rng.choice(self.index, round(fraction * len(self.index)), replace=False))
        labels = self._store.labels.clone()
        labels[places] = labels[places[torch.from_numpy(rng.permutation(len(places)))]]
        return Rows(self._store.replace_labels(labels), self.index, self._augment, self._group_codes)

    def hide_labels(self, positions: Sequence[int]) -> "Rows":
        """Return these rows with the labels at `positions` hidden: class numbers become -1, numeric targets NaN."""
        labels = self._store.labels.clone()
        labels[torch.from_numpy(self.index[list(positions)])] = torch.nan if labels.is_floating_point() else -1
        return Rows(self._store.replace_labels(labels), self.index, self._augment, self._group_codes)

    def to(self, device: torch.device) -> "Rows":
        """Return these rows with batches on `device`."""
        return Rows(self._store.to(device), self.index, self._augment, self._group_codes)

    def rows(self, plan: Iterable[Tensor], rng: torch.Generator | None = None) -> Iterable[Batch]:
        """Return an iterable of batches; see `fedmutual.core.Data.rows`."""
        index = torch.from_numpy(self.index)
        batches = self._store.batches(index.index_select(0, i) for i in plan)
        augment = self._augment
        if rng is None or augment is None:
            return batches
        return ((augment(x, rng), y) for x, y in batches)


def merge_rows(shares: Sequence[Rows]) -> Rows:
    """Return the rows of several shares of one store, each row once, with the labels that the shares' owners have."""
    labels = shares[0]._store.labels.clone()
    for share in shares:
        share_index = torch.from_numpy(share.index)
        labels[share_index] = share._store.labels[share_index]
    merged = shares[0].with_index(np.unique(np.concatenate([s.index for s in shares])))
    if torch.equal(labels, merged._store.labels):
        return merged
    return Rows(merged._store.replace_labels(labels), merged.index, merged._augment, merged._group_codes)


class ChainedRows:
    """Rows of several stores, one after the other: test sets or public rows of clients with data of their own."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def to(self, device: torch.device) -> "ChainedRows":
        """Return these rows with batches on `device`."""
        return ChainedRows([part.to(device) for part in self.parts])

    def rows(self, plan: Iterable[Tensor], rng: torch.Generator | None = None) -> Iterator[Batch]:
        """Yield batches; see `fedmutual.core.Data.rows`. A batch may hold rows of several stores."""
        starts = np.cumsum([0, *map(len, self.parts)]).tolist()
        indices = list(plan)
        masks = [[(index >= start) & (index < end) for index in indices] for start, end in pairwise(starts)]
        part_plans = [
            [i[mask] - start for i, mask in zip(indices, selected, strict=True) if mask.any()]
            for selected, start in zip(masks, starts[:-1], strict=True)
        ]
        iterators = [iter(part.rows(plans, rng)) for part, plans in zip(self.parts, part_plans, strict=True)]
        for index, selected in zip(indices, zip(*masks, strict=True), strict=True):
            part_batches = [(mask, next(batches)) for mask, batches in zip(selected, iterators, strict=True) if mask.any()]
            yield part_batches[0][1] if len(part_batches) == 1 else _merge_batches(len(index), part_batches)


def _merge_batches(size: int, parts: Sequence[tuple[Tensor, Batch]]) -> Batch:
    """Return one batch of `size` rows; each part fills the rows that its mask [size] selects."""
    merged = tuple(t.new_empty(size, *t.shape[1:]) for t in parts[0][1])
    for mask, batch in parts:
        for target, t in zip(merged, batch, strict=True):
            target[mask.to(t.device)] = t
    return merged
