"""Which rows are the test set, and which are whose: partition and splits applied to a table of labels."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedmutual.config import Config, PartitionConfig
from fedmutual.core import At
from fedmutual.data import partition
from fedmutual.data.draws import Index, Names, counts, generator, sample
from fedmutual.data.kinds import TEST, VALIDATION, of_training
from fedmutual.data.splits import LEFT, carve, deal_alike, draw_alike
from fedmutual.errors import ConfigError, DataError

_NOT_IN_NAMES = set('/\\:*?"<>|\0')


@dataclass(frozen=True)
class Table:
    """All rows: those of the training part, numbered from 0, then those of the test part."""

    labels: Index  # [N] class numbers
    trains: int  # how many are of the training part
    classes: tuple[str, ...]
    groups: Names | None = None  # [N]
    domains: Names | None = None  # [N], "" for a test part without domains
    bases: Index | None = None  # [N] which image each was made of, where all domains are made of the same ones


@dataclass(frozen=True)
class Division:
    """Row numbers of the table."""

    test: Index
    clients: Mapping[str, Mapping[str, Index]]  # "private", "validation"; "holdout", "public" where there is one; "test"
    # where clients have test rows of their own: of domains, or out of their own rows (split.private)


def divide(config: Config, table: Table) -> Division:
    """Hold a test set out where the data have none; deal the training rows; give each client its validation, hold-out and
    public rows. Domains made of the same images have one split of these, unless split.shared is false.

    Raises:
        UserError: it cannot be done so; in one sentence, which client or class is in the way.
    """
    if config.split.shared and table.bases is None:
        raise ConfigError(
            "key 'split.shared' = true is for domains that are made of the same images, and these are not; take it out"
        )
    if table.bases is None or config.split.shared is False:
        return _divided(config, table)
    first, *others = _names(table)
    one = _places(table, first)
    of_one = _divided(config, _only(table, np.sort(one)))
    found = {first: {kind: np.sort(one)[rows] for kind, rows in of_one.clients[first].items()}}
    for domain in others:
        same = _places(table, domain)
        found[domain] = {kind: np.sort(same[table.bases[rows]]) for kind, rows in found[first].items()}
    return Division(np.sort(np.concatenate([shares[TEST] for shares in found.values()])), found)


def _divided(config: Config, table: Table) -> Division:
    """As `divide`, each row by itself."""
    split, at = config.split, At(config.seed, -1, config.rounds)
    fractions, whole = of_training(split), np.arange(table.trains)
    own = split.private is not None  # every client holds its own test rows out
    if own:
        test = np.empty(0, dtype=np.int64)
    else:
        _check_groups(table)
        test = np.arange(table.trains, len(table.labels)) if table.trains < len(table.labels) else _held_out(config, table)
    dealt = _deal(config.partition, table, np.setdiff1d(whole, test), generator(at.rng("partition")))
    kept = _capped(config.partition.examples, dealt, table, generator(at.rng("examples")))
    named = {f"client {i!r}": rows for i, rows in kept.items()}
    carved = carve(named, table.labels, table.groups, fractions, generator(at.rng("splits")))
    shares = {
        i: {kind: rows for kind, rows in found.items() if kind != LEFT}
        for i, found in zip(dealt, carved.values(), strict=True)
    }
    if own:
        return Division(np.sort(np.concatenate([found[TEST] for found in shares.values()])), shares)
    if VALIDATION not in fractions:
        chosen = _of_test(config.partition.kind, dealt, test, table, generator(at.rng("validation")))
        shares = {i: {**shares[i], VALIDATION: rows} for i, rows in chosen.items()}
    if config.partition.kind == "domains":
        tests = {i: test[_domains(table)[test] == i] for i in shares}
        shares = {i: {**found, **({TEST: tests[i]} if len(tests[i]) else {})} for i, found in shares.items()}
    return Division(test, shares)


def _only(table: Table, rows: Index) -> Table:
    """Some rows of it, in their order."""
    groups, domains = (None if column is None else column[rows] for column in (table.groups, table.domains))
    bases = None if table.bases is None else table.bases[rows]
    return Table(table.labels[rows], int((rows < table.trains).sum()), table.classes, groups, domains, bases)


def _places(table: Table, domain: str) -> Index:
    """The rows of a domain, by the number of the image that each was made of."""
    rows = np.flatnonzero(_domains(table) == domain)
    assert table.bases is not None
    return rows[np.argsort(table.bases[rows])]


def _held_out(config: Config, table: Table) -> Index:
    """A test set out of the training part, in its class mix, the same for every seed and every partition by rows."""
    if not config.split.test:
        raise ConfigError("key 'split.test' must be above 0, for the data have no test set of their own (data.test)")
    rows = np.arange(table.trains)
    parts = {"the data": rows}
    if config.partition.kind == "domains":
        parts = {f"domain {d!r}": rows[_domains(table)[: table.trains] == d] for d in _names(table)}
    rng = generator(At(0, -1, 1).rng("test"))
    carved = carve(parts, table.labels, table.groups, {TEST: config.split.test}, rng)
    return np.sort(np.concatenate([shares[TEST] for shares in carved.values()]))


def _deal(config: PartitionConfig, table: Table, train: Index, rng: np.random.Generator) -> dict[str, Index]:
    """Client -> its training rows."""
    if config.kind == "domains":
        return {d: train[_domains(table)[train] == d] for d in _names(table)}
    labels = table.labels[train]
    if config.kind == "shards":
        assert config.classes_per_client is not None  # the configuration is checked
        held = counts(labels, len(table.classes))
        parts = partition.cut(
            labels, partition.shard_table(held, config.clients, config.classes_per_client, rng, table.classes), rng
        )
    elif config.kind == "dirichlet":
        assert config.alpha is not None
        parts = partition.dirichlet(labels, config.clients, config.alpha, rng, config.min_size)
    else:
        parts = partition.iid(len(train), config.clients, rng)
    return {str(i): train[part] for i, part in enumerate(parts)}


def _capped(most: int | None, dealt: Mapping[str, Index], table: Table, rng: np.random.Generator) -> Mapping[str, Index]:
    """At most so many training rows a client, in its own class mix."""
    if most is None:
        return dealt
    return {i: rows if len(rows) <= most else sample(rows, table.labels[rows], most, rng) for i, rows in dealt.items()}


def _of_test(kind: str, dealt: Mapping[str, Index], test: Index, table: Table, rng: np.random.Generator) -> dict[str, Index]:
    """Each client's validation rows out of the test set, with its own class mix."""
    held = np.stack([counts(table.labels[rows], len(table.classes)) for rows in dealt.values()])
    if kind == "domains" and (_domains(table)[test] != "").all():
        found = [test[_domains(table)[test] == d] for d in dealt]
    elif kind in ("iid", "shards"):
        found = deal_alike(held, test, table.labels, rng)
    else:
        found = draw_alike(held, test, table.labels, rng)
    for client, rows in zip(dealt, found, strict=True):
        if not len(rows):
            raise DataError(
                f"client {client!r} gets no validation example, for the test set of {len(test)} has too few of its "
                "kind; set split.validation to take them from its training data"
            )
    return dict(zip(dealt, found, strict=True))


