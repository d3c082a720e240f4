"""The public seed set of real sites: each site gives its part as a file, and makes the set from the files of all sites.

A site compares the set with the contract. A file has plain arrays, and is read without any pickle.
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedmutual.algorithms.agree import describe_difference
from fedmutual.config.keys import Table
from fedmutual.core import Message, Public
from fedmutual.data import PublicSet, arrays
from fedmutual.data.draws import Index, count_classes
from fedmutual.data.examples import ArrayExamples, list_names
from fedmutual.data.federation import Federation, list_public_parts
from fedmutual.data.prepared import Prepared
from fedmutual.data.public import PublicPart, make_public_set
from fedmutual.data.rows import Rows
from fedmutual.data.scaling import Scaling, parse_scaling
from fedmutual.data.stores import ResidentStore, make_store
from fedmutual.errors import ConfigError, DataError, format_error
from fedmutual.federation.build import check_enough
from fedmutual.files import replace_file
from fedmutual.sites.schema import SeedsTable

_CHUNK = 1024
_ARRAYS = ("x", "y", "classes", "about")
_WORDS = 2**24  # bytes of an array of text: names of classes, scaling


@dataclass(frozen=True)
class SeedsetFile:
    """The part of one site."""

    site: str
    x: npt.NDArray[Any]  # [n, *shape] as its source has them: uint8, float32, or int64 for ids
    labels: Index | None  # [n] numbers in the order of the classes; None: they stay with the site
    classes: tuple[str, ...]
    scaling: Scaling

    @property
    def examples(self) -> ArrayExamples:
        """Return the examples, [n, *shape] as in `x`, which data sets take by number."""
        return ArrayExamples(self.x)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one example after scaling: for example (channels, height, width)."""
        return (self.x.shape[1], *(self.scaling.size or self.x.shape[2:]))

    @property
    def counts(self) -> list[int]:
        """Return the number of examples of each class; 0 for all classes where labels stay with the site."""
        known = np.empty(0, dtype=np.int64) if self.labels is None else self.labels
        counts: list[int] = count_classes(known, len(self.classes)).tolist()
        return counts

    @property
    def size(self) -> int:
        """Return the bytes of the examples and the labels."""
        return self.x.nbytes + (0 if self.labels is None else self.labels.nbytes)


def make_seedset_path(folder: Path, site: str) -> Path:
    """Return the path of a site's part in a folder of parts."""
    return folder / f"{site}.npz"


def write_seedset_file(folder: Path, content: SeedsetFile) -> Path:
    """Write a part completely or not at all, and return its path. Raises RunError where the file cannot be written."""
    about = {"format": 1, "site": content.site, "scaling": content.scaling.record()}
    contents = {"x": content.x, "classes": np.array(content.classes), "about": np.array(json.dumps(about))}
    with replace_file(make_seedset_path(folder, content.site)) as file:
        np.savez(file, **contents, **({} if content.labels is None else {"y": content.labels}))  # type: ignore[arg-type]
    return make_seedset_path(folder, content.site)


def read_seedset_file(folder: Path, site: str) -> SeedsetFile:
    """Return a site's part.

    Raises:
        DataError: the file is missing, damaged or a pickle, has other arrays, or unpacks to more bytes than the file has.
    """
    path, fix = make_seedset_path(folder, site), f"have site {site!r} write its part of the public seed set again"
    excess = _find_excess(path)
    if excess is not None:
        raise DataError(f"{path}: {excess}; {fix}")
    contents = arrays.read_arrays(path, f"have site {site!r} send its part of the public seed set", fix)
    try:
        about = json.loads(str(contents["about"]))
        scaling = parse_scaling(about["scaling"])
        if about["format"] != 1 or not scaling.divisor > 0:
            raise ValueError("of another format")
        labels, classes = contents.get("y"), contents["classes"].reshape(-1).tolist()
        part = SeedsetFile(site, contents["x"], labels, tuple(map(str, classes)), scaling)
        why = f"it is of site {about['site']!r}" if about["site"] != site else _find_fault(part)
    except (KeyError, TypeError, ValueError, RecursionError):
        why = _find_foreign(list(contents))
    if why is not None:
        raise DataError(f"{path}: {why}; {fix}")
    return part


def _find_excess(path: Path) -> str | None:
    """Return in one clause why reading a part could need more memory than the size of its file.

    None: reading cannot, or the file is no archive, which `read_arrays` reports. The author of an archive can state any
    size and any shape. So members must not be compressed, and the shape of an array is compared with the bytes of the file
    before memory is allocated.
    """
    try:
        with path.open("rb") as file:
            begins = file.read(len(np.lib.format.MAGIC_PREFIX))
        if begins == np.lib.format.MAGIC_PREFIX:
            return "holds a single array"
        if not begins.startswith(b"PK"):
            return None
        with zipfile.ZipFile(path) as archive:
            members, room = archive.infolist(), path.stat().st_size
            names = [member.filename.removesuffix(".npy") for member in members]
            if not set(names) <= set(_ARRAYS):
                return _find_foreign(names)
            if len(set(names)) < len(names):
                return "it holds an array twice"
            for member in members:
                if member.compress_type != zipfile.ZIP_STORED:
                    return f"its {member.filename!r} is compressed, and `fedmutual data give` does not compress"
                if max(member.file_size, member.compress_size) > room:
                    return f"its {member.filename!r} claims to have {member.file_size:,} bytes, more than the whole file"
                excess = _find_array_excess(archive, member)
                if excess is not None:
                    return excess
    except FileNotFoundError:
        return None
    except Exception as problem:  # a damaged file makes numpy and zipfile fail in many ways
        return f"no npz file of arrays ({format_error(problem)})"
    return None


