"""Who gets which training examples: index arrays that hold every row once.

A stream is a numpy or torch generator, or a seed. Notation: K clients, C classes, p classes a client.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedmutual.data.draws import Index, Stream, by_class, counts, generator, many
from fedmutual.errors import DataError

_TRIES = 10_000


def iid(n: int, clients: int, rng: Stream) -> list[Index]:
    """`n` rows dealt at random, client sizes within one of each other.

    Raises:
        DataError: there are fewer rows than clients.
    """
    if n < clients:
        raise DataError(
            f"partition 'iid': {clients} clients cannot share {many(n, 'training example')}: client {str(n)!r} would get "
            "none; lower partition.clients"
        )
    return [np.sort(part) for part in np.array_split(generator(rng).permutation(n), clients)]


def shards(labels: npt.ArrayLike, clients: int, classes_per_client: int, rng: Stream) -> list[Index]:
    """Class-aligned shards: each class is cut into K p / C equal shards, and every client gets p of them.

    No client gets two shards of one class. Where K p is no multiple of C, the stream decides which classes are cut
    into one more. `labels` [n]; the classes are those that occur.

    Raises:
        DataError: the clients cannot hold all classes, or a class has fewer rows than shards.
    """
    rng = generator(rng)
    names, codes = np.unique(np.asarray(labels), return_inverse=True)
    codes = codes.astype(np.int64)
    held = counts(codes, len(names))
    return cut(codes, shard_table(held, clients, classes_per_client, rng, [str(n) for n in names]), rng)


def shard_table(held: Index, clients: int, per_client: int, rng: np.random.Generator, names: Sequence[str]) -> Index:
    """Who gets a shard of which class -> [K, C] of 0 and 1. `held` [C]: the examples of each class; empty ones go to none.

    Shards are dealt from a shuffled deck; a client with two of one class then swaps one of them, at random among the
    swaps that mend more than they spoil. While p <= C there is always such a swap.
    """
    there = held.nonzero()[0]
    if not 1 <= per_client <= len(there):
        raise DataError(
            f"partition 'shards': classes_per_client = {per_client} cannot be met with the {len(there)} classes that have "
            "training examples; lower partition.classes_per_client"
        )
    if clients * per_client < len(there):
        raise DataError(
            f"partition 'shards': {many(clients, 'client')} of classes_per_client = {per_client} can hold "
            f"{clients * per_client} classes, and there are {len(there)}; raise either"
        )
    least, more = divmod(clients * per_client, len(there))
    pieces = np.zeros_like(held)
    pieces[there] = least
    pieces[rng.permutation(there)[:more]] += 1
    short = (held < pieces).nonzero()[0]
    if len(short):
        c = int(short[0])
        has, wanted = many(held[c], "training example"), many(pieces[c], "shard")
        raise DataError(
            f"partition 'shards': class {names[c]!r} has {has}, too few for its {wanted}; "
            "lower partition.clients or partition.classes_per_client, or leave the class out"
        )
    deck = rng.permutation(np.repeat(np.arange(len(held)), pieces)).reshape(clients, per_client)
    table = np.stack([counts(hand, len(held)) for hand in deck])
    while (double := np.argwhere(table > 1)).size:
        client, c = double[rng.integers(len(double))]
        gain = (table > 1).astype(int) - (table[client] > 0)  # [K, C]: what giving this class back for c mends
        gain[(table == 0) | (table[:, [c]] > 0)] = -1
        swaps = np.argwhere(gain >= 0)
        other, d = swaps[rng.integers(len(swaps))]
        table[client, [c, d]] += (-1, 1)
        table[other, [c, d]] += (1, -1)
    return table


def cut(labels: Index, table: Index, rng: np.random.Generator) -> list[Index]:
    """Each class of `labels` [n] in equal pieces to the clients that `table` [K, C] names; sizes within one."""
    parts: list[list[Index]] = [[] for _ in table]
    for c, rows in enumerate(by_class(labels, table.shape[1], rng)):
        holders = rng.permutation(table[:, c].nonzero()[0])
        for client, piece in zip(holders, np.array_split(rows, max(len(holders), 1)), strict=False):
            parts[client].append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]


def dirichlet(labels: npt.ArrayLike, clients: int, alpha: float, rng: Stream, min_size: int = 10) -> list[Index]:
    """Each class shared out in proportions from Dirichlet(alpha, ..., alpha) (Hsu et al. 2019, arXiv:1909.06335, per class).

    Drawn again until every client has `min_size` rows. The smaller alpha, the more the clients differ. `labels` [n].

    Raises:
        DataError: that cannot be, or was not met in 10,000 draws.
    """
    rng = generator(rng)
    _, codes = np.unique(np.asarray(labels), return_inverse=True)
    codes = codes.astype(np.int64)
    held = np.bincount(codes)
    if len(codes) < clients * min_size:
        raise DataError(
            f"partition 'dirichlet': {len(codes)} training examples are too few for {clients} clients of at least "
            f"{min_size}; lower partition.clients or partition.min_size"
        )
    for _ in range(_TRIES):
        upto = rng.dirichlet(np.full(clients, alpha), len(held)).cumsum(1)[:, :-1]
        edges = np.floor(upto * held[:, None] + 0.5).astype(np.int64)
        sizes = np.diff(edges, axis=1, prepend=0, append=held[:, None]).sum(0)
        if sizes.min() >= min_size:
            break
    else:
        raise DataError(
            f"partition 'dirichlet': in {_TRIES:,} draws with alpha = {alpha:g} some client always had fewer than "
            f"{min_size} examples; raise partition.alpha, or lower partition.clients or partition.min_size"
        )
    pieces = [np.split(rows, at) for rows, at in zip(by_class(codes, len(held), rng), edges, strict=True)]
    return [np.sort(np.concatenate(part)) for part in zip(*pieces, strict=True)]
