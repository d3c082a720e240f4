"""Image files as arrays [C, H, W], volumes as [C, D, H, W]: upright, on a white background, gray or in colour."""

import contextlib
import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from fedmutual.config import DataConfig
from fedmutual.data import medical
from fedmutual.data.examples import Examples
from fedmutual.errors import BadRows, format_count

# Formats that `_exceeds_8_bits` can judge: Pillow cuts the values of other formats, such as JPEG 2000, to 8 bits in silence.
_FORMATS = frozenset({"BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP"})
EXTENSIONS = frozenset(
    {".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"}
)
_GRAY = frozenset({"1", "L", "LA"})
_COLOUR = frozenset({"RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr", "HSV"})
_DEEP_GRAY = ("I", "F", "I;16", "I;16B", "I;16L")
_BITS_PER_SAMPLE, _NEW_SUBFILE_TYPE, _ORIENTATION, _PHOTOMETRIC = 258, 254, 274, 262  # tags of TIFF and EXIF
_COPY_OR_MASK = 1 | 4  # flags of NewSubfileType: a page is a smaller copy, or the transparency, of another page
_ON_WHITE = "transparent parts on white"
_ASPECTS = ("formats", "modes", "sizes", "conversions", "spacings")
_MOST_LISTED = 20

Pixels = npt.NDArray[Any]


class ImageExamples(Examples):
    """Files that are decoded on demand to [C, H, W] or [C, D, H, W], with the type and the channels of the first file.

    Images are gray (C = 1) or in colour (C = 3), uint8 if they have 8 bits a channel; deeper ones, DICOM and NIfTI are
    float32.

    Raises:
        BadRows: the first file cannot be used.
    """

    def __init__(self, files: Sequence[Path], root: Path, config: DataConfig, like: "ImageExamples | None") -> None:
        """like: the training images, whose first file decides instead of the first of these."""
        self.files, self._root, self._size, self._most = files, root, config.size, config.max
        self._first_file: Path = files[0] if like is None else like._first_file
        self.first: Pixels = read_file(files[0], config.max) if like is None else like.first

    def __len__(self) -> int:
        return len(self.files)

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return the images of `rows` [B, C, H, W], or volumes; see `Examples.take`.

        Raises:
            BadRows: files cannot be used or have another size; the message names these files.
        """
        with ThreadPoolExecutor() as pool:
            images = list(pool.map(self._read, (self.files[r] for r in rows)))
        sentences = [f for f in images if isinstance(f, str)]
        if sentences:
            raise BadRows(*sentences)
        return torch.from_numpy(np.stack([f for f in images if not isinstance(f, str)]))

    def digest(self) -> bytes:
        """Return a digest of the files' names and sizes; reading all files may take hours."""
        files = [(str(f.relative_to(self._root)), _measure(f)) for f in self.files]
        return hashlib.sha256(repr(files).encode()).digest()

    def _read(self, path: Path) -> Pixels | str:
        """Return the image, or a sentence that says why it cannot be used."""
        try:
            x = read_file(path, self._most)
        except BadRows as problem:
            return str(problem)
        (channels, *sides), dtype = self.first.shape, self.first.dtype
        if len(x) != channels and (len(x), channels) != (1, 3):
            about = "is in colour" if len(x) == 3 else f"has {format_count(len(x), 'channel')}"
            other = "gray" if channels == 1 else "in colour" if channels == 3 else f"of {channels} channels"
            return f"{path} {about} and {self._first_file} is {other}; convert one or the other"
        if x.ndim != self.first.ndim or x.dtype != dtype:
            here, there = (f"{_name_sides(a.shape[1:])} of {a.dtype}" for a in (x, self.first))
            return f"{path} is {here} and {self._first_file} is {there}; read files of one kind, or convert one or the other"
        if self._size is None and list(x.shape[1:]) != sides:
            here, there = _name_sides(x.shape[1:]), _name_sides(sides)
            fix = f"resize all with data.size = {list(sides)}"
            return f"{path} is {here} {'pixels' if len(sides) == 2 else 'voxels'} and {self._first_file} is {there}; {fix}"
        return _fit(x, channels, self._size)


