"""Poisson sampling of private rows, and a guard against other reads of private rows."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmutual.boundary import Refused
from fedmutual.core import Batch, Data
from fedmutual.privacy.secret import Stream


class Units:
    """The units that a guarantee protects: each row, or each group of rows, such as the rows of a patient."""

    def __init__(self, rows: int, batch_size: int, groups: NDArray[np.int64] | None = None, most: int | None = None) -> None:
        """rows: number of rows. batch_size: expected rows of a batch. groups: each row's group [rows]; None: each row is a
        unit. most: the most rows of one group in a batch; a larger group contributes a random subset of its rows."""
        self.codes = None if groups is None else np.unique(groups, return_inverse=True)[1]
        self._most = most if groups is not None else None
        sizes = np.ones(rows, np.int64) if self.codes is None else np.bincount(self.codes)
        self.count = len(sizes)
        capped = int(np.minimum(sizes, self._most or rows).sum())
        # The probability of each unit to be in a batch, independent of the other units.
        self.rate = min(1.0, batch_size / max(capped, 1))
        self.expected = self.rate * capped  # expected rows of a batch

    def sample(self, stream: Stream) -> tuple[Tensor, Tensor | None]:
        """Return a Poisson batch: (row numbers int64 [B], each row's unit [B]; None where rows are units). B may be 0."""
        is_drawn = stream.draw_bernoulli(self.rate, self.count)
        if self.codes is None:
            return is_drawn.nonzero()[:, 0], None
        rows = np.flatnonzero(is_drawn.numpy()[self.codes])
        if self._most is not None:
            rows = self._limit_groups(rows, stream)
        return torch.from_numpy(rows), torch.from_numpy(self.codes[rows])

    def _limit_groups(self, rows: NDArray[np.int64], stream: Stream) -> NDArray[np.int64]:
        """Return at most `most` random rows of each group; the draw from one group does not depend on other groups."""
        assert self.codes is not None
        assert self._most is not None
        sort_keys = stream.draw_words(len(self.codes)).numpy()[rows]
        order = np.lexsort((sort_keys, self.codes[rows]))
        codes = self.codes[rows][order]
        first = np.searchsorted(codes, codes)  # where each row's group begins in the order
        return np.sort(rows[order[np.arange(len(rows)) - first < self._most]])


Read = Callable[[int], Iterable[Batch] | None]
"""number of batches -> batches of private rows in sequence; None: no phase takes steps now."""


class PrivateRows:
    """A client's private rows under differential privacy. This is the `Data` of the core.

    Rows can be read only while a phase takes its steps, and only in Poisson batches: of a phase's plan only the number of
    batches is used. So an algorithm can neither choose rows nor read rows without noise.
    """

    def __init__(self, client: str, source: Data) -> None:
        """source: the rows without protection; the privacy boundary searches for them in outgoing messages."""
        self.source = source
        self.read: Read = refuse_batch
        self._client = client

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, plan: Iterable[Tensor], rng: torch.Generator | None = None) -> Iterable[Batch]:
        """Return as many Poisson batches as the plan has. `rng` is unused: augmentation draws from the client's secret.

        Raises:
            Refused: no phase takes steps now.
            RunError, DataError: as `Mechanism.batches`.
        """
        batches = self.read(len(list(plan)))
        if batches is None:
            raise Refused(
                self._client,
                "private rows",
                "the algorithm reads them outside of its gradient steps, where privacy.nets adds no noise",
            )
        return batches


def refuse_batch(count: int) -> Iterable[Batch] | None:
    """Return None, in place of a batch: the client draws batches only inside a noised phase."""
    return None
