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
from pydantic import ValidationError

from fedmutual.algorithms.agree import describe_difference
from fedmutual.calling import find_image_shape
from fedmutual.config.keys import Table
from fedmutual.core import Message, Public
from fedmutual.data import PublicSet
from fedmutual.data.draws import Index, count_classes
from fedmutual.data.examples import ArrayExamples, list_names
from fedmutual.data.federation import Federation, list_public_parts
from fedmutual.data.prepared import Prepared
from fedmutual.data.public import PublicPart, make_public_set
from fedmutual.data.rows import Rows
from fedmutual.data.scaling import Scaling
from fedmutual.data.stores import ResidentStore, make_store
from fedmutual.errors import ConfigError, DataError, format_error
from fedmutual.federation.build import check_enough
from fedmutual.files import replace_file
from fedmutual.rundir.record_files import describe_violation
from fedmutual.sites.schema import SeedsTable

_ARRAYS = {"x", "y", "classes", "about"}
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


def write_seedset_file(folder: Path, content: SeedsetFile) -> None:
    """Write a part completely or not at all. Raises RunError where the file cannot be written."""
    written = {"divisor", "mean", "std", "size", *(() if content.scaling.dtype is None else ("dtype",))}
    about = {"format": 1, "site": content.site, "scaling": content.scaling.model_dump(mode="json", include=written)}
    contents = {"x": content.x, "classes": np.array(content.classes), "about": np.array(json.dumps(about))}
    with replace_file(make_seedset_path(folder, content.site)) as file:
        np.savez(file, **contents, **({} if content.labels is None else {"y": content.labels}))  # type: ignore[arg-type]


def read_seedset_file(folder: Path, site: str) -> SeedsetFile:
    """Return a site's part. Raises DataError where the file is missing, or is not what `write_seedset_file` writes."""
    path, fix = make_seedset_path(folder, site), f"have site {site!r} write its part of the public seed set again"
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            if not members.keys() <= _ARRAYS or len(members) < len(archive.infolist()):
                raise DataError(f"it has the arrays {list_names(archive.namelist())}")
            contents = {name: _read_array(archive, member, path.stat().st_size) for name, member in members.items()}
        about = json.loads(str(contents["about"]))
        if about["format"] != 1 or about["site"] != site:
            raise DataError(f"it is of format {about['format']!r} and of site {about['site']!r}")
        classes = tuple(map(str, contents["classes"].reshape(-1).tolist()))
        scaling = Scaling.model_validate(about["scaling"], strict=False)
        part = SeedsetFile(site, contents["x"], contents.get("y"), classes, scaling)
        why = _find_fault(part)
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; have site {site!r} send its part of the public seed set") from None
    except ValidationError as problem:
        why = f"its scaling has a wrong {describe_violation(problem)}"
    except Exception as problem:  # a damaged file makes numpy and zipfile fail in many ways
        reason = str(problem) if isinstance(problem, DataError) else format_error(problem)
        why = f"it is not what `fedmutual data give` wrote ({reason})"
    if why is not None:
        raise DataError(f"{path}: {why}; {fix}")
    return part


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, room: int) -> npt.NDArray[Any]:
    """Return an array of an archive, for which no more memory is needed than the file has bytes (`room`).

    The author of an archive can state any size and any shape. So a member must not be compressed, and its bytes are read
    before its shape is used. Python objects are refused, because unpickling can run code.
    """
    if member.compress_type != zipfile.ZIP_STORED or max(member.file_size, member.compress_size) > room:
        raise DataError(f"{member.filename!r} is compressed, or states {member.file_size:,} bytes in a file of {room:,}")
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
        content = bytearray(file.read())
    if dtype.hasobject or (dtype.kind in "US" and len(content) > _WORDS) or len(content) != prod(shape) * dtype.itemsize:
        raise DataError(f"{member.filename!r} is of {dtype} and of shape {shape}, and has {len(content):,} bytes")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")


def _find_fault(content: SeedsetFile) -> str | None:
    """Return in one clause why a part is invalid; None where the part is valid."""
    x, y, mean = content.x, content.labels, content.scaling.mean
    dtypes = (np.uint8, np.float32) if content.scaling.dtype is None else (np.int64,)
    if x.ndim not in (2, 3, 4, 5) or x.dtype not in dtypes or not x.size:
        return f"its examples are {x.dtype} of the shape {list(x.shape)}, and no images or features"
    if len(mean) not in (0, x.shape[1]) or len(content.scaling.std) != len(mean) or 0 in content.scaling.std:
        return f"it has {len(mean)} means and {len(content.scaling.std)} deviations for {x.shape[1]} channels or features"
    if content.scaling.size is not None and x.ndim - 2 != len(content.scaling.size):
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


