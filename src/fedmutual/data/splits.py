"""What is held out, and which validation rows a client gets of the test set."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fedmutual.data.draws import Index, Names, apportion, by_class, counts, many, sample
from fedmutual.errors import DataError

REST = "private"
LEFT = "what is left over"  # by fractions that sum to less than 1: nobody uses it, so it may be nothing
_ORDERS, _ATTEMPTS = 50, 20


def carve(
    parts: Mapping[str, Index],
    labels: Index,
    groups: Names | None,
    fractions: Mapping[str, float],
    rng: np.random.Generator,
) -> dict[str, dict[str, Index]]:
    """Hold fractions of each part out -> part -> {"private": the rest, and a share for each of `fractions`}.

    parts: row numbers, by what messages call them. labels, groups: of all rows there are. Shares follow the class mix of
    their part. With groups, whole groups are held out, and no group has rows in two kinds of shares anywhere.

    Raises:
        DataError: a part has too few rows, or groups, to be divided.
    """
    if groups is None:
        return {name: _rows(name, rows, labels, fractions, rng) for name, rows in parts.items()}
    first = sorted(parts, key=lambda name: len(np.unique(groups[parts[name]])))  # who has fewest groups chooses first
    for attempt in range(_ATTEMPTS):
        kinds: dict[str, str] = {}  # of each group, once it is known
        try:
            shares = {name: _groups(name, parts[name], labels, groups, fractions, kinds, rng) for name in first}
        except DataError:
            if attempt == _ATTEMPTS - 1:
                raise
            first = [first[i] for i in rng.permutation(len(first))]
            continue
        break
    return {name: shares[name] for name in parts}


def _rows(
    name: str, rows: Index, labels: Index, fractions: Mapping[str, float], rng: np.random.Generator
) -> dict[str, Index]:
    shares = {REST: rows}
    for kind, fraction in fractions.items():
        wanted = max(1, round(fraction * len(rows)))
        if kind == LEFT:  # gives way: one row at least is to train on
            wanted = min(wanted, len(shares[REST]) - 1)
        if wanted >= len(shares[REST]):
            raise DataError(
                f"{name} has {many(len(rows), 'training example')}, too few to hold {fraction:g} of them out for {kind}"
            )
        shares[kind] = sample(shares[REST], labels[shares[REST]], wanted, rng, keep=True)
        shares[REST] = np.setdiff1d(shares[REST], shares[kind])
    return shares


def _groups(
    name: str,
    rows: Index,
    labels: Index,
    groups: Names,
    fractions: Mapping[str, float],
    kinds: dict[str, str],
    rng: np.random.Generator,
) -> dict[str, Index]:
    own, codes = np.unique(groups[rows], return_inverse=True)
    table = np.zeros((len(own), int(labels.max()) + 1), dtype=np.int64)  # examples of each group and class
    np.add.at(table, (codes, labels[rows]), 1)
    for kind, fraction in fractions.items():
        known = np.array([kinds.get(g) == kind for g in own])
        free = np.flatnonzero([g not in kinds for g in own])
        ideal = (fraction * table.sum(0) - table[known].sum(0)).clip(0)
        spare = len(free) - (not any(kinds.get(g) == REST for g in own))  # one group at least must be left to train on
        if ideal.sum() >= 0.5 or not known.any():
            for g in _nearest(table[free], ideal, spare, not known.any(), rng):
                kinds[own[free[g]]] = kind
    for g in own:
        kinds.setdefault(g, REST)
    found = np.array([kinds[g] for g in own])[codes]
    shares = {kind: rows[found == kind] for kind in (REST, *fractions)}
    for kind, share in shares.items():
        if not len(share) and kind != LEFT:
            raise DataError(
                f"{name} has {many(len(own), 'group')} of data.group_by, too few to be divided so that some are left for "
                f"{kind}; give it more, or hold out less"
            )
    return shares


def _nearest(table: Index, ideal: npt.NDArray[np.float64], most: int, some: bool, rng: np.random.Generator) -> Index:
    """Which groups, `most` at most, sum nearest to `ideal` examples a class: the best start of 50 random orders."""
    best, chosen = (np.inf if some else float(ideal.sum())), np.empty(0, dtype=np.int64)
    for _ in range(_ORDERS if most > 0 else 0):
        order = rng.permutation(len(table))[:most]
        off = np.abs(table[order].cumsum(0) - ideal).sum(1)
        if off.min() < best:
            best, chosen = float(off.min()), order[: int(off.argmin()) + 1]
    return chosen


def deal_alike(held: Index, test: Index, labels: Index, rng: np.random.Generator) -> list[Index]:
    """The whole test set, each class dealt to the clients in proportion to their training examples of it.

    held [K, C]: training examples. test: row numbers; labels: of all rows. Clients with equal shards of a class get equal
    parts of it, within one; what is left over goes to those who were given least so far. No row is given twice.
    """
    pieces: list[list[Index]] = [[] for _ in held]
    owed = np.zeros(len(held))
    for c in held.sum(0).nonzero()[0]:
        rows = rng.permutation(test[labels[test] == c])
        exact = held[:, c] / held[:, c].sum() * len(rows)
        sizes = np.floor(exact + 1e-9).astype(np.int64)
        first = np.lexsort((rng.permutation(len(held)), -(exact - sizes + owed).round(9), exact - sizes < 1e-9))
        sizes[first[: len(rows) - sizes.sum()]] += 1
        owed += exact - sizes
        for client, piece in enumerate(np.split(rows, sizes.cumsum()[:-1])):
            pieces[client].append(piece)
    return [np.sort(np.concatenate(p)) for p in pieces]


def draw_alike(held: Index, test: Index, labels: Index, rng: np.random.Generator) -> list[Index]:
    """1/K of the test set for each client, in the class mix of its training examples; fewer where a class runs short.

    held [K, C]: training examples. test: row numbers; labels: of all rows. Two clients share rows only where their mixes
    ask for more of a class than there is.
    """
    there = counts(labels[test], held.shape[1])
    stacks = by_class(labels[test], held.shape[1], rng)
    used = np.zeros_like(there)
    found = []
    for own in held:
        mix = np.where(there > 0, own, 0)
        total = max(1, len(test) // len(held))
        if mix.any():
            wanted = mix > 0
            total = max(1, min(total, int((there[wanted] * mix.sum() / mix[wanted]).min() + 1e-9)))
        sizes = apportion(mix, total, there, rng)
        positions = [np.take(s, range(u, u + n), mode="wrap") for s, u, n in zip(stacks, used, sizes, strict=True) if n]
        used += sizes
        found.append(np.sort(test[np.concatenate([*positions, np.empty(0, dtype=np.int64)])]))
    return found
