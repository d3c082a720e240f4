"""The division of data: the rows of the test set, and the rows of each client, by the partition and the splits."""

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedmutual.config import Config, PartitionConfig
from fedmutual.core import At
from fedmutual.data import partition
from fedmutual.data.draws import Index, Names, count_classes, make_numpy_generator, sample
from fedmutual.data.splits import (
    HOLDOUT,
    LEFT,
    PUBLIC,
    TEST,
    VALIDATION,
    deal_alike,
    draw_alike,
    hold_out,
    list_held_out_fractions,
)
from fedmutual.errors import ConfigError, DataError, format_count

PFLLIB_TRAIN = 0.75  # of a client's rows
_NOT_IN_NAMES = set('/\\:*?"<>|\0')


@dataclass(frozen=True)
class Table:
    """The labels of all rows: the rows of the training part from number 0, then those of the test part."""

    labels: Index  # [N] class numbers
    trains: int  # number of rows of the training part
    classes: tuple[str, ...]
    groups: Names | None = None  # [N]
    domains: Names | None = None  # [N], "" for a test part without domains
    bases: Index | None = None  # [N] number of the original image, where all domains show the same images


@dataclass(frozen=True)
class Division:
    """Which rows each client has, as row numbers of a `Table` [n]: the common test set, and the shares of each client."""

    test: Index
    # by client: "private", "validation"; "holdout" and "public" if any; "test" where clients have test rows of their own
    # (domains, or split.private)
    clients: Mapping[str, Mapping[str, Index]]


def divide(config: Config, table: Table) -> Division:
    """Return the division of the table by the configured partition and splits.

    Data without a test set have one held out. Training rows go to the clients; each client then gets validation, hold-out
    and public rows. Domains that show the same images are split alike, unless split.shared is false.

    Raises:
        UserError: the division is impossible; one sentence names the client or class.
    """
    if config.split.shared and table.bases is None:
        raise ConfigError(
            "key 'split.shared' = true is for domains that show the same images, but these domains do not; remove the key"
        )
    if table.bases is None or config.split.shared is False:
        return _divide_rows(config, table)
    first, *others = _list_domains(table)
    # the rows of each domain, in the order of the images that they show
    by_image = {d: np.flatnonzero(_get_domains(table) == d) for d in (first, *others)}
    by_image = {d: rows[np.argsort(table.bases[rows])] for d, rows in by_image.items()}
    rows = np.sort(by_image[first])
    groups, domains = (None if column is None else column[rows] for column in (table.groups, table.domains))
    trains = int((rows < table.trains).sum())
    of_first = _divide_rows(config, Table(table.labels[rows], trains, table.classes, groups, domains, table.bases[rows]))
    images = {kind: table.bases[rows[share]] for kind, share in of_first.clients[first].items()}
    shares = {d: {kind: np.sort(by_image[d][share]) for kind, share in images.items()} for d in (first, *others)}
    return Division(np.sort(np.concatenate([share[TEST] for share in shares.values()])), shares)


def _divide_rows(config: Config, table: Table) -> Division:
    """Return the division of the table, with each row by itself."""
    if config.partition.kind == "pfllib":
        return _divide_as_pfllib(config, table)
    split, at, kind = config.split, At(config.seed, -1, config.rounds), config.partition.kind
    fractions, test = list_held_out_fractions(split), np.empty(0, dtype=np.int64)
    if split.private is None:  # else every client has test rows of its own
        has_test_part = table.trains < len(table.labels)
        groups = np.empty(0, dtype=str) if table.groups is None else table.groups
        shared = np.intersect1d(groups[: table.trains], groups[table.trains :])
        if len(shared):
            raise DataError(
                f"data.group_by: {str(shared[0])!r} has rows in the training and in the test data ({len(shared)} such "
                "groups); remove each group from one of them, or omit the test data: whole groups are held out then"
            )
        if has_test_part:
            test = np.arange(table.trains, len(table.labels))
        elif split.folds is None:
            test = _hold_out_test(config, table)
    training_rows = np.setdiff1d(np.arange(table.trains), test)
    rows_by_client = _deal_training(config.partition, table, training_rows, make_numpy_generator(at.rng("partition")))
    if split.folds is not None:
        scored = _choose_fold(config, table, rows_by_client, split.folds)
        rows_by_client = {i: np.setdiff1d(rows, scored[i]) for i, rows in rows_by_client.items()}
        test = test if len(test) else np.sort(np.concatenate([*scored.values()]))
    shares = _split_clients(config, table, rows_by_client, table.groups, fractions)
    if split.private is not None:
        return Division(np.sort(np.concatenate([share[TEST] for share in shares.values()])), shares)
    if split.folds is not None:
        shares = {i: {**share, VALIDATION: scored[i]} for i, share in shares.items()}
    elif VALIDATION not in fractions:
        rng = make_numpy_generator(at.rng("validation"))
        validation = _choose_validation(kind, rows_by_client, test, table, rng)
        shares = {i: {**shares[i], VALIDATION: rows} for i, rows in validation.items()}
    if kind == "domains":
        own_tests = {i: test[_get_domains(table)[test] == i] for i in shares}
        shares = {i: {**share, **({TEST: own_tests[i]} if len(own_tests[i]) else {})} for i, share in shares.items()}
    return Division(test, shares)


