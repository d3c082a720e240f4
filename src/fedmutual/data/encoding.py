"""Encoding of a table's columns: missing values are filled in, categories one-hot encoded, numbers and dates standardised.

The steps are learned from training rows, and kept as plain numbers and names: a pickled transformer of scikit-learn could
run code when a run folder is opened. Tests hold that the numbers equal those of scikit-learn, which is slow to import.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmutual.config import ColumnConfig, Config
from fedmutual.data.examples import ColumnPlan, Examples, Source, list_names
from fedmutual.errors import ConfigError, format_count
from fedmutual.rundir.schema import RecordedColumn, RecordedScaling

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Encoding:
    """How the cells [B, columns] of a table become features [B, F].

    F is the number of features of all columns together, in the order of the columns.
    """

    columns: tuple[RecordedColumn, ...]
    vocabularies: tuple[tuple[str, ...], ...]  # a column each, as in its `ColumnPlan`

    @property
    def features(self) -> tuple[str, ...]:
        """The names of all features, in order: "sex=f", "sex=m"; of a number or a date the name of its column."""
        return tuple(name for column in self.columns for name in _name_features(column))

    @property
    def plans(self) -> tuple[ColumnPlan, ...]:
        """The plans by which new rows are read."""

        def make_plan(c: RecordedColumn, vocabulary: tuple[str, ...]) -> ColumnPlan:
            known: dict[str, Any] = {"values": vocabulary or None} if c.kind == "category" else {"fill": c.fill}
            return ColumnPlan(c.name, ColumnConfig(kind=c.kind, indicator=c.indicator, **known), vocabulary)

        return tuple(map(make_plan, self.columns, self.vocabularies))

    def __call__(self, cells: Tensor) -> Tensor:
        """Return the features [B, F] float32 of cells [B, columns] float64."""
        parts = zip(self.columns, cells.T, self.vocabularies, strict=True)
        return torch.cat([_encode(column, x, vocabulary) for column, x, vocabulary in parts], 1).float()


def _name_features(column: RecordedColumn) -> tuple[str, ...]:
    names = [f"{column.name}={v}" for v in column.values] if column.kind == "category" else [column.name]
    return (*names, *([f"{column.name} is missing"] if column.indicator else []))


def _encode(column: RecordedColumn, cells: Tensor, vocabulary: Sequence[str]) -> Tensor:
    """Return the features [B, n] float64 of a column's cells [B]; see `RecordedColumn`."""
    if column.kind == "category":
        codes = [float(vocabulary.index(v)) if v in vocabulary else -1.0 for v in column.values]
        features = (cells[:, None] == torch.tensor(codes, dtype=cells.dtype)).to(cells.dtype)
    else:
        features = ((torch.where(cells.isnan(), column.fill, cells) - column.mean) / column.std)[:, None]
    return torch.cat([features, cells.isnan()[:, None].to(cells.dtype)], 1) if column.indicator else features


def make_encoding(columns: Sequence[RecordedColumn]) -> Encoding:
    """Return the encoding of recorded columns. Its vocabularies are the values that it encodes."""
    return Encoding(tuple(columns), tuple(column.values for column in columns))


def learn_encoding(cells: FloatArray, plans: Sequence[ColumnPlan]) -> Encoding:
    """Return the encoding of a table's columns.

    What the settings of a column leave open is learned: the fill is the median, mean and standard deviation are those of the
    filled column, the values of a category those that occur.

    Args:
        cells: the training rows [n, columns].
        plans: how each column is read.
    """
    columns = tuple(_learn_column(cells[:, i], plan) for i, plan in enumerate(plans))
    return Encoding(columns, tuple(plan.vocabulary for plan in plans))


def _learn_column(cells: FloatArray, plan: ColumnPlan) -> RecordedColumn:
    settings = plan.settings
    indicator: dict[str, Any] = {"indicator": True} if settings.indicator else {}
    if settings.kind == "category":
        codes = np.unique(cells[np.isfinite(cells)]).astype(int)
        values = settings.values or tuple(plan.vocabulary[i] for i in codes)
        return RecordedColumn(name=plan.name, kind="category", values=values, **indicator)
    missing = np.isnan(cells)
    fill = settings.fill
    if fill is None:
        fill = 0.0 if missing.all() else float(np.median(cells[~missing]))
    mean, std = settings.mean, settings.std
    if mean is None or std is None:
        filled = np.where(missing, fill, cells)
        mean, std = float(filled.mean()), float(filled.std())
        rounding = len(filled) * np.finfo(np.float64).eps
        # constant but for rounding, by the bound of scikit-learn; or NaN, where the sum of the cells has no finite value
        if not std**2 > rounding * std**2 + (rounding * mean) ** 2:
            std = 1.0
    return RecordedColumn(name=plan.name, kind=settings.kind, fill=fill, mean=mean, std=std, **indicator)


class EncodedExamples(Examples):
    """The rows of a table as features: the cells are encoded when rows are taken, so the table is stored once."""

    def __init__(self, cells: Examples, encoding: Encoding) -> None:
        self._cells, self._encoding = cells, encoding

    def __len__(self) -> int:
        return len(self._cells)

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return the examples of `rows` [B, F]; see `Examples.take`."""
        return self._encoding(self._cells.take_one(rows))

    def digest(self) -> bytes:
        """Return the digest of the table as it is stored, before it is encoded."""
        return self._cells.digest()


def encode_examples(source: Source, examples: Examples, scaling: RecordedScaling) -> Examples:
    """Return the examples of a source as networks take them: encoded where its columns are.

    scaling: the scaling of the client's space, with the encoding of its columns.
    """
    if source.plans is None:
        return examples
    vocabularies = tuple(plan.vocabulary for plan in source.plans)
    return EncodedExamples(examples, Encoding(scaling.columns or (), vocabularies))


def check_encoding(config: Config, source: Source) -> None:
    """Raise ConfigError where something is learned from private rows, and the run has differential privacy."""
    learned_columns = [
        name
        for name, settings, _ in source.plans or ()
        if (settings.values is None if settings.kind == "category" else settings.fill is None or settings.mean is None)
    ]
    if config.privacy.nets != "none" and learned_columns:
        raise ConfigError(
            f"{source.place}: the steps of columns {list_names(learned_columns)} would be learned from private rows, which "
            "the noise of 'privacy.nets' does not cover; give fill, mean and std (of categories: values) in data.columns, "
            "from public knowledge"
        )


def describe_missing(cells: FloatArray, plans: Sequence[ColumnPlan]) -> list[str]:
    """Return remarks on columns of the training rows [n, columns] with empty cells, and on those without any value."""
    is_missing, notes = np.isnan(cells), []
    incomplete, empty = (
        [plan.name for plan, missing in zip(plans, is_missing.T, strict=True) if is_so(missing)]
        for is_so in (np.any, np.all)
    )
    if incomplete:
        count = format_count(int(is_missing.sum()), "empty cell")
        notes.append(f"{count} in the training rows, in columns {list_names(incomplete)}")
    if empty:
        notes.append(f"columns {list_names(empty)} have no value in any training row, so they hold no information")
    return notes
