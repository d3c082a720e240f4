"""Published sets of domains, PACS and Office-Home: folders domain/class/image that everyone fetches for themselves."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from fedmutual.config import DataConfig
from fedmutual.data.examples import Published, Source, listed
from fedmutual.data.folder import folder
from fedmutual.data.published import CACHE, VARIABLE
from fedmutual.errors import ConfigError, DataError

_IMAGENET = Published(255.0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class _Set:
    folders: tuple[str, ...]  # what it may be called below the data root
    domains: tuple[str, ...]
    sized: bool  # whether its images are of one size


SETS = {
    "pacs": _Set(("PACS",), ("art_painting", "cartoon", "photo", "sketch"), sized=True),
    "office-home": _Set(
        ("OfficeHome", "OfficeHomeDataset_10072016"), ("Art", "Clipart", "Product", "Real World"), sized=False
    ),
}


def of_domains(config: DataConfig) -> Source:
    """A set that lies below the data root, or in data.root itself; scaled as ImageNet is.

    Raises:
        ConfigError: its images need one size.
        DataError: it is not there, or cannot be read.
    """
    about = SETS[config.name]
    if config.size is None and not about.sized:
        raise ConfigError(f"data.name = {config.name!r} needs the key 'data.size', for its images differ: [96, 96], say")
    source = folder(config.model_copy(update={"root": _place(config, about)}), domains=True)
    return replace(source, published=_IMAGENET)


def _place(config: DataConfig, about: _Set) -> Path:
    """Where the domains' folders lie."""
    root = config.root or Path(os.environ.get(VARIABLE) or CACHE).expanduser()
    found = [root / name for name in about.folders] + ([root] if config.root is not None else [])
    wanted = {_plain(name) for name in about.domains}
    for place in found:
        if place.is_dir() and wanted <= {_plain(p.name) for p in place.iterdir() if p.is_dir()}:
            return place
    raise DataError(
        f"data {config.name!r} is not at {found[0]}, nor can it be downloaded; put the folders {listed(about.domains)} "
        "there, each with a folder of images a class, or name their place in data.root"
    )


def _plain(name: str) -> str:
    """Copies spell "Real World" in several ways."""
    return name.casefold().replace("_", " ")
