"""The scaling of stored numbers to a network's inputs: x / divisor, resized, minus the mean, over the standard deviation."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmutual.calling import Inputs, list_tensors
from fedmutual.config import DataConfig
from fedmutual.config.keys import FEDERATED
from fedmutual.data.convert import IDS, IMAGES, SERIES, Form
from fedmutual.data.examples import OneInput, Source, list_names
from fedmutual.errors import ConfigError, DataError
from fedmutual.rundir.schema import RecordedScaling

BYTE = 255.0
_LARGE = 30.0  # root mean square of a feature; larger inputs drive a first layer far from its initial state
_KINDS = {2: "tables of features", 3: "series", 4: "images", 5: "volumes"}  # of examples [B, ...], by the number of axes


class Scaling(RecordedScaling):
    """The scaling of every example, in training and test. With empty mean and std, inputs are not standardised.

    Images are resized bilinearly with antialiasing, volumes trilinearly. `dtype`: the type of inputs that are not scaled.
    """

    # the scaling of each of several inputs; the other fields are then unused
    inputs: dict[str, "Scaling"] | None = None  # type: ignore[assignment]

    def __call__(self, x: Inputs) -> Inputs:
        """Return stored examples x [B, *shape] as scaled float32, resized, or as integers. x may be overwritten.

        Callers compare the shapes: of several inputs, those that x lacks are missing in the result.

        Raises:
            DataError: the inputs are integers, and a number of x is no whole number.
        """
        if not isinstance(x, Tensor):
            return {name: scaling._scale(x[name]) for name, scaling in (self.inputs or {}).items() if name in x}
        return self._scale(x)

    def _scale(self, x: Tensor) -> Tensor:
        """Return one input as `__call__`."""
        if self.dtype == "bool":
            return x.to(torch.bool)
        if self.dtype == "int64":
            if x.is_floating_point() and not torch.equal(x, x.trunc()):
                raise DataError("the model takes ids, but an example holds a number that is no whole number; correct it")
            return x.to(torch.int64)
        x = x.to(torch.float32)
        if self.divisor != 1:
            x = x.div_(self.divisor)
        if self.size is not None and tuple(x.shape[2:]) != self.size:
            is_image = len(self.size) == 2
            x = F.interpolate(x, self.size, mode="bilinear" if is_image else "trilinear", antialias=is_image)
        return subtract_mean(x, self.mean, self.std) if self.mean else x

    def scale_black(self, channels: int) -> Tensor:
        """Return the scaled value [C] of a stored 0."""
        return -torch.tensor(self.mean) / torch.tensor(self.std) if self.mean else torch.zeros(channels)


UNSCALED = Scaling(divisor=1.0, mean=(), std=(), size=None)
"""Leaves inputs as they are."""


def subtract_mean(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return x [B, C, ...] minus `mean` [C], over `std` [C]. x is overwritten."""
    mean_, std_ = (torch.tensor(values).view(-1, *(1,) * max(x.dim() - 2, 0)) for values in (mean, std))
    return x.sub_(mean_).div_(std_)


def find_form(scaling: Scaling, shape: Sequence[int]) -> Form:
    """Return the form of inputs with this scaling and this shape of one example."""
    return IDS if scaling.dtype == "int64" else SERIES if len(shape) == 2 else IMAGES


def check_image_keys(config: DataConfig, axes: int) -> None:
    """Raise ConfigError where keys for images are set for other examples. axes: of examples [B, ...]."""
    for key, is_set in (("augment", config.augment != "none"), ("size", config.size is not None)):
        if is_set and axes != 4 and (key, axes) != ("size", 5):
            kind = _KINDS.get(axes, f"arrays of {axes - 1} axes")
            raise ConfigError(f"key 'data.{key}' is for images, but the examples are {kind}; remove the key")
    if config.size is not None and len(config.size) != axes - 2:
        wanted = "[height, width] in pixels" if axes == 4 else "[depth, height, width] in voxels"
        raise ConfigError(f"key 'data.size' is {wanted}, not {list(config.size)}")


