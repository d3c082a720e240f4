"""Rows by index, as the core asks for them: all clients share one store of examples and hold row numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedmutual.calling import Inputs
from fedmutual.core import Batch
from fedmutual.data.draws import Index
from fedmutual.data.stores import Store

Augment = Callable[[Inputs, torch.Generator], Inputs]
"""(images [B, C, H, W], or several inputs, stream) -> augmented inputs."""

PAD = 4


@dataclass(frozen=True)
class CropFlip:
    """A random crop after padding by 4 pixels, and a mirror image with probability 1/2: the usual augmentation for CIFAR.

    black [C]: the scaled value of a pixel 0; it fills the border. input: the name of the images among several inputs.
    """

    black: Tensor
    input: str | None = None

    def __call__(self, x: Inputs, rng: torch.Generator) -> Inputs:
        """Return augmented images [B, C, H, W]. The crops are drawn on the CPU, so they do not depend on the device of x."""
        if not isinstance(x, Tensor):
            return {name: self._change(one, rng) if name == self.input else one for name, one in x.items()}
        return self._change(x, rng)

    def _change(self, x: Tensor, rng: torch.Generator) -> Tensor:
        b, c, h, w = x.shape
        top, left = torch.randint(2 * PAD + 1, (2, b, 1), generator=rng)
        mirrored = torch.randint(2, (b, 1), generator=rng).bool()
        rows = torch.arange(h) + top  # [B, H]
        columns = torch.arange(w)
        columns = torch.where(mirrored, columns.flip(0), columns) + left  # [B, W]
        padded = self.black.to(x.device).view(1, -1, 1, 1).repeat(b, 1, h + 2 * PAD, w + 2 * PAD)
        padded[..., PAD:-PAD, PAD:-PAD] = x
        pixels = (rows[:, :, None] * (w + 2 * PAD) + columns[:, None, :]).view(b, 1, -1).to(x.device)
        return padded.flatten(2).gather(2, pixels.expand(-1, c, -1)).view(b, c, h, w)


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a store: a client's share, or the test set. This class implements the `Data` of the core."""

    store: Store
    index: Index  # row numbers in the store [n]
    augment: Augment | None = None  # of images in training
    group_codes: Index | None = None  # the number of each row's group (`data.group_by`), for all rows of the store [N]

    def __len__(self) -> int:
        return len(self.index)

    @property
    def labels(self) -> Index:
        """The target of each row: of classes and numbers [n], else [n, ...]."""
        return self.store.labels[torch.from_numpy(self.index)].numpy()

    @property
    def groups(self) -> Index | None:
        """The number of each row's group [n]; None where the data have no groups."""
        return None if self.group_codes is None else self.group_codes[self.index]

    def name_row(self, position: int) -> str:
        """Return the name in messages of the row at `position`."""
        return self.store.where(int(self.index[position]))

    def with_index(self, index: Index) -> "Rows":
        """Return the rows `index` of this store, with this augmentation."""
        return replace(self, index=index)

    def _with_labels(self, labels: Tensor) -> "Rows":
        return replace(self, store=self.store.replace_labels(labels))

    def shuffle_labels(self, fraction: float, rng: np.random.Generator) -> "Rows":
        """Return these rows with a random `fraction` of their labels permuted among the chosen rows."""
        places = torch.from_numpy(rng.choice(self.index, round(fraction * len(self.index)), replace=False))
        labels = self.store.labels.clone()
        labels[places] = labels[places[torch.from_numpy(rng.permutation(len(places)))]]
        return self._with_labels(labels)

    def hide_labels(self, positions: Sequence[int]) -> "Rows":
        """Return these rows with the labels at `positions` hidden: class numbers become -1, numeric targets NaN."""
        labels = self.store.labels.clone()
        labels[torch.from_numpy(self.index[list(positions)])] = torch.nan if labels.is_floating_point() else -1
        return self._with_labels(labels)

    def to(self, device: torch.device) -> "Rows":
        """Return these rows with batches on `device`."""
        return replace(self, store=self.store.to(device))

    def rows(self, plan: Iterable[Tensor], rng: torch.Generator | None = None) -> Iterable[Batch]:
        """Return an iterable of batches; see `fedmutual.core.Data.rows`."""
        index = torch.from_numpy(self.index)
        batches = self.store.batches(index.index_select(0, i) for i in plan)
        augment = self.augment
        if rng is None or augment is None:
            return batches
        return ((augment(x, rng), y) for x, y in batches)


def merge_rows(shares: Sequence[Rows]) -> Rows:
    """Return the rows of several shares of one store, each row once, with the labels that the shares' owners have."""
    labels = shares[0].store.labels.clone()
    for share in shares:
        share_index = torch.from_numpy(share.index)
        labels[share_index] = share.store.labels[share_index]
    merged = shares[0].with_index(np.unique(np.concatenate([s.index for s in shares])))
    return merged if torch.equal(labels, merged.store.labels) else merged._with_labels(labels)


def _allocate_rows(count: int, like: Tensor) -> Tensor:
    return like.new_empty(count, *like.shape[1:])


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
            if len(part_batches) == 1:
                yield part_batches[0][1]
                continue
            merged = tree_map(partial(_allocate_rows, len(index)), part_batches[0][1])
            for mask, batch in part_batches:
                tree_map(lambda into, t, mask=mask: into.index_put_((mask.to(t.device),), t), merged, batch)
            yield merged
