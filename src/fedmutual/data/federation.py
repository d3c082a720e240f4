"""A federation's data: the shares of every client and the common test set, over one store of examples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedmutual import tasks
from fedmutual.config import ALONE, Config, has_own_data, make_client_config
from fedmutual.config.values import FEDERATED
from fedmutual.core import At, TargetKind, Task, get_target_kind
from fedmutual.data import encoded_store, labels, record, rows, scaling, sources, standardizing
from fedmutual.data.augment import Augment, CropFlip
from fedmutual.data.division import Division, Table, check_name, divide
from fedmutual.data.draws import Index, Names, make_numpy_generator
from fedmutual.data.encoding import Encoding
from fedmutual.data.examples import BadRows, Part, Source, join_examples, list_problems, listed
from fedmutual.data.kinds import HOLDOUT, PRIVATE, PUBLIC, TEST, VALIDATION
from fedmutual.data.notes import NOBODY, count_training_examples, note_clients_and_classes, note_split
from fedmutual.data.public import PublicPart, PublicSet, make_public_set
from fedmutual.data.rows import ChainedRows, Rows, merge_rows
from fedmutual.data.statistics import Moments, Statistics
from fedmutual.data.targets import Targets, check_masks, read_targets
from fedmutual.errors import ConfigError, DataError, format_count


@dataclass(frozen=True)
class Shares:
    """The rows of one client."""

    private: Rows  # training rows
    validation: Rows  # the client's models are scored on these rows
    holdout: Rows | None  # rows for the choice of a round or a setting
    public: Rows | None = None  # the client's part of the public seed set; disjoint from `private`
    test: Rows | None = None  # the client's own test rows, with domains or data of its own


@dataclass(frozen=True)
class Space:
    """The inputs and outputs of a network."""

    shape: tuple[int, ...]  # of one example: (C, H, W) or (F,)
    classes: tuple[str, ...]  # of classes, or labels, in the order of the outputs; one name for numeric targets
    outputs: int
    task: str
    scaling: dict[str, Any]  # of the inputs: divisor, mean, std, size, augment
    columns: tuple[str, ...] | None = None  # the names of a table's features

    @property
    def targets(self) -> TargetKind:
        """The kind of the targets."""
        return get_target_kind(tasks.make_task(self.task))

    @property
    def numbers(self) -> bool:
        """Whether targets are numbers."""
        return self.targets == "numbers"

    @property
    def of_pixels(self) -> bool:
        """Whether targets are a class of each pixel."""
        return self.targets == "masks"

    def is_compatible(self, other: "Space") -> bool:
        """Return whether one network can serve both spaces. The scaling and the name of numeric targets may differ."""
        own_key, other_key = ((s.shape, s.outputs, s.targets, () if s.numbers else s.classes) for s in (self, other))
        return own_key == other_key

    def compare_columns(self, other: "Space") -> str | None:
        """Return in words how the columns of two tables of one shape differ; None if they agree or have no names."""
        return None if self.shape != other.shape else describe_column_difference(self.columns, other.columns)


def describe_column_difference(columns: Sequence[str] | None, other: Sequence[str] | None) -> str | None:
    """Return in words how `columns` differ from `other`; None if they agree or one of them is None."""
    if columns is None or other is None or tuple(columns) == tuple(other):
        return None
    different = [c for c in columns if c not in other] or [c for c in other if c not in columns]
    return (
        f"other columns ({listed(different, 3)})"
        if different
        else f"the same columns in another order ({listed(columns, 3)})"
    )


@dataclass(frozen=True)
class Federation:
    """The data of all clients, and the common test set."""

    clients: dict[str, Shares]  # by id: "0" .. "K-1", or the name of a domain or of a client with data of its own
    spaces: dict[str, Space]  # by client; all are equal, unless clients have data or a task of their own
    # The common test set; None where no network fits all clients. Of clients with data of their own, it has the test rows
    # of those that disclose all scores.
    test: Rows | ChainedRows | None
    partition: dict[str, Any]  # the content of partition.json
    notes: tuple[str, ...]  # remarks for the user, one sentence each
    public: PublicSet | None = None  # None: no client has public rows
    digests: Mapping[str, str] = field(default_factory=dict)  # by client: of the examples, as stored, that its rows are of
    statistics: Statistics | None = None  # of all training rows, where they were summed (data.mean = "federated")

    @property
    def space(self) -> Space:
        """The space of the first client: the space of all clients, unless they have data of their own."""
        return next(iter(self.spaces.values()))

    def pooled(self) -> Shares:
        """Return the rows of all clients together, each row once; the shares must be of one data set.

        `private` includes the public rows.
        """
        shares = self.clients.values()
        holdouts = [s.holdout for s in shares if s.holdout is not None]
        return Shares(
            merge_rows([rows for s in shares for rows in (s.private, s.public) if rows is not None]),
            merge_rows([s.validation for s in shares]),
            merge_rows(holdouts) if holdouts else None,
        )


@dataclass(frozen=True)
class Prepared:
    """Data that are read and scaled, but not divided. Several runs on these data may share them."""

    source: Source
    table: Table
    store: rows.Store | None  # None: the columns are encoded when the training rows are known, by the division
    space: Space  # of encoded columns: as learned from all rows, so that shapes can be compared before a division
    targets: Index | Targets
    scaled: scaling.Scaling
    notes: tuple[str, ...]
    digest: str
    content: str  # a digest of the examples as stored, whatever is learned of them. Hex


Gather = Callable[[Federation, Mapping[str, Prepared]], PublicSet | None]
"""(federation, data by client) -> the public seed set, or None without public rows."""


def prepare(config: Config) -> dict[str, Prepared]:
    """Read and scale the configured data.

    Return client -> data for clients with data of their own; otherwise one entry under "".

    Raises:
        UserError: data cannot be used; one sentence names the file or key and the fix.
    """
    if not has_own_data(config):
        return {"": _prepare_data_set(config)}
    for client in config.clients:
        check_name(client, f"client {client!r}")
    data_by_client = {}
    problems: list[DataError] = []
    for client, client_config in config.clients.items():
        try:
            data_by_client[client] = _prepare_data_set(
                make_client_config(config, client), common=not client_config.data.labels
            )
        except labels.UnknownClass as problem:
            problems.append(problem.for_client(client, {} if client_config.data.labels else config.data.labels))
        except DataError as problem:
            problems.append(problem)
        except ConfigError as problem:
            raise ConfigError(f"client {client!r}: {problem}") from None
    if len(problems) == 1:
        raise problems[0]
    if problems:  # of all clients at once, so that nobody mends one file, only to hear of the next
        raise BadRows(*(sentence for problem in problems for sentence in list_problems(problem)))
    common_users = [
        i
        for i, client_config in config.clients.items()
        if not client_config.data.labels and make_client_config(config, i).data.labels
    ]
    if common_users:  # a renamed label that no client has is a mistake
        label_names = (
            labels.list_label_names(data_by_client[i].source, make_client_config(config, i).data) for i in common_users
        )
        labels.check_renamed(config.data.labels, set[str]().union(*label_names))
    return data_by_client


def load(
    config: Config,
    prepared: Mapping[str, Prepared] | None = None,
    gathered: Gather | None = None,
    moments: Moments | None = None,
) -> Federation:
    """Divide the configured data among the clients.

    prepared: the result of `prepare`; None: read the data.
    gathered: makes the public seed set, where other sites add to it; None: the rows of these clients.
    moments: what standardises inputs where data.mean = "federated"; None: the statistics of these clients' rows.

    Raises:
        UserError: data cannot be used; one sentence names the file, key or client and the fix.
    """
    data_by_client = prepare(config) if prepared is None else prepared
    statistics: Statistics | None = None
    if config.data.mean == FEDERATED:
        if moments is None:
            statistics = standardizing.sum_clients(list_training_rows(config, data_by_client))
            moments = statistics.moments
        data_by_client = {i: standardizing.standardize(one, moments) for i, one in data_by_client.items()}
    federation = (
        _join_clients(config, data_by_client) if has_own_data(config) else _divide_data_set(config, data_by_client[""])
    )
    is_alone = len(federation.clients) == 1 and config.model.weights is None  # given weights are learned from, too
    notes = ("there is one client only, so there is nobody to learn from or with",) if is_alone else ()
    return replace(
        federation,
        notes=(*federation.notes, *notes),
        public=(gathered or _make_public_set)(federation, data_by_client),
        statistics=statistics,
    )


def list_training_rows(config: Config, data_by_client: Mapping[str, Prepared]) -> dict[str, tuple[Prepared, Index]]:
    """Return for each client its data, and the numbers of its training rows in them."""
    if has_own_data(config):
        configs = {i: make_client_config(config, i) for i in data_by_client}
        divisions = {i: _make_division(configs[i], one.table, one.digest) for i, one in data_by_client.items()}
        return {i: (data_by_client[i], division.clients[ALONE][PRIVATE]) for i, division in divisions.items()}
    prepared = data_by_client[""]
    division = _make_division(config, prepared.table, prepared.digest)
    return {i: (prepared, shares[PRIVATE]) for i, shares in division.clients.items()}


def _prepare_data_set(config: Config, common: bool = False) -> Prepared:
    """Read and scale one data set. common: data.labels serves all clients, not these data alone."""
    task = tasks.make_task(config.training.task)
    kind = get_target_kind(task)
    source = sources.read_source(config, kind != "classes")
    table, targets, classes = _make_table(source, config, kind, common)
    examples = join_examples(source)
    store: rows.Store | None = None
    notes: tuple[str, ...] = ()
    if source.plans is None:
        scaled, notes = scaling.make_scaling(config.data, source)
        store, shape = rows.make_store(
            examples, targets, scaled, _make_row_namer(source), config.data.resident, config.data.workers
        )
    else:
        encoded_store.check_encoding(config, source)
        scaled, shape = scaling.UNSCALED, (len(source.plans),)
    if kind == "masks":
        check_masks(targets, shape, config.data, source.place)
    content = examples.digest()
    digest = record.compute_digest(content, table, shape, targets)
    space = Space(
        shape=shape,
        classes=classes,
        outputs=task.outputs or len(classes),
        task=config.training.task,
        scaling={**scaled.record(), "augment": config.data.augment},
        columns=source.columns,
    )
    if source.plans is not None:
        encoding = encoded_store.learn_from_rows(examples, range(len(examples)), source.plans)
        space = _make_encoded_space(space, encoding)
    return Prepared(source, table, store, space, targets, scaled, notes, digest, content.hex())


def _make_encoded_space(space: Space, encoding: Encoding) -> Space:
    """Return the space of encoded columns."""
    return replace(
        space,
        shape=(len(encoding.features),),
        scaling={**space.scaling, "columns": encoding.record()},
        columns=encoding.features,
    )


def _divide_data_set(config: Config, prepared: Prepared) -> Federation:
    """Divide one data set into the shares of its clients."""
    division = _make_division(config, prepared.table, prepared.digest)
    notes = [*prepared.source.notes, *prepared.notes]
    if prepared.store is not None:
        store, space = prepared.store, prepared.space
    else:
        training_rows = np.unique(np.concatenate([shares[PRIVATE] for shares in division.clients.values()]))
        examples, where = join_examples(prepared.source), _make_row_namer(prepared.source)
        encoded = encoded_store.make_encoded_store(
            prepared.source, examples, prepared.targets, training_rows, where, config.data
        )
        store, space = encoded.store, _make_encoded_space(prepared.space, encoded.encoding)
        notes += encoded.notes
    augment = CropFlip(prepared.scaled.black(space.shape[0])) if config.data.augment == "crop-flip" else None
    partition = record.make_record(config, prepared.table, division, prepared.digest)
    notes += () if config.partition.kind == "file" else note_split(config.split, prepared.table)
    codes = None if prepared.table.groups is None else np.unique(prepared.table.groups, return_inverse=True)[1]
    clients = {i: _make_shares(store, shares, augment, codes) for i, shares in division.clients.items()}
    for i, client_config in config.clients.items():
        if client_config.training.shuffled and i in clients:
            rng = make_numpy_generator(At(config.seed, -1, config.rounds).rng(i, "shuffled"))
            clients[i] = replace(clients[i], private=clients[i].private.shuffled(client_config.training.shuffled, rng))
    return Federation(
        clients=clients,
        spaces={i: _make_client_space(config, i, space) for i in clients},
        test=Rows(store, division.test),
        partition=partition,
        notes=(*notes, *note_clients_and_classes(config, partition)),
        digests=dict.fromkeys(clients, prepared.content),
    )


def list_public_parts(federation: Federation, data_by_client: Mapping[str, Prepared]) -> dict[str, PublicPart]:
    """Return the public rows of each client, with the client's examples and class counts."""
    records, no_counts = federation.partition["clients"], [0] * len(federation.partition["classes"])
    parts = {}
    for i, shares in federation.clients.items():
        source = data_by_client[i if i in data_by_client else ""].source
        examples = encoded_store.encode_examples(source, join_examples(source), federation.spaces[i].scaling)
        parts[i] = PublicPart(
            shares.public, examples, records[i]["counts"].get(PUBLIC, no_counts), count_training_examples(records[i])
        )
    return parts