def make_scaling(config: DataConfig, source: Source) -> tuple[Scaling, tuple[str, ...]]:
    """Return the scaling of a data set, and remarks for the user.

    Raises:
        ConfigError: data.mean, std, size or augment do not fit the data.
        DataError: one of the first examples cannot be read.
    """
    first = source.train.x.take([0])
    if not isinstance(first, Tensor):
        return _scale_several(config, source, first)
    if not first.is_floating_point() and first.dtype != torch.uint8:
        changes = {"mean": config.mean, "std": config.std, "size": config.size, "augment": config.augment != "none"}
        for key in (key for key, is_set in changes.items() if is_set):
            raise ConfigError(f"key 'data.{key}' changes numbers, but the network takes ids; remove the key")
        return UNSCALED.model_copy(update={"dtype": "bool" if first.dtype == torch.bool else "int64"}), ()
    if isinstance(config.mean, dict) or isinstance(config.std, dict):
        raise ConfigError("keys 'data.mean' and 'data.std' name inputs, but x is one array; give lists of numbers")
    check_image_keys(config, first.dim())
    is_image = first.dim() > 2
    whole = BYTE if is_image and first.dtype == torch.uint8 else 1.0
    divisor, mean, std = source.published or (config.max or whole, (), ())
    if (config.mean is None) != (config.std is None):
        raise ConfigError("keys 'data.mean' and 'data.std' must be set together; set both or none")
    if config.mean == FEDERATED or config.std == FEDERATED:  # the clients' sums follow when rows are divided
        mean, std = (), ()
    elif config.mean is not None and config.std is not None:
        mean, std = config.mean, config.std
    for key, values in (("mean", mean), ("std", std)):
        if values and len(values) != (wanted := first.shape[1] if first.dim() > 1 else 1):
            kind = "channels" if is_image else "features"
            raise ConfigError(f"key 'data.{key}' has {len(values)} values, and the examples have {wanted} {kind}")
    if divisor != 1 and any(not 0 <= m <= 1 or s > 1 for m, s in zip(mean, std, strict=True)):
        raise ConfigError(
            f"keys 'data.mean' and 'data.std' are for inputs from 0 to 1 (these inputs are divided by {divisor:g} first), "
            f"but the first mean is {mean[0]:g} and the first std {std[0]:g}; divide both by {divisor:g}"
        )
    scaling = Scaling(divisor=divisor, mean=mean, std=std, size=config.size)
    if (source.published and config.mean is None) or config.mean == FEDERATED:
        return scaling, ()
    large = _describe_large(source, scaling)
    if mean:
        return scaling, ((f"inputs are large after scaling by data.mean and data.std ({large})",) if large else ())
    treatment = f"only divided by {divisor:g}" if divisor != 1 else "taken as they are"
    noun = {2: "features", 4: "pixels"}.get(first.dim(), "values")
    warning = f", some of them large ({large})" if large else ""
    return scaling, (f"data.mean and data.std are not given, so the {noun} are {treatment}{warning}",)


def _scale_several(config: DataConfig, source: Source, first: Mapping[str, Tensor]) -> tuple[Scaling, tuple[str, ...]]:
    """Return the scaling of several inputs, each by its own entry of data.mean and data.std, and remarks."""
    if config.size is not None:
        raise ConfigError("key 'data.size' is for images alone, and the examples have several inputs; remove the key")
    for key in ("mean", "std"):
        table = getattr(config, key)
        is_table = isinstance(table, dict)
        if (is_table and not table.keys() <= first.keys()) or not (is_table or table is None):
            raise ConfigError(
                f"key 'data.{key}': the examples have the inputs {list_names(list(first))}; give a table of an input's name "
                f"and its numbers, as data.{key} = {{ {next(iter(first))} = [...] }}"
            )
    scalings, notes = dict[str, Scaling](), list[str]()
    for name in first:
        changes = {"size": None, "augment": "none"} | {k: (getattr(config, k) or {}).get(name) for k in ("mean", "std")}
        part = replace(source.train, x=OneInput(source.train.x, name))
        scalings[name], remarks = make_scaling(
            config.model_copy(update=changes), replace(source, train=part, columns=None, published=None)
        )
        notes += [f"input {name!r}: {remark}" for remark in remarks]
    return UNSCALED.model_copy(update={"inputs": scalings}), tuple(notes)


def _describe_large(source: Source, scaling: Scaling) -> str:
    """Return a sentence on the largest input if its size makes training difficult, judged by the first rows; else ""."""
    if scaling.divisor == BYTE and all(std >= 1 / _LARGE for std in scaling.std):
        return ""  # bytes cannot be large then
    sampled_rows = 64 if source.train.x.take_one([0]).dim() > 2 else 1024
    x = list_tensors(scaling(source.train.x.take(range(min(sampled_rows, len(source.train.x))))))[0]
    size = x.square().transpose(0, 1).flatten(1).mean(1).sqrt() if x.dim() > 1 else x.square().mean(0, keepdim=True).sqrt()
    largest = int(size.argmax())
    if not size[largest] > _LARGE:
        return ""
    name = f"column {source.columns[largest]!r}" if source.columns else f"{'channel' if x.dim() > 2 else 'column'} {largest}"
    return (
        f"{name} is about {size[largest]:.3g}, which makes training difficult; without data.mean and data.std, "
        "`fedmutual data check` suggests values"
    )
