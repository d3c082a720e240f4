"""A federation's data: the shares of every client and the common test set, over one store of examples."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedmutual import tasks
from fedmutual.calling import Shapes, format_shape
from fedmutual.config import ALONE, Config, has_own_data, make_client_config
from fedmutual.config.keys import FEDERATED
from fedmutual.core import At, get_target_kind
from fedmutual.data import record
from fedmutual.data.division import Division, divide
from fedmutual.data.draws import Index, make_numpy_generator
from fedmutual.data.encoding import encode_examples
from fedmutual.data.examples import list_names
from fedmutual.data.prepared import Prepared, encode_columns, prepare
from fedmutual.data.public import PublicPart, PublicSet, make_public_set
from fedmutual.data.record import NOBODY, count_training_examples, note_clients_and_classes, note_split
from fedmutual.data.rows import ChainedRows, CropFlip, Rows, merge_rows
from fedmutual.data.space import Space
from fedmutual.data.splits import HOLDOUT, PRIVATE, PUBLIC, TEST, VALIDATION
from fedmutual.data.statistics import Moments, Statistics, standardize, sum_clients
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

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, which needs of `partition` only the names of the clients."""
        return self.__dict__ | {"partition": {"clients": dict.fromkeys(self.partition["clients"])}}

    @property
    def space(self) -> Space:
        """The space of the first client: the space of all clients, unless they have data of their own."""
        return next(iter(self.spaces.values()))

    def pool_clients(self) -> Shares:
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


Gather = Callable[[Federation, Mapping[str, Prepared]], PublicSet | None]
"""(federation, data by client) -> the public seed set, or None without public rows."""


