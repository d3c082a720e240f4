"""A folder of images: root/class/*.png; with train and test folders above the classes; or root/domain/class."""

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
from fedmutual.data.arrays import require_root
from fedmutual.data.draws import Names
from fedmutual.data.examples import BadRows, Part, Source, list_names
from fedmutual.errors import DataError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})
METADATA = "metadata.csv"  # columns: file_name, relative to the folder, and the column of data.group_by
_GRAY = frozenset({"1", "L", "LA"})
_COLOUR = frozenset({"RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr", "HSV"})


def read_folder(config: DataConfig, domains: bool) -> Source:
    """Return the images below data.root. `domains`: the folders above the class folders are the domains.

    Raises:
        ConfigError: data.root is not set.
        DataError: a folder is missing or has no images, the first image cannot be read, or the metadata lack a file.
    """
    root = require_root(config)
    split = config.test is None and (root / "train").is_dir() and (root / "test").is_dir()
    train, images = _read_part(root / "train" if split else root, root, config, domains, None)
    test = None
    if split or config.test is not None:
        place = config.test or root / "test"
        test, _ = _read_part(place, root if split else place, config, domains, images)
    notes = (f"images are read as gray, because the first image is gray ({images.files[0]})",) if images.gray else ()
    return Source(str(root), train, test, notes=notes)


class ImageExamples:
    """Image files that are decoded on demand to uint8 [C, H, W]: gray (C = 1) or colour (C = 3), as the first file is.

    Raises:
        BadRows: the first file cannot be read as an image.
    """

    def __init__(
        self, files: Sequence[Path], root: Path, size: tuple[int, ...] | None, like: "ImageExamples | None"
    ) -> None:
        self.files, self._root, self._size = files, root, size
        self._format: tuple[bool, tuple[int, int], Path] = like._format if like else self._read_format()
        self.gray, self._shape, self._first = self._format

    def __len__(self) -> int:
        return len(self.files)

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return the images of `rows` [B, C, H, W]; see `Examples.take`.

        Raises:
            BadRows: files cannot be read or have another size; the message names these files.
        """
        with ThreadPoolExecutor() as pool:
            images = list(pool.map(self._read_image, (self.files[r] for r in rows)))
        sentences = [f for f in images if isinstance(f, str)]
        if sentences:
            raise BadRows(*sentences)
        return torch.from_numpy(np.stack([f for f in images if not isinstance(f, str)]))

    def digest(self) -> bytes:
        """Return a digest of the files' names and sizes; reading all files may take hours."""
        files = [(str(f.relative_to(self._root)), os.path.getsize(f)) for f in self.files]
        return hashlib.sha256(repr(files).encode()).digest()

    @cached_property
    def _gray_minority(self) -> str:
        """The message where gray images are a minority of this part; else ""."""
        gray_files = [f for f in self.files if _is_gray(f)] if self._first == self.files[0] else self.files
        if 2 * len(gray_files) >= len(self.files):
            return ""
        others = f" (and {len(gray_files) - 1} more)" if len(gray_files) > 1 else ""
        return f"{gray_files[0]}{others} is gray and the other images are in colour; convert one or the other"

    def _read_format(self) -> tuple[bool, tuple[int, int], Path]:
        first = self.files[0]
        try:
            with Image.open(first) as image:
                return image.mode in _GRAY, (image.height, image.width), first
        except (OSError, UnidentifiedImageError) as problem:
            raise BadRows(_describe_unreadable(first, problem)) from None

    def _read_image(self, path: Path) -> npt.NDArray[np.uint8] | str:
        """Return the image [C, H, W], or a sentence that says why it cannot be used."""
        try:
            with Image.open(path) as image:
                if self.gray and image.mode in _COLOUR:
                    return self._gray_minority or f"{path} is in colour and {self._first} is gray; convert one or the other"
                image_array = convert_image(image, path, self.gray, self._size)
        except BadRows as problem:
            return str(problem)
        except Exception as problem:  # a damaged file raises many kinds of errors
            return _describe_unreadable(path, problem)
        if self._size is None and image_array.shape[1:] != self._shape:
            (height, width), (h, w) = image_array.shape[1:], self._shape
            return (
                f"{path} is {height} x {width} pixels and {self._first} is {h} x {w}; resize all with data.size = [{h}, {w}]"
            )
        return image_array


