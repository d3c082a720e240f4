"""Read and scale the data of each client, before they are divided."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedmutual import models, tasks
from fedmutual.config import Config, has_own_data, make_client_config
from fedmutual.core import TargetKind, get_target_kind
from fedmutual.data import encoded_store, labels, record, scaling, sources, stores
from fedmutual.data.division import Table, check_name
from fedmutual.data.draws import Index, Names
from fedmutual.data.encoding import Encoding
from fedmutual.data.examples import IMAGES, SERIES, BadRows, Part, Source, join_examples, list_problems
from fedmutual.data.space import Space
from fedmutual.data.targets import Targets, check_masks, note_one_class, read_targets
from fedmutual.errors import ConfigError, DataError

TriedNetworks = dict[tuple[str, tuple[int, ...], int], nn.Module]


@dataclass(frozen=True)
class Prepared:
    """Data that are read and scaled, but not divided. Several runs on these data may share them."""

    source: Source
    table: Table
    store: stores.Store | None  # None: the columns are encoded when the training rows are known, by the division
    space: Space  # of encoded columns: as learned from all rows, so that shapes can be compared before a division
    targets: Index | Targets
    scaled: scaling.Scaling
    notes: tuple[str, ...]
    digest: str
    content: str  # a digest of the examples as stored, whatever is learned of them. Hex


def prepare(config: Config) -> dict[str, Prepared]:
    """Read and scale the configured data.

    Return client -> data for clients with data of their own; otherwise one entry under "".

    Raises:
        UserError: data cannot be used; one sentence names the file or key and the fix.
    """
    if not has_own_data(config):
        return {"": _prepare_data_set(config, {})}
    for client in config.clients:
        check_name(client, f"client {client!r}")
    data_by_client = {}
    made: TriedNetworks = {}
    problems: list[DataError] = []
    for client, client_config in config.clients.items():
        try:
            data_by_client[client] = _prepare_data_set(
                make_client_config(config, client), made, common=not client_config.data.labels
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


def _prepare_data_set(config: Config, made: TriedNetworks, common: bool = False) -> Prepared:
    """Read and scale one data set.

    made: the networks that were made for other data sets of the experiment (`models.try_network`). common: data.labels
    serves all clients, not these data alone.
    """
    task = tasks.make_task(config.training.task)
    kind = get_target_kind(task)
    source = sources.read_source(config, kind != "classes")
    table, targets, classes = _make_table(source, config, kind, common)
    source = _choose_form(source, config, task.outputs or len(classes), kind, made)
    examples = join_examples(source)
    store: stores.Store | None = None
    notes: tuple[str, ...] = ()
    if source.plans is None:
        scaled, notes = scaling.make_scaling(config.data, source)
        store, shape = stores.make_store(
            examples, targets, scaled, make_row_namer(source), config.data.resident, config.data.workers
        )
    else:
        encoded_store.check_encoding(config, source)
        scaled, shape = scaling.UNSCALED, (len(source.plans),)
    if kind == "masks":
        check_masks(targets, shape, config.data, source.place)
        notes = (*note_one_class(targets, classes, source.place), *notes)
    if source.columns is not None or kind == "numbers":
        from fedmutual.data import column_check  # imports pandas, which takes 0.3 s

        rounded = (
            column_check.note_rounded_numbers({classes[0]: source.train.labels}, source.place) if kind == "numbers" else []
        )
        notes = (*column_check.check_columns(source, targets, config.data), *rounded, *notes)
    is_deliberate = config.data.classes or config.data.name == "femnist"  # its classes are small and capital letters
    if kind == "classes" and not is_deliberate:
        notes = (*labels.note_similar_classes(classes, table.labels, source, config.data), *notes)
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
        space = make_encoded_space(space, encoding)
    return Prepared(source, table, store, space, targets, scaled, notes, digest, content.hex())


def _choose_form(source: Source, config: Config, outputs: int, kind: TargetKind, made: TriedNetworks) -> Source:
    """Return the data set in the first of its forms that all networks of the user accept.

    If a network computes other outputs from images [n, 1, a, b] than from series [n, a, b], squares are images and other
    arrays are series; a remark says so. If no form suits all networks, the data set has its usual form, and the check of the
    networks says what does not fit.
    """
    names = models.list_user_networks(config)
    if not names or len(source.forms) == 1:
        return source

    def compute(name: str, shape: tuple[int, ...], x: Tensor) -> Tensor | None:
        return models.try_network(name, shape, x, outputs, kind == "masks", made)

    chosen: Source | None = None
    for form in source.forms:
        try:
            candidate = source.with_form(form)
            x = candidate.train.x.take([row % len(candidate.train.x) for row in range(2)])
        except DataError:  # the numbers cannot have this form
            continue
        x = x if x.dtype == torch.int64 else x.float()
        shape = tuple(x.shape[1:])
        tried = (x, models.make_example_inputs(shape, x.dtype))
        if not all(any(compute(name, shape, inputs) is not None for inputs in tried) for name in names):
            continue
        if form == SERIES and chosen is not None:
            note = f"the networks take x as series {list(shape)}, and as images {[1, *shape]} with other outputs"
            if shape[0] == shape[1]:
                fix = "they get images; for series, let their `forward` refuse inputs of 4 dimensions"
                return replace(chosen, notes=(*source.notes, f"{note}; {fix}"))
            fix = f"they get series; for images, give x the shape {['examples', 1, *shape]}".replace("'", "")
            return replace(candidate, notes=(*source.notes, f"{note}; {fix}"))
        if form != IMAGES or SERIES not in source.forms:
            return chosen or candidate
        pairs = [(compute(name, shape, x), compute(name, shape, x[:, 0])) for name in names]
        if all(a is None or b is None or torch.allclose(a, b, equal_nan=True) for a, b in pairs):
            return candidate
        chosen = candidate
    return chosen or source


def make_encoded_space(space: Space, encoding: Encoding) -> Space:
    """Return the space with the encoded columns [F] as inputs; the encoding is recorded in its scaling."""
    return replace(
        space,
        shape=(len(encoding.features),),
        scaling={**space.scaling, "columns": encoding.record()},
        columns=encoding.features,
    )


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
        columns = config.data.label_columns if config.data.name in sources.TABLES else ("y",)
        classes, by_part = read_targets(source, config.data, kind, columns, common)
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


def make_row_namer(source: Source) -> stores.Where:
    """Return the function that names a row of the source in messages, by the row's number over both parts."""
    trains, test = len(source.train.x), source.test

    def where(row: int) -> str:
        return source.train.where(row) if test is None or row < trains else test.where(row - trains)

    return where
