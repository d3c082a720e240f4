"""The public seed set of real sites: each site makes it from the files of all, and compares it with the contract."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedmutual.algorithms.agree import describe_difference
from fedmutual.config.keys import Table
from fedmutual.core import Message, Public
from fedmutual.data import PublicSet
from fedmutual.data.federation import Federation, list_public_parts
from fedmutual.data.prepared import Prepared
from fedmutual.data.public import PublicPart, make_public_set
from fedmutual.data.rows import Rows
from fedmutual.data.stores import ResidentStore, make_store
from fedmutual.errors import ConfigError, DataError
from fedmutual.federation.validate import check_enough
from fedmutual.sites.schema import SeedsTable
from fedmutual.sites.seedset_file import SeedsetFile, find_mismatch, make_seedset_path, read_seedset_file

_CHUNK = 1024


def record_seedset(folder: Path, sites: Sequence[str], shape: Sequence[int], classes: Sequence[str], use: Public) -> Table:
    """Return the record (`SeedsTable`) of the public seed set in a contract, with counts of labels if all sites give labels.

    Raises UserError where a site's file is missing, damaged, or does not fit the others'; or the examples are too few.
    """
    files = {i: _read_part(folder, i, use.labelled) for i in sites}
    for i, one in files.items():
        _check(make_seedset_path(folder, i), find_mismatch(one, shape, classes, files[sites[0]].scaling))
    check_enough(use, {i: len(one.x) for i, one in files.items()})
    parts = {i: _read_site_part(one, make_seedset_path(folder, i)) for i, one in files.items()}
    public = _gather_parts(parts, classes)
    about = SeedsTable(
        rows={i: len(rows) for i, rows in public.owners.items()},
        counts={i: list(counts) for i, counts in public.counts.items()} if use.labelled else None,
        bytes=public.count_bytes(use.labelled),
        digest=public.digest if use.labelled else public.unlabelled,
        parts={i: _print(_gather_parts({i: part}, classes).summary(use.labelled)) for i, part in parts.items()},
    )
    return about.model_dump()


@dataclass(frozen=True)
class CollectedSeedset:
    """Makes the public seed set at one site: the site's rows from its data, the rows of other sites from their files."""

    folder: Path
    site: str
    sites: tuple[str, ...]
    labelled: bool
    agreed: Table | None  # the contract's record; None: it is not made yet

    def __call__(self, federation: Federation, prepared: Mapping[str, Prepared]) -> PublicSet | None:
        """Return the public seed set; None where this site gives no rows to the set.

        Raises UserError where a file is missing or damaged, or has other rows than this site's split; the set differs from
        the contract, or lacks a class that this site trains on.
        """
        site_part, classes = list_public_parts(federation, prepared)[self.site], federation.space.classes
        if site_part.rows is None:
            return None
        parts = {i: self._of(i, site_part, federation.space.shape, classes, prepared[self.site]) for i in self.sites}
        for i in self.sites if self.agreed is not None else ():
            self._check_agreed(i, _gather_parts({i: parts[i]}, classes).summary(self.labelled))
        for k, name in enumerate(classes):
            if self.labelled and site_part.trained[k] and not any(part.counts[k] for part in parts.values()):
                raise ConfigError(
                    f"{self.folder}: the public seed set has no example of class {name!r}, which this site trains on; raise "
                    "'split.public' in the federation's file, and have all sites write their parts again"
                )
        return _gather_parts(parts, classes)

    def _of(
        self, site: str, site_part: PublicPart, shape: Sequence[int], classes: Sequence[str], prepared: Prepared
    ) -> PublicPart:
        """Return the part of a site."""
        path, one = make_seedset_path(self.folder, site), _read_part(self.folder, site, self.labelled)
        _check(path, find_mismatch(one, shape, classes, prepared.scaled))
        if site != self.site:
            return _read_site_part(one, path, site_part.rows)
        if not _is_equal(one, site_part):
            raise DataError(
                f"{path}: the file does not contain the public rows that this site's split selects; the file was made with "
                "another seed, another split or other data; write the file again with `fedmutual data give`, and send it to "
                "all sites"
            )
        return site_part._replace(trained=[0] * len(classes))  # what the set lacks is said here

    def _check_agreed(self, site: str, mine: Message) -> None:
        """Raise DataError where a site's part differs from the part that the contract records."""
        assert self.agreed is not None
        rows, counts = torch.tensor(self.agreed["rows"][site]), self.agreed["counts"]
        digest = torch.frombuffer(bytearray.fromhex(self.agreed["parts"][site]), dtype=torch.uint8)
        theirs = {"rows": rows, "digest": digest} | ({"counts": torch.tensor(counts[site])} if self.labelled else {})
        unequal = describe_difference(mine, theirs)
        if unequal is not None:
            raise DataError(
                f"{make_seedset_path(self.folder, site)}: the contract was made with another part of site {site!r}: "
                f"this one has {unequal}; have it give all the same file"
            )


def _read_part(folder: Path, site: str, labelled: bool) -> SeedsetFile:
    """Return a site's part, with or without labels."""
    part = read_seedset_file(folder, site)
    if labelled and part.labels is None:
        raise DataError(
            f"{make_seedset_path(folder, site)}: it has no labels, which this algorithm gives to all; "
            f"have site {site!r} write its part again"
        )
    return part if labelled else replace(part, labels=None)


def _check(path: Path, fault: str | None) -> None:
    if fault is not None:
        raise DataError(f"{path}: {fault}; give the data of all sites one form, and have this part written again")


def _read_site_part(seedset_file: SeedsetFile, path: Path, like: Rows | None = None) -> PublicPart:
    """Return a part as data sets have parts. like: rows whose storage and augmentation the part takes; None: no training."""
    labels = np.full(len(seedset_file.x), -1) if seedset_file.labels is None else seedset_file.labels
    resident = like is not None and isinstance(like.store, ResidentStore)
    store, _ = make_store(
        seedset_file.examples, labels, seedset_file.scaling, lambda row: f"row {row} of {path}", resident, 0
    )
    rows = Rows(store, np.arange(len(labels)), None if like is None else like.augment)
    return PublicPart(rows, seedset_file.examples, seedset_file.counts, seedset_file.counts)


def _is_equal(seedset_file: SeedsetFile, site_part: PublicPart) -> bool:
    """Return whether a file has the rows of this site's split."""
    assert site_part.rows is not None
    index = site_part.rows.index
    if len(seedset_file.x) != len(index) or (
        seedset_file.labels is not None and not np.array_equal(seedset_file.labels, site_part.rows.labels)
    ):
        return False
    pieces = (slice(k, k + _CHUNK) for k in range(0, len(index), _CHUNK))
    return all(
        np.array_equal(seedset_file.x[rows], site_part.examples.take(index[rows].tolist()).numpy()) for rows in pieces
    )


def _gather_parts(parts: Mapping[str, PublicPart], classes: Sequence[str]) -> PublicSet:
    public = make_public_set(parts, tuple(classes))
    assert public is not None  # every part has rows
    return public


def _print(summary: Message) -> str:
    return bytes(summary["digest"].tolist()).hex()
