"""Which examples make which step: index tensors, drawn from a stream."""

from collections.abc import Iterator

import torch
from torch import Tensor


def draws(examples: int, steps: int, batch_size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """`steps` batches, each drawn anew from all of `examples` rows, none twice in one -> index tensors [B], all there are at
    most."""
    for _ in range(steps):
        yield torch.randperm(examples, generator=rng)[:batch_size]


def epochs(examples: int, epochs: int, batch_size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """`epochs` passes over `examples` rows in fresh random orders, cut into batches -> index tensors [B].

    No row is dropped: the last batch of a pass may be smaller, and where it would hold a single row (which BatchNorm
    cannot train on) that row joins the batch before it.
    """
    for _ in range(epochs):
        batches = list(torch.split(torch.randperm(examples, generator=rng), batch_size))
        if len(batches) > 1 and batch_size > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        yield from batches
