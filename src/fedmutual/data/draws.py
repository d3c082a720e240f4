"""Random choices over labelled rows, for partitions and splits."""

import numpy as np
import numpy.typing as npt
import torch

Index = npt.NDArray[np.int64]
"""Row numbers, class numbers or counts."""

Stream = np.random.Generator | torch.Generator | int
"""A source of randomness; an int is a seed."""

Names = npt.NDArray[np.str_]
"""Text, one a row: labels, groups, domains."""


def make_numpy_generator(rng: Stream) -> np.random.Generator:
    """Return a stream as a numpy generator.

    A numpy generator is returned itself; a torch generator gives its next number as the seed.
    """
    if isinstance(rng, np.random.Generator):
        return rng
    if isinstance(rng, torch.Generator):
        rng = int(torch.randint(2**63 - 1, (), generator=rng))
    return np.random.default_rng(rng)


def split_by_class(labels: Index, classes: int, rng: np.random.Generator) -> list[Index]:
    """Return the positions of each class in `labels` [n], in random order."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return np.split(order, np.bincount(labels, minlength=classes).cumsum()[:-1])


def count_classes(labels: Index, classes: int) -> Index:
    """Return the number of labels of each class [classes]."""
    return np.bincount(labels, minlength=classes).astype(np.int64)


def apportion(weights: npt.ArrayLike, total: int, caps: Index, rng: np.random.Generator) -> Index:
    """Return whole numbers [C] in proportion to `weights` that sum to `total` (Hamilton's method of largest remainders).

    No number is above its cap. Where caps bind, the other numbers grow in proportion; where all caps bind, the sum is below
    `total`. The stream breaks ties.
    """
    weight = np.asarray(weights, dtype=float)
    is_free = (weight > 0) & (caps > 0)
    ideal = np.zeros(len(weight))
    available = min(total, int(caps[is_free].sum()))
    remaining = float(available)
    while is_free.any():
        share = weight * (remaining / weight[is_free].sum())
        is_capped = is_free & (share >= caps)
        if not is_capped.any():
            ideal[is_free] = share[is_free]
            break
        ideal[is_capped] = caps[is_capped]
        remaining -= float(caps[is_capped].sum())
        is_free &= ~is_capped
    numbers = np.floor(ideal + 1e-9).astype(np.int64)
    remainders = (ideal - numbers).round(9)
    order = np.lexsort((rng.permutation(len(weight)), -remainders))
    numbers[order[: available - int(numbers.sum())]] += 1
    return numbers


def sample(rows: Index, labels: Index, total: int, rng: np.random.Generator, keep: bool = False) -> Index:
    """Return `total` random rows in the class mix of their `labels`, sorted.

    keep: leave at least one row of each class behind, if possible.
    """
    held = count_classes(labels, int(labels.max(initial=0)) + 1)
    caps = np.maximum(held - 1, 0) if keep and (held - 1).clip(0).sum() >= total else held
    wanted = apportion(held, total, caps, rng)
    picked = [c[:n] for c, n in zip(split_by_class(labels, len(wanted), rng), wanted, strict=True)]
    return np.sort(rows[np.concatenate(picked)])