def _measure(path: Path) -> int:
    """Return the bytes of a file, or of all DICOM slices in a folder."""
    return sum(map(os.path.getsize, medical.list_slices(path))) if path.is_dir() else os.path.getsize(path)


def _name_sides(sides: Sequence[int]) -> str:
    return " x ".join(map(str, sides))


def describe_files(files: Sequence[Path]) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return what files hold, by their headers, and remarks on what was converted.

    The first is aspect -> description -> number of files.
    """
    with ThreadPoolExecutor() as pool:
        descriptions = list(pool.map(_describe_file, files))
    counts = {aspect: Counter(about[aspect] for about in descriptions if about.get(aspect)) for aspect in _ASPECTS}
    notes = []
    transparent = [
        file for file, about in zip(files, descriptions, strict=True) if _ON_WHITE in about.get("conversions", "")
    ]
    if transparent:
        notes.append(
            f"{format_count(len(transparent), 'image')} can have transparent parts ({transparent[0]}, for example); "
            "these parts are read on a white background"
        )
    uneven = [(file, about["gaps"]) for file, about in zip(files, descriptions, strict=True) if about.get("gaps")]
    if uneven:
        notes.append(
            f"slices have uneven distances in {format_count(len(uneven), 'volume')} ({uneven[0][0]}: {uneven[0][1]} mm, for "
            "example); slices may be missing, and the volumes are not resampled to even distances"
        )
    if len(spacings := counts["spacings"].most_common()) > 1:
        notes.append(
            f"the files have {len(spacings)} spacings, {spacings[0][0]} and {spacings[-1][0]} mm for example; they are not "
            "resampled to one spacing"
        )
    return {aspect: dict(counter.most_common(_MOST_LISTED)) for aspect, counter in counts.items() if counter}, notes


def _describe_file(path: Path) -> Mapping[str, str]:
    """Return the description of a file by aspect; empty for a file that cannot be read, which is told where it is read."""
    try:
        if medical.find_ending(path) in medical.PACKAGES:
            return medical.describe_volume(path)
        with _open_image(path) as image:
            is_deep = _exceeds_8_bits(image)  # before the pixels are loaded, which EXIF data may need
            done = [f"{image.mode} to RGB"] if image.mode in _COLOUR - {"RGB", "RGBA"} else []
            done += [_ON_WHITE] if image.has_transparency_data else []
            with contextlib.suppress(Exception):  # damaged EXIF data
                done += ["turned by EXIF"] if image.getexif().get(_ORIENTATION, 1) in range(2, 9) else []
            return {
                "formats": str(image.format),
                "modes": image.mode + (", more than 8 bits" if is_deep else ""),
                "sizes": _name_sides((image.height, image.width)),
                "conversions": ", ".join(done),
            }
    except Exception:  # headers fail in many ways on a damaged file
        return {}


def decode_image(path: Path, channels: int, size: tuple[int, ...] | None, most: float | None = None) -> Pixels:
    """Return one file as [C, H, W] or [C, D, H, W], as `ImageExamples` reads it; resized to `size` if given.

    channels: C, those of the model. most: data.max.

    Raises:
        BadRows: the file cannot be used, or has other channels.
    """
    x = read_file(path, most)
    if len(x) != channels and (len(x), channels) != (1, 3):
        about = "is in colour and the model learned from gray images" if channels == 1 else f"has {len(x)} channels"
        raise BadRows(f"{path} {about}{'' if channels == 1 else f' and the model takes {channels}'}; convert it")
    return _fit(x, channels, size)


def read_file(path: Path, most: float | None) -> Pixels:
    """Return a file as a person sees it, [C, H, W] or [C, D, H, W]: uint8 of 8 bits a channel, else float32.

    An image is turned and mirrored as its EXIF orientation says, and its transparent parts are white. most: data.max, the
    greatest value that a file may hold.

    Raises:
        BadRows: the file cannot be used; see `_open_image`.
    """
    if medical.find_ending(path) in medical.PACKAGES:
        x = _read_volume(path)
    else:
        with _open_image(path) as image:
            x = _read_deep(image, path, most) if _exceeds_8_bits(image) else _make_array(_read_picture(image))
    if most is not None and x.max() > most:
        raise BadRows(f"{path} holds the value {x.max():g}, and data.max is {most:g}; raise data.max, or correct the file")
    return x


def _read_volume(path: Path) -> Pixels:
    ending = medical.find_ending(path)
    if not medical.is_installed(ending):
        raise BadRows(f"{path}: reading {ending} needs the package {medical.PACKAGES[ending]}: {medical.INSTALL}")
    try:
        return medical.read_volume(path)
    except Exception as problem:  # readers fail in many ways on a damaged file
        reason = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise BadRows(f"{path} cannot be read as {ending} ({reason}); fix or remove it") from None


def _read_picture(image: ImageFile) -> Image.Image:
    """Return the picture of an opened image of 8 bits, in the mode "L" (gray) or "RGB"."""
    mode = "L" if image.mode in _GRAY else "RGB"
    image.load()
    with contextlib.suppress(Exception):  # damaged EXIF data; an image that was turned before the error stays turned
        ImageOps.exif_transpose(image, in_place=True)
    if not image.has_transparency_data:
        return image.convert(mode)
    layer = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert(mode)


def _read_deep(image: ImageFile, path: Path, most: float | None) -> Pixels:
    """Return an opened image of more than 8 bits as float32 [C, H, W]; torchvision reads colours, which Pillow cuts."""
    if image.format != "PNG" and not (image.format == "TIFF" and image.mode in _DEEP_GRAY):
        raise BadRows(f"{path} has more than 8 bits a channel in a form that is not read; save it as PNG")
    if most is None:
        raise BadRows(
            f"{path} has more than 8 bits a channel, and values are never cut; set data.max to the greatest value that a "
            "file can hold, for example 4095 for 12 bits or 65535 for 16 bits"
        )
    if most < np.inf and isinstance(image, TiffImageFile) and image.tag_v2.get(_PHOTOMETRIC) == 0:  # not of a mask
        raise BadRows(
            f"{path} has more than 8 bits and the value 0 for white; invert it, and save it with the value 0 for black"
        )
    if image.mode in _DEEP_GRAY:
        x = np.asarray(image)[None]
    else:
        from torchvision.io import ImageReadMode, decode_png

        with warnings.catch_warnings():  # TorchVision moves its decoders to TorchCodec, which installs FFmpeg
            warnings.simplefilter("ignore", DeprecationWarning)
            content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            x = decode_png(content, ImageReadMode.UNCHANGED).numpy()
    if len(x) not in (1, 3):
        raise BadRows(f"{path} has more than 8 bits a channel and an alpha channel; save it without the alpha channel")
    places = Image.fromarray(np.arange(x[0].size, dtype=np.int32).reshape(x.shape[1:]))
    with contextlib.suppress(Exception):  # damaged EXIF data
        places.getexif()[_ORIENTATION] = image.getexif().get(_ORIENTATION, 1)
        ImageOps.exif_transpose(places, in_place=True)
    return x.astype(np.float32).reshape(len(x), -1)[:, np.asarray(places)]


def read_mask(path: Path, size: tuple[int, ...] | None) -> Pixels:
    """Return the whole numbers of a mask file [H, W] or [D, H, W]; those of a palette are its positions.

    size: the sides to which the mask is resized, each pixel with the value of the nearest one.

    Raises:
        BadRows: the file cannot be read, or holds colours or decimal numbers.
    """
    if medical.find_ending(path) in medical.PACKAGES:
        x = _read_volume(path)
    else:
        with _open_image(path) as image:
            if _exceeds_8_bits(image):
                x = _read_deep(image, path, np.inf)
            else:
                image.load()
                with contextlib.suppress(Exception):
                    ImageOps.exif_transpose(image, in_place=True)
                x = np.atleast_3d(np.asarray(image)).transpose(2, 0, 1)
    if (x[:3] != x[:1]).any():
        raise BadRows(f"{path} holds colours; a mask has one number for each pixel: save it as gray or with a palette")
    mask: Pixels = x[0]
    if mask.dtype.kind == "f" and (mask != np.round(mask)).any():
        raise BadRows(f"{path} holds decimal numbers; a mask has whole numbers, the class of each pixel")
    if size is not None and mask.shape != tuple(size):
        near = torch.from_numpy(mask[None, None].astype(np.float32))
        mask = F.interpolate(near, tuple(size), mode="nearest-exact")[0, 0].numpy()
    return mask.astype(np.int64 if mask.dtype.kind in "fi" else np.uint8)


@contextlib.contextmanager
def _open_image(path: Path) -> Iterator[ImageFile]:
    """Open an image file; the pixels are not decoded yet.

    Raises:
        BadRows: the file cannot be read as an image, here or by the caller, or holds several pictures.
    """
    try:
        # A path would do, but Pillow 13 maps a TIFF of a path into memory, and scrambles the pixels if the image is turned.
        with path.open("rb") as file, Image.open(file) as image:
            if image.format not in _FORMATS:  # Pillow tells the format by the content, whatever the ending is
                raise BadRows(f"{path} holds an image of the format {image.format}; save it as PNG, with 8 bits a channel")
            if image.mode not in _GRAY | _COLOUR and not _exceeds_8_bits(image):
                raise BadRows(f"{path} has pixels of the mode {image.mode}; save it as gray or RGB with 8 bits")
            count = _count_pictures(image)
            if count > 1:
                raise BadRows(f"{path} holds {count} pictures; save each picture as a file of its own")
            yield image
    except BadRows:
        raise
    except UnidentifiedImageError:
        raise BadRows(f"{path} cannot be read as an image (its format is unknown); fix or remove it") from None
    except Exception as problem:  # decoders fail in many ways on a damaged file
        reason = str(problem).replace(str(path), "").strip(" :'") or type(problem).__name__
        raise BadRows(f"{path} cannot be read as an image ({reason}); fix or remove it") from None


def _exceeds_8_bits(image: ImageFile) -> bool:
    """Return whether an opened image has more than 8 bits a channel, even if Pillow would cut its values to 8 bits."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return True
    if isinstance(image, TiffImageFile):
        return any(bits > 8 for bits in image.tag_v2.get(_BITS_PER_SAMPLE, ()))
    if image.format == "PPM":
        arguments = image.tile[0].args
        return isinstance(arguments, tuple) and len(arguments) > 1 and arguments[1] > 255  # the greatest value
    return image.format == "PNG" and ";16" in str(image.tile[0].args)


