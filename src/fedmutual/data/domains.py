"""Published data sets with domains, PACS and Office-Home: folders domain/class/image that users download themselves."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from fedmutual.config import DataConfig
from fedmutual.data.examples import Published, Source, list_names
from fedmutual.data.folder import read_folder
from fedmutual.data.published import CACHE, VARIABLE
from fedmutual.errors import ConfigError, DataError

_IMAGENET = Published(255.0, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class _DomainSet:
    folders: tuple[str, ...]  # possible folder names below the data root
    domains: tuple[str, ...]
    has_one_size: bool  # whether all images have one size


SETS = {
    "pacs": _DomainSet(("PACS",), ("art_painting", "cartoon", "photo", "sketch"), has_one_size=True),
    "office-home": _DomainSet(
        ("OfficeHome", "OfficeHomeDataset_10072016"), ("Art", "Clipart", "Product", "Real World"), has_one_size=False
    ),
}


def read_domains(config: DataConfig) -> Source:
    """Return a data set with domains from the data root or from data.root itself, scaled as for ImageNet.

    Raises:
        ConfigError: data.size is missing, but the images differ in size.
        DataError: the data are missing or cannot be read.
    """
    data_set = SETS[config.name]
    if config.size is None and not data_set.has_one_size:
        raise ConfigError(
            f"data.name = {config.name!r} needs the key 'data.size', because its images differ in size; set, for "
            "example, data.size = [96, 96]"
        )
    source = read_folder(config.model_copy(update={"root": _find_folder(config, data_set)}), domains=True)
    return replace(source, published=_IMAGENET)


def _find_folder(config: DataConfig, data_set: _DomainSet) -> Path:
    """Return the folder that holds the domains' folders."""
    root = config.root or Path(os.environ.get(VARIABLE) or CACHE).expanduser()
    candidates = [root / name for name in data_set.folders] + ([root] if config.root is not None else [])
    domain_names = {_normalize(name) for name in data_set.domains}
    for candidate in candidates:
        if candidate.is_dir() and domain_names <= {_normalize(p.name) for p in candidate.iterdir() if p.is_dir()}:
            return candidate
    raise DataError(
        f"data {config.name!r} is not at {candidates[0]} and cannot be downloaded; put the folders "
        f"{list_names(data_set.domains)} "
        "there, each with a folder of images for every class, or set data.root to their folder"
    )


def _normalize(name: str) -> str:
    """Return a folder name in lower case with blanks: copies spell "Real World" in several ways."""
    return name.casefold().replace("_", " ")
