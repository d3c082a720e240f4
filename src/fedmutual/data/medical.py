"""DICOM and NIfTI files as numbers: images [C, H, W] and volumes [C, D, H, W]. Their packages are an extra."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmutual.errors import BadRows, DataError, format_error

PACKAGES = {".dcm": "pydicom", ".dicom": "pydicom", ".nii": "nibabel", ".nii.gz": "nibabel"}
_MOST_UNEVEN = 1.1  # in a volume without a gap, the greatest distance between slices is at most this many times the least
INSTALL = "pip install 'fedmutual[medical]'"


def find_ending(path: Path) -> str:
    """Return the ending of a file's name in small letters; ".dcm" for a DICOM file whose name has none, such as IM.0001, and
    for a folder of DICOM slices.
    """
    if path.is_dir():
        return ".dcm"  # of slices, see `group_slices`
    name = path.name.lower()
    ending = ".nii.gz" if name.endswith(".nii.gz") else path.suffix.lower()
    if ending and not ending[1:].isdigit():
        return ending
    try:
        with path.open("rb") as file:
            return ".dcm" if file.read(132)[128:] == b"DICM" else ""
    except OSError:
        return ""


def _is_dicom(path: Path) -> bool:
    """Return whether a path is a DICOM file, or a folder of slices."""
    return PACKAGES.get(find_ending(path)) == "pydicom"


def is_installed(ending: str) -> bool:
    """Return whether the package that reads files with this ending of `PACKAGES` is installed."""
    return find_spec(PACKAGES[ending]) is not None


def read_volume(path: Path) -> npt.NDArray[Any]:
    """Return a file as [C, H, W] or [C, D, H, W]: uint8 of colours, else float32 in the unit of the file.

    DICOM: MONOCHROME1 is inverted, then rescale slope and intercept are applied; several frames are a volume.
    A folder: its DICOM slices are D, in the order of their positions along the normal of the slices, else of their numbers.
    NIfTI: the axes of a volume are turned to RAS+, and are then D (to the head), H (to the front), W (to the right).
    Slope and intercept are applied, and a fourth axis holds the channels.

    Raises:
        Exception: the package cannot read the file, or the array has no such axes.
    """
    if path.is_dir():
        slices = [_read_dicom(file) for file in _sort_slices(list_slices(path))[0]]
        if len({one.shape for one in slices}) > 1:
            raise ValueError("its slices differ in their numbers of rows, columns or frames")
        return np.stack(slices, 1)
    if _is_dicom(path):
        return _read_dicom(path)
    image = _load_nifti(path)
    if image.get_data_dtype().kind == "c":
        raise ValueError("it holds complex numbers")
    x = image.get_fdata(dtype=np.float32)
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


def list_slices(folder: Path) -> list[Path]:
    """Return the DICOM files of a folder, sorted by name."""
    return sorted(file for file in folder.iterdir() if file.is_file() and _is_dicom(file))


def group_slices(files: Sequence[Path]) -> list[Path]:
    """Return files with the folder in place of its DICOM files, where it has several. They must be slices of one series.

    Raises:
        DataError: the DICOM files of a folder are no slices of one series.
    """
    by_folder: dict[Path, list[Path]] = {}
    for file in files:
        by_folder.setdefault(file.parent, []).append(file)
    grouped = list[Path]()
    for folder, inside in by_folder.items():
        slices = [file for file in inside if _is_dicom(file)]
        if len(slices) < 2:
            grouped += inside
            continue
        series = {_read_header(file).get("SeriesInstanceUID") for file in slices}
        if len(series) > 1 or len(slices) < len(inside):
            has = f"{len(series)} series" if len(series) > 1 else "other images"
            fix = "with data.slices = true, give each volume a folder with the slices of one series"
            raise DataError(f"{folder}: has {len(slices)} DICOM slices and {has}; {fix}")
        grouped.append(folder)
    return sorted(grouped)


def _read_header(file: Path) -> Any:
    from pydicom import dcmread

    try:
        return dcmread(file, stop_before_pixels=True)
    except Exception as problem:  # pydicom fails in many ways on a damaged file
        raise BadRows(f"{file} cannot be read as .dcm ({format_error(problem)}); fix or remove it") from None


def _sort_slices(files: Sequence[Path]) -> tuple[list[Path], list[float]]:
    """Return DICOM files in their order in space, by the position along the normal of the slices, and the distances in mm.

    Where a file has no position, the slices are ordered by their numbers, and there are no distances.

    Raises:
        ValueError: the slices have no order, or different orientations.
    """
    headers = {file: _read_header(file) for file in files}
    axes = [one for header in headers.values() if (one := header.get("ImageOrientationPatient"))]
    if not all(np.allclose(one, axes[0], atol=0.01) for one in axes):
        raise ValueError("its slices have different orientations, so they are no volume")
    positions: dict[Path, Any] = {file: _find_position(header) for file, header in headers.items()}
    have_positions = None not in positions.values()
    if not have_positions:
        positions = {file: header.get("InstanceNumber") for file, header in headers.items()}
    if None in positions.values() or len(set(positions.values())) < len(files):
        raise ValueError("a slice has no ImagePositionPatient or InstanceNumber, or has that of another slice")
    ordered = sorted(files, key=positions.__getitem__)
    return ordered, np.diff([positions[file] for file in ordered]).tolist() if have_positions else []


def _find_position(header: Any) -> float | None:
    """Return the position of a slice along its normal, in mm; None where the file does not say it."""
    place, axes = header.get("ImagePositionPatient"), header.get("ImageOrientationPatient")
    if not place or not axes:
        return None
    row, column = np.array(axes, float).reshape(2, 3)
    return round(float(np.cross(row, column) @ np.array(place, float)), 3)


def _load_nifti(path: Path) -> Any:
    nibabel: Any = import_module("nibabel")
    image = nibabel.load(path)
    return nibabel.as_closest_canonical(image) if len(image.shape) > 2 else image


def describe_volume(path: Path) -> dict[str, str]:
    """Return the format, the mode, the size, the conversion and the spacing (in mm, in the order of the size) of a file.

    Where slices have uneven distances, "gaps" has the least and the greatest distance in mm.

    Raises:
        Exception: the package cannot read the file.
    """
    gaps = ""
    if _is_dicom(path):
        slices = list_slices(path) if path.is_dir() else []
        file = _read_header(slices[0] if slices else path)
        frames, kind = int(file.get("NumberOfFrames", 1)), file.PhotometricInterpretation
        slope = (float(file.get("RescaleSlope", 1)), float(file.get("RescaleIntercept", 0)))
        done = [f"rescaled by slope {slope[0]:g} and intercept {slope[1]:g}"] if slope != (1, 0) else []
        distances = _sort_slices(slices)[1] if slices else []
        spacing = file.get("PixelSpacing") or file.get("ImagerPixelSpacing") or ()
        spacing = [float(np.median(distances)), *spacing] if distances and spacing else spacing
        if distances and max(distances) > _MOST_UNEVEN * min(distances):
            gaps = f"{min(distances):.4g} to {max(distances):.4g}"
        sides = [*([frames] if frames > 1 else [len(slices)] if slices else []), file.Rows, file.Columns]
        about = (
            "DICOM slices" if slices else "DICOM",
            f"{kind}, {file.BitsStored} bits",
            ["inverted"] * (kind == "MONOCHROME1") + done,
        )
    else:
        nibabel: Any = import_module("nibabel")
        image = nibabel.load(path)
        axes = "".join(map(str, nibabel.aff2axcodes(image.affine)))
        turned = _load_nifti(path)
        sides, spacing = turned.shape[:3][::-1], turned.header.get_zooms()[:3][::-1]
        about = "NIfTI", str(image.get_data_dtype()), [f"turned from {axes} to RAS"] * (axes != "RAS" and len(sides) > 2)
    return {
        "formats": about[0],
        "modes": about[1],
        "sizes": " x ".join(map(str, sides)),
        "conversions": ", ".join(about[2]),
        "spacings": " x ".join(f"{float(v):.4g}" for v in spacing),
        "gaps": gaps,
    }
