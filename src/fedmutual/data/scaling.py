"""From stored numbers to a network's inputs: x over a divisor, resized, minus the mean, over the standard deviation."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedmutual.config import DataConfig
from fedmutual.data.examples import Source
from fedmutual.errors import ConfigError

BYTE = 255.0
_LARGE = 30.0  # the root mean square of a feature from which on a first layer is driven far from where it begins
_ROWS, _IMAGES = 1024, 64


@dataclass(frozen=True)
class Scaling:
    """The same for every example, training and test. Empty mean and std: neither is applied."""

    divisor: float
    mean: tuple[float, ...]  # a value a channel, or a feature
    std: tuple[float, ...]
    size: tuple[int, int] | None = None  # height, width to resize to, bilinear with antialiasing

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, *shape] as stored, which is used up -> float32, resized."""
        x = x.to(torch.float32)
        if self.divisor != 1:
            x = x.div_(self.divisor)
        if self.size is not None and tuple(x.shape[2:]) != self.size:
            x = F.interpolate(x, self.size, mode="bilinear", antialias=True)
        if self.mean:
            mean, std = (torch.tensor(v).view(-1, *(1,) * (x.dim() - 2)) for v in (self.mean, self.std))
            x = x.sub_(mean).div_(std)
        return x

    def record(self) -> dict[str, Any]:
        """As environment.json holds it."""
        return {**asdict(self), "mean": list(self.mean), "std": list(self.std), "size": self.size and list(self.size)}

    def black(self, channels: int) -> Tensor:
        """What a stored 0 becomes [C]."""
        return -torch.tensor(self.mean) / torch.tensor(self.std) if self.mean else torch.zeros(channels)


def recorded(found: Mapping[str, Any]) -> Scaling:
    """What `Scaling.record` made a record of."""
    size = found.get("size")
    return Scaling(found["divisor"], tuple(found["mean"]), tuple(found["std"]), size and (size[0], size[1]))


def of_source(config: DataConfig, source: Source) -> tuple[Scaling, tuple[str, ...]]:
    """How this data set is scaled, and what is worth saying about it.

    Raises:
        ConfigError: data.mean, std, size or augment do not fit the data.
    """
    first = source.train.x.take([0])
    image = first.dim() == 4
    published = source.published
    divisor = published.divisor if published else BYTE if image and first.dtype == torch.uint8 else 1.0
    mean, std = (published.mean, published.std) if published else ((), ())
    if (config.mean is None) != (config.std is None):
        raise ConfigError("keys 'data.mean' and 'data.std' are given together or not at all")
    if config.mean is not None and config.std is not None:
        mean, std = config.mean, config.std
    kind = "channels" if image else "features"
    for key, values in (("mean", mean), ("std", std)):
        if values and len(values) != first.shape[1]:
            raise ConfigError(f"key 'data.{key}' has {len(values)} values, and the examples have {first.shape[1]} {kind}")
    if divisor != 1 and any(not 0 <= m <= 1 or s > 1 for m, s in zip(mean, std, strict=True)):
        raise ConfigError(
            f"keys 'data.mean' and 'data.std' are of inputs from 0 to 1, for these are divided by {divisor:g} first, "
            f"and have {_first(mean)} and {_first(std)}; divide both by {divisor:g}"
        )
    if config.augment != "none" and not image:
        raise ConfigError(f"key 'data.augment': {config.augment!r} is for images, and the examples are tables of features")
    scaling = Scaling(divisor, mean, std, _size(config, image))
    if published and config.mean is None:
        return scaling, ()
    large = _large(source, scaling)
    if mean:
        return scaling, ((f"inputs are large as data.mean and data.std make them ({large})",) if large else ())
    done = "only divided by 255" if divisor == BYTE else "taken as they are"
    some = f", some of them large ({large})" if large else ""
    return scaling, (f"data.mean and data.std are not given, so the {'pixels' if image else 'features'} are {done}{some}",)


def _large(source: Source, scaling: Scaling) -> str:
    """Of inputs as they are scaled, what training may come to grief by, and the mend; told from the first rows."""
    if scaling.divisor == BYTE and all(std >= 1 / _LARGE for std in scaling.std):
        return ""  # whatever the bytes are
    rows = _IMAGES if source.train.x.take([0]).dim() == 4 else _ROWS
    x = scaling(source.train.x.take(range(min(rows, len(source.train.x)))))
    size = x.square().transpose(0, 1).flatten(1).mean(1).sqrt()
    worst = int(size.argmax())
    if not size[worst] > _LARGE:
        return ""
    name = f"column {source.columns[worst]!r}" if source.columns else f"{'channel' if x.dim() == 4 else 'column'} {worst}"
    return (
        f"{name} is about {size[worst]:.3g}, which networks learn badly from; `fedmutual data check` tells, where they are "
        "unset, the data.mean and data.std that they ask for"
    )


def _first(values: tuple[float, ...]) -> str:
    return f"{values[0]:g}{', ...' if len(values) > 1 else ''}"


def _size(config: DataConfig, image: bool) -> tuple[int, int] | None:
    if config.size is None:
        return None
    if len(config.size) != 2:
        raise ConfigError(f"key 'data.size' is [height, width] in pixels, not {list(config.size)}")
    if not image:
        raise ConfigError("key 'data.size' is for images, and the examples are tables of features; take it out")
    return config.size[0], config.size[1]
