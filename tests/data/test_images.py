"""Pixels of image files, compared with what a person sees."""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import AppendingTiffWriter

from fedmutual import data
from fedmutual.data import images
from fedmutual.errors import BadRows
from own_data import config, refused

Pixels = npt.NDArray[Any]
ORIENTATION = 0x0112
SHOWN: dict[int, Callable[[Pixels], Pixels]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


def make_pixels(height: int = 16, width: int = 24) -> Pixels:
    """Return a smooth image [H, W, 3] whose mirrored and turned forms all differ."""
    y, x = np.mgrid[:height, :width]
    return np.stack([9 * y + 2 * x, 3 * y + 8 * x, 100 + x], axis=2).astype(np.uint8)


def save(path: Path, pixels: Pixels, orientation: int | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    if orientation is not None:
        exif[ORIENTATION] = orientation
    Image.fromarray(pixels).save(path, exif=exif, **options)
    return path


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("ending", ["png", "tif", "webp"])
@pytest.mark.parametrize("orientation", SHOWN)
def test_an_image_is_read_upright(tmp_path: Path, orientation: int, ending: str, channels: int) -> None:
    pixels = make_pixels()[..., 0] if channels == 1 else make_pixels()
    file = save(tmp_path / f"a.{ending}", pixels, orientation, **({"lossless": True} if ending == "webp" else {}))
    x = images.decode_image(file, 1 if channels == 1 and ending != "webp" else 3, None)  # WebP has no gray
    assert np.array_equal(x, np.atleast_3d(SHOWN[orientation](pixels)).transpose(2, 0, 1).repeat(len(x) // channels, 0))


@pytest.mark.parametrize("side", [16, 24])
@pytest.mark.parametrize("orientation", [6, 8])
def test_photos_are_read_upright_for_training(tmp_path: Path, orientation: int, side: int) -> None:
    expected = []
    for name in ("cat", "dog"):
        for k in range(4):
            file = save(tmp_path / name / f"{k}.jpg", make_pixels(16, side) + k, orientation, quality=95)
            with Image.open(file) as image:
                expected.append(np.asarray(ImageOps.exif_transpose(image)).transpose(2, 0, 1))
    prepared = data.prepare(config(data={"name": "folder", "root": str(tmp_path)}))[""]
    assert prepared.space.shape == (3, side, 16)
    assert torch.equal(prepared.source.train.x.take(range(8)), torch.from_numpy(np.stack(expected)))
    raw = make_pixels(16, side).astype(int)  # the camera's, before JPEG
    assert np.abs(expected[0].transpose(1, 2, 0) - SHOWN[orientation](raw)).mean() < 3


@pytest.mark.parametrize(
    ("exif", "orientation"),
    [
        (b"", 1),
        (b"Exif\0\0garbage", 1),
        (b"Exif\0\0II*\0\xff\xff\xff\xff", 1),
        (b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0", 6),
        (b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x09\0\0\0\0\0", 1),
    ],
)
def test_an_image_with_damaged_exif_data_is_read(tmp_path: Path, exif: bytes, orientation: int) -> None:
    Image.fromarray(make_pixels()).save(tmp_path / "a.jpg", exif=exif)
    x = images.decode_image(tmp_path / "a.jpg", 3, None)
    assert x.shape == ((3, 16, 24) if orientation == 1 else (3, 24, 16))


HALF = np.full((1, 3, 4), (200, 0, 40, 255), np.uint8)  # opaque, half transparent, transparent
HALF[0, 1:, 3] = 128, 0
ON_WHITE = [[200, 227, 255], [0, 127, 255], [40, 147, 255]]


@pytest.mark.parametrize(
    ("picture", "name", "options", "shown"),
    [
        (Image.fromarray(HALF), "a.png", {}, ON_WHITE),
        (Image.fromarray(HALF), "a.webp", {"lossless": True, "exact": True}, ON_WHITE),
        (Image.fromarray(HALF), "a.tif", {}, ON_WHITE),
        (Image.fromarray(HALF).quantize(3), "a.png", {}, ON_WHITE),
        (Image.fromarray(HALF[..., [0, 3]]), "a.png", {}, ON_WHITE[:1]),
        (Image.fromarray(HALF[..., :3]), "a.png", {"transparency": (200, 0, 40)}, [[255] * 3] * 3),
        (Image.fromarray(HALF[..., 0]), "a.png", {"transparency": 200}, [[255] * 3]),
        (Image.fromarray(HALF[..., 0]).convert("P"), "a.gif", {"transparency": 200}, [[255] * 3] * 3),
        (Image.fromarray(HALF[..., :3]).convert("CMYK"), "a.tif", {}, [[200] * 3, [0] * 3, [40] * 3]),
        (Image.fromarray(HALF[..., 0] > 9), "a.png", {}, [[255] * 3]),
        (Image.fromarray(HALF[..., 0]).convert("P"), "a.png", {}, [[200] * 3] * 3),
    ],
)
def test_every_mode_is_read_as_gray_or_colour_on_white(
    tmp_path: Path, picture: Image.Image, name: str, options: dict[str, Any], shown: list[list[int]]
) -> None:
    picture.save(tmp_path / name, **options)
    assert images.decode_image(tmp_path / name, len(shown), None)[:, 0].tolist() == shown
    assert images.decode_image(tmp_path / name, 3, None)[:, 0].tolist() == [*shown, *shown, *shown][:3]


def test_transparent_parts_are_reported_once(tmp_path: Path) -> None:
    for k in range(6):
        save(tmp_path / "cat" / f"{k}.png", make_pixels(), None)
        save(tmp_path / "dog" / f"{k}.png", HALF.repeat(16, 0).repeat(8, 1), None)
    notes = data.load(config(data={"name": "folder", "root": str(tmp_path)})).notes
    (note,) = (note for note in notes if "transparent" in note)
    assert note.startswith(f"6 images can have transparent parts ({tmp_path / 'dog' / '0.png'}, for example)")


def make_png(values: Pixels) -> bytes:
    """Return a PNG of 16 bits a channel [H, W, C], which Pillow cannot write in colour."""
    height, width, channels = values.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )


def write_deep(path: Path) -> None:
    """Write an image with more than 8 bits a channel; the name says which: "rgb16.png", "gray10.pgm" ..."""
    values = np.arange(24).reshape(2, 4, 3) * 40
    match path.name:
        case "gray16.tif" | "gray32.tif" | "float.tif":
            kind = {"gray16.tif": np.uint16, "gray32.tif": np.int32, "float.tif": np.float32}[path.name]
            Image.fromarray(values[..., 0].astype(kind)).save(path)
        case "gray10.pgm":
            path.write_bytes(b"P5\n4 2\n1023\n" + values[..., 0].astype(">u2").tobytes())
        case "rgb10.ppm":
            path.write_bytes(b"P6\n4 2\n1023\n" + values.astype(">u2").tobytes())
        case "text.ppm":
            path.write_text("P3\n2 1\n65535\n1 2 3 4 5 60000\n")
        case "rgb16.tif":  # baseline TIFF: a header, the pixels, the tags
            tags = ((256, 3, 1, 4), (257, 3, 1, 2), (258, 3, 3, 182), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, 134))
            more = ((277, 3, 1, 3), (278, 3, 1, 2), (279, 4, 1, 48), (284, 3, 1, 1))
            listed = b"".join(struct.pack("<HHII", *tag) for tag in tags + more)
            head = b"II*\0" + struct.pack("<IH", 8, len(tags + more)) + listed + struct.pack("<I", 0)
            path.write_bytes(head + values.astype("<u2").tobytes() + struct.pack("<HHH", 16, 16, 16))
        case _:
            channels = {"gray16.png": 1, "gray_alpha16.png": 2, "rgb16.png": 3, "rgba16.png": 4}[path.name]
            path.write_bytes(make_png(values.reshape(-1)[: 4 * channels].reshape(2, 2, channels)))


DEEP = "gray16.png gray_alpha16.png rgb16.png rgba16.png gray16.tif gray32.tif float.tif rgb16.tif gray10.pgm rgb10.ppm"


@pytest.mark.parametrize("name", [*DEEP.split(), "text.ppm"])
def test_more_than_8_bits_a_channel_are_never_cut(tmp_path: Path, name: str) -> None:
    write_deep(tmp_path / name)
    with pytest.raises(BadRows, match=rf"{name} has more than 8 bits a channel"):
        images.decode_image(tmp_path / name, 3, None)


@pytest.mark.parametrize("kind", ["TGA", "JPEG2000", "AVIF"])
def test_other_formats_are_refused_under_every_ending(tmp_path: Path, kind: str) -> None:
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow has no {kind}")
    Image.fromarray(make_pixels()).save(tmp_path / "a.png", format=kind)
    with pytest.raises(BadRows, match=rf"a\.png holds an image of the format {kind}; save it as PNG"):
        images.decode_image(tmp_path / "a.png", 3, None)


def test_images_of_12_bits_are_read_by_the_users_code(module: Callable[[str], str], tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.uint16).reshape(4, 6) * 170
    for name in ("ill", "well"):
        (tmp_path / name).mkdir()
        for k in range(4):
            Image.fromarray(values + k).save(tmp_path / name / f"{k}.png")
    refused("set data.max to the greatest value", data={"name": "folder", "root": str(tmp_path)})
    name = module("""
        from pathlib import Path
        from PIL import Image
        class make(Dataset):
            files = sorted(Path(".").glob("*/*.png"))
            def __len__(self): return len(self.files)
            def __getitem__(self, i):
                file = self.files[i]
                return np.asarray(Image.open(file), dtype=np.float32)[None] / 4095, int(file.parent.name == "well")
        """)
    x = data.prepare(config(data={"name": f"{name}:make"}))[""].source.train.x.take([0, 3])
    assert torch.allclose(x * 4095, torch.from_numpy(np.stack([values, values + 3])[:, None].astype(np.float32)))


def test_images_of_fewer_bits_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.pgm").write_bytes(b"P5\n3 1\n15\n\0\x05\x0f")
    assert images.decode_image(tmp_path / "a.pgm", 1, None).tolist() == [[[0, 85, 255]]]


@pytest.mark.parametrize("name", ["a.gif", "a.tif", "a.webp", "a.png"])
def test_a_file_of_several_pictures_is_refused(tmp_path: Path, name: str) -> None:
    pictures = [Image.fromarray(make_pixels() + 40 * k) for k in range(3)]
    pictures[0].save(tmp_path / name, save_all=True, append_images=pictures[1:])
    with pytest.raises(BadRows, match=f"{name} holds 3 pictures; save each"):
        images.decode_image(tmp_path / name, 3, None)


def test_a_smaller_copy_inside_a_file_is_no_second_picture(tmp_path: Path) -> None:
    picture = Image.fromarray(make_pixels())
    with AppendingTiffWriter(str(tmp_path / "a.tif"), True) as file:
        picture.save(file, "TIFF")
        file.newFrame()
        picture.resize((4, 4)).save(file, "TIFF", tiffinfo={254: 1})
        file.newFrame()
    picture.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[picture.resize((8, 8))])
    assert np.array_equal(images.decode_image(tmp_path / "a.tif", 3, None), make_pixels().transpose(2, 0, 1))
    assert images.decode_image(tmp_path / "a.jpg", 3, None).shape == (3, 16, 24)


def test_a_photo_of_a_mode_without_conversion_is_refused(tmp_path: Path) -> None:
    for k in range(2):
        save(tmp_path / "cat" / f"{k}.tif", make_pixels(), None)
    Image.fromarray(make_pixels()).convert("LAB").save(tmp_path / "cat" / "2.tif")
    save(tmp_path / "dog" / "0.tif", make_pixels(), None)
    refused("2.tif has pixels of the mode LAB; save it as", data={"name": "folder", "root": str(tmp_path)})


def test_a_deep_image_with_0_for_white_is_not_read_as_its_negative(tmp_path: Path) -> None:
    """Pillow inverts such images of 8 bits, and not those of 16."""
    Image.fromarray(np.array([[0, 4000]], np.uint16)).save(tmp_path / "a.tif", tiffinfo={262: 0})
    with pytest.raises(BadRows, match=r"a\.tif has more than 8 bits and the value 0 for white; invert it"):
        images.read_file(tmp_path / "a.tif", 4095)
    assert images.read_mask(tmp_path / "a.tif", None).tolist() == [[0, 4000]]  # numbers of classes
