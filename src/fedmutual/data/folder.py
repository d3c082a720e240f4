"""A folder of images: root/class/*.png; root/train and root/test of such; root/domain/class where domains are clients."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedmutual.config import DataConfig
from fedmutual.data.arrays import given
from fedmutual.data.draws import Names
from fedmutual.data.examples import BadRows, Part, Source, listed
from fedmutual.errors import DataError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})
METADATA = "metadata.csv"  # columns file_name, relative to its folder, and whatever data.group_by may name
_GRAY = frozenset({"1", "L", "LA"})
_COLOUR = frozenset({"RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr", "HSV"})


def folder(config: DataConfig, domains: bool) -> Source:
    """The images below data.root. With `domains`, the folders above the classes' are the domains.

    Raises:
        DataError: no images where they should be, a class without any, metadata that miss a file.
    """
    root = given(config)
    split = config.test is None and (root / "train").is_dir() and (root / "test").is_dir()
    train, images = _part(root / "train" if split else root, root, config, domains, None)
    test = None
    if split or config.test is not None:
        place = config.test or root / "test"
        test, _ = _part(place, root if split else place, config, domains, images)
    notes = (f"images are read as gray, as the first is ({images.files[0]})",) if images.gray else ()
    return Source(str(root), train, test, notes=notes)


class Images:
    """Image files, decoded as they are needed: uint8 [C, H, W], gray (C = 1) or colour (C = 3) as the first file is."""

    def __init__(self, files: Sequence[Path], root: Path, size: tuple[int, ...] | None, like: "Images | None") -> None:
        self.files, self._root, self._size = files, root, size
        self._like: tuple[bool, tuple[int, int], Path] = like._like if like else self._look()
        self.gray, self._shape, self._first = self._like

    def __len__(self) -> int:
        return len(self.files)

    def take(self, rows: Sequence[int]) -> Tensor:
        """As `Examples.take`. Raises BadRows with every file that cannot be read or is of another size."""
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(self._read, (self.files[r] for r in rows)))
        bad = [f for f in found if isinstance(f, str)]
        if bad:
            raise BadRows(*bad)
        return torch.from_numpy(np.stack([f for f in found if not isinstance(f, str)]))

    def digest(self) -> bytes:
        """Over the files' names and sizes: to read all may take hours."""
        about = [(str(f.relative_to(self._root)), os.path.getsize(f)) for f in self.files]
        return hashlib.sha256(repr(about).encode()).digest()

    @cached_property
    def _few_gray(self) -> str:
        """The sentence on gray images among more in colour; "" where they are no fewer, or those of another part."""
        gray = [f for f in self.files if _is_gray(f)] if self._first == self.files[0] else self.files
        if 2 * len(gray) >= len(self.files):
            return ""
        more = f" (and {len(gray) - 1} more)" if len(gray) > 1 else ""
        return f"{gray[0]}{more} is gray and the other images are in colour; convert one or the other"

    def _look(self) -> tuple[bool, tuple[int, int], Path]:
        first = self.files[0]
        try:
            with Image.open(first) as image:
                return image.mode in _GRAY, (image.height, image.width), first
        except (OSError, UnidentifiedImageError) as problem:
            raise BadRows(_unreadable(first, problem)) from None

    def _read(self, path: Path) -> npt.NDArray[np.uint8] | str:
        """An image, or what is wrong with it."""
        try:
            with Image.open(path) as image:
                if self.gray and image.mode in _COLOUR:
                    return self._few_gray or f"{path} is in colour and {self._first} is gray; convert one or the other"
                found = pixels(image, path, self.gray, self._size)
        except BadRows as problem:
            return str(problem)
        except Exception as problem:  # decoders fail in many ways on a damaged file
            return _unreadable(path, problem)
        if self._size is None and found.shape[1:] != self._shape:
            (height, width), (h, w) = found.shape[1:], self._shape
            return (
                f"{path} is {height} x {width} pixels and {self._first} is {h} x {w}; resize all with data.size = [{h}, {w}]"
            )
        return found


