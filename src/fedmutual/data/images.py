"""Image files as pixels of 8 bits: upright, on a white background, gray or in colour."""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import TiffImageFile
from torch import Tensor

from fedmutual.data.examples import BadRows, Examples
from fedmutual.errors import format_count

# Formats that `_exceeds_8_bits` can judge: Pillow cuts the values of other formats, such as JPEG 2000, to 8 bits in silence.
_FORMATS = frozenset({"BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP"})
EXTENSIONS = frozenset(
    {".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"}
)
_GRAY = frozenset({"1", "L", "LA"})
_COLOUR = frozenset({"RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr", "HSV"})
_BITS_PER_SAMPLE, _NEW_SUBFILE_TYPE = 258, 254  # tags of TIFF
_COPY_OR_MASK = 1 | 4  # flags of NewSubfileType: a page is a smaller copy, or the transparency, of another page


class ImageExamples(Examples):
    """Image files that are decoded on demand to uint8 [C, H, W]: gray (C = 1) or colour (C = 3), as the first file is.

    Raises:
        BadRows: the first file cannot be used.
    """

    def __init__(
        self, files: Sequence[Path], root: Path, size: tuple[int, ...] | None, like: "ImageExamples | None"
    ) -> None:
        """like: the training images, whose first file decides instead of the first of these."""
        self.files, self._root, self._size = files, root, size
        if like is None:
            first = read_picture(files[0])
            self.gray, self._shape, self._first = first.mode == "L", (first.height, first.width), files[0]
        else:
            self.gray, self._shape, self._first = like.gray, like._shape, like._first

    def __len__(self) -> int:
        return len(self.files)

    def take(self, rows: Sequence[int]) -> Tensor:
        """Return the images of `rows` [B, C, H, W]; see `Examples.take`.

        Raises:
            BadRows: files cannot be used or have another size; the message names these files.
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

    def describe_transparency(self) -> Iterator[str]:
        """Yield a sentence if images have an alpha channel or a transparent colour."""
        with ThreadPoolExecutor() as pool:
            are_transparent = pool.map(_can_be_transparent, self.files)
            transparent = [f for f, is_transparent in zip(self.files, are_transparent, strict=True) if is_transparent]
        if transparent:
            yield (
                f"{format_count(len(transparent), 'image')} can have transparent parts ({transparent[0]}, for example); "
                "these parts are read on a white background"
            )

    def _read_image(self, path: Path) -> npt.NDArray[np.uint8] | str:
        """Return the image [C, H, W], or a sentence that says why it cannot be used."""
        try:
            picture = read_picture(path)
        except BadRows as problem:
            return str(problem)
        if self.gray and picture.mode != "L":
            return f"{path} is in colour and {self._first} is gray; convert one or the other"
        if self._size is None and (picture.height, picture.width) != self._shape:
            h, w = self._shape
            return (
                f"{path} is {picture.height} x {picture.width} pixels and {self._first} is {h} x {w}; "
                f"resize all with data.size = [{h}, {w}]"
            )
        return _make_array(picture, self.gray, self._size)


def decode_image(path: Path, gray: bool, size: tuple[int, ...] | None) -> npt.NDArray[np.uint8]:
    """Return one image file as uint8 [C, H, W], as `ImageExamples` reads it: C = 1 if `gray`; resized to `size` if given.

    Raises:
        BadRows: the file cannot be used, or is in colour although `gray` is true.
    """
    picture = read_picture(path)
    if gray and picture.mode != "L":
        raise BadRows(f"{path} is in colour and the model learned from gray images; convert it")
    return _make_array(picture, gray, size)


def read_picture(path: Path) -> Image.Image:
    """Return the picture of an image file as a person sees the picture: in the mode "L" (gray) or "RGB".

    The picture is turned and mirrored as the file's EXIF orientation says, and its transparent parts are white.

    Raises:
        BadRows: the file cannot be used; see `_open_image`.
    """
    with _open_image(path) as image:
        mode = "L" if image.mode in _GRAY else "RGB"
        image.load()
        with contextlib.suppress(Exception):  # damaged EXIF data; an image that was turned before the error stays turned
            ImageOps.exif_transpose(image, in_place=True)
        if not image.has_transparency_data:
            return image.convert(mode)
        layer = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert(mode)


@contextlib.contextmanager
def _open_image(path: Path) -> Iterator[ImageFile]:
    """Open an image file; the pixels are not decoded yet.

    Raises:
        BadRows: the file cannot be read as an image, here or by the caller, has more than 8 bits a channel, or holds
            several pictures.
    """
    try:
        # A path would do, but Pillow 13 maps a TIFF of a path into memory, and scrambles the pixels if the image is turned.
        with path.open("rb") as file, Image.open(file) as image:
            if image.format not in _FORMATS:  # Pillow tells the format by the content, whatever the ending is
                raise BadRows(f"{path} holds an image of the format {image.format}; save it as PNG, with 8 bits a channel")
            if _exceeds_8_bits(image):
                raise BadRows(
                    f"{path} has more than 8 bits a channel, and values are never cut; scale it and save it with 8 bits, or "
                    "read the images with code of your own (data.name = 'module:factory')"
                )
            if image.mode not in _GRAY | _COLOUR:
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


def _make_array(picture: Image.Image, gray: bool, size: tuple[int, ...] | None) -> npt.NDArray[np.uint8]:
    """Return a picture as uint8 [C, H, W]: C = 1 if `gray`, else 3. size: (H, W), or None to keep the size."""
    converted = picture.convert("L" if gray else "RGB")
    if size is not None:
        converted = converted.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    x = np.asarray(converted)
    return x[None] if gray else np.ascontiguousarray(x.transpose(2, 0, 1))


def _can_be_transparent(path: Path) -> bool:
    try:
        with _open_image(path) as image:
            return image.has_transparency_data
    except BadRows:
        return False
