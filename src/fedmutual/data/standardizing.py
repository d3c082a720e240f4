"""`data.mean = "federated"`: inputs are standardised by the statistics of all clients' training rows (`statistics`)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedmutual.config import ColumnConfig
from fedmutual.data.draws import Index
from fedmutual.data.examples import ColumnPlan, join_examples
from fedmutual.data.statistics import Layout, Moments, Statistics, Words, add_sums, check_layouts, read_sums, sum_rows
from fedmutual.errors import ConfigError, DataError, format_count

if TYPE_CHECKING:
    from fedmutual.data.prepared import Prepared
    from fedmutual.data.space import Space

_CHUNK = 2**20  # values that are summed at a time


def make_layout(space: "Space", columns: Mapping[str, ColumnConfig]) -> Layout:
    """Return the kinds of values that the statistics of a data set describe: with `data.columns`, the stored cells."""
    classes = space.classes if space.targets == "classes" else ()  # a label or a pixel is not the class of a row
    if columns:
        categories = tuple(name for name, settings in columns.items() if settings.kind == "category")
        return Layout(tuple(columns), classes, categories=categories)
    inputs = space.columns or tuple(str(number) for number in range(space.shape[0]))
    return Layout(inputs, classes, values=prod(space.shape[1:]))


def sum_client(prepared: "Prepared", rows: Index, hide_carries: bool = False) -> Words:
    """Return the words of a client's training rows; see `statistics.sum_rows`. rows: their numbers in the data set [n].

    Raises:
        DataError: a row cannot be read, or the values are too large.
    """
    layout = _make_layout(prepared)
    labels = prepared.table.labels[rows].tolist()
    return sum_rows(layout, _read_chunks(prepared, rows, len(layout.inputs) * layout.values), labels, hide_carries)


def sum_clients(data_by_client: Mapping[str, tuple["Prepared", Index]]) -> Statistics:
    """Return the statistics of several clients in one process. data_by_client: client -> data and numbers of training rows.

    Raises:
        DataError: clients have other columns, classes or shapes; or a client's values are too large.
    """
    layouts = {client: _make_layout(prepared) for client, (prepared, _) in data_by_client.items()}
    check_layouts(layouts)
    parts = []
    for client, (prepared, rows) in data_by_client.items():
        try:
            parts.append(sum_client(prepared, rows))
        except DataError as problem:
            raise DataError(f"client {client!r}: {problem}") from None
    return read_sums(next(iter(layouts.values())), add_sums(parts))


def standardize(prepared: "Prepared", moments: Moments) -> "Prepared":
    """Return data whose inputs are standardised.

    With `data.columns`: a column's mean and std, and its fill, are those of `moments` where its settings have none.

    Raises:
        ConfigError: the data have another number of inputs than `moments`.
    """
    source, (mean, std), count = prepared.source, moments, len(_make_layout(prepared).inputs)
    if count != len(mean):
        raise ConfigError(
            f"{source.place}: has {format_count(count, 'input')}, and the statistics of the federation are of {len(mean)}; "
            "give all clients the same channels or columns"
        )
    if source.plans is not None:
        plans = zip(source.plans, mean, std, strict=True)
        return replace(prepared, source=replace(source, plans=tuple(_plan_column(*one) for one in plans)))
    scaled = replace(prepared.scaled, mean=mean, std=std)
    space = replace(prepared.space, scaling={**prepared.space.scaling, "mean": list(mean), "std": list(std)})
    assert prepared.store is not None
    return replace(prepared, store=prepared.store.standardize(mean, std), scaled=scaled, space=space)


def _make_layout(prepared: "Prepared") -> Layout:
    return make_layout(prepared.space, {plan.name: plan.settings for plan in prepared.source.plans or ()})


def _plan_column(plan: ColumnPlan, mean: float, std: float) -> ColumnPlan:
    """Return the plan of a column with the mean and deviation of all clients where its settings leave them open."""
    settings = plan.settings
    if settings.kind == "category":
        return plan
    changes = {"fill": mean} if settings.fill is None else {}
    changes |= {"mean": mean, "std": std} if settings.mean is None else {}
    return plan._replace(settings=settings.model_copy(update=changes))


def _read_chunks(prepared: "Prepared", rows: Index, values: int) -> Iterator[Tensor]:
    """Yield the inputs of rows, in chunks, before a mean is subtracted. values: numbers in a row."""
    chunks = torch.split(torch.from_numpy(rows), max(1, _CHUNK // values))
    if prepared.store is not None:
        yield from (x for x, _ in prepared.store.batches(chunks))
    else:
        examples = join_examples(prepared.source)
        yield from (examples.take(chunk.tolist()) for chunk in chunks)