def _make_public_set(federation: Federation, data_by_client: Mapping[str, Prepared]) -> PublicSet | None:
    """Return the public set of these clients; None if no client has public rows."""
    if all(shares.public is None for shares in federation.clients.values()):
        return None
    _check_spaces(federation.spaces)
    return make_public_set(list_public_parts(federation, data_by_client), tuple(federation.partition["classes"]))


def _make_client_space(config: Config, client: str, common: Space) -> Space:
    """Return the space of a client with a share of common data.

    Raises:
        ConfigError: the client's task has targets of another kind than the federation's.
    """
    client_config = config.clients.get(client)
    if client_config is None or client_config.training.task is None:
        return common
    own_task = tasks.make_task(client_config.training.task, f"clients.{client}.training.task")
    if _describe_targets(own_task) != _describe_targets(tasks.make_task(common.task)):
        raise ConfigError(
            f"key 'clients.{client}.training.task': {client_config.training.task!r} learns other targets than "
            f"{common.task!r}, and "
            "the client has a share of common data; give clients data of their own ([clients.ID.data]), or all one kind of "
            "targets"
        )
    return replace(common, task=client_config.training.task)


def _describe_targets(task: Task) -> tuple[TargetKind, int | None]:
    return get_target_kind(task), task.outputs


def _join_clients(config: Config, data_by_client: Mapping[str, Prepared]) -> Federation:
    """Return the federation of clients with data of their own; each client's data are divided separately."""
    federations = {}
    for client, prepared in data_by_client.items():
        try:
            federations[client] = _divide_data_set(make_client_config(config, client), prepared)
        except DataError as problem:
            reason = str(problem).removeprefix(f"client {ALONE!r} ")
            raise DataError(f"client {client!r}: {reason}") from None
    partition = record.join_records(config, {i: federation.partition for i, federation in federations.items()})
    spaces = {i: federation.space for i, federation in federations.items()}
    has_one_space = all(space.is_compatible(next(iter(spaces.values()))) for space in spaces.values())
    clients = {
        i: replace(federation.clients[ALONE], test=_get_test_rows(federation)) for i, federation in federations.items()
    }
    return Federation(
        clients=clients,
        spaces=spaces,
        test=_join_test_sets(config, federations) if has_one_space else None,
        partition=partition,
        notes=tuple(
            f"client {i!r}: {note}".replace(f"client {ALONE!r} ", "it ")
            for i, federation in federations.items()
            for note in federation.notes
            if not note.startswith(NOBODY)  # others may have them
        ),
        digests={i: federation.digests[ALONE] for i, federation in federations.items()},
    )


