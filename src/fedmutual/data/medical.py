"""DICOM and NIfTI files as numbers: images [C, H, W] and volumes [C, D, H, W]. Their packages are an extra."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PACKAGES = {".dcm": "pydicom", ".dicom": "pydicom", ".nii": "nibabel", ".nii.gz": "nibabel"}
INSTALL = "pip install 'fedmutual[medical]'"


def find_ending(path: Path) -> str:
    """Return the ending of a file's name in small letters; ".dcm" for a DICOM file whose name has none, such as IM.0001."""
    name = path.name.lower()
    ending = ".nii.gz" if name.endswith(".nii.gz") else path.suffix.lower()
    if ending and not ending[1:].isdigit():
        return ending
    try:
        with path.open("rb") as file:
            return ".dcm" if file.read(132)[128:] == b"DICM" else ""
    except OSError:
        return ""


def is_installed(ending: str) -> bool:
    """Return whether the package that reads files with this ending of `PACKAGES` is installed."""
    return find_spec(PACKAGES[ending]) is not None


def read_volume(path: Path) -> npt.NDArray[Any]:
    """Return a file as [C, H, W] or [C, D, H, W]: uint8 of colours, else float32 in the unit of the file.

    DICOM: MONOCHROME1 is inverted, then rescale slope and intercept are applied; several frames are a volume.
    NIfTI: the axes are turned to those of RAS+, and are then D (to the head), H (to the front), W (to the right); slope and
    intercept are applied, and a fourth axis holds the channels.

    Raises:
        Exception: the package cannot read the file, or the array has no such axes.
    """
    if PACKAGES[find_ending(path)] == "pydicom":
        return _read_dicom(path)
    x = _load_nifti(path).get_fdata(dtype=np.float32)
    x = x[:, :, :, 0] if x.ndim == 5 and x.shape[3] == 1 else x  # vectors, such as the channels that some programs write
    if x.ndim not in (2, 3, 4):
        raise ValueError(f"it has {x.ndim} axes")
    x = x if x.ndim == 4 else x[..., None]  # [X, Y, Z, C], or of a plane [X, Y, C]
    return np.ascontiguousarray(x.T)


def _read_dicom(path: Path) -> npt.NDArray[Any]:
    from pydicom import dcmread

    pixels: Any = import_module("pydicom.pixels")
    file = dcmread(path)
    x, kind = file.pixel_array, file.PhotometricInterpretation
    if kind == "PALETTE COLOR":
        x = pixels.apply_color_lut(x, file)
    has_colours = kind == "PALETTE COLOR" or file.SamplesPerPixel > 1
    if has_colours:
        x = np.moveaxis(x, -1, 0)
        if x.dtype != np.uint8:
            raise ValueError("its colours have more than 8 bits")
        return np.ascontiguousarray(x)
    x = x.astype(np.float64)
    if kind == "MONOCHROME1":
        x = (2.0**file.BitsStored - 1 if file.PixelRepresentation == 0 else -1.0) - x
    return np.asarray(pixels.apply_modality_lut(x, file), dtype=np.float32)[None]


def _load_nifti(path: Path) -> Any:
    nibabel: Any = import_module("nibabel")
    image = nibabel.load(path)
    return nibabel.as_closest_canonical(image) if len(image.shape) > 2 else image


def describe_volume(path: Path) -> dict[str, str]:
    """Return the format, the mode, the size, the conversion and the spacing (in mm, in the order of the size) of a file.

    Raises:
        Exception: the package cannot read the file.
    """
    if PACKAGES[find_ending(path)] == "pydicom":
        from pydicom import dcmread

        file = dcmread(path, stop_before_pixels=True)
        frames, kind = int(file.get("NumberOfFrames", 1)), file.PhotometricInterpretation
        slope = (float(file.get("RescaleSlope", 1)), float(file.get("RescaleIntercept", 0)))
        done = [f"rescaled by slope {slope[0]:g} and intercept {slope[1]:g}"] if slope != (1, 0) else []
        spacing = file.get("PixelSpacing") or file.get("ImagerPixelSpacing") or ()
        sides = [*([frames] if frames > 1 else []), file.Rows, file.Columns]
        about = "DICOM", f"{kind}, {file.BitsStored} bits", ["inverted"] * (kind == "MONOCHROME1") + done
    else:
        nibabel: Any = import_module("nibabel")
        image = nibabel.load(path)
        axes = "".join(map(str, nibabel.aff2axcodes(image.affine)))
        turned = _load_nifti(path)
        sides, spacing = turned.shape[:3][::-1], turned.header.get_zooms()[:3][::-1]
        about = "NIfTI", str(image.get_data_dtype()), [f"turned from {axes} to RAS"] * (axes != "RAS")
    return {
        "formats": about[0],
        "modes": about[1],
        "sizes": " x ".join(map(str, sides)),
        "conversions": ", ".join(about[2]),
        "spacings": " x ".join(f"{float(v):.4g}" for v in spacing),
    }
