"""Random choices over labelled rows: the few that partitions and splits are made of."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Index = npt.NDArray[np.int64]
"""Row numbers, class numbers or counts."""

Stream = np.random.Generator | torch.Generator | int
"""Where randomness comes from; an int is a seed."""

Names = npt.NDArray[np.str_]
"""Text, one a row: labels, groups, domains."""


def generator(rng: Stream) -> np.random.Generator:
    """The stream as numpy's. One of torch's gives its next number as the seed; one of numpy's is used as it is."""
    if isinstance(rng, np.random.Generator):
        return rng
    if isinstance(rng, torch.Generator):
        rng = int(torch.randint(2**63 - 1, (), generator=rng))
    return np.random.default_rng(rng)


def by_class(labels: Index, classes: int, rng: np.random.Generator) -> list[Index]:
    """The positions of each class in `labels` [n], in random order."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return np.split(order, np.bincount(labels, minlength=classes).cumsum()[:-1])


def counts(labels: Index, classes: int) -> Index:
    """How many of each class."""
    return np.bincount(labels, minlength=classes).astype(np.int64)


def many(n: int | np.int64, noun: str) -> str:
    """A number with its noun, for a sentence."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def apportion(weights: npt.ArrayLike, total: int, caps: Index, rng: np.random.Generator) -> Index:
    """Whole numbers in proportion to `weights` that sum to `total`, none above its cap (Hamilton's largest remainders).

    Where caps bind, the others take more in proportion; where all bind, the sum falls short. Ties go by the stream.
    """
    weight = np.asarray(weights, dtype=float)
    free = (weight > 0) & (caps > 0)
    ideal = np.zeros(len(weight))
    left = min(total, int(caps[free].sum()))
    rest = float(left)
    while free.any():
        share = weight * (rest / weight[free].sum())
        over = free & (share >= caps)
        if not over.any():
            ideal[free] = share[free]
            break
        ideal[over] = caps[over]
        rest -= float(caps[over].sum())
        free &= ~over
    whole = np.floor(ideal + 1e-9).astype(np.int64)
    remainders = (ideal - whole).round(9)
    order = np.lexsort((rng.permutation(len(weight)), -remainders))
    whole[order[: left - int(whole.sum())]] += 1
    return whole


def take(rows: Index, labels: Index, wanted: Sequence[int] | Index, rng: np.random.Generator) -> Index:
    """So many of each class out of `rows`, whose classes are `labels`, at random; sorted."""
    picked = [c[:n] for c, n in zip(by_class(labels, len(wanted), rng), wanted, strict=True)]
    return np.sort(rows[np.concatenate(picked)])


def sample(rows: Index, labels: Index, total: int, rng: np.random.Generator, keep: bool = False) -> Index:
    """`total` of `rows` in the class mix of their `labels`; sorted. keep: leave one of each class behind if that can be."""
    held = counts(labels, int(labels.max(initial=0)) + 1)
    caps = np.maximum(held - 1, 0) if keep and (held - 1).clip(0).sum() >= total else held
    return take(rows, labels, apportion(held, total, caps, rng), rng)