def _domains(table: Table) -> Names:
    if table.domains is None:
        raise DataError(
            "partition.kind = 'domains': the data name no domains; a folder has them above its classes, a CSV file in a "
            "column 'domain', arrays in an array 'domain', a Dataset in an attribute 'domains'"
        )
    return table.domains


def _names(table: Table) -> list[str]:
    """The domains of the training part: they become clients, and name folders."""
    there = _domains(table)[: table.trains]
    names: list[str] = np.unique(there).tolist() if table.bases is None else list(dict.fromkeys(there.tolist()))
    for name in names:
        check_name(name, f"domain {name!r}")
    return names


def check_name(name: str, what: str) -> None:
    """Raise DataError unless a client can be called so; `what` has the name."""
    if not name.strip(". ") or _NOT_IN_NAMES & set(name):
        raise DataError(f"{what} cannot name a client, whose name is a folder's too; rename it")


def _check_groups(table: Table) -> None:
    """A test set of one's own must not hold groups that are trained on."""
    if table.groups is None:
        return
    both = np.intersect1d(table.groups[: table.trains], table.groups[table.trains :])
    if len(both):
        raise DataError(
            f"data.group_by: {str(both[0])!r} has rows in the training and in the test data ({len(both)} such groups); take "
            "each out of one of them, or leave the test data out and whole groups are held out"
        )
