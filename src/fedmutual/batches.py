"""Draw the rows of each step: index tensors from a random stream."""

from collections.abc import Iterator

import torch
from torch import Tensor


def draws(examples: int, steps: int, batch_size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield `steps` index tensors [B], each drawn from all `examples` rows without repetition; B is at most `examples`."""
    for _ in range(steps):
        yield torch.randperm(examples, generator=rng)[:batch_size]


def epochs(examples: int, epochs: int, batch_size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield the index tensors [B] of `epochs` passes over `examples` rows, each pass in a new random order.

    No row is dropped: the last batch of a pass may be smaller. BatchNorm cannot train on a single row, so a last batch of a
    single row joins the batch before it.
    """
    for _ in range(epochs):
        batches = list(torch.split(torch.randperm(examples, generator=rng), batch_size))
        if len(batches) > 1 and batch_size > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        yield from batches
