"""Partitions of training examples among clients: index arrays that hold every row once.

A stream is a numpy or torch generator, or a seed. Notation: K clients, C classes, p classes a client.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedmutual.data.draws import Index, Stream, count_classes, make_numpy_generator, split_by_class
from fedmutual.errors import DataError, format_count

_MAX_DRAWS = 10_000
_LEAST = 40  # rows of a client in PFLlib: a quarter of them, its test rows, fill one batch of 10


def iid(n: int, clients: int, rng: Stream) -> list[Index]:
    """Return the sorted row numbers of each client: `n` rows dealt at random; client sizes differ by at most one.

    Raises:
        DataError: there are fewer rows than clients.
    """
    if n < clients:
        raise DataError(
            f"partition 'iid': {clients} clients cannot share {format_count(n, 'training example')}: client {str(n)!r} "
            "would get none; lower partition.clients"
        )
    return [np.sort(part) for part in np.array_split(make_numpy_generator(rng).permutation(n), clients)]


def shards(labels: npt.ArrayLike, clients: int, classes_per_client: int, rng: Stream) -> list[Index]:
    """Return class-aligned shards: each class is cut into K p / C equal shards, and every client gets p of them.

    No client gets two shards of one class. Where K p is no multiple of C, the stream decides which classes are cut
    into one more shard. `labels` [n]; the classes are those that occur.

    The list has the sorted row numbers of each client.

    Raises:
        DataError: the clients cannot hold all classes, or a class has fewer rows than shards.
    """
    rng = make_numpy_generator(rng)
    names, codes = np.unique(np.asarray(labels), return_inverse=True)
    codes = codes.astype(np.int64)
    held = count_classes(codes, len(names))
    return cut_classes(codes, deal_shards(held, clients, classes_per_client, rng, [str(n) for n in names]), rng)


def deal_shards(held: Index, clients: int, per_client: int, rng: np.random.Generator, names: Sequence[str]) -> Index:
    """Return the table [K, C] of 0 and 1: which client gets a shard of which class.

    `held` [C]: the examples of each class; classes without examples have no shards. Shards are dealt from a shuffled deck. A
    client with two shards of one class then swaps one of them, at random among the swaps that remove at least as many
    doubles as they add. While p <= C there is always such a swap.

    Raises:
        DataError: the clients cannot hold all classes, or a class has fewer rows than shards.
    """
    classes = held.nonzero()[0]
    if not 1 <= per_client <= len(classes):
        raise DataError(
            f"partition 'shards': classes_per_client = {per_client} cannot be met with the {len(classes)} classes that have "
            "training examples; lower partition.classes_per_client"
        )
    if clients * per_client < len(classes):
        raise DataError(
            f"partition 'shards': {format_count(clients, 'client')} of classes_per_client = {per_client} can hold "
            f"{clients * per_client} classes, and there are {len(classes)}; raise either"
        )
    base, extra = divmod(clients * per_client, len(classes))
    pieces = np.zeros_like(held)
    pieces[classes] = base
    pieces[rng.permutation(classes)[:extra]] += 1
    short = (held < pieces).nonzero()[0]
    if len(short):
        class_number = int(short[0])
        available, needed = format_count(held[class_number], "training example"), format_count(pieces[class_number], "shard")
        raise DataError(
            f"partition 'shards': class {names[class_number]!r} has {available}, too few for its {needed}; "
            "lower partition.clients or partition.classes_per_client, or leave the class out"
        )
    deck = rng.permutation(np.repeat(np.arange(len(held)), pieces)).reshape(clients, per_client)
    table = np.stack([count_classes(hand, len(held)) for hand in deck])
    while (doubles := np.argwhere(table > 1)).size:
        client, class_number = doubles[rng.integers(len(doubles))]
        # [K, C]: the doubles that a swap of class_number for this class of this client removes, minus those it adds
        fewer_doubles = (table > 1).astype(int) - (table[client] > 0)
        fewer_doubles[(table == 0) | (table[:, [class_number]] > 0)] = -1
        swaps = np.argwhere(fewer_doubles >= 0)
        other, other_class = swaps[rng.integers(len(swaps))]
        table[client, [class_number, other_class]] += (-1, 1)
        table[other, [class_number, other_class]] += (1, -1)
    return table


def cut_classes(labels: Index, table: Index, rng: np.random.Generator) -> list[Index]:
    """Return each class of `labels` [n] in equal pieces for the clients of `table` [K, C]; sizes differ by at most one.

    The list has the sorted positions in `labels` of each client.
    """
    parts: list[list[Index]] = [[] for _ in table]
    for c, rows in enumerate(split_by_class(labels, table.shape[1], rng)):
        holders = rng.permutation(table[:, c].nonzero()[0])
        for client, piece in zip(holders, np.array_split(rows, max(len(holders), 1)), strict=False):
            parts[client].append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]


def dirichlet(labels: npt.ArrayLike, clients: int, alpha: float, rng: Stream, min_size: int = 10) -> list[Index]:
    """Return each class divided in proportions from Dirichlet(alpha, ..., alpha) (Hsu et al. 2019, arXiv:1909.06335).

    Proportions are drawn again until every client has `min_size` rows. Small alpha: clients differ much. `labels` [n].

    The list has the sorted row numbers of each client.

    Raises:
        DataError: there are too few rows, or 10,000 draws did not give every client `min_size` rows.
    """
    rng = make_numpy_generator(rng)
    _, codes = np.unique(np.asarray(labels), return_inverse=True)
    codes = codes.astype(np.int64)
    held = np.bincount(codes)
    if len(codes) < clients * min_size:
        raise DataError(
            f"partition 'dirichlet': {len(codes)} training examples are too few for {clients} clients of at least "
            f"{min_size}; lower partition.clients or partition.min_size"
        )
    for _ in range(_MAX_DRAWS):
        upto = rng.dirichlet(np.full(clients, alpha), len(held)).cumsum(1)[:, :-1]
        edges = np.floor(upto * held[:, None] + 0.5).astype(np.int64)
        sizes = np.diff(edges, axis=1, prepend=0, append=held[:, None]).sum(0)
        if sizes.min() >= min_size:
            break
    else:
        raise DataError(
            f"partition 'dirichlet': in {_MAX_DRAWS:,} draws with alpha = {alpha:g} some client always had fewer than "
            f"{min_size} examples; raise partition.alpha, or lower partition.clients or partition.min_size"
        )
    pieces = [np.split(rows, at) for rows, at in zip(split_by_class(codes, len(held), rng), edges, strict=True)]
    return [np.sort(np.concatenate(part)) for part in zip(*pieces, strict=True)]


def pfllib(labels: npt.ArrayLike, clients: int, alpha: float, rng: Stream) -> list[Index]:
    """Return each class divided by Dirichlet(alpha, ..., alpha) among the clients that are not full.

    The rule "dir" of PFLlib (Zhang et al., JMLR 2025, https://github.com/TsingZ0/PFLlib): classes are dealt one after
    the other, a client with n / K rows or more gets none of the next class, and all is drawn again until every client has
    min(40, n / K / 2) rows. `labels` [n].

    The list has the sorted row numbers of each client.

    Raises:
        DataError: there are fewer rows than clients, or 10,000 draws did not give every client enough rows.
    """
    rng = make_numpy_generator(rng)
    _, codes = np.unique(np.asarray(labels), return_inverse=True)
    n = len(codes)
    if n < clients:
        raise DataError(
            f"partition 'pfllib': {clients} clients cannot share {format_count(n, 'example')}; lower partition.clients"
        )
    least = int(min(_LEAST, n / clients / 2))
    for _ in range(_MAX_DRAWS):
        parts = [np.empty(0, dtype=np.int64)] * clients
        for c in range(int(codes.max()) + 1):
            rows = rng.permutation(np.flatnonzero(codes == c))
            shares = rng.dirichlet(np.full(clients, alpha)) * [len(part) < n / clients for part in parts]
            edges = (np.cumsum(shares / shares.sum()) * len(rows)).astype(np.int64)[:-1]
            parts = [np.concatenate(both) for both in zip(parts, np.split(rows, edges), strict=True)]
        if min(map(len, parts)) >= least:
            return [np.sort(part) for part in parts]
    raise DataError(
        f"partition 'pfllib': in {_MAX_DRAWS:,} draws with alpha = {alpha:g} some client always had fewer than {least} "
        "examples; raise partition.alpha or lower partition.clients"
    )