def _join_test_sets(config: Config, federations: Mapping[str, Federation]) -> ChainedRows | None:
    """Return the test rows of the clients that disclose all scores; None without such clients.

    From a common score and the other clients' scores, the score of a client that discloses less could be computed.
    """
    parts = []
    for client, federation in federations.items():
        if config.disclosure(client) == "all":
            parts.append(_get_test_rows(federation))
    return ChainedRows(parts) if parts else None


def _get_test_rows(federation: Federation) -> Rows:
    """Return the test set of one data set."""
    assert isinstance(federation.test, Rows)
    return federation.test


def _check_spaces(spaces: Mapping[str, Space]) -> None:
    """Raise ConfigError unless clients with data of their own can learn from one public set."""
    first_client, first_space = next(iter(spaces.items()))
    for client, space in spaces.items():
        columns = space.compare_columns(first_space)
        if columns is not None:
            raise ConfigError(
                f"the public set (split.public) is for all, but client {client!r} has {columns}, and client "
                f"{first_client!r} "
                f"{listed(first_space.columns or (), 3)}; give all files the same columns in one order"
            )
        if space.is_compatible(first_space):
            continue
        if space.numbers or first_space.numbers or space.classes == first_space.classes:
            difference = (
                f"examples of the shape {list(space.shape)} and {format_count(space.outputs, 'output')}, and client "
                f"{first_client!r} {list(first_space.shape)} and {first_space.outputs}; bring the data into one form "
                "('data.size')"
            )
        else:
            difference = (
                f"the classes {listed(space.classes)}, and client {first_client!r} {listed(first_space.classes)}; name all "
                "in data.classes"
            )
        raise ConfigError(f"the public set (split.public) is for all, but client {client!r} has {difference}")