def _choose_fold(config: Config, table: Table, rows_by_client: Mapping[str, Index], folds: int) -> dict[str, Index]:
    """Return the rows of each client in the fold of the run.

    The folds of a client have its class mix, and sizes that differ by one row at most. Each group is in one fold.

    Raises:
        DataError: a client has too few rows or groups.
    """
    fold = config.split.fold or 0
    rng = make_numpy_generator(At(config.seed, -1, config.rounds).rng("folds"))
    if table.groups is None:
        chosen = {}
        for i, rows in rows_by_client.items():
            order = np.lexsort((rng.permutation(len(rows)), table.labels[rows]))
            chosen[i] = np.sort(rows[order[fold::folds]])
    else:
        from sklearn.model_selection import StratifiedGroupKFold  # takes a second

        rows = np.concatenate([*rows_by_client.values()])
        owners = np.repeat(np.arange(len(rows_by_client)), [len(own) for own in rows_by_client.values()])
        strata = owners * len(table.classes) + table.labels[rows]
        splitter = StratifiedGroupKFold(folds, shuffle=True, random_state=int(rng.integers(2**31)))
        with warnings.catch_warnings(), contextlib.suppress(ValueError):  # classes with fewer rows than folds
            warnings.simplefilter("ignore")
            rows = rows[[*splitter.split(rows, strata, table.groups[rows])][fold][1]]
        chosen = {i: np.intersect1d(own, rows) for i, own in rows_by_client.items()}
    for i, own in rows_by_client.items():
        if len(own) < folds or not 0 < len(chosen[i]) < len(own):
            what = format_count(len(own), "row") if table.groups is None else "groups of data.group_by"
            raise DataError(f"client {i!r} has {what}, too few for {folds} folds; lower split.folds, or add rows")
    return chosen


def _divide_as_pfllib(config: Config, table: Table) -> Division:
    """Return PFLlib's division: the rows of each client are split at random, 75 % to train on and 25 % to be scored on.

    The test set holds the clients' rows to be scored on, as PFLlib's accuracy is over all of them.
    """
    if table.groups is not None:
        raise ConfigError("partition.kind = 'pfllib' divides single rows and keeps no groups together; remove data.group_by")
    clients, alpha = config.partition.clients, config.partition.alpha
    assert alpha is not None
    rng = make_numpy_generator(At(config.seed, -1, config.rounds).rng("partition"))
    parts = [rng.permutation(part) for part in partition.pfllib(table.labels, clients, alpha, rng)]
    halves = {str(i): np.split(part, [int(PFLLIB_TRAIN * len(part))]) for i, part in enumerate(parts)}
    fractions = {kind: f for kind, f in ((HOLDOUT, config.split.holdout), (PUBLIC, config.split.public)) if f}
    shares = _split_clients(config, table, {i: np.sort(trained) for i, (trained, _) in halves.items()}, None, fractions)
    scored = {i: np.sort(rows) for i, (_, rows) in halves.items()}
    divided = {i: {**share, VALIDATION: scored[i]} for i, share in shares.items()}
    return Division(np.sort(np.concatenate(list(scored.values()))), divided)