def _count_pictures(image: ImageFile) -> int:
    """Return the number of pictures in an opened file, without previews and smaller copies of the first picture."""
    count: int = getattr(image, "n_frames", 1)
    if image.format == "MPO":  # a photo with previews
        return 1
    if not isinstance(image, TiffImageFile):
        return count
    pictures = 0
    for page in range(count):
        image.seek(page)
        pictures += not image.tag_v2.get(_NEW_SUBFILE_TYPE, 0) & _COPY_OR_MASK
    image.seek(0)
    return pictures


def _make_array(picture: Image.Image) -> Pixels:
    """Return a picture as uint8 [C, H, W]."""
    x = np.asarray(picture)
    return x[None] if x.ndim == 2 else np.ascontiguousarray(x.transpose(2, 0, 1))


def _fit(x: Pixels, channels: int, size: tuple[int, ...] | None) -> Pixels:
    """Return x [C, *sides] with this many channels and these sides: bilinear, of volumes trilinear."""
    x = np.repeat(x, channels, 0) if len(x) < channels else x
    if size is None or len(size) != x.ndim - 1:  # a size of other axes is refused where all keys are checked
        return x
    if x.dtype != np.uint8 or x.ndim != 3:
        mode = "bilinear" if x.ndim == 3 else "trilinear"
        resized = F.interpolate(torch.from_numpy(x[None]).float(), tuple(size), mode=mode, antialias=x.ndim == 3)[0]
        return resized.round().to(torch.uint8).numpy() if x.dtype == np.uint8 else resized.numpy()
    picture = Image.fromarray(x[0] if len(x) == 1 else x.transpose(1, 2, 0))
    return _make_array(picture.resize((size[1], size[0]), Image.Resampling.BILINEAR))