def decode_image(path: Path, gray: bool, size: tuple[int, ...] | None) -> npt.NDArray[np.uint8]:
    """Return one image file as uint8 [C, H, W], as `ImageExamples` reads it: C = 1 if `gray`; resized to `size` if given.

    Raises:
        BadRows: the file cannot be read as an image, has more than 8 bits a pixel, or is in colour although `gray` is true.
    """
    try:
        with Image.open(path) as image:
            if gray and image.mode in _COLOUR:
                raise BadRows(f"{path} is in colour and the model learned from gray images; convert it")
            return convert_image(image, path, gray, size)
    except BadRows:
        raise
    except Exception as problem:  # decoders fail in many ways on a damaged file
        raise BadRows(_describe_unreadable(path, problem)) from None


def convert_image(image: Image.Image, path: Path, gray: bool, size: tuple[int, ...] | None) -> npt.NDArray[np.uint8]:
    """Return an opened image as uint8 [C, H, W]: C = 1 if `gray`, else 3. size: (H, W), or None to keep the size.

    Raises:
        BadRows: pixels have more than 8 bits; the message names `path`.
    """
    if image.mode not in _GRAY | _COLOUR:
        fix = "save it with 8 bits, or use a factory that scales it"
        raise BadRows(f"{path} has more than 8 bits a pixel (mode {image.mode}); {fix}")
    converted = image.convert("L" if gray else "RGB")
    if size is not None:
        converted = converted.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    x = np.asarray(converted)
    return x[None] if gray else np.ascontiguousarray(x.transpose(2, 0, 1))


def _is_gray(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            return image.mode in _GRAY
    except (OSError, UnidentifiedImageError):
        return False


def _describe_unreadable(path: Path, problem: Exception) -> str:
    reason = str(problem).replace(str(path), "").strip(" :'") or type(problem).__name__
    return f"{path} cannot be read as an image ({reason}); fix or remove it"


def _read_part(
    place: Path, base: Path, config: DataConfig, domains: bool, like: ImageExamples | None
) -> tuple[Part, ImageExamples]:
    if not place.is_dir():
        raise DataError(f"{place}: there is no such folder; key 'data.root' or 'data.test' names it")
    files: list[Path] = []
    labels: list[str] = []
    domain_names: list[str] = []
    for domain in _list_folders(place) if domains else [place]:
        for class_folder in _list_folders(domain):
            class_files = sorted(
                f for f in class_folder.iterdir() if f.suffix.lower() in EXTENSIONS and not f.name.startswith(".")
            )
            if not class_files:
                raise DataError(
                    f"{class_folder}: the folder of class {class_folder.name!r} holds no images; fill or remove it "
                    "(images lie in "
                    "root/class, or in root/domain/class with partition.kind = 'domains')"
                )
            files += class_files
            labels += [class_folder.name] * len(class_files)
            domain_names += [domain.name] * len(class_files)
    x = ImageExamples(files, base, config.size, like)
    groups = _read_groups(base, files, config.group_by) if config.group_by is not None else None
    return Part(x, np.array(labels), lambda i: str(files[i]), groups, np.array(domain_names) if domains else None), x


def _list_folders(place: Path) -> list[Path]:
    folders = sorted(f for f in place.iterdir() if f.is_dir() and not f.name.startswith("."))
    if not folders:
        raise DataError(
            f"{place}: has no folder of a class; put images into root/class, or into root/domain/class with "
            "partition.kind = 'domains'"
        )
    return folders


def _read_groups(base: Path, files: Sequence[Path], column: str) -> Names:
    import pandas as pd  # takes 0.3 s: imported only for groups

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
            raise DataError(f"{path}: there is no column {name!r}; it has {list_names(list(table.columns))}")
    group_by_file = dict(zip((os.path.normpath(n) for n in table["file_name"]), table[column], strict=True))
    missing_files = [f for f in files if not group_by_file.get(str(f.relative_to(base)))]
    if missing_files:
        raise DataError(f"{path}: it names no {column} for {missing_files[0].relative_to(base)}; add a line for every image")
    return np.array([group_by_file[str(f.relative_to(base))] for f in files])
