"""Held-out shares of clients' rows, and the validation rows that a client gets out of the test set."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fedmutual.data.draws import Index, Names, apportion, count_classes, sample, split_by_class
from fedmutual.errors import DataError, format_count

REST = "private"
LEFT = "what is left over"  # unused rows, where fractions sum to less than 1; may be empty
_ORDERS, _ATTEMPTS = 50, 20


def hold_out(
    parts: Mapping[str, Index],
    labels: Index,
    groups: Names | None,
    fractions: Mapping[str, float],
    rng: np.random.Generator,
) -> dict[str, dict[str, Index]]:
    """Hold out fractions of each part; return part -> {"private": the rest, and one share for each of `fractions`}.

    parts: name in messages -> row numbers. labels, groups [N]: of all rows. Shares have the class mix of their part. With
    groups, whole groups are held out, and no group has rows in two kinds of shares, in any part.

    Raises:
        DataError: a part has too few rows or groups.
    """
    if groups is None:
        return {name: _hold_out_rows(name, rows, labels, fractions, rng) for name, rows in parts.items()}
    # Parts with few groups come first, because they have the fewest choices.
    order = sorted(parts, key=lambda name: len(np.unique(groups[parts[name]])))
    for attempt in range(_ATTEMPTS):
        kinds: dict[str, str] = {}  # group -> kind of share
        try:
            shares = {name: _hold_out_groups(name, parts[name], labels, groups, fractions, kinds, rng) for name in order}
        except DataError:
            if attempt == _ATTEMPTS - 1:
                raise
            order = [order[i] for i in rng.permutation(len(order))]
            continue
        break
    return {name: shares[name] for name in parts}


def _hold_out_rows(
    name: str, rows: Index, labels: Index, fractions: Mapping[str, float], rng: np.random.Generator
) -> dict[str, Index]:
    shares = {REST: rows}
    for kind, fraction in fractions.items():
        size = max(1, round(fraction * len(rows)))
        if kind == LEFT:  # unused rows may shrink, so that one training row is left
            size = min(size, len(shares[REST]) - 1)
        if size >= len(shares[REST]):
            raise DataError(
                f"{name} has {format_count(len(rows), 'training example')}, too few to hold {fraction:g} of them out for "
                f"{kind}"
            )
        shares[kind] = sample(shares[REST], labels[shares[REST]], size, rng, keep=True)
        shares[REST] = np.setdiff1d(shares[REST], shares[kind])
    return shares


def _hold_out_groups(
    name: str,
    rows: Index,
    labels: Index,
    groups: Names,
    fractions: Mapping[str, float],
    kinds: dict[str, str],
    rng: np.random.Generator,
) -> dict[str, Index]:
    part_groups, codes = np.unique(groups[rows], return_inverse=True)
    table = np.zeros((len(part_groups), int(labels.max()) + 1), dtype=np.int64)  # examples of each group and class
    np.add.at(table, (codes, labels[rows]), 1)
    for kind, fraction in fractions.items():
        has_kind = np.array([kinds.get(g) == kind for g in part_groups])
        free = np.flatnonzero([g not in kinds for g in part_groups])
        ideal = (fraction * table.sum(0) - table[has_kind].sum(0)).clip(0)
        most = len(free) - (not any(kinds.get(g) == REST for g in part_groups))  # one group must remain for training
        if ideal.sum() >= 0.5 or not has_kind.any():
            for g in _choose_groups(table[free], ideal, most, not has_kind.any(), rng):
                kinds[part_groups[free[g]]] = kind
    for g in part_groups:
        kinds.setdefault(g, REST)
    row_kinds = np.array([kinds[g] for g in part_groups])[codes]
    shares = {kind: rows[row_kinds == kind] for kind in (REST, *fractions)}
    for kind, share in shares.items():
        if not len(share) and kind != LEFT:
            raise DataError(
                f"{name} has {format_count(len(part_groups), 'group')} of data.group_by, too few for "
                f"{kind}; add groups, or hold out fewer rows"
            )
    return shares


def _choose_groups(
    table: Index, ideal: npt.NDArray[np.float64], most: int, required: bool, rng: np.random.Generator
) -> Index:
    """Return at most `most` groups whose counts sum nearest to `ideal` [C]: the best prefix of 50 random orders.

    table [groups, C]: examples. required: whether at least one group must be chosen.
    """
    best_distance, best_groups = (np.inf if required else float(ideal.sum())), np.empty(0, dtype=np.int64)
    for _ in range(_ORDERS if most > 0 else 0):
        order = rng.permutation(len(table))[:most]
        distance = np.abs(table[order].cumsum(0) - ideal).sum(1)
        if distance.min() < best_distance:
            best_distance, best_groups = float(distance.min()), order[: int(distance.argmin()) + 1]
    return best_groups


def deal_alike(held: Index, test: Index, labels: Index, rng: np.random.Generator) -> list[Index]:
    """Return the whole test set in K parts: each class in proportion to the clients' training examples of the class.

    held [K, C]: training examples. test: row numbers. labels [N]: of all rows. Clients with equal shards of a class get
    equal parts of the class, within one row; remaining rows go to the clients with the fewest so far. No row is used twice.
    """
    pieces: list[list[Index]] = [[] for _ in held]
    owed = np.zeros(len(held))
    for c in held.sum(0).nonzero()[0]:
        rows = rng.permutation(test[labels[test] == c])
        exact = held[:, c] / held[:, c].sum() * len(rows)
        sizes = np.floor(exact + 1e-9).astype(np.int64)
        receivers = np.lexsort((rng.permutation(len(held)), -(exact - sizes + owed).round(9), exact - sizes < 1e-9))
        sizes[receivers[: len(rows) - sizes.sum()]] += 1
        owed += exact - sizes
        for client, piece in enumerate(np.split(rows, sizes.cumsum()[:-1])):
            pieces[client].append(piece)
    return [np.sort(np.concatenate(p)) for p in pieces]


def draw_alike(held: Index, test: Index, labels: Index, rng: np.random.Generator) -> list[Index]:
    """Return 1/K of the test set for each client, in the class mix of its training examples; fewer where a class runs
    short.

    held [K, C]: training examples. test: row numbers. labels [N]: of all rows. Two clients share rows only if their class
    mixes need more rows of a class than the test set has.
    """
    available = count_classes(labels[test], held.shape[1])
    stacks = split_by_class(labels[test], held.shape[1], rng)
    used = np.zeros_like(available)
    shares = []
    for client_counts in held:
        mix = np.where(available > 0, client_counts, 0)
        total = max(1, len(test) // len(held))
        if mix.any():
            is_needed = mix > 0
            total = max(1, min(total, int((available[is_needed] * mix.sum() / mix[is_needed]).min() + 1e-9)))
        sizes = apportion(mix, total, available, rng)
        positions = [np.take(s, range(u, u + n), mode="wrap") for s, u, n in zip(stacks, used, sizes, strict=True) if n]
        used += sizes
        shares.append(np.sort(test[np.concatenate([*positions, np.empty(0, dtype=np.int64)])]))
    return shares