def load(
    config: Config,
    prepared: Mapping[str, Prepared] | None = None,
    gathered: Gather | None = None,
    moments: Moments | None = None,
) -> Federation:
    """Divide the configured data among the clients, and return the data of all clients.

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
            rows_by_client = list_training_rows(config, data_by_client)
            statistics = sum_clients({i: rows for i, rows in rows_by_client.items() if config.takes_part(i)})
            moments = statistics.moments
        data_by_client = {i: standardize(one, moments) for i, one in data_by_client.items()}
    federation = (
        _join_clients(config, data_by_client) if has_own_data(config) else _divide_data_set(config, data_by_client[""])
    )
    federation = _select_participants(config, federation)
    is_alone = len(federation.clients) == 1 and config.model.weights is None  # given weights are learned from, too
    notes = ("there is one client only, so no other client can teach it",) if is_alone else ()
    public = None if gathered is None else gathered(federation, data_by_client)
    if gathered is None and any(shares.public is not None for shares in federation.clients.values()):
        _check_spaces(federation.spaces)
        public = make_public_set(list_public_parts(federation, data_by_client), tuple(federation.partition["classes"]))
    if config.split.public_file is not None and gathered is None:
        from fedmutual.data.public_file import read_public_set  # imports pandas, which takes 0.3 s

        _check_spaces(federation.spaces)
        public = read_public_set(config, config.split.public_file, federation.spaces, federation.partition)
    return replace(federation, notes=(*federation.notes, *notes), public=public, statistics=statistics)


def _select_participants(config: Config, federation: Federation) -> Federation:
    """Return the federation of the clients that take part. The test set and the record of the division stay those of all.

    Raises:
        ConfigError: there is no client of such a name.
    """
    if unknown := [i for i in config.participants or () if i not in federation.clients]:
        known = list_names([*federation.clients])
        raise ConfigError(f"key 'participants': there is no client {unknown[0]!r}; there are {known}")
    chosen = [i for i in federation.clients if config.takes_part(i)]
    return replace(
        federation,
        clients={i: federation.clients[i] for i in chosen},
        spaces={i: federation.spaces[i] for i in chosen},
        digests={i: federation.digests[i] for i in chosen},
    )


def list_training_rows(config: Config, data_by_client: Mapping[str, Prepared]) -> dict[str, tuple[Prepared, Index]]:
    """Return for each client its data, and the numbers of its training rows in them.

    Raises:
        UserError: the division is impossible; see `divide` and `record.restore_division`.
    """
    if not has_own_data(config):
        prepared = data_by_client[""]
        return {i: (prepared, shares[PRIVATE]) for i, shares in _make_division(config, prepared).clients.items()}
    divisions = {i: _make_division(make_client_config(config, i), one) for i, one in data_by_client.items()}
    return {i: (data_by_client[i], division.clients[ALONE][PRIVATE]) for i, division in divisions.items()}


def _make_division(config: Config, prepared: Prepared) -> Division:
    if config.partition.kind != "file":
        return divide(config, prepared.table)
    assert config.partition.file is not None  # the configuration is checked
    return record.restore_division(config.partition.file, prepared.table, prepared.digest)


def _divide_data_set(config: Config, prepared: Prepared) -> Federation:
    """Divide one data set into the shares of its clients."""
    division = _make_division(config, prepared)
    if prepared.store is None:
        training_rows = np.unique(np.concatenate([shares[PRIVATE] for shares in division.clients.values()]))
        prepared = encode_columns(prepared, training_rows, config.data)
    store, table = prepared.store, prepared.table
    assert store is not None
    inputs = prepared.space.scaling(prepared.examples.take([row % len(table.labels) for row in range(2)]))
    space = replace(prepared.space, rows=inputs)
    augment = _make_augment(prepared) if config.data.augment == "crop-flip" else None
    partition = record.make_record(config, table, division, prepared.digest)
    partition |= {"read": prepared.source.read} if prepared.source.read else {}
    partition["inputs"] = record.describe_inputs(store)
    codes = None if table.groups is None else np.unique(table.groups, return_inverse=True)[1]
    clients = {}
    for i, shares in division.clients.items():
        training = {kind: Rows(store, shares[kind], augment, codes) for kind in (PRIVATE, PUBLIC) if kind in shares}
        scored = {kind: Rows(store, shares[kind]) for kind in (HOLDOUT, TEST) if kind in shares}
        clients[i] = Shares(
            private=training[PRIVATE],
            validation=Rows(store, shares[VALIDATION]),
            holdout=scored.get(HOLDOUT),
            public=training.get(PUBLIC),
            test=scored.get(TEST),
        )
    for i, client_config in config.clients.items():
        if client_config.training.shuffled and i in clients:
            rng = make_numpy_generator(At(config.seed, -1, config.rounds).rng(i, "shuffled"))
            clients[i] = replace(clients[i], private=clients[i].private.shuffle_labels(client_config.training.shuffled, rng))
    of_split = () if config.partition.kind == "file" else note_split(config.split, table)
    remarks = note_clients_and_classes(config, partition, space.targets == "classes")
    return Federation(
        clients=clients,
        spaces={i: _make_client_space(config, i, space) for i in clients},
        test=Rows(store, division.test),
        partition=partition,
        notes=(*prepared.source.notes, *prepared.notes, *of_split, *remarks),
        digests=dict.fromkeys(clients, prepared.content),
    )


def _make_augment(prepared: Prepared) -> CropFlip:
    """Return the augmentation of images. Raises ConfigError unless one of several inputs holds images."""
    shape, scaled = prepared.space.shape, prepared.space.scaling
    if not isinstance(shape, Shapes):
        return CropFlip(scaled.scale_black(shape[0]))
    images = [name for name, one in shape.items() if len(one) == 3]
    if len(images) != 1:
        raise ConfigError(
            f"key 'data.augment' is for one input of images [channels, height, width], and {len(images)} of the inputs "
            f"{list_names(list(shape))} are images; remove the key"
        )
    return CropFlip((scaled.inputs or {})[images[0]].scale_black(shape[images[0]][0]), images[0])


def list_public_parts(federation: Federation, data_by_client: Mapping[str, Prepared]) -> dict[str, PublicPart]:
    """Return the public rows of each client, with the client's examples and class counts."""
    records, no_counts = federation.partition["clients"], [0] * len(federation.partition["classes"])
    parts = {}
    for i, shares in federation.clients.items():
        prepared = data_by_client[i if i in data_by_client else ""]
        examples = encode_examples(prepared.source, prepared.examples, federation.spaces[i].scaling)
        parts[i] = PublicPart(
            shares.public, examples, records[i]["counts"].get(PUBLIC, no_counts), count_training_examples(records[i])
        )
    return parts