def _find_foreign(names: Sequence[str]) -> str:
    return f"it is not what `fedmutual data give` wrote, but holds {list_names(names) or 'nothing'}"


def _find_array_excess(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str | None:
    """Why an array would be allocated that its member does not fill, in one clause; None: it would not."""
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in headers:
            return f"its {member.filename!r} is of another form than numpy.savez writes"
        shape, _, dtype = headers[version](file)
        size = prod(shape) * dtype.itemsize
        if not dtype.hasobject and size != member.file_size - file.tell():
            return f"its {member.filename!r} states {size:,} bytes and has {member.file_size - file.tell():,}"
    if dtype.kind in "US" and size > _WORDS:
        return f"its {member.filename!r} holds {size:,} bytes of text, and {_WORDS:,} are enough"
    return None


def _find_fault(content: SeedsetFile) -> str | None:
    """Return in one clause why a part is invalid; None where the part is valid."""
    x, y, mean = content.x, content.labels, content.scaling.mean
    dtypes = (np.uint8, np.float32) if content.scaling.dtype is None else (np.int64,)
    if x.ndim not in (2, 3, 4, 5) or x.dtype not in dtypes or not x.size:
        return f"its examples are {x.dtype} of the shape {list(x.shape)}, and no images or features"
    if len(mean) not in (0, x.shape[1]) or len(content.scaling.std) != len(mean) or 0 in content.scaling.std:
        return f"it has {len(mean)} means and {len(content.scaling.std)} deviations for {x.shape[1]} channels or features"
    if content.scaling.size is not None and (x.ndim - 2 != len(content.scaling.size) or min(content.scaling.size) < 1):
        return f"its examples of the shape {list(x.shape[1:])} are to be resized to {list(content.scaling.size)}"
    if y is not None and (y.shape != (len(x),) or y.dtype != np.int64 or y.min() < 0 or y.max() >= len(content.classes)):
        return f"its labels are not {len(x)} numbers of {len(content.classes)} classes"
    return None


def find_mismatch(part: SeedsetFile, shape: Sequence[int], classes: Sequence[str], scaling: Scaling) -> str | None:
    """Return in one clause how a part differs from the wanted form, or None. Each site chooses the dtype of its examples."""
    if part.shape != tuple(shape):
        return f"its examples have the shape {list(part.shape)}, and {list(shape)} is wanted"
    if part.classes != tuple(classes):
        return (
            f"its labels are of the classes {list_names(part.classes)}, and {list_names(classes)} are wanted, in this order"
        )
    if part.scaling.dtype != scaling.dtype:
        stated_type, wanted_type = (s.dtype or "float32" for s in (part.scaling, scaling))
        return f"its examples are of type {stated_type}, but the network takes {wanted_type} (int64 are ids)"
    if (part.scaling.mean, part.scaling.std) != (scaling.mean, scaling.std):
        stated, wanted = ([list(s.mean), list(s.std)] for s in (part.scaling, scaling))
        return f"its examples are to be scaled by data.mean and data.std {stated}, and {wanted} are wanted"
    return None


def record_seedset(folder: Path, sites: Sequence[str], shape: Sequence[int], classes: Sequence[str], use: Public) -> Table:
    """Return the record (`SeedsTable`) of the public seed set in a contract, with counts of labels if all sites give labels.

    Raises UserError where a site's file is missing, damaged, or does not fit the others'; or the examples are too few.
    """
    files = {i: _read_part(folder, i, use.labelled) for i in sites}
    for i, one in files.items():
        _check(make_seedset_path(folder, i), find_mismatch(one, shape, classes, files[sites[0]].scaling))
    check_enough(use, {i: len(one.x) for i, one in files.items()})
    parts = {i: _read_site_part(one, make_seedset_path(folder, i)) for i, one in files.items()}
    public, single = _gather_parts(parts, classes), {i: _gather_parts({i: part}, classes) for i, part in parts.items()}
    about = SeedsTable(
        rows={i: len(rows) for i, rows in public.owners.items()},
        counts={i: list(counts) for i, counts in public.counts.items()} if use.labelled else None,
        bytes=public.count_bytes(use.labelled),
        digest=public.digest if use.labelled else public.unlabelled,
        parts={i: bytes(gathered.summary(use.labelled)["digest"].tolist()).hex() for i, gathered in single.items()},
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