def _make_table(
    source: Source, config: Config, kind: TargetKind, common: bool
) -> tuple[Table, Index | Targets, tuple[str, ...]]:
    """Return the table of all rows, each row's target, and the names of the classes or labels.

    Targets of another kind than classes count as one class in partitions and splits.
    """
    parts = [p for p in (source.train, source.test) if p is not None]
    if kind == "classes":
        classes, coded = labels.match_labels(source, config.data, common)
        targets: Index | Targets = np.concatenate(coded)
        numbers = np.asarray(targets, dtype=np.int64)
        columns = classes
    else:
        columns = (config.data.label if config.data.name in sources.TABLES else "y",)
        classes, by_part = read_targets(source, config.data, kind, columns)
        targets = np.concatenate([np.asarray(part) for part in by_part])
        numbers = np.zeros(len(targets), dtype=np.int64)
    groups, domains = _join_column(parts, "groups"), _join_column(parts, "domains")
    bases = [p.bases for p in parts if p.bases is not None]
    table = Table(numbers, len(source.train.x), columns, groups, domains, np.concatenate(bases) if bases else None)
    return table, targets, classes


def _join_column(parts: list[Part], name: str) -> Names | None:
    """A column of the training part; "" for the rows of a test part that lacks it."""
    if getattr(parts[0], name) is None:
        return None
    values = [getattr(p, name) if getattr(p, name) is not None else np.full(len(p.x), "") for p in parts]
    return np.concatenate(values)


def _make_row_namer(source: Source) -> rows.Where:
    trains, test = len(source.train.x), source.test

    def where(row: int) -> str:
        return source.train.where(row) if test is None or row < trains else test.where(row - trains)

    return where


def _make_division(config: Config, table: Table, digest: str) -> Division:
    if config.partition.kind != "file":
        return divide(config, table)
    assert config.partition.file is not None  # the configuration is checked
    if config.partition.examples is not None:
        raise ConfigError("key 'partition.examples' has no effect with partition.kind = 'file'; take it out")
    return record.restore_division(config.partition.file, table, digest)


def _make_shares(
    store: rows.Store, shares: Mapping[str, Index], augment: Augment | None, group_codes: Index | None
) -> Shares:
    def get_rows(kind: str, augment: Augment | None = None) -> Rows | None:
        return Rows(store, shares[kind], augment, group_codes) if kind in shares else None

    return Shares(
        private=Rows(store, shares[PRIVATE], augment, group_codes),
        validation=Rows(store, shares[VALIDATION]),
        holdout=get_rows(HOLDOUT),
        public=get_rows(PUBLIC, augment),
        test=get_rows(TEST),
    )
