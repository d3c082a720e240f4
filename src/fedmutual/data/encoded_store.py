"""The store of a table's encoded rows: steps are learned from training rows, once the division says which these are."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from fedmutual.config import Config, DataConfig
from fedmutual.data import scaling, stores
from fedmutual.data.draws import Index
from fedmutual.data.encoding import (
    EncodedExamples,
    Encoding,
    FloatArray,
    learn_encoding,
    list_learned_columns,
    parse_encoding,
)
from fedmutual.data.examples import ColumnPlan, Examples, Source, list_names
from fedmutual.data.targets import Targets
from fedmutual.errors import ConfigError, DataError, format_count


class EncodedStore(NamedTuple):
    """The rows of a table as inputs of networks, with remarks on cells without a value."""

    store: stores.Store
    encoding: Encoding
    notes: tuple[str, ...]  # remarks for the user


def check_encoding(config: Config, source: Source) -> None:
    """Raise ConfigError where the encoding of columns contradicts other settings."""
    if config.data.augment != "none":
        raise ConfigError(
            f"key 'data.augment': {config.data.augment!r} is for images, but the examples are tables of features; "
            "remove the key"
        )
    learned_columns = list_learned_columns(source.plans or ())
    if config.privacy.nets != "none" and learned_columns:
        raise ConfigError(
            f"{source.place}: the steps of columns {list_names(learned_columns)} would be learned from private rows, which "
            "the noise of 'privacy.nets' does not cover; give fill, mean and std (of categories: values) in data.columns, "
            "from public knowledge"
        )


def learn_from_rows(examples: Examples, index: Sequence[int], plans: Sequence[ColumnPlan]) -> Encoding:
    """Return the encoding learned from the rows `index` of a table."""
    return learn_encoding(_take_cells(examples, index), plans)


def make_encoded_store(
    source: Source,
    examples: Examples,
    targets: Targets | Index,
    training_rows: Index,
    where: stores.Where,
    config: DataConfig,
) -> EncodedStore:
    """Return all rows of a table, encoded by what is learned from its training rows.

    Raises:
        DataError: all columns are categories without a value.
    """
    plans = source.plans or ()
    cells = _take_cells(examples, training_rows.tolist())
    encoding = learn_encoding(cells, plans)
    if not encoding.features:
        raise DataError(f"{source.place}: no column of data.columns has a value in the training rows; add a column")
    encoded = EncodedExamples(examples, encoding)
    store, _ = stores.make_store(encoded, targets, scaling.UNSCALED, where, config.resident, config.workers)
    return EncodedStore(store, encoding, tuple(f"{source.place}: {note}" for note in _describe_missing(cells, plans)))


def encode_examples(source: Source, examples: Examples, record: Mapping[str, Any]) -> Examples:
    """Return the examples of a source as networks take them: encoded where its columns are.

    record: the scaling of the client's space, with what was learned of its columns.
    """
    if source.plans is None:
        return examples
    vocabularies = tuple(plan.vocabulary for plan in source.plans)
    return EncodedExamples(examples, replace(parse_encoding(record["columns"]), vocabularies=vocabularies))


def _take_cells(examples: Examples, index: Sequence[int]) -> FloatArray:
    return np.asarray(examples.take(index).numpy(), dtype=np.float64)


def _describe_missing(cells: FloatArray, plans: Sequence[ColumnPlan]) -> list[str]:
    is_missing, notes = np.isnan(cells), []
    incomplete_columns = [plan.name for plan, missing in zip(plans, is_missing.T, strict=True) if missing.any()]
    if incomplete_columns:
        count = format_count(int(is_missing.sum()), "empty cell")
        notes.append(f"{count} in the training rows, in columns {list_names(incomplete_columns)}")
    empty_columns = [plan.name for plan, missing in zip(plans, is_missing.T, strict=True) if missing.all()]
    if empty_columns:
        notes.append(f"columns {list_names(empty_columns)} have no value in any training row, so they hold no information")
    return notes
