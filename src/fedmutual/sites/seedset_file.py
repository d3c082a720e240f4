"""One site's part of the public seed set, as the file that it gives to the others: plain arrays, read without any pickle."""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmutual.data import arrays
from fedmutual.data.draws import Index, count_classes
from fedmutual.data.examples import ArrayExamples, list_names
from fedmutual.data.scaling import Scaling, parse_scaling
from fedmutual.errors import DataError, format_error
from fedmutual.files import replace_file

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
    if content.scaling.size is not None and (x.ndim != 4 or min(content.scaling.size) < 1):
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
