"""Poisson sampling of private rows, and the guard that lets nothing else read them."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmutual.boundary import Refused
from fedmutual.core import Batch, Data
from fedmutual.privacy.secret import Stream


class Units:
    """What a guarantee is given to: each row, or each group of rows (a patient)."""

    def __init__(self, rows: int, batch_size: int, groups: NDArray[np.int64] | None = None, most: int | None = None) -> None:
        """rows: how many there are. batch_size: rows that a batch is to have on average. groups: each row's group [rows];
        None: each row is a unit. most: rows of one group that a batch may hold; the others are left out by lot."""
        self.codes = None if groups is None else np.unique(groups, return_inverse=True)[1]
        self._most = most if groups is not None else None
        sizes = np.ones(rows, np.int64) if self.codes is None else np.bincount(self.codes)
        self.count = len(sizes)
        capped = int(np.minimum(sizes, self._most or rows).sum())
        self.rate = min(1.0, batch_size / max(capped, 1))  # with which each unit is in a batch, whatever else is in it
        self.expected = self.rate * capped  # rows of a batch

    def sample(self, stream: Stream) -> tuple[Tensor, Tensor | None]:
        """One Poisson batch -> (row numbers int64 [B], each row's unit [B], None where rows are units). B may be 0."""
        taken = stream.chances(self.rate, self.count)
        if self.codes is None:
            return taken.nonzero()[:, 0], None
        rows = np.flatnonzero(taken.numpy()[self.codes])
        if self._most is not None:
            rows = self._capped(rows, stream)
        return torch.from_numpy(rows), torch.from_numpy(self.codes[rows])

    def _capped(self, rows: NDArray[np.int64], stream: Stream) -> NDArray[np.int64]:
        """At most so many rows of each group, drawn by lot: what is drawn of one group does not depend on another."""
        assert self.codes is not None
        assert self._most is not None
        lots = stream.words(len(self.codes)).numpy()[rows]
        order = np.lexsort((lots, self.codes[rows]))
        codes = self.codes[rows][order]
        first = np.searchsorted(codes, codes)  # where each row's group begins in the order
        return np.sort(rows[order[np.arange(len(rows)) - first < self._most]])


Read = Callable[[int], Iterable[Batch] | None]
"""So many batches of private rows, one after the other; None: no phase takes steps now."""


class PrivateRows:
    """A client's private rows under differential privacy. This is the `Data` of the core.

    Rows are handed out only while a phase takes its steps, and in Poisson batches: of the plan that a phase draws only the
    number of batches is used. So an algorithm can neither choose rows nor read them where no noise is added.
    """

    def __init__(self, client: str, source: Data) -> None:
        """source: the rows themselves, for the privacy boundary, which looks for them in what leaves."""
        self.source = source
        self.read: Read = closed
        self._client = client

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, plan: Iterable[Tensor], rng: torch.Generator | None = None) -> Iterable[Batch]:
        """As many Poisson batches as the plan has batches; `rng` is not used, augmentation draws from the secret.

        Raises:
            Refused: no phase takes steps now.
        """
        batches = self.read(len(list(plan)))
        if batches is None:
            raise Refused(
                self._client,
                "private rows",
                "the algorithm reads them outside of its gradient steps, where privacy.nets adds no noise",
            )
        return batches


def closed(count: int) -> Iterable[Batch] | None:
    """No batches, whatever is asked for."""
    return None
