"""Which rows are the test set, and which are whose: partition and splits applied to a table of labels."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedmutual.config import Config, PartitionConfig, SplitConfig
from fedmutual.core import At
from fedmutual.data import partition
from fedmutual.data.draws import Index, Names, counts, generator, sample
from fedmutual.data.splits import REST, carve, deal_alike, draw_alike
from fedmutual.errors import ConfigError, DataError

PRIVATE, VALIDATION, HOLDOUT = REST, "validation", "holdout"
_V1 = 0.1  # of a client's training data are its validation data under the preset "v1"
_NOT_IN_NAMES = set('/\\:*?"<>|\0')


@dataclass(frozen=True)
class Table:
    """All rows: those of the training part, numbered from 0, then those of the test part."""

    labels: Index  # [N] class numbers
    trains: int  # how many are of the training part
    classes: tuple[str, ...]
    groups: Names | None = None  # [N]
    domains: Names | None = None  # [N], "" for a test part without domains


@dataclass(frozen=True)
class Division:
    """Row numbers of the table."""

    test: Index
    clients: Mapping[str, Mapping[str, Index]]  # "private", "validation", and "holdout" where there is one


def divide(config: Config, table: Table) -> Division:
    """Hold a test set out where the data have none; deal the training rows; give each client its validation and hold-out.

    Raises:
        UserError: it cannot be done so; in one sentence, which client or class is in the way.
    """
    fractions = _fractions(config.split)
    at = At(config.seed, -1, config.rounds)
    _check_groups(table)
    test = np.arange(table.trains, len(table.labels)) if table.trains < len(table.labels) else _held_out(config, table)
    train = np.setdiff1d(np.arange(table.trains), test)
    dealt = _deal(config.partition, table, train, generator(at.rng("partition")))
    kept = _capped(config.partition.examples, dealt, table, generator(at.rng("examples")))
    named = {f"client {i!r}": rows for i, rows in kept.items()}
    carved = carve(named, table.labels, table.groups, fractions, generator(at.rng("splits")))
    shares = dict(zip(dealt, carved.values(), strict=True))
    if VALIDATION not in fractions:
        chosen = _of_test(config.partition.kind, dealt, test, table, generator(at.rng("validation")))
        shares = {i: {**shares[i], VALIDATION: rows} for i, rows in chosen.items()}
    return Division(test, shares)


def _fractions(split: SplitConfig) -> dict[str, float]:
    """What is held out of each client's training data; its validation rows too, unless they come out of the test set."""
    if split.validation == 0:
        raise ConfigError("key 'split.validation' must be above 0; leave it out for the preset's choice")
    found = (
        {VALIDATION: split.validation} if split.validation is not None else {VALIDATION: _V1} if split.preset == "v1" else {}
    )
    if split.holdout:
        found[HOLDOUT] = split.holdout
    if sum(found.values()) >= 1:
        raise ConfigError("keys 'split.validation' and 'split.holdout' must leave training data: their sum must be below 1")
    return found


def _held_out(config: Config, table: Table) -> Index:
    """A test set out of the training part, in its class mix, the same for every seed and every partition by rows."""
    if not config.split.test:
        raise ConfigError("key 'split.test' must be above 0, for the data have no test set of their own (data.test)")
    rows = np.arange(table.trains)
    parts = {"the data": rows}
    if config.partition.kind == "domains":
        parts = {f"domain {d!r}": rows[_domains(table)[: table.trains] == d] for d in _names(table)}
    rng = generator(At(0, -1, 1).rng("test"))
    carved = carve(parts, table.labels, table.groups, {"test": config.split.test}, rng)
    return np.sort(np.concatenate([shares["test"] for shares in carved.values()]))


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
    names: list[str] = np.unique(_domains(table)[: table.trains]).tolist()
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
