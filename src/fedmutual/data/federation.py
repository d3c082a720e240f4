"""A federation's data: every client's shares and the common test set, over one store of examples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedmutual import tasks
from fedmutual.config import ALONE, Config, alone, brings_data
from fedmutual.core import At
from fedmutual.data import labels, record, rows, scaling, sources
from fedmutual.data.augment import Augment, CropFlip
from fedmutual.data.division import Division, Table, check_name, divide
from fedmutual.data.draws import Index, Names, generator, many
from fedmutual.data.examples import Examples, Joined, Part, Source, listed, said
from fedmutual.data.kinds import HOLDOUT, PRIVATE, PUBLIC, TEST, VALIDATION
from fedmutual.data.labels import Targets
from fedmutual.data.notes import NOBODY, of_split, remarks, training
from fedmutual.data.public import Part as Given
from fedmutual.data.public import PublicSet, gather
from fedmutual.data.rows import Chained, Rows, union
from fedmutual.errors import ConfigError, DataError


@dataclass(frozen=True)
class Shares:
    """One client's rows."""

    private: Rows  # to train on
    validation: Rows  # its own predictions are scored on these
    holdout: Rows | None  # to choose a round or a setting by
    public: Rows | None = None  # its part of the public seed set: none of them is private, too
    test: Rows | None = None  # its own part of the test set, where it has one: of a domain, or of data of its own


@dataclass(frozen=True)
class Space:
    """What a network takes and gives."""

    shape: tuple[int, ...]  # of one example: (C, H, W) or (F,)
    classes: tuple[str, ...]  # in the order of the outputs; of targets that are numbers, their one name
    outputs: int
    task: str
    scaling: dict[str, Any]  # what was done to the inputs: divisor, mean, std, size, augment
    columns: tuple[str, ...] | None = None  # the names of a table's features

    @property
    def numbers(self) -> bool:
        """Whether targets are numbers."""
        return tasks.make(self.task).outputs is not None

    def like(self, other: "Space") -> bool:
        """Whether one network can serve both: what is scaled otherwise still fits, and numbers of any name do."""
        ours, theirs = ((s.shape, s.outputs, s.numbers, () if s.numbers else s.classes) for s in (self, other))
        return ours == theirs

    def unlike(self, other: "Space") -> str | None:
        """How the named columns of two tables of one shape differ, in words; None where they do not, or have no names."""
        return None if self.shape != other.shape else other_columns(self.columns, other.columns)


def other_columns(ours: Sequence[str] | None, theirs: Sequence[str] | None) -> str | None:
    """How columns differ from others', in words."""
    if ours is None or theirs is None or tuple(ours) == tuple(theirs):
        return None
    odd = [c for c in ours if c not in theirs] or [c for c in theirs if c not in ours]
    return f"other columns ({listed(odd, 3)})" if odd else f"the same columns in another order ({listed(ours, 3)})"


@dataclass(frozen=True)
class Federation:
    """Who has what."""

    clients: dict[str, Shares]  # ids "0" .. "K-1", the names of domains, or of clients that bring data of their own
    spaces: dict[str, Space]  # of each client; the same for all but those that bring their own data
    test: Rows | Chained | None  # the federation's whole test set; None where no network can serve all. Of clients that
    # bring their own data, the test rows of those that share their scores
    partition: dict[str, Any]  # what partition.json holds
    notes: tuple[str, ...]  # one sentence each: what a user should know of these data
    public: PublicSet | None = None  # None where nobody has public rows
    digests: Mapping[str, str] = field(default_factory=dict)  # of the examples, as stored, that each client's rows are of

    @property
    def space(self) -> Space:
        """The first client's, which is everyone's unless they bring their own data."""
        return next(iter(self.spaces.values()))

    def pooled(self) -> Shares:
        """All clients' rows in one place, each row once, public ones with the private. Of shares of one data set."""
        shares = self.clients.values()
        holdouts = [s.holdout for s in shares if s.holdout is not None]
        return Shares(
            union([rows for s in shares for rows in (s.private, s.public) if rows is not None]),
            union([s.validation for s in shares]),
            union(holdouts) if holdouts else None,
        )


@dataclass(frozen=True)
class Prepared:
    """Data read and scaled, not yet divided: what several runs on the same data may share."""

    source: Source
    table: Table
    store: rows.Store
    space: Space
    scaled: scaling.Scaling
    notes: tuple[str, ...]
    digest: str
    content: str  # a digest of the examples as stored, whatever is learned of them. Hex


Gather = Callable[[Federation, Mapping[str, Prepared]], PublicSet | None]
"""Makes the public seed set of a federation, from the data as they were read."""