def decode(path: Path, gray: bool, size: tuple[int, ...] | None) -> npt.NDArray[np.uint8]:
    """One image file as a data set of such reads it: uint8 [C, H, W], C = 1 where gray, resized to `size` if there is one.

    Raises:
        BadRows: it is no image that can be read, or in colour where gray ones are wanted.
    """
    try:
        with Image.open(path) as image:
            if gray and image.mode in _COLOUR:
                raise BadRows(f"{path} is in colour and the model learned from gray images; convert it")
            return pixels(image, path, gray, size)
    except BadRows:
        raise
    except Exception as problem:  # decoders fail in many ways on a damaged file
        raise BadRows(_unreadable(path, problem)) from None


def pixels(image: Image.Image, path: Path, gray: bool, size: tuple[int, ...] | None) -> npt.NDArray[np.uint8]:
    """An opened image as uint8 [C, H, W]. `path` is what messages call it; BadRows where 8 bits do not hold its pixels."""
    if image.mode not in _GRAY | _COLOUR:
        mend = "save it with 8, or bring a factory that scales it"
        raise BadRows(f"{path} has more than 8 bits a pixel (mode {image.mode}); {mend}")
    found = image.convert("L" if gray else "RGB")
    if size is not None:
        found = found.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    x = np.asarray(found)
    return x[None] if gray else np.ascontiguousarray(x.transpose(2, 0, 1))


def _is_gray(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            return image.mode in _GRAY
    except (OSError, UnidentifiedImageError):
        return False


def _unreadable(path: Path, problem: Exception) -> str:
    why = str(problem).replace(str(path), "").strip(" :'") or type(problem).__name__
    return f"{path} cannot be read as an image ({why}); mend it or take it out"


def _part(place: Path, base: Path, config: DataConfig, domains: bool, like: Images | None) -> tuple[Part, Images]:
    if not place.is_dir():
        raise DataError(f"{place}: there is no such folder; key 'data.root' or 'data.test' names it")
    files: list[Path] = []
    labels: list[str] = []
    origins: list[str] = []
    for domain in _folders(place) if domains else [place]:
        for kind in _folders(domain):
            found = sorted(f for f in kind.iterdir() if f.suffix.lower() in EXTENSIONS and not f.name.startswith("."))
            if not found:
                raise DataError(
                    f"{kind}: the folder of class {kind.name!r} holds no images; fill it or take it out (images lie in "
                    "root/class, or in root/domain/class with partition.kind = 'domains')"
                )
            files += found
            labels += [kind.name] * len(found)
            origins += [domain.name] * len(found)
    x = Images(files, base, config.size, like)
    groups = _groups(base, files, config.group_by) if config.group_by is not None else None
    return Part(x, np.array(labels), lambda i: str(files[i]), groups, np.array(origins) if domains else None), x


def _folders(place: Path) -> list[Path]:
    found = sorted(f for f in place.iterdir() if f.is_dir() and not f.name.startswith("."))
    if not found:
        raise DataError(
            f"{place}: there are no folders of classes in it; images lie in root/class, or in root/domain/class with "
            "partition.kind = 'domains'"
        )
    return found


def _groups(base: Path, files: Sequence[Path], column: str) -> Names:
    import pandas as pd  # a third of a second, which only who groups waits for

    path = base / METADATA
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except FileNotFoundError:
        raise DataError(
            f"{path}: there is no such file; data.group_by needs it, with the columns file_name and {column}"
        ) from None
    except (OSError, ValueError) as problem:
        raise DataError(f"{path}: cannot be read as CSV ({str(problem).strip().splitlines()[0]})") from None
    for name in ("file_name", column):
        if name not in table:
            raise DataError(f"{path}: there is no column {name!r}; it has {listed(list(table.columns))}")
    known = dict(zip((os.path.normpath(n) for n in table["file_name"]), table[column], strict=True))
    lacking = [f for f in files if not known.get(str(f.relative_to(base)))]
    if lacking:
        raise DataError(f"{path}: it names no {column} for {lacking[0].relative_to(base)}; add a line for every image")
    return np.array([known[str(f.relative_to(base))] for f in files])
