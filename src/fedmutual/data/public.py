"""The public seed set: the public examples of all nodes. All nodes agree on the set once; messages refer to positions."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedmutual.calling import list_tensors
from fedmutual.core import Message
from fedmutual.data.examples import Examples
from fedmutual.data.rows import ChainedRows, Rows
from fedmutual.errors import ConfigError

_CHUNK = 1024


class PublicPart(NamedTuple):
    """The public rows of one node."""

    rows: Rows | None  # None: no public rows
    examples: Examples  # all examples of the node, unscaled
    counts: Sequence[int]  # public examples of each class
    trained: Sequence[int]  # training examples of each class, with the public ones


@dataclass(frozen=True)
class PublicSet:
    """The public rows of all nodes, in the order of the clients: positions 0 .. n - 1."""

    data: Rows | ChainedRows  # with all labels
    owners: Mapping[str, range]  # node -> positions of its rows
    counts: Mapping[str, tuple[int, ...]]  # node -> public examples of each class
    digest: str  # hex; of the examples, labels and owners
    unlabelled: str  # hex; of the examples and owners, without labels
    sizes: Mapping[str, int]  # node -> bytes of its unscaled examples
    label_size: int  # bytes of a label
    file: Path | None = None  # from which all participants have the set (split.public_file); None: it is of their rows
    has_labels: bool = True

    def __len__(self) -> int:
        return len(self.data)

    @property
    def parts(self) -> Sequence[Rows]:
        """The rows of each node with public rows; a single part where all rows are of one store."""
        return [self.data] if isinstance(self.data, Rows) else self.data.parts

    def show_to(self, client: str, labels: bool) -> Rows | ChainedRows:
        """Return the set as one client sees it.

        labels: whether public data are labelled; if not, labels of other nodes are hidden: -1, or NaN for numeric targets.
        """
        if labels:
            return self.data
        own_positions = self.owners[client]
        if isinstance(self.data, Rows):
            return self.data.hide_labels([i for i in range(len(self)) if i not in own_positions])
        public_clients = [i for i, positions in self.owners.items() if len(positions)]
        parts = zip(public_clients, self.data.parts, strict=True)
        return ChainedRows([part if i == client else part.hide_labels(range(len(part))) for i, part in parts])

    def count_bytes(self, labels: bool) -> dict[str, int]:
        """Return the bytes that each node sends once: its examples and, if `labels`, their labels."""
        return {i: size + labels * self.label_size * len(self.owners[i]) for i, size in self.sizes.items()}

    def summary(self, labels: bool) -> Message:
        """Return what nodes compare before training: digest uint8 [32], and rows int64 [].

        With `labels` also counts int64 [C]: the examples of each class.
        """
        digest = bytearray.fromhex(self.digest if labels else self.unlabelled)
        message = {"digest": torch.frombuffer(digest, dtype=torch.uint8), "rows": torch.tensor(len(self))}
        return message | ({"counts": torch.tensor([*self.counts.values()]).sum(0)} if labels else {})


def make_public_set(parts: Mapping[str, PublicPart], classes: tuple[str, ...]) -> PublicSet | None:
    """Return the public rows of all nodes as one set; None if no node has public rows.

    Raises:
        ConfigError: a class that nodes train on has no public example.
        DataError: a public example cannot be read.
    """
    rows_by_client = {i: part.rows for i, part in parts.items() if part.rows is not None}
    if not rows_by_client:
        return None
    for k, name in enumerate(classes):
        if any(part.trained[k] for part in parts.values()) and not any(part.counts[k] for part in parts.values()):
            raise ConfigError(
                f"the public set has no example of class {name!r}, which clients train on; raise 'split.public', divide "
                "the data otherwise, or add examples to 'split.public_file'"
            )
    owners, sizes, digests, start = {}, {}, hashlib.sha256(), 0
    for i, part in parts.items():
        index = part.rows.index if part.rows is not None else np.empty(0, dtype=np.int64)
        owners[i], sizes[i] = range(start, start := start + len(index)), 0
        digests.update(f"{i}\0{len(index)}\0".encode())
        for rows in (index[k : k + _CHUNK] for k in range(0, len(index), _CHUNK)):
            for x in map(Tensor.contiguous, list_tensors(part.examples.take(rows.tolist()))):
                digests.update(f"{x.dtype}{list(x.shape[1:])}".encode() + x.numpy().tobytes())
                sizes[i] += x.nbytes
    public_rows = list(rows_by_client.values())
    labels = [rows.labels for rows in public_rows]
    labelled = hashlib.sha256(digests.digest() + b"".join(node_labels.tobytes() for node_labels in labels))
    is_one_store = all(rows.store is public_rows[0].store for rows in public_rows)
    index = np.concatenate([rows.index for rows in public_rows])
    return PublicSet(
        data=public_rows[0].with_index(index) if is_one_store else ChainedRows(public_rows),
        owners=owners,
        counts={i: tuple(part.counts) for i, part in parts.items()},
        digest=labelled.hexdigest(),
        unlabelled=digests.hexdigest(),
        sizes=sizes,
        label_size=labels[0][:1].nbytes,
    )
