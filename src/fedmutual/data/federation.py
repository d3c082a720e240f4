"""A federation's data: every client's shares and the common test set, over one store of examples."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmutual.config import Config
from fedmutual.data import labels, record, rows, scaling, sources
from fedmutual.data.augment import Augment, CropFlip
from fedmutual.data.division import HOLDOUT, PRIVATE, VALIDATION, Division, Table, divide
from fedmutual.data.draws import Names
from fedmutual.data.examples import Examples, Joined, Part, Source
from fedmutual.data.notes import remarks
from fedmutual.data.rows import Rows
from fedmutual.errors import ConfigError, DataError


@dataclass(frozen=True)
class Shares:
    """One client's rows."""

    private: Rows  # to train on
    validation: Rows  # its own predictions are scored on these
    holdout: Rows | None  # to choose a round or a setting by


@dataclass(frozen=True)
class Federation:
    """Who has what."""

    classes: tuple[str, ...]
    shape: tuple[int, ...]  # of one example: (C, H, W) or (F,)
    clients: dict[str, Shares]  # ids "0" .. "K-1", or the names of domains
    test: Rows  # the federation's whole test set
    partition: dict[str, Any]  # what partition.json holds
    notes: tuple[str, ...]  # one sentence each: what a user should know of these data
    scaling: dict[str, Any]  # what was done to the inputs: divisor, mean, std, size, augment
    columns: tuple[str, ...] | None = None  # the names of a table's features

    def pooled(self) -> Shares:
        """All clients' rows in one place, each row once."""
        shares = self.clients.values()
        holdouts = [s.holdout for s in shares if s.holdout is not None]
        return Shares(
            _union([s.private for s in shares]),
            _union([s.validation for s in shares]),
            _union(holdouts) if holdouts else None,
        )


@dataclass(frozen=True)
class Prepared:
    """Data read and scaled, not yet divided: what several runs on the same data may share."""

    source: Source
    table: Table
    store: rows.Store
    shape: tuple[int, ...]
    scaled: scaling.Scaling
    notes: tuple[str, ...]
    digest: str


def prepare(config: Config) -> Prepared:
    """Read the configured data, and scale them.

    Raises:
        UserError: in one sentence, what is wrong with which file or key, and the mend.
    """
    source = sources.read(config.data, config.partition.kind == "domains")
    table = _table(source, config)
    scaled, notes = scaling.of_source(config.data, source)
    examples = _examples(source)
    store, shape = rows.make_store(examples, table.labels, scaled, _where(source), config.data.resident, config.data.workers)
    digest = record.data_digest(examples.digest(), table, shape)
    return Prepared(source, table, store, shape, scaled, notes, digest)


def load(config: Config, prepared: Prepared | None = None) -> Federation:
    """Read the configured data unless they are prepared, and divide them among the clients.

    Raises:
        UserError: in one sentence, what is wrong with which file, key or client, and the mend.
    """
    read = prepared or prepare(config)
    source, table, store, scaled = read.source, read.table, read.store, read.scaled
    augment = CropFlip(scaled.black(read.shape[0])) if config.data.augment == "crop-flip" else None
    division = _division(config, table, read.digest)
    partition = record.describe(config, table, division, read.digest)
    return Federation(
        classes=table.classes,
        shape=read.shape,
        clients={i: _shares(store, shares, augment) for i, shares in division.clients.items()},
        test=Rows(store, division.test),
        partition=partition,
        notes=(*source.notes, *read.notes, *remarks(config, partition)),
        scaling={**scaled.record(), "augment": config.data.augment},
        columns=source.columns,
    )


def _table(source: Source, config: Config) -> Table:
    classes, coded = labels.match(source, config.data)
    parts = [p for p in (source.train, source.test) if p is not None]
    return Table(
        np.concatenate(coded),
        len(source.train.x),
        classes,
        _column(parts, "groups"),
        _column(parts, "domains"),
    )


def _column(parts: list[Part], name: str) -> Names | None:
    """A column of the training part; "" for the rows of a test part that lacks it."""
    if getattr(parts[0], name) is None:
        return None
    found = [getattr(p, name) if getattr(p, name) is not None else np.full(len(p.x), "") for p in parts]
    return np.concatenate(found)


def _examples(source: Source) -> Examples:
    if source.test is None:
        return source.train.x
    first, second = (tuple(p.x.take([0]).shape[1:]) for p in (source.train, source.test))
    if first != second:
        raise DataError(
            f"{source.place}: training examples have the shape {list(first)} and test examples {list(second)}; make them "
            "equal"
        )
    return Joined(source.train.x, source.test.x)


def _where(source: Source) -> rows.Where:
    trains, test = len(source.train.x), source.test

    def where(row: int) -> str:
        return source.train.where(row) if test is None or row < trains else test.where(row - trains)

    return where


def _division(config: Config, table: Table, digest: str) -> Division:
    if config.partition.kind != "file":
        return divide(config, table)
    assert config.partition.file is not None  # the configuration is checked
    if config.partition.examples is not None:
        raise ConfigError("key 'partition.examples' has no effect with partition.kind = 'file'; take it out")
    return record.restore(config.partition.file, table, digest)


def _shares(store: rows.Store, shares: Any, augment: Augment | None) -> Shares:
    held = Rows(store, shares[HOLDOUT]) if HOLDOUT in shares else None
    return Shares(Rows(store, shares[PRIVATE], augment), Rows(store, shares[VALIDATION]), held)


def _union(shares: list[Rows]) -> Rows:
    return shares[0].with_index(np.unique(np.concatenate([s.index for s in shares])))