def _split_clients(
    config: Config, table: Table, rows_by_client: Mapping[str, Index], groups: Names | None, fractions: Mapping[str, float]
) -> dict[str, dict[str, Index]]:
    """Return the shares of each client: at most partition.examples of its training rows, and what is held out of them."""
    at, most = At(config.seed, -1, config.rounds), config.partition.examples
    rng, limited = make_numpy_generator(at.rng("examples")), {}
    for i, rows in rows_by_client.items():
        if most is not None and len(rows) > most:
            rows = sample(rows, table.labels[rows], most, rng)
        limited[f"client {i!r}"] = rows
    shares = hold_out(limited, table.labels, groups, fractions, make_numpy_generator(at.rng("splits")))
    return {
        i: {kind: rows for kind, rows in share.items() if kind != LEFT}
        for i, share in zip(rows_by_client, shares.values(), strict=True)
    }


def _hold_out_test(config: Config, table: Table) -> Index:
    """Return test rows out of the training part, in its class mix; equal for all seeds and all partitions by rows."""
    if not config.split.test:
        raise ConfigError("key 'split.test' must be above 0: the data have no test set of their own (data.test)")
    rows = np.arange(table.trains)
    parts = {"the data": rows}
    if config.partition.kind == "domains":
        parts = {f"domain {d!r}": rows[_get_domains(table)[: table.trains] == d] for d in _list_domains(table)}
    rng = make_numpy_generator(At(0, -1, 1).rng("test"))
    shares_by_part = hold_out(parts, table.labels, table.groups, {TEST: config.split.test}, rng)
    return np.sort(np.concatenate([shares[TEST] for shares in shares_by_part.values()]))


def _deal_training(config: PartitionConfig, table: Table, train: Index, rng: np.random.Generator) -> dict[str, Index]:
    """Return client -> training rows."""
    if config.kind == "domains":
        return {d: train[_get_domains(table)[train] == d] for d in _list_domains(table)}
    labels = table.labels[train]
    if config.kind == "shards":
        assert config.classes_per_client is not None  # the configuration is checked
        class_counts = count_classes(labels, len(table.classes))
        parts = partition.cut_classes(
            labels, partition.deal_shards(class_counts, config.clients, config.classes_per_client, rng, table.classes), rng
        )
    elif config.kind == "dirichlet":
        assert config.alpha is not None
        parts = partition.dirichlet(labels, config.clients, config.alpha, rng, config.min_size)
    else:
        parts = partition.iid(len(train), config.clients, rng)
    return {str(i): train[part] for i, part in enumerate(parts)}


def _choose_validation(
    kind: str, rows_by_client: Mapping[str, Index], test: Index, table: Table, rng: np.random.Generator
) -> dict[str, Index]:
    """Return validation rows out of the test set for each client, in the client's class mix."""
    class_counts = np.stack([count_classes(table.labels[rows], len(table.classes)) for rows in rows_by_client.values()])
    if kind == "domains" and (_get_domains(table)[test] != "").all():
        validation_parts = [test[_get_domains(table)[test] == d] for d in rows_by_client]
    elif kind in ("iid", "shards"):
        validation_parts = deal_alike(class_counts, test, table.labels, rng)
    else:
        validation_parts = draw_alike(class_counts, test, table.labels, rng)
    for client, rows in zip(rows_by_client, validation_parts, strict=True):
        if not len(rows):
            raise DataError(
                f"client {client!r} gets no validation example: the test set of {len(test)} has too few of its "
                "classes; set split.validation to take them from its training data"
            )
    return dict(zip(rows_by_client, validation_parts, strict=True))


def _get_domains(table: Table) -> Names:
    if table.domains is None:
        raise DataError(
            "partition.kind = 'domains': the data name no domains; a folder has them above its classes, a CSV file in a "
            "column 'domain', arrays in an array 'domain', a Dataset in an attribute 'domains'"
        )
    return table.domains


def _list_domains(table: Table) -> list[str]:
    """Return the domains of the training part; raise DataError where one cannot be the name of a client and a folder."""
    domain_column = _get_domains(table)[: table.trains]
    names: list[str] = list(dict.fromkeys(domain_column.tolist()))
    names = names if table.bases is not None else sorted(names)
    for name in names:
        check_name(name, f"domain {name!r}")
    return names


def check_name(name: str, subject: str) -> None:
    """Raise DataError if `name` cannot be the id of a client, which is also the name of a folder.

    subject: the begin of the message, with the name.
    """
    if not name.strip(". ") or _NOT_IN_NAMES & set(name):
        raise DataError(f"{subject} cannot name a client, because the name is also a folder name; rename it")
