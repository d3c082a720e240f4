"""The public seed set: what all nodes give to be learned from together, agreed once, and then referred to by position."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from fedmutual.core import Message
from fedmutual.data.examples import Examples
from fedmutual.data.rows import Chained, Rows
from fedmutual.errors import ConfigError

_CHUNK = 1024


class Part(NamedTuple):
    """What one node gives."""

    rows: Rows | None  # None: nothing
    examples: Examples  # of its store, as the source has them
    counts: Sequence[int]  # its public examples of each class
    trained: Sequence[int]  # all its training examples of each class


@dataclass(frozen=True)
class PublicSet:
    """All nodes' public rows, node after node in the order of the clients: positions 0 .. n - 1."""

    data: Rows | Chained  # with all labels
    owners: Mapping[str, range]  # of all nodes: the positions of its rows
    counts: Mapping[str, tuple[int, ...]]  # of all nodes: its examples of each class
    digest: str  # of the examples, the labels and the owners; hex
    unlabelled: str  # the same without the labels
    sizes: Mapping[str, int]  # of all nodes: bytes of its examples as the source has them
    label_size: int  # bytes of a label

    def __len__(self) -> int:
        return len(self.data)

    @property
    def parts(self) -> Sequence[Rows]:
        """One after the other: the rows of each node that gives some, or all as rows of one store."""
        return [self.data] if isinstance(self.data, Rows) else self.data.parts

    def seen_by(self, client: str, labels: bool) -> Rows | Chained:
        """The set as a node has it. Without `labels` others' are -1 (of numbers: NaN), and its own are there."""
        if labels:
            return self.data
        own = self.owners[client]
        if isinstance(self.data, Rows):
            return self.data.unlabelled([i for i in range(len(self)) if i not in own])
        held = [i for i, positions in self.owners.items() if len(positions)]
        parts = zip(held, self.data.parts, strict=True)
        return Chained([part if i == client else part.unlabelled(range(len(part))) for i, part in parts])

    def bytes(self, labels: bool) -> dict[str, int]:
        """What each node gives out, once: its examples, and their labels where public data are labelled."""
        return {i: size + labels * self.label_size * len(self.owners[i]) for i, size in self.sizes.items()}

    def summary(self, labels: bool) -> Message:
        """What nodes hold against each other before they begin: digest uint8 [32], rows int64 []; with labels also counts
        int64 [C], examples a class."""
        digest = bytearray.fromhex(self.digest if labels else self.unlabelled)
        found = {"digest": torch.frombuffer(digest, dtype=torch.uint8), "rows": torch.tensor(len(self))}
        return found | ({"counts": torch.tensor([*self.counts.values()]).sum(0)} if labels else {})


def gather(parts: Mapping[str, Part], classes: tuple[str, ...]) -> PublicSet | None:
    """The public rows of all nodes as one set; None where no node has any.

    Raises:
        ConfigError: it misses a class that nodes train on.
    """
    given = {i: part.rows for i, part in parts.items() if part.rows is not None}
    if not given:
        return None
    for k, name in enumerate(classes):
        if any(part.trained[k] for part in parts.values()) and not any(part.counts[k] for part in parts.values()):
            raise ConfigError(
                f"the public set has no example of class {name!r}, which clients train on; raise 'split.public', or divide "
                "the data otherwise"
            )
    owners, start = {}, 0
    for i, part in parts.items():
        owners[i] = range(start, start := start + len(part.rows or ()))
    digests, sizes = hashlib.sha256(), {}
    for i, part in parts.items():
        digests.update(f"{i}\0{len(owners[i])}\0".encode())
        sizes[i] = _read(part, digests)
    labels = [rows.labels for rows in given.values()]
    labelled = hashlib.sha256(digests.digest() + b"".join(found.tobytes() for found in labels))
    return PublicSet(
        data=_chained(list(given.values())),
        owners=owners,
        counts={i: tuple(part.counts) for i, part in parts.items()},
        digest=labelled.hexdigest(),
        unlabelled=digests.hexdigest(),
        sizes=sizes,
        label_size=labels[0].itemsize,
    )


def _read(part: Part, digest: "hashlib._Hash") -> int:
    """A node's examples into the digest -> their bytes."""
    size = 0
    index = part.rows.index if part.rows is not None else np.empty(0, dtype=np.int64)
    for rows in (index[k : k + _CHUNK] for k in range(0, len(index), _CHUNK)):
        x = part.examples.take(rows.tolist()).contiguous()
        digest.update(f"{x.dtype}{list(x.shape[1:])}".encode() + x.numpy().tobytes())
        size += prod(x.shape) * x.element_size()
    return size


def _chained(given: list[Rows]) -> Rows | Chained:
    """One after the other: as rows of one store, if they are."""
    if all(rows.store is given[0].store for rows in given):
        return given[0].with_index(np.concatenate([rows.index for rows in given]))
    return Chained(given)
