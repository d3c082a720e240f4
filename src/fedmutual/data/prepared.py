"""Read and scale the data of each client, before they are divided."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedmutual import models, tasks
from fedmutual.calling import Shape, find_image_shape
from fedmutual.config import Config, DataConfig, has_own_data, make_client_config
from fedmutual.config.keys import FEDERATED
from fedmutual.core import TargetKind, get_target_kind
from fedmutual.data import labels, record, scaling, sources, stores
from fedmutual.data.convert import IMAGES, SERIES
from fedmutual.data.division import Table, check_name
from fedmutual.data.draws import Index, Names
from fedmutual.data.encoding import EncodedExamples, Encoding, check_encoding, describe_missing, learn_encoding
from fedmutual.data.examples import Examples, Source, join_examples, list_names
from fedmutual.data.space import Space
from fedmutual.data.targets import Targets, check_masks, name_outputs, note_one_class, read_targets
from fedmutual.errors import BadRows, ConfigError, DataError, list_problems
from fedmutual.losses import Ordinal
from fedmutual.metric import UNLABELLED

TriedNetworks = dict[tuple[str, Shape, int], nn.Module]


@dataclass(frozen=True)
class Prepared:
    """Data that are read and scaled, but not divided. Several runs on these data may share them."""

    source: Source
    table: Table
    examples: Examples  # of both parts, unscaled; of a table with data.columns its cells until `encode_columns`
    store: stores.Store | None  # None: the columns are encoded when the training rows are known, by the division
    space: Space  # of encoded columns: as learned from all rows, so that shapes can be compared before a division
    targets: Index | Targets
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
    made: TriedNetworks = {}
    data_by_client, problems = dict[str, Prepared](), list[DataError]()
    for client in config.clients:
        check_name(client, f"client {client!r}")
    configs = {client: make_client_config(config, client) for client in config.clients}
    common_users = [client for client, own in config.clients.items() if not own.data.labels]
    for client, client_config in configs.items():
        try:
            data_by_client[client] = _prepare_data_set(client_config, made, common=client in common_users)
        except labels.UnknownClass as problem:
            existing = config.data.labels if client in common_users else {}
            problems.append(labels.UnknownClass(problem.where, problem.unknown, problem.classes, client, existing))
        except DataError as problem:
            problems.append(problem)
        except ConfigError as problem:
            raise ConfigError(f"client {client!r}: {problem}") from None
    if len(problems) == 1:
        raise problems[0]
    if problems:  # of all clients at once, so that nobody mends one file, only to hear of the next
        raise BadRows(*(sentence for problem in problems for sentence in list_problems(problem)))
    users = [client for client in common_users if configs[client].data.labels]
    if users:  # a renamed label that no client has is a mistake
        known = (labels.list_label_names(data_by_client[i].source, configs[i].data) for i in users)
        labels.check_renamed(config.data.labels, set[str]().union(*known))
    return data_by_client


def _prepare_data_set(config: Config, made: TriedNetworks, common: bool = False) -> Prepared:
    """Read and scale one data set.

    made: the networks that were made for other data sets of the experiment (`models.try_network`). common: data.labels
    serves all clients, not these data alone.
    """
    task = tasks.make_task(config.training.task)
    kind = get_target_kind(task)
    source = sources.read_source(config, kind)
    columns = config.data.label_columns if config.data.name in (*sources.TABLES, "folder") else ("y",)
    classes, by_part = read_targets(source, config.data, kind, name_outputs(task, config.data, columns), common)
    has_order = config.data.classes or source.classes or all(name.isdecimal() for name in classes)
    if isinstance(task, Ordinal) and not has_order:
        raise ConfigError(
            f"{source.place}: training.task = 'ordinal' learns classes in their order, and the classes are the names "
            f"{list_names(classes)}; list them in their order in data.classes"
        )
    targets: Index | Targets = np.concatenate(by_part)  # type: ignore[assignment]
    if targets.ndim > 2 and kind == "numbers" and config.training.task in tasks.TASKS:
        raise DataError(
            f"{source.place}: targets have the shape {[*targets.shape]}; give one number for each output: [n, outputs]"
        )
    if kind == "classes" and config.data.unlabelled and FEDERATED in (config.data.mean, config.data.std):
        raise ConfigError(
            "key 'data.unlabelled': with data.mean = 'federated' each client counts the rows of each class, so every row "
            "needs a label; set data.mean and data.std to numbers"
        )
    outputs = tasks.make_task(config.training.task, outputs=classes).outputs or len(classes)
    for part in source.parts:
        labels.check_groups(part, config.data)
    table = _make_table(source, targets, classes if kind == "classes" else columns, kind)
    source = _choose_form(source, config, outputs, kind, made)
    examples = join_examples(source)
    store: stores.Store | None = None
    notes: tuple[str, ...] = ()
    if source.plans is None:
        scaled, notes = scaling.make_scaling(config.data, source)
        store, shape = stores.make_store(
            examples, targets, scaled, source.name_row, config.data.resident, config.data.workers
        )
    else:
        check_encoding(config, source)
        scaling.check_image_keys(config.data, 2)
        scaled, shape = scaling.UNSCALED, (len(source.plans),)
    if kind == "masks":
        check_masks(targets, find_image_shape(shape), config.data, source.place)
        notes = (*note_one_class(targets, classes, source.place), *notes)
    if source.columns or kind in ("numbers", "times"):
        from fedmutual.data import column_check  # imports pandas, which takes 0.3 s

        by_output = source.train.labels.reshape(len(source.train.x), -1).T
        names = {"numbers": classes, "times": source.label_columns or ("time", "event")}.get(kind, ())
        numbers = dict(zip(names, by_output, strict=False))
        rounded = column_check.note_rounded_numbers(numbers, source.place)
        notes = (*column_check.check_columns(source, targets, config.data), *rounded, *notes)
    is_deliberate = config.data.classes or config.data.name == "femnist"  # its classes are small and capital letters
    if kind == "classes" and not is_deliberate:
        notes = (
            *labels.note_similar_classes(classes, table.labels[table.labels < len(classes)], source, config.data),
            *notes,
        )
    content = examples.digest()
    space = Space(
        shape=shape,
        classes=classes,
        outputs=outputs,
        task=config.training.task,
        scaling=scaled.model_copy(update={"augment": config.data.augment}),
        columns=source.columns,
    )
    if source.plans is not None:
        cells = examples.take_one(range(len(examples))).numpy().astype(np.float64)
        space = _make_encoded_space(space, learn_encoding(cells, source.plans))
    digest = record.compute_digest(content, table, shape, targets)
    return Prepared(source, table, examples, store, space, targets, notes, digest, content.hex())


def encode_columns(prepared: Prepared, rows: Index, config: DataConfig) -> Prepared:
    """Return the data of a table with its columns encoded by what these training rows [n] teach.

    Raises:
        DataError: all columns are categories without a value.
    """
    source, plans = prepared.source, prepared.source.plans or ()
    cells = prepared.examples.take_one(rows.tolist()).numpy().astype(np.float64)
    encoding = learn_encoding(cells, plans)
    if not encoding.features:
        raise DataError(f"{source.place}: no column of data.columns has a value in the training rows; add a column")
    examples = EncodedExamples(prepared.examples, encoding)
    store, _ = stores.make_store(
        examples, prepared.targets, scaling.UNSCALED, source.name_row, config.resident, config.workers
    )
    notes = (*prepared.notes, *(f"{source.place}: {note}" for note in describe_missing(cells, plans)))
    space = _make_encoded_space(prepared.space, encoding)
    return replace(prepared, examples=examples, store=store, space=space, notes=notes)


def _make_encoded_space(space: Space, encoding: Encoding) -> Space:
    """Return the space with the encoded columns [F] as inputs; the encoding is recorded in its scaling."""
    steps = space.scaling.model_copy(update={"columns": encoding.columns})
    return replace(space, shape=(len(encoding.features),), scaling=steps, columns=encoding.features)


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
            x = candidate.train.x.take_one([row % len(candidate.train.x) for row in range(2)])
        except DataError:  # the numbers cannot have this form
            continue
        x = x if x.dtype == torch.int64 else x.float()
        shape = tuple(x.shape[1:])
        try:
            if any(compute(name, shape, x) is None for name in names):
                continue
        except IndexError:  # ids beyond an embedding, as the check of the network says
            return candidate
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


def _make_table(source: Source, targets: Index | Targets, columns: tuple[str, ...], kind: TargetKind) -> Table:
    """Return the table of all rows; targets of another kind than classes count as one class in partitions and splits.

    Rows without a label count as the last class, `UNLABELLED`.
    """

    def join(name: str) -> Names | None:
        """A column of the training part; "" for the rows of a test part that lacks it."""
        if getattr(source.train, name) is None:
            return None
        values = ((getattr(part, name), len(part.x)) for part in source.parts)
        return np.concatenate([np.full(n, "") if column is None else column for column, n in values])

    numbers = targets.astype(np.int64) if kind == "classes" else np.zeros(len(targets), dtype=np.int64)
    if (numbers < 0).any():  # only with data.unlabelled
        if UNLABELLED in columns:
            fix = f'rename it: data.labels = {{ "{UNLABELLED}" = "another name" }}'
            raise DataError(f"{source.place}: the class {UNLABELLED!r} has the name that marks rows without a label; {fix}")
        numbers, columns = np.where(numbers < 0, len(columns), numbers), (*columns, UNLABELLED)
    bases = [part.bases for part in source.parts if part.bases is not None]
    return Table(
        numbers, len(source.train.x), columns, join("groups"), join("domains"), np.concatenate(bases) if bases else None
    )