def record_seedset(
    folder: Path, sites: Sequence[str], shape: Sequence[int], classes: Sequence[str], use: Public, all_have: bool
) -> Table:
    """Return the record (`SeedsTable`) of the public seed set in a contract, with counts of labels if all sites give labels.

    all_have: whether the rows are of a file that all sites have, so that no site sends any. Raises UserError where a site's
    file is missing, damaged, or does not fit the others'; or the examples are too few.
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
        bytes=dict.fromkeys(files, 0) if all_have else public.count_bytes(use.labelled),
        digest=public.digest if use.labelled else public.unlabelled,
        parts={i: bytes(gathered.summary(use.labelled)["digest"].tolist()).hex() for i, gathered in single.items()},
    )
    return about.model_dump()


def collect_seedset(
    folder: Path,
    site: str,
    sites: Sequence[str],
    use: Public,
    agreed: Table | None,
    all_have: bool,
    federation: Federation,
    prepared: Mapping[str, Prepared],
) -> PublicSet | None:
    """Return the public seed set at one site: its rows from its data, and the rows of other sites from their files.

    None: this site gives no rows to the set. agreed: the contract's record; None: it is not made yet. all_have: whether the
    rows are of a file that all sites have; then this site's rows are from its file, too. Raises UserError where
    a file is missing or damaged, or has other rows than this site's split; the set differs from the contract, or lacks a
    class that this site trains on.
    """
    mine, space, classes = list_public_parts(federation, prepared)[site], federation.space, federation.space.classes
    if mine.rows is None and not all_have:
        return None
    like = mine.rows or federation.clients[site].validation  # which are not augmented, as the rows of a file
    parts = {}
    for i in sites:
        is_known = use.labelled or (all_have and use.own_labels and i == site)
        path, one = make_seedset_path(folder, i), _read_part(folder, i, is_known)
        _check(path, find_mismatch(one, find_image_shape(space.shape), classes, space.scaling))
        parts[i] = given = _read_site_part(one, path, like)
        if mine.rows is not None and i == site:
            parts[i] = mine._replace(trained=[0] * len(classes))  # the loop below warns of classes that the set lacks
        found = _gather_parts({i: parts[i]}, classes).summary(use.labelled)
        if parts[i] is not given and describe_difference(found, _gather_parts({i: given}, classes).summary(use.labelled)):
            raise DataError(
                f"{path}: the file does not contain the public rows that this site's split selects; the file was made with "
                "another seed, another split or other data; write the file again with `fedmutual data give`, and send it to "
                "all sites"
            )
        if agreed is not None:
            _check_agreed(path, i, found, agreed)
    for k, name in enumerate(classes):
        if use.labelled and mine.trained[k] and not any(part.counts[k] for part in parts.values()):
            raise ConfigError(
                f"{folder}: the public seed set has no example of class {name!r}, which this site trains on; raise "
                "'split.public' in the federation's file, or add examples to 'split.public_file', and have all sites write "
                "their parts again"
            )
    public = _gather_parts(parts, classes)
    return replace(public, sizes=dict.fromkeys(sites, 0), label_size=0, file=folder) if all_have else public


def _check_agreed(path: Path, site: str, mine: Message, agreed: Table) -> None:
    """Raise DataError where a site's part differs from the part that the contract records."""
    digest = torch.frombuffer(bytearray.fromhex(agreed["parts"][site]), dtype=torch.uint8)
    theirs = {"rows": torch.tensor(agreed["rows"][site]), "digest": digest}
    theirs |= {} if agreed["counts"] is None else {"counts": torch.tensor(agreed["counts"][site])}
    unequal = describe_difference(mine, theirs)
    if unequal is not None:
        raise DataError(
            f"{path}: the contract was made with another part of site {site!r}: this one has {unequal}; have it give all "
            "the same file"
        )


def _read_part(folder: Path, site: str, labelled: bool) -> SeedsetFile:
    """Return a site's part, with or without labels."""
    part = read_seedset_file(folder, site)
    if labelled and part.labels is None:
        raise DataError(
            f"{make_seedset_path(folder, site)}: it has no labels, which this algorithm needs; "
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
    examples = ArrayExamples(seedset_file.x)
    store, _ = make_store(examples, labels, seedset_file.scaling, lambda row: f"row {row} of {path}", resident, 0)
    rows = Rows(store, np.arange(len(labels)), None if like is None else like.augment)
    return PublicPart(rows, examples, seedset_file.counts, seedset_file.counts)


def _gather_parts(parts: Mapping[str, PublicPart], classes: Sequence[str]) -> PublicSet:
    public = make_public_set(parts, tuple(classes))
    assert public is not None  # every part has rows
    return public
