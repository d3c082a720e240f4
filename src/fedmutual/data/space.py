"""The inputs and outputs of a network, as the data determine them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fedmutual import tasks
from fedmutual.calling import Inputs, Shape, Shapes, get_shape, map_inputs
from fedmutual.core import TargetKind, get_target_kind
from fedmutual.data.examples import list_names
from fedmutual.data.scaling import Scaling
from fedmutual.metric import KINDS
from fedmutual.models import make_example_inputs


@dataclass(frozen=True)
class Space:
    """The inputs and outputs of a network."""

    shape: Shape  # of one example: (F,), (C, T), (C, H, W), ..., or of several inputs by name
    classes: tuple[str, ...]  # the names of classes, labels, numbers or times, in the order of the outputs
    outputs: int
    task: str
    scaling: Scaling  # of the inputs, with the encoding of a table's columns
    columns: tuple[str, ...] | None = None  # the names of a table's features
    rows: Inputs | None = field(default=None, compare=False, repr=False)  # two inputs [2, *shape] of the data, if any

    @property
    def dtype(self) -> torch.dtype:
        """The type of the inputs: float32, or int64 for ids. Of several inputs float32."""
        return find_dtype(self.scaling)

    @property
    def has_integers(self) -> bool:
        """Whether an input holds integers."""
        return torch.int64 in map(find_dtype, [self.scaling, *(self.scaling.inputs or {}).values()])

    def make_examples(self) -> Inputs:
        """Return two inputs [2, *shape] for trying a network: rows of the data, or constants without such rows."""
        if self.rows is not None and get_shape(self.rows) == self.shape:
            return map_inputs(torch.clone, self.rows)
        return make_constants(self.shape, self.scaling)

    @property
    def targets(self) -> TargetKind:
        """The kind of the targets. Raises ConfigError if there is no such task, or its module cannot be imported."""
        return get_target_kind(tasks.make_task(self.task))

    @property
    def numbers(self) -> bool:
        """Whether targets are numbers, not classes or labels."""
        return not KINDS[self.targets].is_named

    @property
    def of_pixels(self) -> bool:
        """Whether targets are a class of each pixel."""
        return self.targets == "masks"

    def is_compatible(self, other: "Space") -> bool:
        """Return whether one network can serve both spaces. The scaling and the name of numeric targets may differ."""
        own_key, other_key = (
            (s.shape, s.dtype, s.outputs, s.targets, () if s.targets == "numbers" else s.classes) for s in (self, other)
        )
        return own_key == other_key

    def compare_columns(self, other: "Space") -> str | None:
        """Return in words how the columns of two tables of one shape differ; None if they agree or have no names."""
        return None if self.shape != other.shape else describe_column_difference(self.columns, other.columns)


def find_dtype(scaling: Scaling) -> torch.dtype:
    """Return the type of a scaled input."""
    dtype: torch.dtype = getattr(torch, scaling.dtype or "float32")
    return dtype


def make_constants(shape: Shape, scaling: Scaling) -> Inputs:
    """Return two constant inputs [2, *shape] of the scaled types, for a network without data."""
    if not isinstance(shape, Shapes):
        return make_example_inputs(shape, find_dtype(scaling))
    inputs = scaling.inputs or {}
    return {name: make_example_inputs(one, find_dtype(inputs[name])) for name, one in shape.items()}


def describe_column_difference(columns: Sequence[str] | None, other: Sequence[str] | None) -> str | None:
    """Return in words how `columns` differ from `other`; None if they agree or one of them is None."""
    if columns is None or other is None or tuple(columns) == tuple(other):
        return None
    different = [c for c in columns if c not in other] or [c for c in other if c not in columns]
    if different:
        return f"other columns ({list_names(different, 3)})"
    return f"the same columns in another order ({list_names(columns, 3)})"
