"""The kinds of a client's shares, their fractions, and the rows that are held out."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fedmutual.config import SplitConfig
from fedmutual.data.draws import Index, Names, apportion, count_classes, sample, split_by_class
from fedmutual.errors import ConfigError, DataError, format_count

PRIVATE, VALIDATION, HOLDOUT, PUBLIC, TEST = "private", "validation", "holdout", "public", "test"
ROW_KINDS = (PRIVATE, PUBLIC, VALIDATION, HOLDOUT, TEST)  # in the order of files and tables
LEFT = "what is left over"  # unused rows, where fractions sum to less than 1; may be empty
_V1_VALIDATION = 0.1  # fraction of validation rows under the preset "v1"
_ROUNDING = 1e-9  # tolerance for fractions that sum to 1
_ORDERS, _ATTEMPTS = 50, 20


def list_held_out_fractions(split: SplitConfig) -> dict[str, float]:
    """Return kind -> the fraction that is held out of each client's training data.

    Validation rows are included unless they come out of the test set. With split.private the fractions are of all rows of a
    client, hold-out rows a fraction of its private rows, and unused rows are a kind, too.

    Raises:
        ConfigError: a fraction is missing, or the sum of the fractions is too large.
    """
    if split.validation == 0:
        raise ConfigError("key 'split.validation' must be above 0; omit it to use the preset's value")
    if split.private is None:
        validation = _V1_VALIDATION if split.validation is None and split.preset == "v1" else split.validation
        pairs = ((VALIDATION, validation), (HOLDOUT, split.holdout), (PUBLIC, split.public))
        held_out = {kind: fraction for kind, fraction in pairs if fraction}
        if sum(held_out.values()) >= 1:
            keys = " and ".join(f"'split.{kind}'" for kind in held_out)
            raise ConfigError(f"keys {keys} must leave training data: their sum must be below 1")
        return held_out
    if split.validation is None:
        raise ConfigError("key 'split.private' needs the key 'split.validation': the fraction of each client's rows")
    if not split.test:
        raise ConfigError("key 'split.test' must be above 0: with 'split.private' each client has its own test rows")
    unused = 1 - (split.private + split.public + split.validation + split.test)
    if unused < -_ROUNDING:
        raise ConfigError(
            "keys 'split.private', 'split.public', 'split.validation' and 'split.test' are fractions of a client's rows, "
            f"but their sum is {1 - unused:g}; it must be at most 1"
        )
    fractions = {
        TEST: split.test,
        VALIDATION: split.validation,
        PUBLIC: split.public,
        HOLDOUT: split.holdout * split.private,
    }
    return {kind: f for kind, f in {**fractions, LEFT: unused if unused > _ROUNDING else 0.0}.items() if f}


def hold_out(
    parts: Mapping[str, Index], labels: Index, groups: Names | None, fractions: Mapping[str, float], rng: np.random.Generator
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
    shares = {PRIVATE: rows}
    for kind, fraction in fractions.items():
        size = max(1, round(fraction * len(rows)))
        if kind == LEFT:  # unused rows may shrink, so that one training row is left
            size = min(size, len(shares[PRIVATE]) - 1)
        if size >= len(shares[PRIVATE]):
            raise DataError(
                f"{name} has {format_count(len(rows), 'training example')}, too few to hold {fraction:g} of them out for "
                f"{kind}"
            )
        shares[kind] = sample(shares[PRIVATE], labels[shares[PRIVATE]], size, rng, keep=True)
        shares[PRIVATE] = np.setdiff1d(shares[PRIVATE], shares[kind])
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
        most = len(free) - (not any(kinds.get(g) == PRIVATE for g in part_groups))  # one group must remain for training
        if ideal.sum() >= 0.5 or not has_kind.any():
            for g in _choose_groups(table[free], ideal, most, not has_kind.any(), rng):
                kinds[part_groups[free[g]]] = kind
    for g in part_groups:
        kinds.setdefault(g, PRIVATE)
    row_kinds = np.array([kinds[g] for g in part_groups])[codes]
    shares = {kind: rows[row_kinds == kind] for kind in (PRIVATE, *fractions)}
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