def prepare(config: Config) -> dict[str, Prepared]:
    """Read the configured data, and scale them -> those of each client that brings its own; under "" those common to all.

    Raises:
        UserError: in one sentence, what is wrong with which file or key, and the mend.
    """
    if not brings_data(config):
        return {"": _prepared(config)}
    for client in config.clients:
        check_name(client, f"client {client!r}")
    found = {}
    for client, own in config.clients.items():
        try:
            found[client] = _prepared(alone(config, client), common=not own.data.labels)
        except labels.UnknownClass as problem:
            raise problem.of(client, {} if own.data.labels else config.data.labels) from None
        except ConfigError as problem:
            raise ConfigError(f"client {client!r}: {problem}") from None
    sharing = [i for i, own in config.clients.items() if not own.data.labels and alone(config, i).data.labels]
    if sharing:  # a common name is somebody's, or a slip
        called = (labels.called(found[i].source, alone(config, i).data) for i in sharing)
        labels.check_renamed(config.data.labels, set[str]().union(*called))
    return found


def load(config: Config, prepared: Mapping[str, Prepared] | None = None, gathered: Gather | None = None) -> Federation:
    """Read the configured data unless they are prepared, and divide them among the clients.

    gathered: makes the public seed set, where others give to it too; else it is what these clients give.

    Raises:
        UserError: in one sentence, what is wrong with which file, key or client, and the mend.
    """
    read = prepare(config) if prepared is None else prepared
    found = _joined(config, read) if brings_data(config) else _divided(config, read[""])
    alone_here = len(found.clients) == 1 and config.model.weights is None  # else it learns from who made these weights
    few = ("there is one client only, so there is nobody to learn from or with",) if alone_here else ()
    return replace(found, notes=(*found.notes, *few), public=(gathered or _public)(found, read))


def _prepared(config: Config, common: bool = False) -> Prepared:
    """common: the keys of `data.labels` are of all clients, not of these data alone."""
    task = tasks.make(config.training.task)
    source = sources.read(config, task.outputs is not None)
    table, targets = _table(source, config, task.outputs, common)
    scaled, notes = scaling.of_source(config.data, source)
    examples = examples_of(source)
    store, shape = rows.make_store(examples, targets, scaled, _where(source), config.data.resident, config.data.workers)
    content = examples.digest()
    digest = record.data_digest(content, table, shape, targets)
    about = {**scaled.record(), "augment": config.data.augment}
    space = Space(
        shape=shape,
        classes=table.classes,
        outputs=task.outputs or len(table.classes),
        task=config.training.task,
        scaling=about,
        columns=source.columns,
    )
    return Prepared(source, table, store, space, scaled, notes, digest, content.hex())


def _divided(config: Config, read: Prepared) -> Federation:
    """One data set in shares."""
    store, space = read.store, read.space
    augment = CropFlip(read.scaled.black(space.shape[0])) if config.data.augment == "crop-flip" else None
    division = _division(config, read.table, read.digest)
    partition = record.describe(config, read.table, division, read.digest)
    notes = () if config.partition.kind == "file" else of_split(config.split, read.table)
    codes = None if read.table.groups is None else np.unique(read.table.groups, return_inverse=True)[1]
    clients = {i: _shares(store, shares, augment, codes) for i, shares in division.clients.items()}
    for i, own in config.clients.items():
        if own.training.shuffled and i in clients:
            rng = generator(At(config.seed, -1, config.rounds).rng(i, "shuffled"))
            clients[i] = replace(clients[i], private=clients[i].private.shuffled(own.training.shuffled, rng))
    return Federation(
        clients=clients,
        spaces={i: _space(config, i, space) for i in clients},
        test=Rows(store, division.test),
        partition=partition,
        notes=(*read.source.notes, *read.notes, *notes, *remarks(config, partition)),
        digests=dict.fromkeys(clients, read.content),
    )


def given(found: Federation, read: Mapping[str, Prepared]) -> dict[str, Given]:
    """What each client gives to be learned from together."""
    about, nothing = found.partition["clients"], [0] * len(found.partition["classes"])
    parts = {}
    for i, shares in found.clients.items():
        examples = examples_of(read[i if i in read else ""].source)
        parts[i] = Given(shares.public, examples, about[i]["counts"].get(PUBLIC, nothing), training(about[i]))
    return parts


def _public(found: Federation, read: Mapping[str, Prepared]) -> PublicSet | None:
    """The same as one set."""
    if all(shares.public is None for shares in found.clients.values()):
        return None
    _check_alike(found.spaces)
    return gather(given(found, read), tuple(found.partition["classes"]))


def _space(config: Config, client: str, common: Space) -> Space:
    """A client's, of shares of common data: its task may be its own, if it learns the same targets."""
    own = config.clients.get(client)
    if own is None or own.training.task is None:
        return common
    if tasks.make(own.training.task, f"clients.{client}.training.task").outputs != tasks.make(common.task).outputs:
        raise ConfigError(
            f"key 'clients.{client}.training.task': {own.training.task!r} learns other targets than {common.task!r}, and "
            "the client has a share of common data; give clients data of their own ([clients.ID.data]), or all one kind of "
            "targets"
        )
    return replace(common, task=own.training.task)


