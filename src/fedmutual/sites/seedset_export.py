"""A site gives its part of the public seed set: the rows that its own split sets apart as public, and no others."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedmutual import data
from fedmutual.data.federation import list_public_parts
from fedmutual.errors import ConfigError, format_count
from fedmutual.sites import contract as contracts
from fedmutual.sites.seedset_file import SeedsetFile, make_seedset_path, write_seedset_file
from fedmutual.sites.site_settings import SiteSettings, configure_site, read_site_file
from fedmutual.user_code import plugins


def export_seedset(file: Path, site: Path, folder: Path) -> SeedsetFile:
    """Write the part of a site into a folder, and return the part. file: FEDERATION.toml. site: the site.toml.

    Raises:
        UserError: the site has no public rows, or a file cannot be read or written.
    """
    mine = read_site_file(site)
    with plugins.use_rule(mine.code):
        return _write_own_part(contracts.read_contract(file), mine, file, folder)


def _write_own_part(contract: contracts.Contract, mine: SiteSettings, file: Path, folder: Path) -> SeedsetFile:
    config, use, name = configure_site(contract, mine), contract.algorithm.public, mine.file.site
    if use is None:
        raise ConfigError(
            f"{file}: algorithm {config.algorithm['name']!r} has no public seed set to export; `fedmutual data give` is for "
            "contracts with an algorithm that has one, such as fedh2l"
        )
    read = data.prepare(config)
    federation = data.load(config, read, gathered=lambda *_: None)
    part = list_public_parts(federation, read)[name]
    if part.rows is None:
        raise ConfigError(
            f"{file}: the key 'split.public' is not set, the fraction of each site's training data that it gives to all"
        )
    if federation.space.targets != "classes":
        raise ConfigError(
            f"{file}: training.task learns {federation.space.targets}, and the public seed set of real sites is of classes"
        )
    x = part.examples.take(part.rows.index.tolist()).numpy()
    labels = part.rows.labels.astype(np.int64) if use.labelled else None
    made = SeedsetFile(name, x, labels, federation.space.classes, read[name].scaled)
    write_seedset_file(folder, made)
    return made


def describe_export(exported: SeedsetFile, folder: Path) -> Iterator[str]:
    """Yield sentences for the site's operator on the part that was written."""
    known = "and their labels" if exported.labels is not None else "and not their labels"
    path = make_seedset_path(folder, exported.site)
    yield f"{path}: {format_count(len(exported.x), 'example')} of site {exported.site!r}, {exported.size:,} bytes"
    if exported.labels is not None:
        yield f"of each class: {', '.join(f'{name} {n}' for name, n in zip(exported.classes, exported.counts, strict=True))}"
    yield (
        "Send this file to all other sites and to the person who submits the federation. They then know these examples "
        f"{known}, and this cannot be undone; the file has no other rows."
    )