def _make_client_space(config: Config, client: str, common: Space) -> Space:
    """Return the space of a client with a share of common data.

    Raises:
        ConfigError: the client's task has targets of another kind than the federation's.
    """
    client_config = config.clients.get(client)
    if client_config is None or client_config.training.task is None:
        return common
    own_task, task = (
        tasks.make_task(name, key)
        for name, key in ((client_config.training.task, f"clients.{client}.training.task"), (common.task, "training.task"))
    )
    if (get_target_kind(own_task), own_task.outputs) != (get_target_kind(task), task.outputs):
        raise ConfigError(
            f"key 'clients.{client}.training.task': {client_config.training.task!r} learns other targets than "
            f"{common.task!r}, and the client has a share of common data; give clients data of their own "
            "([clients.ID.data]), or give all clients one kind of targets"
        )
    return replace(common, task=client_config.training.task)


def _join_clients(config: Config, data_by_client: Mapping[str, Prepared]) -> Federation:
    """Return the federation of clients with data of their own; each client's data are divided separately."""
    federations = {}
    for client, prepared in data_by_client.items():
        try:
            federations[client] = _divide_data_set(make_client_config(config, client), prepared)
        except DataError as problem:
            reason = str(problem).removeprefix(f"client {ALONE!r} ").removeprefix(f"site {client!r}: ")
            raise DataError(f"client {client!r}: {reason}") from None
    partition = record.join_records(config, {i: federation.partition for i, federation in federations.items()})
    spaces = {i: federation.space for i, federation in federations.items()}
    has_one_space = all(space.is_compatible(next(iter(spaces.values()))) for space in spaces.values())
    clients = {
        i: replace(federation.clients[ALONE], test=get_test_rows(federation)) for i, federation in federations.items()
    }
    # From a common score and the other clients' scores, the score of a client that discloses less could be computed.
    disclosed = [get_test_rows(one) for i, one in federations.items() if config.disclosure(i) == "all"]
    return Federation(
        clients=clients,
        spaces=spaces,
        test=ChainedRows(disclosed) if disclosed and has_one_space else None,
        partition=partition,
        notes=tuple(_join_notes(federations)),
        digests={i: federation.digests[ALONE] for i, federation in federations.items()},
    )


def _join_notes(federations: Mapping[str, Federation]) -> Iterator[str]:
    """Yield the remarks of all clients, an equal remark of several clients once."""
    clients_by_note = dict[str, list[str]]()
    for client, federation in federations.items():
        for note in federation.notes:
            note = note.removeprefix(f"site {client!r}: ")  # the place of objects in memory names the client, too
            if not note.startswith(NOBODY):  # other clients may have examples of these classes
                clients_by_note.setdefault(note, []).append(client)
    for note, clients in clients_by_note.items():
        label, pronoun = ("client", "it") if len(clients) == 1 else ("clients", "each")
        yield f"{label} {list_names(clients)}: {note.replace(f'client {ALONE!r} ', f'{pronoun} ')}"


def get_test_rows(federation: Federation) -> Rows:
    """Return the test rows of a federation with one data set. With several data sets the test rows are `ChainedRows`."""
    assert isinstance(federation.test, Rows)  # several data sets have ChainedRows
    return federation.test


def _check_spaces(spaces: Mapping[str, Space]) -> None:
    """Raise ConfigError unless clients with data of their own can learn from one public set."""
    first_client, first = next(iter(spaces.items()))
    for client, space in spaces.items():
        columns = space.compare_columns(first)
        if columns is not None:
            difference, other = columns, f"has {list_names(first.columns or (), 3)}"
            fix = "give all files the same columns in one order"
        elif space.is_compatible(first):
            continue
        elif space.numbers or first.numbers or space.classes == first.classes:
            difference = f"examples of the shape {format_shape(space.shape)} and {format_count(space.outputs, 'output')}"
            other, fix = f"{format_shape(first.shape)} and {first.outputs}", "bring the data into one form ('data.size')"
        else:
            difference, other = f"the classes {list_names(space.classes)}", list_names(first.classes)
            fix = "name all in data.classes"
        raise ConfigError(
            f"the public set (split.public) is for all clients, but client {client!r} has {difference}, and client "
            f"{first_client!r} {other}; {fix}"
        )