def _joined(config: Config, read: Mapping[str, Prepared]) -> Federation:
    """Clients that bring data of their own, each divided as if it were alone."""
    found = {}
    for client, own in read.items():
        try:
            found[client] = _divided(alone(config, client), own)
        except DataError as problem:
            why = str(problem).removeprefix(f"client {ALONE!r} ")
            raise DataError(f"client {client!r}: {why}") from None
    partition = record.joined(config, {i: one.partition for i, one in found.items()})
    spaces = {i: one.space for i, one in found.items()}
    alike = all(space.like(next(iter(spaces.values()))) for space in spaces.values())
    clients = {i: replace(one.clients[ALONE], test=_of_one(one)) for i, one in found.items()}
    return Federation(
        clients=clients,
        spaces=spaces,
        test=_common_test(config, found) if alike else None,
        partition=partition,
        notes=tuple(
            f"client {i!r}: {note}".replace(f"client {ALONE!r} ", "it ")
            for i, one in found.items()
            for note in one.notes
            if not note.startswith(NOBODY)  # others may have them
        ),
        digests={i: one.digests[ALONE] for i, one in found.items()},
    )


def _common_test(config: Config, found: Mapping[str, Federation]) -> Chained | None:
    """The test rows of all clients that tell all of their scores: what others were told of them would tell theirs."""
    parts = []
    for client, one in found.items():
        if config.disclosure(client) == "all":
            parts.append(_of_one(one))
    return Chained(parts) if parts else None


def _of_one(federation: Federation) -> Rows:
    """The test set of one data set."""
    assert isinstance(federation.test, Rows)
    return federation.test


def _check_alike(spaces: Mapping[str, Space]) -> None:
    """Raise ConfigError unless clients that bring their own data can learn from one public set."""
    one, first = next(iter(spaces.items()))
    for client, space in spaces.items():
        columns = space.unlike(first)
        if columns is not None:
            raise ConfigError(
                f"the public set (split.public) is for all, but client {client!r} has {columns}, and client {one!r} "
                f"{listed(first.columns or (), 3)}; give all files the same columns in one order"
            )
        if space.like(first):
            continue
        if space.numbers or first.numbers or space.classes == first.classes:
            odd = f"examples of the shape {list(space.shape)} and {many(space.outputs, 'output')}, and client {one!r} "
            odd += f"{list(first.shape)} and {first.outputs}; bring the data into one form ('data.size')"
        else:
            odd = (
                f"the classes {listed(space.classes)}, and client {one!r} {listed(first.classes)}; name all in data.classes"
            )
        raise ConfigError(f"the public set (split.public) is for all, but client {client!r} has {odd}")


def _table(source: Source, config: Config, outputs: int | None, common: bool) -> tuple[Table, Index | Targets]:
    """All rows, and what is learned of each. Numbers are of one class, for what deals and splits by classes."""
    parts = [p for p in (source.train, source.test) if p is not None]
    if outputs is None:
        classes, coded = labels.match(source, config.data, common)
        targets: Index | Targets = np.concatenate(coded)
        numbers = np.asarray(targets, dtype=np.int64)
    else:
        classes = (config.data.label if config.data.name == "csv" else "y",)
        targets = np.concatenate(labels.numbers(source, config.data))
        numbers = np.zeros(len(targets), dtype=np.int64)
    groups, domains = _column(parts, "groups"), _column(parts, "domains")
    bases = [p.bases for p in parts if p.bases is not None]
    return Table(numbers, len(source.train.x), classes, groups, domains, np.concatenate(bases) if bases else None), targets


def _column(parts: list[Part], name: str) -> Names | None:
    """A column of the training part; "" for the rows of a test part that lacks it."""
    if getattr(parts[0], name) is None:
        return None
    found = [getattr(p, name) if getattr(p, name) is not None else np.full(len(p.x), "") for p in parts]
    return np.concatenate(found)


def examples_of(source: Source) -> Examples:
    """All examples of a data set, as stored: the test part's numbered after the training part's."""
    if source.test is None:
        return source.train.x
    first, second = (p.x.take([0])[0] for p in (source.train, source.test))
    if first.shape != second.shape:
        raise DataError(
            f"{source.place}: training examples have the shape {list(first.shape)} and test examples "
            f"{list(second.shape)}; make them equal"
        )
    if first.dtype != second.dtype:  # bytes are divided by 255, and other numbers are not
        raise DataError(
            f"{source.place}: training examples are {said(first)} and test examples {said(second)}; make them equal"
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


def _shares(store: rows.Store, shares: Mapping[str, Index], augment: Augment | None, group_codes: Index | None) -> Shares:
    def held(kind: str, augment: Augment | None = None) -> Rows | None:
        return Rows(store, shares[kind], augment, group_codes) if kind in shares else None

    return Shares(
        private=Rows(store, shares[PRIVATE], augment, group_codes),
        validation=Rows(store, shares[VALIDATION]),
        holdout=held(HOLDOUT),
        public=held(PUBLIC, augment),
        test=held(TEST),
    )
