"""A public seed set from a file that all participants have (split.public_file), in place of rows of the clients."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedmutual.calling import Shapes, format_shape
from fedmutual.config import Config, DataConfig, has_own_data, make_client_config
from fedmutual.config.keys import Table
from fedmutual.data import folder, stores
from fedmutual.data.draws import Index, count_classes
from fedmutual.data.encoding import EncodedExamples, make_encoding
from fedmutual.data.examples import Examples, Source
from fedmutual.data.public import PublicPart, PublicSet, make_public_set
from fedmutual.data.record import count_training_examples
from fedmutual.data.rows import Rows
from fedmutual.data.scaling import UNSCALED
from fedmutual.data.space import Space
from fedmutual.data.space_files import read_file
from fedmutual.data.targets import Targets, read_targets
from fedmutual.errors import ConfigError, DataError


def read_public_set(config: Config, path: Path, spaces: Mapping[str, Space], partition: Table) -> PublicSet:
    """Return the rows of a file as the public seed set: each participant stands for an equal part of them.

    Without labels in the file, all labels of the set are hidden.

    spaces: by client. partition: the content of partition.json. Raises UserError as `read_public_rows`; ConfigError where
    the file lacks a class.
    """
    rows, examples, has_labels = read_public_rows(config, path, spaces)
    space = next(iter(spaces.values()))
    size, parts = len(space.classes), dict[str, PublicPart]()
    for client, index in zip(spaces, np.array_split(rows.index, len(spaces)), strict=True):
        labels = rows.with_index(index).labels if space.targets == "classes" else np.zeros(len(index), np.int64)
        counts = count_classes(labels, size).tolist() if has_labels else [0] * size
        trained = count_training_examples(partition["clients"][client]) if has_labels else [0] * size
        parts[client] = PublicPart(rows.with_index(index), examples, counts, trained)
    public = make_public_set(parts, tuple(partition["classes"]))
    assert public is not None  # every part has rows, or the source would have been refused
    return replace(public, sizes=dict.fromkeys(spaces, 0), label_size=0, file=path, has_labels=has_labels)


def read_public_rows(config: Config, path: Path, spaces: Mapping[str, Space]) -> tuple[Rows, Examples, bool]:
    """Return all rows of a public file, its examples before they are scaled, and whether it has labels.

    spaces: by client.

    Raises:
        ConfigError: split.public is set, too; rows have several inputs; or clients scale their inputs differently.
        DataError: the file cannot be read, or has another form than the clients' data.
    """
    if config.split.public:
        raise ConfigError("keys 'split.public' and 'split.public_file' exclude each other; remove one")
    clients, space = list(spaces), next(iter(spaces.values()))
    if isinstance(space.shape, Shapes):
        raise ConfigError("key 'split.public_file' is for one input a row, but the examples have several; use split.public")
    if any(other.scaling != space.scaling for other in spaces.values()):
        raise ConfigError(
            "key 'split.public_file': clients scale their inputs differently, so that no file serves all; set 'data.mean' "
            "and 'data.std' for all"
        )
    data = make_client_config(config, clients[0]).data if has_own_data(config) else config.data
    source, has_labels = _read_source(path, data.model_copy(update={"root": path, "test": None, "group_by": None}), space)
    kind = space.targets
    targets: Index | Targets = np.full(len(source.train.x), -1, np.int64)
    if has_labels:
        known = data.model_copy(update={"classes": space.classes if kind == "classes" else data.classes})
        _, (targets,) = read_targets(source, known, kind, space.classes)
    examples, scaled = source.train.x, space.scaling
    if scaled.columns is not None:
        examples, scaled = EncodedExamples(examples, make_encoding(scaled.columns)), UNSCALED
    store, shape = stores.make_store(examples, targets, scaled, source.name_row, config.data.resident, config.data.workers)
    if shape != space.shape:
        raise DataError(
            f"{path}: its examples have the shape {format_shape(shape)}, and the clients' {format_shape(space.shape)}"
        )
    return Rows(store, np.arange(len(targets))), examples, has_labels


def _read_source(path: Path, data: DataConfig, space: Space) -> tuple[Source, bool]:
    """Return the rows of a file, unscaled, and whether they have labels; without labels they have placeholders."""
    if path.is_dir() and data.name != "datasets":
        data = data.model_copy(update={"classes": space.classes})
        return folder.read_folder(data, domains=False, kind=space.targets), True
    read = None if path.suffix.lower() == ".npz" and space.columns is not None else read_file(path, space, data, None)
    if read is None:
        kind = "that datasets saved" if data.name == "datasets" else "of images"
        wanted = "a CSV file with the columns of the clients' data" if space.columns else f"an npz file or a folder {kind}"
        raise DataError(f"{path}: is no public data for these clients (split.public_file); give {wanted}")
    return read
